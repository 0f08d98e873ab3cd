"""The pool of page ids: entries are written once, and a device copy can follow."""

import numpy as np
import pytest

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy
from flashinfer_cascade.pages import LOG_LENGTH, MIN_CAPACITY, SPARE, PagePool, PageView


def pool_of(*tables):
    pool = PagePool()
    pool.resize(16)
    for slot, table in enumerate(tables):
        pool.put(slot, np.array(table))
    return pool


def test_tables_grow_in_place_and_move_when_what_is_behind_them_is_taken():
    pool = pool_of([1, 2, 3], [4])
    view = pool.view()
    begin = pool.begin.copy()
    pool.extend(0, np.array([5, 6]))
    pool.extend_each(np.array([0, 1]), np.array([7, 8]))
    assert pool.table(0).tolist() == [1, 2, 3, 5, 6, 7]
    assert pool.table(1).tolist() == [4, 8]
    assert (pool.begin == begin).all()
    pool.cut(0, 2)
    pool.extend_each(np.array([1, 0]), np.array([9, 10]))
    assert pool.table(0).tolist() == [1, 2, 10]
    assert pool.begin[0] != begin[0]
    pool.replace(1, 0, 11)
    assert pool.table(1).tolist() == [11, 8, 9]
    assert view.ids[begin[0] : begin[0] + 6].tolist() == [1, 2, 3, 5, 6, 7]
    assert view.ids[begin[1] : begin[1] + 3].tolist() == [4, 8, 9]
    with pytest.raises(ValueError, match="read-only"):
        view.ids[0] = 1


def test_a_full_pool_moves_and_drops_what_left():
    pool = pool_of(*([range(1000)] * 3))
    first = pool.pool_id
    for round in range(50):
        pool.drop(round % 3)
        pool.put(round % 3, np.arange(round, round + 1000))
    assert pool.pool_id != first
    assert [pool.table(slot)[0] for slot in range(3)] == [48, 49, 47]
    # Room for three tables and one more, with what they may grow by, before it is multiplied.
    assert pool.capacity <= max(SPARE * 4 * (1000 + 125 + 32), MIN_CAPACITY)


class Mirror:
    """A copy of a session's page ids as a device would hold it."""

    def __init__(self):
        self.pool_id, self.version, self.ids = 0, 0, np.zeros(0, np.int32)
        self.copied = self.uploads = 0

    def follow(self, view):
        writes = view.writes_since(self.pool_id, self.version)
        if writes is None:
            self.ids = np.full(len(view.ids), -7, np.int32)
            writes, self.uploads = np.array([[0], [view.size]]), self.uploads + 1
        for begin, end in writes.T.tolist():
            self.ids[begin:end] = view.ids[begin:end]
            self.copied += end - begin
        self.pool_id, self.version = view.pool_id, view.version


def test_a_device_copy_follows_with_what_changed():
    config = CascadeConfig(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=4, dtype="bfloat16")
    session = CascadePlanner(config, PlannerPolicy(executor="levels", fold=False)).session()
    rng = np.random.default_rng(3)
    fresh = iter(range(1000, 10**6))
    for r in range(20):
        session.add(r, [*range(500), next(fresh)], 2001, computed_len=2000)
    mirrors = [Mirror(), Mirror()]
    for step in range(400):
        if step:
            grow = {id: next(fresh) % 60000 for id in session.ids if session.seq_len(id) % 4 == 0}
            session.step(grow)
        if step % 7 == 0:
            victim = session.ids[int(rng.integers(len(session)))]
            session.remove(victim)
            session.fork(session.ids[0], victim)
            session.replace_page(victim, len(session.block_table(victim)) - 1, next(fresh) % 60000)
            session.truncate(session.ids[1], session.seq_len(session.ids[1]) - 1)
        plan = session.plan()
        # One follows every plan, the other looks in from time to time.
        for mirror in mirrors if step % 20 == 0 else mirrors[:1]:
            mirror.follow(plan.pages)
            copy = np.concatenate(
                [mirror.ids[a : a + n] for a, n in zip(plan.seg_page_begin, plan.seg_num_pages, strict=True)]
            )
            assert copy.tolist() == plan.seg_pages.tolist()
    assert mirrors[0].uploads < 30
    assert mirrors[0].copied < 400 * 500  # 10,000 page ids are live


def test_a_copy_that_is_too_far_behind_is_told_to_start_again():
    pool = pool_of([1])
    old = pool.view()
    for page in range(LOG_LENGTH):
        pool.extend(0, np.array([page]))
        view = pool.view()
    assert view.writes_since(old.pool_id, old.version).shape == (2, LOG_LENGTH)
    assert view.writes_since(view.pool_id, view.version).shape == (2, 0)
    pool.cut(0, 1)
    pool.extend(0, np.array([5]))
    view = pool.view()
    assert view.writes_since(old.pool_id, old.version) is None
    assert view.writes_since(old.pool_id + 1, old.version) is None
    assert view.writes_since(view.pool_id, view.version + 1) is None
    assert PageView(view.ids, 1).writes_since(0, 0) is None

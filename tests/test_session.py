"""Sessions: equal to one-shot planning whatever happens, and unchanged by what they refuse."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashinfer_cascade import (
    CapacityError,
    CascadeConfig,
    CascadePlanner,
    InvalidBatchError,
    PlanCapacity,
    PlannerPolicy,
    UnsupportedError,
)
from flashinfer_cascade.pages import gather_runs

FORCED = PlannerPolicy(executor="levels", fold=False)
POLICIES = (
    PlannerPolicy(),
    FORCED,
    PlannerPolicy(executor="levels"),
    PlannerPolicy(executor="levels", fold=False, max_levels=2, max_decode_rows=1),
    PlannerPolicy(executor="stock", max_decode_rows=2),
    PlannerPolicy(min_speedup=1.0),
)


def config(**changes):
    values = {
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 16,
        "dtype": "bfloat16",
        "max_batch_size": 1024,
        "max_kv_pages": 2**20,
    }
    return CascadeConfig(**(values | changes))


class Model:
    """What a session should hold: plain lists, planned from scratch."""

    def __init__(self, planner):
        self.planner, self.page_size = planner, planner.config.page_size
        self.tables, self.lens, self.computed, self.rows = {}, {}, {}, {}

    def needed(self, length):
        return -(-length // self.page_size)

    def add(self, id, pages, seq_len, computed_len=0):
        self.tables[id], self.lens[id], self.computed[id], self.rows[id] = list(pages), seq_len, computed_len, 1

    def fork(self, id, new_id):
        for state in (self.tables, self.lens, self.computed, self.rows):
            state[new_id] = list(state[id]) if state is self.tables else state[id]

    def remove(self, id):
        for state in (self.tables, self.lens, self.computed, self.rows):
            del state[id]

    def append(self, id, num_tokens, new_pages=()):
        self.tables[id] += new_pages
        self.lens[id] += num_tokens

    def truncate(self, id, seq_len):
        self.lens[id] = seq_len
        self.computed[id] = min(self.computed[id], seq_len)
        del self.tables[id][self.needed(seq_len) :]

    def reorder(self, ids):
        for name in ("tables", "lens", "computed", "rows"):
            setattr(self, name, {id: getattr(self, name)[id] for id in ids})

    def qo_lens(self):
        return [self.lens[id] - self.computed[id] or min(self.rows[id], max(self.lens[id], 1)) for id in self.tables]

    def plan(self, qo_lens=None, capacity=None):
        rows = self.qo_lens() if qo_lens is None else qo_lens
        plan = self.planner.plan(list(self.tables.values()), list(self.lens.values()), rows, capacity=capacity)
        self.computed = dict(self.lens)
        self.rows = dict(zip(self.tables, rows, strict=True))
        return plan


def assert_same(plan, expected):
    """Equal, and for the same reasons."""
    assert plan == expected
    assert len(plan.parts) == len(expected.parts)
    for part, other in zip(plan.parts, expected.parts, strict=True):
        for name in ("reason", "predicted_us", "request_begin", "row_end", "seg_begin", "num_levels", "causal"):
            assert getattr(part, name) == getattr(other, name), name
        assert part.kept.tolist() == other.kept.tolist()
        for name in ("order", "parent", "depth", "begin", "end", "page_begin", "num_pages", "first_page", "tail_begin"):
            assert getattr(part.forest, name).tolist() == getattr(other.forest, name).tolist(), name


class Decoding(RuleBasedStateMachine):
    """Random calls on a session and on its model, in any order that an engine could make them."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        policy=st.sampled_from(POLICIES),
        window=st.sampled_from([-1, -1, -1, 40]),
        native=st.booleans(),
    )
    def begin(self, page_size, policy, window, native):
        made = config(page_size=page_size, window_left=window if policy.executor == "auto" else -1)
        self.session = CascadePlanner(made, policy, native=native).session()
        self.model = Model(CascadePlanner(made, policy, native=False))
        self.fresh = 100
        self.count = 0
        self.last = None
        self.kept = []

    def pages(self, num, shared):
        """New pages; with `shared` from the few that everybody may hold."""
        if shared:
            return [int(page) for page in np.arange(num) % 3]
        self.fresh += num
        return list(range(self.fresh - num, self.fresh))

    def pick(self, data):
        return data.draw(st.sampled_from(list(self.model.tables)))

    def do(self, name, *args, **kwargs):
        getattr(self.session, name)(*args, **kwargs)
        getattr(self.model, name)(*args, **kwargs)

    @rule(data=st.data(), own=st.integers(0, 40), shared=st.booleans(), spare=st.integers(0, 2))
    def add(self, data, own, shared, spare):
        page_size, prefix = self.model.page_size, []
        if self.model.tables and data.draw(st.booleans()):
            parent = self.model.tables[self.pick(data)]
            prefix = parent[: data.draw(st.integers(0, len(parent)))]
        length = len(prefix) * page_size + own
        pages = prefix + self.pages(self.model.needed(length) - len(prefix) + spare, shared)
        computed = data.draw(st.sampled_from([0, length // 2, max(length - 1, 0)]))
        self.count += 1
        # Ids come again after their request has left.
        id = next(i for i in range(self.count) if i not in self.model.tables)
        self.do("add", id, np.array(pages, np.int32) if shared else pages, length, computed_len=computed)

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def fork(self, data):
        self.count += 1
        id = next(i for i in range(self.count) if i not in self.model.tables)
        self.do("fork", self.pick(data), id)

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def remove(self, data):
        self.do("remove", self.pick(data))

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), num=st.integers(0, 20), shared=st.booleans())
    def append(self, data, num, shared):
        id = self.pick(data)
        missing = self.model.needed(self.model.lens[id] + num) - len(self.model.tables[id])
        self.do("append", id, num, self.pages(max(missing, 0), shared))

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), shared=st.booleans(), some=st.booleans(), times=st.integers(1, 20))
    def step(self, data, shared, some, times):
        ids = data.draw(st.lists(st.sampled_from(list(self.model.tables)), unique=True)) if some else None
        for _ in range(times):
            grown = [id for id, n in self.model.lens.items() if n] if ids is None else ids
            need = [id for id in grown if self.model.needed(self.model.lens[id] + 1) > len(self.model.tables[id])]
            new_pages = {id: self.pages(1, shared)[0] for id in need}
            self.session.step(new_pages, ids=ids)
            for id in grown:
                self.model.append(id, 1, [new_pages[id]] if id in new_pages else [])
            self.plan(data) if times > 1 else None

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), far=st.booleans())
    def truncate(self, data, far):
        id = self.pick(data)
        length = self.model.lens[id]
        self.do("truncate", id, data.draw(st.integers(0 if far else max(length - 5, 0), length)))

    @precondition(lambda self: any(self.model.tables.values()))
    @rule(data=st.data(), shared=st.booleans())
    def replace_page(self, data, shared):
        id = data.draw(st.sampled_from([id for id, table in self.model.tables.items() if table]))
        index = data.draw(st.integers(0, len(self.model.tables[id]) - 1))
        page = self.pages(1, shared)[0]
        self.session.replace_page(id, index, page)
        self.model.tables[id][index] = page

    @rule(data=st.data())
    def reorder(self, data):
        self.do("reorder", data.draw(st.permutations(list(self.model.tables))))

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def plan(self, data):
        self.check(self.session.plan(), self.model.plan())

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def plan_rows(self, data):
        rows = [data.draw(st.integers(1, min(max(n, 1), 9))) for n in self.model.lens.values()]
        self.check(self.session.plan(rows), self.model.plan(rows))

    @precondition(lambda self: self.model.tables)
    @rule(segments=st.integers(0, 3), slots=st.integers(0, 6))
    def plan_to_fit(self, segments, slots):
        num = len(self.model.tables)
        capacity = PlanCapacity(num_segments=num + segments, num_slots=slots)
        self.check(self.session.plan(capacity=capacity), self.model.plan(capacity=capacity))

    def check(self, plan, expected):
        assert_same(plan, expected)
        if self.last is not None and self.last.structure_id == plan.structure_id and self.last is not plan:
            assert plan.generation == self.last.generation + 1
        self.last = plan
        self.kept = [*self.kept[-3:], (plan, plan.seg_pages.copy(), plan.pages.size)]

    @invariant()
    def plans_never_change(self):
        for plan, pages, size in getattr(self, "kept", []):
            assert gather_runs(plan.pages.ids, plan.seg_page_begin, plan.seg_num_pages).tolist() == pages.tolist()
            assert (plan.seg_page_begin + plan.seg_num_pages).max() <= size

    @invariant()
    def tables_are_what_they_should_be(self):
        if hasattr(self, "model"):
            assert self.session.ids == list(self.model.tables)
            for id, table in self.model.tables.items():
                assert self.session.block_table(id).tolist() == table
                assert self.session.seq_len(id) == self.model.lens[id]


TestDecoding = Decoding.TestCase
TestDecoding.settings = settings(settings.default, stateful_step_count=40)


def decoding(num=4, prefix=40, policy=FORCED, page_size=16, **changes):
    """A session of requests that share `prefix` pages; each has a token of its own, its first."""
    session = CascadePlanner(config(page_size=page_size, **changes), policy).session()
    for r in range(num):
        session.add(r, [*range(prefix), 1000 + r], page_size * prefix + 1, computed_len=page_size * prefix)
    return session


def steps_until_refused(session, **kwargs):
    """Decode until a plan is refused; the last plan, and why."""
    plan, page_size = None, session.config.page_size
    for step in range(200):
        full = session.seq_len(0) % page_size == 0
        session.step({r: 5000 + 4 * step + r for r in session.ids} if full else None)
        try:
            plan = session.plan(**kwargs)
        except CapacityError as error:
            return plan, str(error)
    raise AssertionError("never refused")


def test_a_step_keeps_the_structure_and_shares_its_arrays():
    session = decoding()
    first = session.plan()
    session.step()
    second = session.plan()
    assert session.plan() is second
    assert (second.structure_id, second.generation) == (first.structure_id, first.generation + 1)
    for name in ("row_order", "request_order", "qo_indptr", "seg_row_begin", "seg_num_rows", "seg_kv_start"):
        assert getattr(second, name) is getattr(first, name)
    assert second.parts[0].forest is first.parts[0].forest
    assert second.seg_kv_len.tolist() == [640, 2, 2, 2, 2]
    assert first.seg_kv_len.tolist() == [640, 1, 1, 1, 1]
    session.remove(3)
    third = session.plan()
    assert (third.structure_id != first.structure_id, third.generation) == (True, 0)


def test_forks_share_a_page_more_when_it_fills_before_they_part():
    session = decoding(num=1, prefix=2, page_size=4, policy=FORCED)
    session.fork(0, "fork")
    shared = []
    for _ in range(12):
        full = session.seq_len(0) % 4 == 0
        session.step({0: 50 + len(shared), "fork": 50 + len(shared)} if full else None)
        shared.append(int(session.plan().seg_kv_len[0]))
    assert len(set(shared)) > 2
    session.replace_page("fork", 0, 99)
    assert session.plan().parts[0].forest.num_nodes == 0


def test_a_copy_on_write_parts_a_fork():
    session = decoding(num=1, prefix=2)
    session.fork(0, 1)
    session.replace_page(1, 2, 77)
    session.step()
    plan = session.plan()
    assert plan.seg_pages.tolist() == [0, 1, 1000, 77]
    assert session.block_table(0).tolist() == [0, 1, 1000]


def test_rows_are_the_tokens_since_the_last_plan():
    session = CascadePlanner(config(), FORCED).session()
    session.add("cached", range(5), 70, computed_len=64)
    session.add("new", range(10, 15), 70)
    assert np.diff(session.plan().qo_indptr).tolist() == [6, 70]
    session.append("new", 4)
    session.step(ids=["cached"])
    plan = session.plan()
    assert np.diff(plan.qo_indptr).tolist() == [1, 4]
    session.add("more", [90], 1)
    assert np.diff(session.plan().qo_indptr).tolist() == [1, 4, 1]
    session.remove("new")
    assert np.diff(session.plan().qo_indptr).tolist() == [1, 1]
    assert np.diff(session.plan([3, 1]).qo_indptr).tolist() == [3, 1]


def test_rejected_drafts():
    session = decoding(num=2, prefix=4)
    session.plan()
    for accepted in (1, 3, 5, 2):
        for id in session.ids:
            session.append(id, 5)
        plan = session.plan()
        assert np.diff(plan.qo_indptr).tolist() == [5, 5]
        for id in session.ids:
            session.truncate(id, session.seq_len(id) - 5 + accepted)
    assert session.seq_len(0) == 65 + 11


def test_padding_stays_padding():
    session = decoding(num=2)
    session.add("pad", [], 0)
    for _ in range(3):
        session.step()
        plan = session.plan()
    assert plan.row_pos.tolist() == [643, 643, -1]
    session.step({"pad": 5}, ids=["pad"])
    assert session.plan().seg_kv_len.tolist() == [640, 4, 4, 1]


def test_a_capacity_holds_from_step_to_step():
    session = decoding(page_size=4, prefix=4)
    capacity = PlanCapacity(num_segments=5, num_page_indices=32)
    plan, why = steps_until_refused(session, capacity=capacity)
    assert "num_page_indices" in why
    assert not capacity.lacks(plan.usage())
    assert capacity.lacks(session.plan().usage())


def test_limits_of_the_configuration_hold():
    session = decoding(max_batch_size=4, max_kv_indices=170)
    session.plan()
    with pytest.raises(CapacityError, match="5 requests exceed max_batch_size=4"):
        session.add(9, [1], 1)
    with pytest.raises(CapacityError, match="5 requests exceed max_batch_size=4"):
        session.fork(0, 9)
    assert "hold 172 page ids, above max_kv_indices=170" in steps_until_refused(session)[1]
    assert session.seq_len(0) == 42 * 16 + 1
    session.remove(0)
    assert session.plan().num_requests == 3
    session = decoding(max_num_rows=1024)
    session.add("prompt", range(64), 1024)
    with pytest.raises(CapacityError, match="1028 query rows exceed max_num_rows=1024"):
        session.plan()


WRONG = {
    "taken id": (lambda s: s.add(0, [1], 1), "request 0 is in the session already"),
    "fork to itself": (lambda s: s.fork(0, 0), "request 0 is in the session already"),
    "unknown fork": (lambda s: s.fork("x", "y"), "request 'x' is not in the session: add it first"),
    "unknown": (lambda s: s.remove("x"), "request 'x' is not in the session: add it first"),
    "unhashable": (lambda s: s.remove([]), r"request \[\] is not in the session"),
    "unhashable to add": (lambda s: s.add([9], [1], 3), "the request's id is a list, which has no hash: give a string"),
    "unhashable fork": (lambda s: s.fork(0, {}), "the request's id is a dict, which has no hash"),
    "a number of ids": (lambda s: s.step(ids=5), "ids is 5: give the ids of requests, as a list"),
    "an array that is a number": (lambda s: s.step(ids=np.array(5)), "ids is a ndarray: give the ids of requests"),
    "an id for ids": (lambda s: s.reorder("r0"), "ids is 'r0': give the ids of requests"),
    "capacity": (lambda s: s.plan(capacity=5), "capacity is 5: give the PlanCapacity of a graph"),
    "capacity in a worker": (lambda s: s.plan_async(capacity="no"), "capacity is 'no': give the PlanCapacity"),
    "too few pages": (lambda s: s.add(9, [1, 2], 33), "request 9: its table has 2 pages, but 33 tokens need 3"),
    "page out of range": (lambda s: s.add(9, [1, 2**20], 32), "page id 1048576 at position 1 is outside"),
    "negative page": (lambda s: s.append(0, 16, [-1]), "page id -1 at position 0 is outside"),
    "float pages": (lambda s: s.add(9, [1.5], 3), "pages holds float64 values"),
    "matrix": (lambda s: s.add(9, [[1]], 3), r"pages has shape \(1, 1\)"),
    "float length": (lambda s: s.add(9, [1], 3.0), "seq_len is 3.0: give an integer"),
    "bool length": (lambda s: s.add(9, [1], True), "seq_len is True: give an integer"),
    "negative length": (lambda s: s.add(9, [1], -1), r"seq_len=-1 is outside \[0, 2147483647\]"),
    "all computed": (lambda s: s.add(9, [1], 3, computed_len=3), r"computed_len=3 is outside \[0, 2\]"),
    "append without pages": (lambda s: s.append(0, 16), "request 0: its table has 41 pages, but 657 tokens need 42"),
    "negative append": (lambda s: s.append(0, -1), "num_tokens=-1 is outside"),
    "longer by truncation": (lambda s: s.truncate(0, 642), r"seq_len=642 is outside \[0, 641\]"),
    "index": (lambda s: s.replace_page(0, 41, 3), r"index=41 is outside \[0, 40\]"),
    "page of replace": (lambda s: s.replace_page(0, 0, 2**20), "page=1048576 is outside"),
    "reorder too few": (lambda s: s.reorder([0, 1, 2]), "3 ids for 4 live requests: name each request once"),
    "reorder twice": (lambda s: s.reorder([0, 1, 2, 2]), "4 ids for 4 live requests: name each request once"),
    "reorder unknown": (lambda s: s.reorder([0, 1, 2, 4]), "request 4 is not in the session"),
    "step twice": (lambda s: s.step(ids=[0, 0]), "ids names a request twice"),
    "step unknown": (lambda s: s.step({"x": 1}), "request 'x' is not in the session"),
    "step page": (lambda s: s.step({0: 2**20}), "new_pages: page id 1048576 at position 0 is outside"),
    "step bool": (lambda s: s.step({0: True}), "new_pages holds bool values"),
    "rows": (lambda s: s.plan([1, 1]), "qo_lens has 2 entries for 4 seq_lens"),
    "too many rows": (lambda s: s.plan([642, 1, 1, 1]), r"qo_lens\[0\] = 642 exceeds seq_lens\[0\] = 641"),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_session_is_not_copied(copied, native):
    session = CascadePlanner(config(), native=native).session()
    with pytest.raises(
        UnsupportedError, match=r"a session cannot be copied or pickled, .*: give the other process a planner"
    ):
        copied(session)


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused_changes_nothing(call, message):
    session, same = decoding(), decoding()
    with pytest.raises(InvalidBatchError, match=message):
        call(session)
    for one in (session, same):
        one.step({0: 70})
        one.append(2, 3)
    assert session.plan() == same.plan()
    assert [session.block_table(r).tolist() for r in range(4)] == [same.block_table(r).tolist() for r in range(4)]


def test_a_step_without_its_pages_is_refused():
    session = decoding()
    for _ in range(15):
        session.step()
    with pytest.raises(InvalidBatchError, match=r"3 requests, 0 the first, need a page .*, at 656 tokens"):
        session.step({2: 70})
    with pytest.raises(InvalidBatchError, match="request 1 needs a page"):
        session.step(ids=[1])
    assert session.seq_len(2) == 656
    session.step({r: 70 + r for r in range(4)})
    assert session.plan().num_requests == 4
    with pytest.raises(InvalidBatchError, match="the batch is empty"):
        CascadePlanner(config()).session().plan()


def test_a_window_is_compared_with_exact_lengths():
    planner = CascadePlanner(config(window_left=512 * 16 + 5))
    session, model = planner.session(), Model(planner)
    for r in range(64):
        for one in (session, model):
            one.add(r, [*range(512), 1000 + r], 512 * 16 + 1, computed_len=512 * 16)
    executors = []
    for _ in range(10):
        plan, expected = session.plan(), model.plan()
        assert_same(plan, expected)
        executors.append(plan.parts[0].executor)
        session.step()
        for r in range(64):
            model.append(r, 1)
    assert executors == ["levels"] * 6 + ["flat"] * 4
    forced = CascadePlanner(config(window_left=645), FORCED).session()
    forced.add(0, range(41), 646)
    forced.plan()
    forced.step()
    with pytest.raises(UnsupportedError, match="window_left=645 does not cover a context of 647"):
        forced.plan()


def test_plans_made_in_a_worker_are_the_same():
    sessions = decoding(num=8), decoding(num=8)
    earlier = []
    for step in range(60):
        pages = {r: 2000 + 8 * step + r for r in range(8)} if sessions[0].seq_len(0) % 16 == 0 else None
        for session in sessions:
            session.step(pages)
        future = sessions[1].plan_async()
        if step % 3 == 0:
            sessions[1].remove(0)  # waits for the plan, which still has the request
            sessions[1].add(0, sessions[0].block_table(0), sessions[0].seq_len(0), computed_len=0)
            sessions[1].reorder(range(8))
        expected = sessions[0].plan()
        assert future.result() == expected
        sessions[1].plan([1] * 8)
        earlier.append((future.result(), expected.seg_pages.copy()))
    for plan, pages in earlier:
        assert gather_runs(plan.pages.ids, plan.seg_page_begin, plan.seg_num_pages).tolist() == pages.tolist()
    failing = CascadePlanner(config()).session().plan_async()
    with pytest.raises(InvalidBatchError, match="the batch is empty"):
        failing.result()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", ">i2", ">i4", ">i8"])
def test_page_ids_of_any_integer_type_are_checked(dtype):
    session = CascadePlanner(
        CascadeConfig(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=4, dtype="float16")
    ).session()
    with pytest.raises(InvalidBatchError, match="page id -1 at position 1 is outside"):
        session.add("a", np.array([0, -1], dtype), 8, computed_len=7)
    session.add("a", np.array([5, 3], dtype), 8, computed_len=7)
    assert session.plan().seg_pages.tolist() == [5, 3]

"""Sessions: equal to one-shot planning whatever happens, and unchanged by what they refuse."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashinfer_cascade import (
    CascadeConfig,
    CascadePlanner,
    PlanCapacity,
    PlannerPolicy,
)

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


@settings(max_examples=60, stateful_step_count=40)
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
            assert plan._gather(slice(None)).tolist() == pages.tolist()
            assert (plan.seg_page_begin + plan.seg_num_pages).max() <= size

    @invariant()
    def tables_are_what_they_should_be(self):
        if hasattr(self, "model"):
            assert self.session.ids == list(self.model.tables)
            for id, table in self.model.tables.items():
                assert self.session.block_table(id).tolist() == table
                assert self.session.seq_len(id) == self.model.lens[id]


TestDecoding = Decoding.TestCase

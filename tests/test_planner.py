"""Whole plans: the rules of correctness, the choices, and hostile or odd batches."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import (
    CapacityError,
    CascadeConfig,
    CascadePlanner,
    DeviceProfile,
    InvalidBatchError,
    PlanCapacity,
    PlannerPolicy,
    UnsupportedError,
)
from flashinfer_cascade.profile import PROFILES

FORCED = PlannerPolicy(executor="levels", fold=False)
NO_SEGMENTS = DeviceProfile(**(PROFILES["h200"].model_dump() | {"name": "no segments", "segment_launch_us": 10_000.0}))
"""On which they never pay, so that flat and levels are weighed against each other."""


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


@st.composite
def batches(draw):
    """Random forests with appends, padding, repeated ids and identical requests, and a page size."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    tables, seq_lens, qo_lens = [], [], []
    for _ in range(draw(st.integers(1, 10))):
        base = draw(st.sampled_from(tables)) if tables and draw(st.booleans()) else []
        table = base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 3), max_size=5))
        seq_len = draw(st.integers(0, len(table) * page_size))
        tables.append(table)
        seq_lens.append(seq_len)
        qo_lens.append(draw(st.integers(1, max(seq_len, 1))) if draw(st.booleans()) else 1)
    return page_size, tables, seq_lens, qo_lens


POLICIES = st.sampled_from(
    [
        PlannerPolicy(),
        FORCED,
        PlannerPolicy(executor="levels"),
        PlannerPolicy(executor="flat"),
        PlannerPolicy(executor="levels", fold=False, max_levels=2),
        PlannerPolicy(executor="levels", fold=False, max_decode_rows=2),
    ]
)


def pages_needed(seq_len, page_size):
    return -(-seq_len // page_size)


def check_rules(plan, page_size, tables, seq_lens, qo_lens):
    """Rules 1 and 2 of a correct plan, from the plan's public arrays alone."""
    assert sorted(plan.request_order) == list(range(len(tables)))
    q_begin = np.concatenate(([0], np.cumsum(qo_lens)))
    order = np.arange(plan.num_rows) if plan.row_order is None else plan.row_order
    for position, r in enumerate(plan.request_order):
        low, high = plan.qo_indptr[position : position + 2]
        assert order[low:high].tolist() == list(range(q_begin[r], q_begin[r + 1]))
        expected = range(seq_lens[r] - qo_lens[r], seq_lens[r]) if seq_lens[r] else [-1] * qo_lens[r]
        assert plan.row_pos[low:high].tolist() == list(expected)
        table, length = [], 0
        covering = [
            s
            for s in range(plan.num_segments)
            if plan.seg_row_begin[s] < high and plan.seg_row_begin[s] + plan.seg_num_rows[s] > low
        ]
        for s in covering:
            # A segment covers all rows of a request or none, and they follow each other without a gap.
            assert plan.seg_row_begin[s] <= low
            assert plan.seg_row_begin[s] + plan.seg_num_rows[s] >= high
            assert plan.seg_kv_start[s] == length
            assert plan.seg_kv_start[s] % page_size == 0
            pages = plan.seg_pages[plan.seg_page_indptr[s] : plan.seg_page_indptr[s + 1]]
            assert len(pages) == pages_needed(plan.seg_kv_len[s], page_size)
            table += pages.tolist()
            length += int(plan.seg_kv_len[s])
        assert table == tables[r][: pages_needed(seq_lens[r], page_size)]
        assert length == seq_lens[r]
        shared = [s for s in covering if plan.seg_num_rows[s] > high - low]
        limit = max(seq_lens[r] - qo_lens[r], 0) // page_size * page_size
        assert all(plan.seg_kv_start[s] + plan.seg_kv_len[s] <= limit for s in shared)
        own = covering[-1]
        assert plan.seg_num_rows[own] == high - low
        assert plan.seg_kv_len[own] >= qo_lens[r] or seq_lens[r] == 0


def check_levels(plan, page_size):
    """The levels view says the same as the segments."""
    seen = {row: [] for row in range(plan.num_rows)}
    levels = plan.levels()
    assert len(levels) == plan.num_levels
    for level in levels:
        groups = len(level.kv_last_page_len)
        assert level.qo_indptr.dtype == level.kv_indptr.dtype == np.int32
        assert len(level.qo_indptr) == len(level.kv_indptr) == groups + 1
        assert level.qo_indptr[0] == 0
        assert level.qo_indptr[-1] == plan.num_rows
        assert (np.diff(level.qo_indptr) > 0).all()
        assert level.kv_indptr[-1] == len(level.kv_indices)
        for g in range(groups):
            pages = level.kv_indices[level.kv_indptr[g] : level.kv_indptr[g + 1]].tolist()
            last = int(level.kv_last_page_len[g])
            assert (last == 0) == (not pages)
            assert last <= page_size
            for row in range(level.qo_indptr[g], level.qo_indptr[g + 1]):
                seen[row].append((pages, (len(pages) - 1) * page_size + last if pages else 0))
    for row, parts in seen.items():
        covering = [
            s
            for s in range(plan.num_segments)
            if plan.seg_row_begin[s] <= row < plan.seg_row_begin[s] + plan.seg_num_rows[s]
        ]
        assert [p for pages, _ in parts for p in pages] == [
            p for s in covering for p in plan.seg_pages[plan.seg_page_indptr[s] : plan.seg_page_indptr[s + 1]]
        ]
        assert [n for _, n in parts if n] == [plan.seg_kv_len[s] for s in covering if plan.seg_kv_len[s]]


@given(batches(), POLICIES)
def test_rules_hold_for_any_batch_and_policy(batch, policy):
    page_size, tables, seq_lens, qo_lens = batch
    plan = CascadePlanner(config(page_size=page_size), policy).plan(tables, seq_lens, qo_lens)
    check_rules(plan, page_size, tables, seq_lens, qo_lens)
    check_levels(plan, page_size)
    assert plan.num_levels <= policy.max_levels
    rows = np.concatenate([np.arange(p.row_begin, p.row_end) for p in plan.parts])
    assert rows.tolist() == list(range(plan.num_rows))


@given(batches(), st.integers(1, 12), st.integers(1, 30))
def test_a_capacity_is_met_or_refused(batch, segments, partials):
    page_size, tables, seq_lens, qo_lens = batch
    planner = CascadePlanner(config(page_size=page_size), FORCED)
    flat = CascadePlanner(config(page_size=page_size), PlannerPolicy(executor="flat")).plan(tables, seq_lens, qo_lens)
    capacity = PlanCapacity(
        num_segments=len(tables) + segments - 1,
        num_partials=flat.num_rows + partials - 1,
        num_page_indices=len(flat.seg_pages),
        num_slots=2 * len(tables),
        num_levels=2,
    )
    plan = planner.plan(tables, seq_lens, qo_lens, capacity=capacity)
    assert not capacity.lacks(plan.usage())
    check_rules(plan, page_size, tables, seq_lens, qo_lens)
    num = len(tables)
    match = rf"even a flat plan of this batch does not fit the capacity: num_segments {num} > {num - 1}\. Reserve more"
    with pytest.raises(CapacityError, match=match):
        planner.plan(tables, seq_lens, qo_lens, capacity=PlanCapacity(num_segments=num - 1))


@given(batches(), POLICIES)
def test_a_plan_fits_its_own_usage(batch, policy):
    page_size, tables, seq_lens, qo_lens = batch
    planner = CascadePlanner(config(page_size=page_size), policy)
    plan = planner.plan(tables, seq_lens, qo_lens)
    assert planner.plan(tables, seq_lens, qo_lens, capacity=plan.usage()) == plan


def test_a_node_too_wide_for_the_room_does_not_drag_smaller_ones_along():
    tables, seq_lens = nested((100, [1] * 30 + [(60, [1] * 6)]))
    capacity = PlanCapacity(num_partials=36 + 6)
    plan = CascadePlanner(config(), FORCED).plan(tables, seq_lens, capacity=capacity)
    assert plan.parts[0].kept.tolist() == [False, True]


def test_a_tight_capacity_merges_the_least_useful_node_and_says_so():
    tables = [[*range(64), 64, 65, 100 + r] for r in range(4)] + [[*range(64), 66, 200 + r] for r in range(4)]
    seq_lens = [67 * 16] * 4 + [66 * 16] * 4
    planner = CascadePlanner(config(), FORCED)
    assert planner.plan(tables, seq_lens).num_segments == 8 + 3
    plan = planner.plan(tables, seq_lens, capacity=PlanCapacity(num_segments=10))
    assert plan.parts[0].kept.tolist() == [True, True, False]
    assert "; 1 shared segment merged to fit the limits" in plan.parts[0].reason
    flat = planner.plan(tables, seq_lens, capacity=PlanCapacity(num_levels=1))
    assert (flat.parts[0].executor, flat.num_segments) == ("flat", 8)


def family(tables, prefix, leaves, fresh):
    """Add requests under `prefix`, a request for each number of own pages, nested for (pages, leaves)."""
    for leaf in leaves:
        if isinstance(leaf, tuple):
            family(tables, prefix + [next(fresh) for _ in range(leaf[0])], leaf[1], fresh)
        else:
            tables.append(prefix + [next(fresh) for _ in range(leaf)])


def nested(*families):
    tables, fresh = [], iter(range(10**6))
    family(tables, [], families, fresh)
    return tables, [16 * len(table) for table in tables]


def test_a_capacity_counts_the_reads_that_a_node_saves_now():
    # Without the root its run is read by its two children, not by all 32 requests: that costs least.
    tables, seq_lens = nested((200, [(50, [1] * 16), (50, [1] * 16)]), (40, [1] * 12))
    planner = CascadePlanner(config(), FORCED)
    plan = planner.plan(tables, seq_lens, capacity=PlanCapacity(num_segments=len(tables) + 3))
    assert plan.parts[0].forest.num_pages[~plan.parts[0].kept].tolist() == [200]
    # A node that ends the segment of unkept ones above it saves their pages too.
    tables, seq_lens = nested((64, [1, (1, [1] * 32)]), (4, [1] * 32), (64, [1] * 16))
    plan = CascadePlanner(config(), PlannerPolicy(executor="levels")).plan(tables, seq_lens)
    small = CascadePlanner(config(), PlannerPolicy(executor="levels")).plan(
        tables, seq_lens, capacity=PlanCapacity(num_segments=plan.num_segments - 1)
    )
    assert small.num_segments == plan.num_segments - 1
    assert len(small.seg_pages) < 1.5 * len(plan.seg_pages)


def test_a_capacity_that_spoils_the_gain_gives_flat():
    tables, seq_lens = tree([64], 8192, 256)
    levels = CascadePlanner(config(), PlannerPolicy(executor="levels"))
    part = levels.plan(tables, seq_lens, capacity=PlanCapacity(num_slots=0)).parts[0]
    assert (part.executor, part.reason) == ("flat", "the capacity has no room for a shared segment")
    planner = CascadePlanner(config(), profile=NO_SEGMENTS)
    chosen = set()
    for segments in range(13, 40):
        tables, seq_lens = nested((256, [1, 4, 4]), (256, [1] * 8 + [20]))
        capacity = PlanCapacity(num_segments=segments)
        part = planner.plan(tables, seq_lens, capacity=capacity).parts[0]
        gain = part.predicted_us["flat"] / part.predicted_us.get("levels", part.predicted_us["flat"])
        assert (part.executor == "levels") == (gain >= PlannerPolicy().min_speedup)
        chosen.add(part.executor)
    assert chosen == {"flat", "levels"}


def test_max_levels_merges_on_the_paths_that_are_too_long_alone():
    deep = (500, [4, 4])
    for _ in range(8):
        deep = (500, [4, deep])
    tables, seq_lens = nested(*[(100, [2] * 6) for _ in range(80)], deep)
    plan = CascadePlanner(config(max_kv_indices=2**24), FORCED).plan(tables, seq_lens)
    part = plan.parts[0]
    assert plan.num_levels == PlannerPolicy().max_levels
    assert part.kept[part.forest.depth == 0].sum() >= 80
    assert part.kept.sum() == 80 + PlannerPolicy().max_levels - 1


def test_which_of_two_long_paths_is_cut_first_does_not_hang_on_the_order_of_requests():
    tables = [[0, 1, 2], [0, 1, 2, 3], [0, 4], [0, 4, 5, 6], [0, 4, 5, 6, 7, 8, 9]]
    policy = PlannerPolicy(executor="levels", fold=False, max_levels=2)
    planner = CascadePlanner(config(page_size=1), policy)
    plans = [planner.plan(t, [len(x) for x in t]) for t in (tables, [tables[i] for i in (3, 1, 4, 2, 0)])]
    assert len(plans[0].seg_pages) == len(plans[1].seg_pages)


@pytest.mark.parametrize("policy", [FORCED, PlannerPolicy(executor="levels", fold=False, max_levels=3)])
@pytest.mark.parametrize("segments", [2**31 - 1, 9])
def test_which_nodes_are_merged_does_not_hang_on_the_order_of_requests(policy, segments):
    root = list(range(20))
    one = [*root, 100, 101]
    two = [*one, *range(200, 220)]
    first = [[*two, 1], [*two, 2], [*one, 5]]
    second = [[*root, 300, 301, 302, 303, 3], [*root, 300, 301, 302, 303, 4]]
    planner = CascadePlanner(config(), policy)
    plans = [
        planner.plan(t, [16 * len(x) for x in t], capacity=PlanCapacity(num_segments=segments))
        for t in (first + second, second + first)
    ]
    assert plans[0].num_segments == plans[1].num_segments
    assert sorted(plans[0].seg_pages) == sorted(plans[1].seg_pages)


@given(batches(), st.randoms(use_true_random=False), POLICIES)
def test_permuting_requests_permutes_the_plan(batch, rng, policy):
    page_size, tables, seq_lens, qo_lens = batch
    planner = CascadePlanner(config(page_size=page_size), policy)
    old = list(range(len(tables)))
    rng.shuffle(old)

    def content(plan, names):
        return {
            (
                frozenset(names[plan.request_order[p]] for p in positions),
                int(plan.seg_kv_start[s]),
                tuple(plan.seg_pages[plan.seg_page_indptr[s] : plan.seg_page_indptr[s + 1]].tolist()),
                int(plan.seg_kv_len[s]),
            )
            for s in range(plan.num_segments)
            for positions in [
                np.flatnonzero(
                    (plan.qo_indptr[:-1] >= plan.seg_row_begin[s])
                    & (plan.qo_indptr[1:] <= plan.seg_row_begin[s] + plan.seg_num_rows[s])
                )
            ]
        }

    plan = planner.plan(tables, seq_lens, qo_lens)
    other = planner.plan([tables[i] for i in old], [seq_lens[i] for i in old], [qo_lens[i] for i in old])
    assert content(plan, list(range(len(tables)))) == content(other, old)


def tree(groups, shared, own, page_size=16):
    """`groups` lists of requests, each under its own prefix of `shared` tokens, `own` tokens behind it."""
    ids = iter(range(2**20))
    tables = []
    for size in groups:
        prefix = [next(ids) for _ in range(shared // page_size)]
        tables += [prefix + [next(ids) for _ in range(pages_needed(own, page_size))] for _ in range(size)]
    return tables, [shared + own] * sum(groups)


def test_sixty_three_share_and_one_does_not():
    tables, seq_lens = tree([63], 4096, 100)
    tables.insert(20, list(range(5000, 5200)))
    seq_lens.insert(20, 3200)
    plan = CascadePlanner(config()).plan(tables, seq_lens)
    assert plan.parts[0].executor == "segments"
    assert plan.seg_num_rows[0] == 63
    assert plan.seg_kv_len[0] == 4096
    assert plan.levels()[0].kv_last_page_len.tolist() == [16, 0]
    assert 20 not in plan.row_order[:63]


def test_descending_page_ids():
    shared = list(range(900, 644, -1))
    tables = [[*shared, 1000 - r] for r in range(64)]
    plan = CascadePlanner(config()).plan(tables, [4096 + 5] * 64)
    assert plan.seg_pages[:256].tolist() == shared


def test_nothing_is_shared_once_the_sharers_left():
    sharing, lens = tree([8], 1024, 64)
    others = [list(range(10_000 + 100 * r, 10_080 + 100 * r)) for r in range(7)]
    planner = CascadePlanner(config())
    before = planner.plan(sharing + others, lens + [1280] * 7)
    after = planner.plan(others, [1280] * 7)
    assert before.parts[0].forest.num_nodes == 1
    assert after.parts[0].forest.num_nodes == 0
    assert after.parts[0].reason.endswith("as fast as flat; no full page is shared")
    assert after.parts[0].num_levels == 1
    (part,) = CascadePlanner(config(), profile=NO_SEGMENTS).plan(others, [1280] * 7).parts
    assert (part.executor, part.reason) == ("flat", "no full page is shared")


def test_forty_tokens_on_three_pages_share_two():
    plan = CascadePlanner(config(), FORCED).plan([[4, 5, 6], [4, 5, 6]], [40, 40])
    assert plan.seg_kv_len.tolist() == [32, 8, 8]
    assert plan.seg_pages.tolist() == [4, 5, 6, 6]


def test_a_cold_prefill_beside_a_decode_over_the_same_pages():
    tables, seq_lens, qo_lens = [[1, 2, 3], [1, 2, 3], [1, 2, 3]], [48, 41, 42], [48, 1, 1]
    plan = CascadePlanner(config(), FORCED).plan(tables, seq_lens, qo_lens)
    check_rules(plan, 16, tables, seq_lens, qo_lens)
    assert [(p.name, p.executor) for p in plan.parts] == [("decode", "levels"), ("append", "flat")]
    assert plan.row_order[:2].tolist() == [48, 49]
    one_part = PlannerPolicy(executor="levels", fold=False, max_decode_rows=64)
    plan = CascadePlanner(config(), one_part).plan(tables, seq_lens, qo_lens)
    check_rules(plan, 16, tables, seq_lens, qo_lens)
    assert plan.seg_num_rows[0] == 2  # the two decodes; the prefill sees no page that is full before it


def test_stale_tails_and_padding_rows_of_a_persistent_table():
    table = np.tile(np.arange(64), (8, 1))  # every slot still holds another request's ids
    table[:3, 2:4] = [[100, 101], [102, 103], [104, 105]]
    plan = CascadePlanner(config(), FORCED).plan(table, [60, 50, 40, 0, 0, 0])
    assert plan.seg_kv_len.tolist() == [32, 28, 18, 8, 0, 0, 0]
    assert plan.row_pos.tolist() == [59, 49, 39, -1, -1, -1]
    assert plan.levels()[1].kv_last_page_len.tolist() == [12, 2, 8, 0, 0, 0]


def test_lengths_around_a_page():
    plan = CascadePlanner(config(), FORCED).plan([[1], [1], [1], [1, 2]], [1, 15, 16, 17])
    assert (plan.num_levels, plan.seg_kv_len.tolist()) == (1, [1, 15, 16, 17])
    plan = CascadePlanner(config(), FORCED).plan([[1], [1, 3], [1, 2]], [16, 17, 18])
    assert plan.seg_kv_len.tolist() == [16, 16, 1, 2]


def test_a_short_prefix_of_few_requests_does_not_pay():
    tables, seq_lens = tree([8], 256, 512)
    plan = CascadePlanner(config(), profile=NO_SEGMENTS).plan(tables, seq_lens)
    assert plan.parts[0].executor == "flat"
    assert plan.parts[0].forest.num_nodes == 1


def test_a_long_prefix_of_many_requests_pays():
    tables, seq_lens = tree([64], 8192, 256)
    for profile, executor in ("h200", "segments"), (NO_SEGMENTS, "levels"):
        part = CascadePlanner(config(), profile=profile).plan(tables, seq_lens).parts[0]
        assert part.executor == executor
        assert part.predicted_us[executor] < 0.6 * part.predicted_us["flat"]
        assert part.kept.all()


def test_long_prefills_are_planned_apart_from_decodes():
    tables, seq_lens = tree([32], 4096, 256)
    qo_lens = [1, 200] * 16
    plan = CascadePlanner(config()).plan(tables, seq_lens, qo_lens)
    assert [p.name for p in plan.parts] == ["decode", "append"]
    assert [p.num_requests for p in plan.parts] == [16, 16]
    assert plan.causal
    assert not CascadePlanner(config()).plan(tables, seq_lens).causal


def test_a_window_that_does_not_cover_the_context_is_never_cascaded():
    tables, seq_lens = tree([64], 8192, 256)
    planner = CascadePlanner(config(window_left=4095))
    part = planner.plan(tables, seq_lens).parts[0]
    assert part.executor == "flat"
    assert part.reason == "window_left=4095 does not cover the longest context of 8448 tokens"
    assert CascadePlanner(config(window_left=8447)).plan(tables, seq_lens).parts[0].executor == "levels"
    with pytest.raises(UnsupportedError, match="window_left=8446 does not cover a context of 8448"):
        CascadePlanner(config(window_left=8446), FORCED).plan(tables, seq_lens)


def test_groups_of_layers_share_one_forest():
    tables, seq_lens = tree([64], 8192, 256)
    full, windowed = config(), config(window_left=1023, logits_soft_cap=50.0, num_kv_heads=16)
    planner = CascadePlanner(full)
    plans = planner.plan_groups([full, windowed], tables, seq_lens)
    assert [p.parts[0].executor for p in plans] == ["segments", "flat"]
    assert [p.config for p in plans] == [full, windowed]
    assert plans[0].parts[0].forest is plans[1].parts[0].forest
    assert plans[0] == planner.plan(tables, seq_lens)
    assert plans[1] == CascadePlanner(windowed).plan(tables, seq_lens)
    with pytest.raises(InvalidBatchError, match="page_size=32 of a group differs from the planner's 16"):
        planner.plan_groups([full, config(page_size=32)], tables, seq_lens)
    for configs, match in (
        ([full, None], r"configs\[1\] is None: give a CascadeConfig for each group"),
        (full, "configs is a CascadeConfig: give a list"),
        ((c for c in (full,)), "configs is a generator: give a list"),
    ):
        with pytest.raises(InvalidBatchError, match=match):
            planner.plan_groups(configs, tables, seq_lens)


@pytest.mark.parametrize(
    "plan",
    [
        lambda planner, capacity: planner.plan([[0]], [3], capacity=capacity),
        lambda planner, capacity: planner.plan_groups([planner.config], [[0]], [3], capacity=capacity),
    ],
    ids=["plan", "plan_groups"],
)
def test_a_capacity_that_is_none(plan):
    with pytest.raises(InvalidBatchError, match="capacity is 5: give the PlanCapacity of a graph"):
        plan(CascadePlanner(config()), 5)


def test_a_million_page_request():
    big = config(page_size=1, max_kv_pages=2**20, max_kv_indices=2**21)
    plan = CascadePlanner(big, FORCED).plan([np.arange(10**6), np.arange(10**6)], [10**6, 10**6])
    assert plan.seg_kv_len.tolist() == [10**6 - 1, 1, 1]


def test_chains_hundreds_of_levels_deep_stay_within_max_levels():
    depth = 600
    tables = [[*range(4 * (r + 1)), 10_000 + r] for r in range(depth)]
    seq_lens = [(4 * (r + 1) + 1) * 16 for r in range(depth)]
    for policy in (PlannerPolicy(executor="levels", max_levels=5), PlannerPolicy(executor="levels", fold=False)):
        plan = CascadePlanner(config(), policy).plan(tables, seq_lens)
        assert plan.parts[0].forest.num_nodes == depth - 1
        assert 1 < plan.num_levels <= policy.max_levels
        check_rules(plan, 16, tables, seq_lens, [1] * depth)


def test_errors_of_construction():
    for wrong, match in (
        ({"policy": "h200"}, "policy is 'h200': give a PlannerPolicy"),
        ({"profile": None}, "profile is None: give the name of a built-in profile"),
        ({"config": {}}, "config is a dict: give a CascadeConfig"),
    ):
        with pytest.raises(InvalidBatchError, match=match):
            CascadePlanner(**({"config": config()} | wrong))
    with pytest.raises(UnsupportedError, match=r"profile 'b200' is not built in \(h200, h100"):
        CascadePlanner(config(), profile="b200")
    e4m3, segments = config(kv_dtype="float8_e4m3fn"), PlannerPolicy(executor="segments")
    with pytest.raises(
        UnsupportedError, match=r"executor='segments' with float8_e4m3fn KV on a GPU of capability 8\.0"
    ):
        CascadePlanner(e4m3, segments, profile="a100")
    with pytest.raises(
        UnsupportedError, match=r"executor='segments' with 32 query heads for each KV head: its kernels"
    ):
        CascadePlanner(config(num_qo_heads=32, num_kv_heads=1), segments)
    with pytest.raises(ValueError, match="max_levels"):
        PlannerPolicy(max_levels=1)
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        PlannerPolicy(levels=3)


def test_a_profile_of_ones_own_changes_the_choice():
    tables, seq_lens = tree([64], 8192, 256)
    h200 = CascadePlanner(config()).profile
    for slow, executor in (
        ({"merge_us": 10_000.0}, "segments"),
        ({"segment_launch_us": 10_000.0}, "levels"),
        ({"merge_us": 10_000.0, "segment_launch_us": 10_000.0}, "flat"),
    ):
        profile = DeviceProfile(**(h200.model_dump() | {"name": "slow"} | slow))
        assert CascadePlanner(config(), profile=profile).plan(tables, seq_lens).parts[0].executor == executor


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import hashlib, pickle, numpy as np
from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy
rng = np.random.default_rng(5)
tables = [np.concatenate([np.arange(r % 7 * 20), rng.integers(500, 900, 9)]) for r in range(90)]
plan = CascadePlanner(
    CascadeConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16"),
    PlannerPolicy(executor="levels"),
).plan(tables, [16 * len(t) for t in tables])
print(hashlib.sha256(pickle.dumps([*plan._arrays(), plan.seg_pages])).hexdigest())
"""


def test_segments_are_chosen_where_the_gpu_takes_them():
    def chosen(profile, **changes):
        cfg = config(**changes)
        tables = [[*range(512), *range(600 + 20 * request, 620 + 20 * request)] for request in range(64)]
        return CascadePlanner(cfg, profile=profile).plan(tables, [8192 + 250] * 64).parts[0].executor

    assert chosen("a100", kv_dtype="float8_e4m3fn") == "levels"
    for profile, changes in (
        ("a100", {"kv_dtype": "float8_e5m2"}),
        ("l40s", {"kv_dtype": "float8_e4m3fn"}),
        ("h200", {"kv_dtype": "float8_e4m3fn"}),
        ("a100", {}),
    ):
        assert chosen(profile, **changes) == "segments"


def test_plans_are_the_same_in_every_process():
    out = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(path=sys.path)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(out) == 1


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("copied", [lambda p: pickle.loads(pickle.dumps(p)), copy.deepcopy, copy.copy])
def test_a_copy_of_a_planner_plans_the_same(copied, native):
    own = PROFILES["h100"].model_copy(update={"name": "own"})
    planner = CascadePlanner(config(page_size=4), PlannerPolicy(executor="segments"), own, native=native)
    other = copied(planner)
    assert (other.config, other.policy, other.profile) == (planner.config, planner.policy, planner.profile)
    assert other.native == planner.native
    tables, seq_lens = tree([8], 512, 40, page_size=4)
    assert other.plan(tables, seq_lens) == planner.plan(tables, seq_lens)
    session = other.session()
    session.add("r0", tables[0], seq_lens[0])
    assert session.plan().num_rows == seq_lens[0]


def test_planning_twice_gives_equal_plans_of_two_structures():
    tables, seq_lens = tree([5, 9], 640, 33)
    planner = CascadePlanner(config(), FORCED)
    first, second = planner.plan(tables, seq_lens), planner.plan(tables, seq_lens)
    assert first == second
    assert first.structure_id != second.structure_id
    assert first != planner.plan(tables, [n - 1 for n in seq_lens])

"""Lowering by the native core gives what Python defines, array by array, also into a room of the caller's."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CapacityError, CascadeConfig, CascadePlanner, PlannerPolicy
from flashinfer_cascade.lower import Lowered, Tiling, lower, lower_into
from flashinfer_cascade.native import load_core
from flashinfer_cascade.native_lower import FIELDS, WINDOW, LoweredRoom
from flashinfer_cascade.testing import random_batch

HEADS = [(32, 8), (4, 4), (10, 2), (16, 1), (64, 8), (6, 2), (128, 64), (7, 1), (22, 2)]
BUILT = pytest.mark.skipif(load_core() is None, reason="the native core was not built")
BOTH = pytest.mark.parametrize("native", [pytest.param(True, marks=BUILT), False], ids=["native", "python"])
NAMES = [field.name for field in fields(Lowered) if field.name != "num_double"]
SENTINEL = -77


def config_of(heads=(32, 8), page_size=16):
    return CascadeConfig(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        page_size=page_size,
        dtype="bfloat16",
        max_batch_size=1024,
        max_kv_pages=2**20,
    )


def tilings(config):
    small = Tiling(4, min_cut=64, short_tokens=64)
    fine = Tiling(4, min_cut=64, short_tokens=64, wide_tokens=32)
    pairs = [(132, True), (132, False), (8, True)]
    return [
        small,
        fine,
        *(Tiling.of(config, *pair) for pair in pairs),
        *(Tiling.of(config, sms, True, True) for sms in (132, 8)),
    ]


def plan_of(lengths, config):
    """One part of decode rows that share nothing."""
    pages = np.cumsum([0, *(-(-length // config.page_size) for length in lengths)])
    tables = [np.arange(low, high) for low, high in pairwise(pages)]
    return CascadePlanner(config, PlannerPolicy(executor="segments")).plan(tables, lengths)


def tree_of_classes(seed=0):
    """A plan with items of all three classes."""
    tables, fresh = [], 2000
    for node in range(6):
        for _ in range((3, 7, 20)[node % 3]):
            tables.append([*range(100 * node, 100 * node + (7, 90)[node % 2]), fresh, fresh + 1])
            fresh += 2
    policy = PlannerPolicy(executor="segments", fold=False)
    return CascadePlanner(config_of(), policy).plan(tables, [16 * len(table) - seed % 16 for table in tables])


def room_of(lowered, spare=0, **smaller):
    """Room for a lowered part and `spare` more of everything, filled with a number that is in none."""
    arrays = {}
    for name in NAMES:
        array = getattr(lowered, name)
        length = max(len(array) + spare - smaller.get(name, 0), 0)
        arrays[name] = np.full((length, *array.shape[1:]), SENTINEL, np.int32)
    return LoweredRoom(**arrays, num_partials=lowered.num_partials + spare - smaller.get("num_partials", 0))


def assert_equal(plan, part, tiling, max_partials=None, page_begin=None):
    native = lower(plan, part, tiling, page_begin, max_partials)
    python = lower(plan, part, tiling, page_begin, max_partials, native=False)
    for name in NAMES:
        mine, theirs = getattr(native, name), getattr(python, name)
        assert mine.dtype == theirs.dtype == np.int32
        assert np.array_equal(mine, theirs), (name, tiling, max_partials)
    assert native.num_double == python.num_double
    return python


def assert_holds(room, lowered, sizes):
    """What `LoweredRoom` says of its arrays."""
    rows = len(lowered.combined)
    assert (sizes.num_wide, sizes.num_double) == (len(lowered.wide), lowered.num_double)
    assert (sizes.num_short, sizes.num_narrow) == (len(lowered.short) - WINDOW, len(lowered.narrow) - WINDOW)
    assert (sizes.num_rows, sizes.num_partials) == (rows, lowered.num_partials)
    for name in ("wide", "short_runs", "narrow_runs", "combined"):
        table, wanted = getattr(room, name), getattr(lowered, name)
        assert np.array_equal(table[: len(wanted)], wanted), name
        assert not table[len(wanted) :].any(), name
    for name in ("short", "narrow"):
        table, wanted = getattr(room, name), getattr(lowered, name)
        assert np.array_equal(table[: len(wanted)], wanted), name
    assert np.array_equal(room.partial_indptr[: rows + 1], lowered.partial_indptr)
    assert (room.partial_indptr[rows:] == lowered.partial_indptr[-1]).all()


@BUILT
@pytest.mark.parametrize("seed", range(70))
def test_native_equals_python(seed):
    rng = np.random.default_rng(seed)
    config = config_of(HEADS[seed % len(HEADS)], [1, 16, 64][seed % 3])
    count, longest = int(rng.integers(1, 60)), int(rng.choice([30, 300, 3000]))
    batch = random_batch(
        rng, page_size=config.page_size, num_requests=count, max_new=[1, 1, 4, 40][seed % 4], max_len=longest
    )
    plan = CascadePlanner(config, PlannerPolicy(executor="segments", fold=bool(seed % 2), max_levels=64)).plan(*batch)
    for tiling in tilings(config):
        for part in plan.parts:
            segs = slice(part.seg_begin, part.seg_end)
            pairs = int(plan.seg_num_rows[segs].sum())
            for most in (None, pairs, pairs + 20):
                assert_equal(plan, part, tiling, most)
            assert_equal(plan, part, tiling, None, plan.seg_page_begin[segs])


@BUILT
@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.sampled_from(HEADS),
    sms=st.integers(1, 40),
    wide=st.tuples(st.integers(1, 3), st.sampled_from([1, 64, 384]), st.sampled_from([64, 128]), st.integers(1, 2)),
    blocks=st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(sorted).map(tuple),
    min_run_tiles=st.integers(1, 5),
    max_finished=st.integers(0, 3),
    narrow_rows=st.sampled_from([8, 16, 24]),
    spare=st.integers(0, 40),
)
def test_any_tiling_and_room(seed, heads, sms, wide, blocks, min_run_tiles, max_finished, narrow_rows, spare):
    rng = np.random.default_rng(seed)
    config = config_of(heads)
    batch = random_batch(rng, page_size=16, num_requests=int(rng.integers(1, 80)), max_new=3, max_len=900)
    plan = CascadePlanner(config, PlannerPolicy(executor="segments", fold=False, max_levels=64)).plan(*batch)
    tiling = Tiling(
        sms,
        wide_blocks=wide[0],
        min_cut=wide[1],
        wide_rows=wide[2],
        wide_tiles=wide[3],
        short_blocks=blocks[:2],
        narrow_blocks=blocks,
        narrow_rows=narrow_rows,
        min_run_tiles=min_run_tiles,
        max_finished=max_finished,
    )
    for part in plan.parts:
        python = assert_equal(plan, part, tiling)
        for native in (True, False):
            room = room_of(python, spare)
            assert_holds(room, python, lower_into(plan, part, tiling, None, room, native=native))


@BUILT
@pytest.mark.parametrize(
    "lengths",
    [[1], [2**20], [1] * 1024, [65536] + [100] * 255, [0, 0, 0], [0, 5, 0], [100] * 140, [512, 512, 30] * 50],
    ids=lambda lengths: f"{len(lengths)} up to {max(lengths)}",
)
def test_lengths_that_are_hard_to_deal(lengths):
    config = config_of()
    plan = plan_of(lengths, config)
    for tiling in tilings(config):
        lowered = assert_equal(plan, plan.parts[0], tiling)
        tiles = -(-np.array(lengths) // tiling.narrow_tile_tokens)
        assert lowered.narrow_runs[:, 4].sum() == tiles.sum()
        assert (lowered.combined[np.array(lengths) == 0] == 0).all()


@BOTH
def test_a_room_is_filled_again_and_again(native):
    tiling = Tiling.of(config_of(), 132, True)
    plans = [tree_of_classes(), plan_of([5000, 3, 0], config_of()), tree_of_classes(3), plan_of([0], config_of())]
    largest = lower(plans[0], plans[0].parts[0], tiling, native=False)
    assert min(len(largest.short), len(largest.narrow)) > WINDOW
    assert len(largest.wide)
    room = room_of(largest, spare=200)
    for plan in plans:
        page_begin = plan.seg_page_begin[: plan.num_segments] + 1000
        lowered = lower(plan, plan.parts[0], tiling, page_begin, room.num_partials, native=False)
        assert_holds(room, lowered, lower_into(plan, plan.parts[0], tiling, page_begin, room, native=native))


@BOTH
@pytest.mark.parametrize("short_runs", [0, 3])
def test_a_room_without_wide_and_short_items(short_runs, native):
    """As of graphs for plans that share nothing."""
    plan, tiling = plan_of([700, 20, 9], config_of()), Tiling.of(config_of(), 132, True)
    lowered = lower(plan, plan.parts[0], tiling, native=False)
    room = room_of(lowered, short=WINDOW, short_runs=len(lowered.short_runs) - short_runs)
    assert (len(room.wide), len(room.short), len(room.short_runs)) == (0, 0, short_runs)
    sizes = lower_into(plan, plan.parts[0], tiling, None, room, native=native)
    assert (sizes.num_short_runs, sizes.num_narrow_runs) == (0, len(lowered.narrow_runs))
    assert np.array_equal(room.narrow, lowered.narrow)
    assert np.array_equal(room.narrow_runs, lowered.narrow_runs)
    assert not room.short_runs.any()


@BOTH
@pytest.mark.parametrize(
    ("name", "smaller", "message"),
    [
        ("wide", {"wide": 1}, r"num_wide (\d+) > (\d+)\. Plan with the capacity"),
        ("short", {"short": 1}, r"num_short (\d+) > (\d+)"),
        ("narrow", {"narrow": 1}, r"num_narrow (\d+) > (\d+)"),
        ("short_runs", {"short_runs": 1}, r"num_short_runs 66 > 65"),
        ("narrow_runs", {"narrow_runs": 1}, r"num_narrow_runs 165 > 164"),
        ("rows", {"combined": 1, "partial_indptr": 1}, r"num_rows 60 > 59"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_nothing_is_written_where_something_does_not_fit(name, smaller, message, native):
    plan, tiling = tree_of_classes(), Tiling.of(config_of(), 132, True)
    lowered = lower(plan, plan.parts[0], tiling, native=False)
    room = room_of(lowered, **smaller)
    with pytest.raises(CapacityError, match=message) as caught:
        lower_into(plan, plan.parts[0], tiling, None, room, native=native)
    ((needed, reserved),) = caught.value.lacking.values()
    assert needed == reserved + 1
    assert all((getattr(room, array) == SENTINEL).all() for array in NAMES)


@BOTH
def test_partials_at_the_limit_and_beyond(native):
    """Uncut KV takes one piece of each row and segment, or none where a narrow item finishes its row."""
    plan, part, tiling = tree_of_classes(), tree_of_classes().parts[0], Tiling.of(config_of(), 132, True)
    free = lower(plan, part, tiling, native=False).num_partials
    least = lower(plan, part, replace(tiling, min_cut=10**6), native=False).num_partials
    assert least < free
    for most in (free, free - 1, least):
        lowered = lower(plan, part, tiling, None, most, native=native)
        assert lowered.num_partials == (free if most == free else least)
    with pytest.raises(CapacityError, match=rf"num_partials {least} > {least - 1}\. Plan with the capacity"):
        lower(plan, part, tiling, None, least - 1, native=native)
    room = room_of(lower(plan, part, tiling, None, least, native=False), spare=100, num_partials=101)
    with pytest.raises(CapacityError, match=rf"num_partials {least} > {least - 1}"):
        lower_into(plan, part, tiling, None, room, native=native)
    assert (room.partial_indptr == SENTINEL).all()


@BOTH
def test_page_ids_begin_where_an_int32_reaches(native):
    plan, tiling = plan_of([40, 50], config_of()), Tiling.of(config_of(), 132, True)
    lowered = lower(plan, plan.parts[0], tiling, np.array([3, 2**31 - 1]), native=native)
    assert sorted(lowered.narrow[:2, 2].tolist()) == [3, 2**31 - 1]
    with pytest.raises(CapacityError, match=r"page_begin 2147483648 > 2147483647"):
        lower(plan, plan.parts[0], tiling, np.array([2**31, 3]), native=native)


def test_rooms_of_impossible_shapes():
    arrays = {name: np.zeros((WINDOW, FIELDS), np.int32) for name in NAMES[:5]}
    by_row = {"partial_indptr": np.zeros(5, np.int32), "combined": np.zeros(4, np.int32)}
    assert LoweredRoom(**arrays, **by_row, num_partials=9).most.num_short == 0
    with pytest.raises(CapacityError, match=r"narrow has room for 31 items, but ends with 32 of zeros: add as many"):
        LoweredRoom(**arrays | {"narrow": arrays["narrow"][1:]}, **by_row, num_partials=9)
    with pytest.raises(CapacityError, match=r"partial_indptr has 4 numbers for the 4 rows of combined: give it 5"):
        LoweredRoom(**arrays, **by_row | {"partial_indptr": np.zeros(4, np.int32)}, num_partials=9)

"""Shapes of graphs: what is captured by default, and how plans are laid onto launches."""

import numpy as np
import pytest

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlanCapacity, PlannerPolicy, UnsupportedError
from flashinfer_cascade.bench.traffic import Traffic
from flashinfer_cascade.cost import TILES
from flashinfer_cascade.lower import WINDOW, Tiling, lower
from flashinfer_cascade.runtime.captured import float_workspace_bytes, int_workspace_bytes
from flashinfer_cascade.runtime.fit import Needs, fit, level_backends
from flashinfer_cascade.runtime.shapes import (
    GraphShape,
    LaunchSpec,
    SegmentRoom,
    SegmentShape,
    bucket_capacity,
    check_segments,
    default_shapes,
    fa2_tile,
    launch_specs,
    level_shapes,
    make_bucket,
    one_for_all,
)

SMS, HOPPER = 132, (9, 0)


def config(heads=(32, 8), **changes):
    values = {"head_dim": 128, "page_size": 16, "dtype": "bfloat16", "max_batch_size": 1024, "max_num_rows": 8192}
    return CascadeConfig(num_qo_heads=heads[0], num_kv_heads=heads[1], **(values | changes))


CFG = config()
DECODES = [1, 2, 3, 8, 33, 34, 64, 256, 257, 1024]
APPENDS = [(1, 1), (16, 16), (512, 64), (512, 1), (8192, 256)]
HEADS = [(32, 8), (32, 32), (64, 8), (16, 1), (128, 1), (12, 4), (7, 1)]


def buckets(cfg):
    return [make_bucket(cfg, size) for size in DECODES] + [make_bucket(cfg, None, *sizes) for sizes in APPENDS]


def shapes_of_levels(shapes):
    return [shape for shape in shapes if isinstance(shape, GraphShape)]


@pytest.mark.parametrize("changes", [{}, {"head_dim": 256}, {"kv_dtype": "float8_e4m3fn"}, {"window_left": 500}])
@pytest.mark.parametrize("heads", HEADS)
def test_default_launches_are_ones_that_flashinfer_plans_so(heads, changes):
    cfg = config(heads, **changes)
    for bucket in buckets(cfg):
        defaults = default_shapes(cfg, bucket, SMS, HOPPER)
        assert len(set(defaults)) == len(defaults)
        shapes = level_shapes(cfg, bucket, SMS, has_fa3=True)
        assert any(not shape.shared for shape in shapes)
        assert (bucket.num_requests == 1) == all(not shape.shared for shape in shapes)
        for shape in shapes_of_levels([*shapes, *defaults, one_for_all(cfg, bucket, SMS, HOPPER)]):
            for spec in launch_specs(cfg, bucket, shape, SMS):
                assert spec.planned_rows >= bucket.num_rows
                if spec.backend == "fa2":  # the tile is FlashInfer's choice
                    assert fa2_tile(cfg, max(spec.planned_rows - spec.num_slots + 1, 0)) == spec.tile
                if spec.backend == "fa3":
                    assert cfg.kv_dtype == cfg.dtype
                    assert cfg.window_left < 0
                assert float_workspace_bytes(cfg, spec, SMS) < 2**31
                assert int_workspace_bytes(cfg, spec, SMS) < 2**25


def test_what_is_captured_by_default():
    def said(bucket):
        return [str(shape) for shape in default_shapes(CFG, bucket, SMS, HOPPER)]

    nothing = "segments, nothing shared"
    assert said(make_bucket(CFG, 1)) == ["fa2", nothing]
    assert said(make_bucket(CFG, 8)) == ["fa2", nothing, "segments"]
    assert said(make_bucket(CFG, 64)) == ["fa2_uncut", nothing, "segments"]
    assert said(make_bucket(CFG, 256)) == ["fa2_uncut", "decode", nothing, "segments"]
    assert [str(one_for_all(CFG, make_bucket(CFG, size), SMS, HOPPER)) for size in (1, 256)] == [nothing, "segments"]
    # Sixteen rows a request, and one more.
    assert said(make_bucket(CFG, None, 512, 32))[-1] == "segments"
    assert said(make_bucket(CFG, None, 513, 32))[-1] == "fa3 + fa2_uncut + fa3"
    assert str(one_for_all(CFG, make_bucket(CFG, None, 512, 32), SMS, HOPPER)) == "fa2 + fa2_uncut + fa2"


E4M3 = {"kv_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("heads", "changes", "capability", "why"),
    [
        ((32, 1), {}, HOPPER, "32 query heads for each KV head: its kernels take up to 16"),
        ((32, 8), {"window_left": 100}, HOPPER, "window_left=100: its kernels take no window in a graph"),
        ((32, 8), E4M3, (8, 6), "float8_e4m3fn KV on a GPU of capability 8.6: its kernels take that from 8.9 on"),
        ((32, 8), {}, (7, 5), "bfloat16 KV on a GPU of capability 7.5: its kernels take that from 8.0 on"),
    ],
)
def test_levels_are_captured_where_segments_do_not_run(heads, changes, capability, why):
    cfg = config(heads, **changes)
    for bucket in buckets(cfg):
        levels = level_shapes(cfg, bucket, SMS, has_fa3=capability == HOPPER)
        assert default_shapes(cfg, bucket, SMS, capability) == levels
        assert isinstance(one_for_all(cfg, bucket, SMS, capability), GraphShape)
        with pytest.raises(UnsupportedError, match=f"segments with {why}; use a GraphShape"):
            check_segments(cfg, bucket, SegmentShape(), capability)


@pytest.mark.parametrize(
    ("changes", "capability"), [({}, (8, 0)), ({"kv_dtype": "float8_e5m2"}, (8, 0)), (E4M3, (8, 9)), (E4M3, (12, 0))]
)
def test_segments_are_captured_where_they_run(changes, capability):
    cfg = config(head_dim=256, **changes)
    for bucket in buckets(cfg):
        assert check_segments(cfg, bucket, SegmentShape(), capability) == SegmentShape()
        assert any(isinstance(shape, SegmentShape) for shape in default_shapes(cfg, bucket, SMS, capability)) == (
            bucket.kind == "decode" or bucket.num_rows <= 16 * bucket.num_requests
        )


def test_levels_of_a_bucket():
    def said(bucket, has_fa3=True):
        return [str(shape) for shape in level_shapes(CFG, bucket, SMS, has_fa3)]

    assert said(make_bucket(CFG, 1)) == ["fa2"]
    assert said(make_bucket(CFG, 8)) == ["fa2", "fa2 + fa2_uncut + fa2", "fa2 + fa2_uncut + fa2_uncut"]
    flat, deep, broad = said(make_bucket(CFG, 64))
    assert (flat, deep, broad) == ("fa2_uncut", "fa2 + fa2_uncut + fa2_uncut", "fa2_uncut + fa2_uncut + fa2_uncut")
    assert len(said(make_bucket(CFG, 256))) == 8
    assert len(said(make_bucket(CFG, 256), has_fa3=False)) == 6


@pytest.mark.parametrize(
    "tiling", [Tiling(num_sms=4, min_cut=64), Tiling.of(CFG, SMS, is_native=True)], ids=["4", "132"]
)
@pytest.mark.parametrize(("heads", "max_new"), [((32, 8), 1), ((32, 8), 4), ((4, 4), 1), ((16, 1), 3)])
def test_segment_graphs_have_room_for_what_their_capacity_admits(heads, max_new, tiling):
    cfg = config(heads, page_size=4, max_kv_pages=4000)
    policy = PlannerPolicy(executor="segments", fold=False, max_levels=64, max_decode_rows=64)
    planner = CascadePlanner(cfg, policy)
    traffic = Traffic(np.random.default_rng(2), 4, 4000, 60, max_new, max_len=200)
    num_wide = 0
    for _ in range(12):
        batch = traffic.step()
        requests, rows = len(batch.seq_lens), batch.num_rows
        bucket = make_bucket(cfg, requests) if max_new == 1 else make_bucket(cfg, None, rows, requests)
        room = SegmentRoom.of(cfg, bucket, tiling, shares=True)
        capacity = PlanCapacity(num_segments=room.num_segments, num_partials=room.num_partials)
        plan = planner.plan(*batch, capacity=capacity)
        lowered = lower(plan, plan.parts[0], tiling, max_partials=room.num_partials)
        assert plan.num_segments <= room.num_segments
        assert lowered.num_partials <= room.num_partials
        assert len(lowered.wide) <= room.num_wide
        assert len(lowered.narrow) - WINDOW <= room.num_segments
        assert len(lowered.short) - WINDOW <= room.num_segments
        num_wide += len(lowered.wide)
    assert (num_wide > 0) == (cfg.group_size > 1)


@pytest.mark.parametrize(
    ("bucket", "shares", "room"),
    [
        # 165 runs on narrow tiles of two rows, 33 + 1 wide blocks of 16; no cut is left out for want of room.
        (make_bucket(CFG, 64), False, (64, 64 + 330 + 544, 33 + 2 * (58 + 64))),
        (make_bucket(CFG, 64), True, (127, 8 * 64 + 330 + 544, 33 + 2 * (86 + 127))),
        (make_bucket(CFG, None, 256, 40), True, (79, 8 * 256 + 330 + 544, 33 + 2 * (182 + 79))),
    ],
    ids=str,
)
def test_what_a_segment_graph_reserves(bucket, shares, room):
    assert SegmentRoom.of(CFG, bucket, Tiling.of(CFG, SMS, is_native=True), shares) == room


@pytest.mark.parametrize("requests", [1, 2, 16, 33])
def test_a_segment_graph_has_room_for_as_many_segments_as_a_tree_can_have(requests):
    # Each request parts from the one before it a page later; or, where none shares, each has its own segment alone.
    tiling = Tiling.of(CFG, SMS, is_native=True)
    policy = PlannerPolicy(executor="segments", fold=False, max_levels=64)
    for shares, prefix in ((True, lambda r: range(min(r + 1, requests - 1))), (False, lambda r: ())):
        room = SegmentRoom.of(CFG, make_bucket(CFG, requests), tiling, shares)
        tables = [[*prefix(r), 9000 + r] for r in range(requests)]
        lens = [16 * len(table) for table in tables]
        most = PlanCapacity(num_segments=room.num_segments)
        plan = CascadePlanner(CFG, policy).plan(tables, lens, capacity=most)
        assert plan == CascadePlanner(CFG, policy).plan(tables, lens)
        assert plan.num_segments == room.num_segments


@pytest.mark.parametrize("native", [True, False])
def test_cuts_give_way_where_room_is_short(native):
    """A chain of prefixes with as many (segment, row) pairs as there is room for leaves none for cuts."""
    tiling = Tiling(num_sms=64, min_cut=64)
    tables = [[*range(40 * r + 40), 9000 + r] for r in range(30)]
    policy = PlannerPolicy(executor="segments", fold=False, max_levels=64)
    plan = CascadePlanner(CFG, policy).plan(tables, [16 * len(table) for table in tables])
    pairs = plan.usage().num_partials
    free = lower(plan, plan.parts[0], tiling, native=native)
    tight = lower(plan, plan.parts[0], tiling, max_partials=pairs, native=native)
    assert free.num_partials > pairs
    assert tight.num_partials == pairs


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("max_new", [1, 9])
def test_plans_made_to_fit_do(max_new, heads):
    cfg = config(heads, max_kv_pages=3000)
    planner = CascadePlanner(cfg, PlannerPolicy(executor="levels", fold=False))
    traffic = Traffic(np.random.default_rng(1), 16, 3000, 60, max_new, max_len=200)
    deepest = 0
    for _ in range(12):
        batch = traffic.step()
        size, rows = len(batch.seq_lens), batch.num_rows
        exact = make_bucket(cfg, size) if max_new == 1 else make_bucket(cfg, None, rows, size)
        padded = make_bucket(cfg, size + 5) if max_new == 1 else make_bucket(cfg, None, rows + 5, size + 2)
        for bucket in (exact, padded):
            shapes = [*level_shapes(cfg, bucket, SMS, True), *default_shapes(cfg, bucket, SMS, HOPPER)]
            for shape in shapes_of_levels([*shapes, one_for_all(cfg, bucket, SMS, HOPPER)]):
                specs = launch_specs(cfg, bucket, shape, SMS)
                plan = planner.plan(*batch, capacity=bucket_capacity(cfg, bucket, specs))
                levels = plan.levels()
                found = fit(cfg, bucket, shape, specs, Needs.of(bucket, plan, levels), SMS)
                assert found is not None
                used = [number for number in found.level_of if number is not None]
                assert used == list(range(len(levels)))
                for spec, number in zip(specs, found.level_of, strict=True):
                    if number is not None and spec.backend == "fa2_uncut":
                        # Rows of padding make one more group at most, which begins one more tile.
                        counts = np.append(np.diff(levels[number].qo_indptr), bucket.num_rows - rows)
                        assert (-(-counts * cfg.group_size // spec.tile)).sum() <= spec.num_blocks
                deepest = max(deepest, len(levels))
    assert deepest == 3


def plan_of(num_levels, backends, rows=64):
    """A chain: all requests share a page, half of them two, and so on."""
    tables = [[*range(sum(r < rows >> i for i in range(num_levels - 1))), 900 + r] for r in range(rows)]
    policy = PlannerPolicy(executor="levels", fold=False)
    plan = CascadePlanner(CFG, policy).plan(tables, [16 * len(table) for table in tables])
    assert plan.num_levels == num_levels
    (part,) = plan.parts
    object.__setattr__(part, "backends", tuple(backends))
    return plan


SHAPE = GraphShape(("fa2", "fa2_uncut", "fa3"), ("fa2_uncut", "decode"))


@pytest.mark.parametrize(
    ("backends", "level_of", "distance"),
    [
        (["decode"], (None, None, None, None, 0), 5),
        (["fa2"], (None, None, None, 0, None), 6),
        (["fa2", "fa2_uncut"], (0, None, None, 1, None), 3),
        (["fa2_uncut", "decode"], (None, 0, None, None, 1), 4),
        (["fa3", "decode"], (None, None, 0, None, 1), 4),
        (["fa2", "fa3", "decode"], (0, None, 1, None, 2), 2),
        (["fa2", "fa2_uncut", "fa3", "decode"], (0, 1, 2, None, 3), 1),
        (["fa3", "fa3", "decode"], (None, 0, 1, None, 2), 4),
    ],
)
def test_levels_go_to_the_launches_most_like_them(backends, level_of, distance):
    plan = plan_of(len(backends), backends)
    bucket = make_bucket(CFG, 64)
    specs = launch_specs(CFG, bucket, SHAPE, SMS)
    found = fit(CFG, bucket, SHAPE, specs, Needs.of(bucket, plan, plan.levels()), SMS)
    assert found == (level_of, distance)


def test_what_does_not_fit():
    bucket = make_bucket(CFG, 64)
    specs = launch_specs(CFG, bucket, SHAPE, SMS)
    deep = plan_of(5, ["fa2"] * 5)
    assert fit(CFG, bucket, SHAPE, specs, Needs.of(bucket, deep, deep.levels()), SMS) is None
    # As many groups as there are may have no KV for rows of padding.
    shape = GraphShape(("fa2_uncut",), ("fa2",))
    pairs = CascadePlanner(CFG, PlannerPolicy(executor="levels", fold=False)).plan(
        [[r // 2, 900 + r] for r in range(8)], [32] * 8
    )
    for rows, fits in ((8, True), (9, False)):
        bucket = make_bucket(CFG, rows)
        level, own = launch_specs(CFG, bucket, shape, SMS)
        tight = [level._replace(num_slots=4), own]
        assert (fit(CFG, bucket, shape, tight, Needs.of(bucket, pairs, pairs.levels()), SMS) is not None) == fits
    # The decode kernel would cut long KV where rows are few.
    shape = GraphShape((), ("decode", "fa2"))
    specs = launch_specs(CFG, bucket, shape, SMS)
    for tokens, level_of in ((128, (0, None)), (129, (None, 0))):
        plan = CascadePlanner(CFG).plan([list(range(9))], [tokens])
        object.__setattr__(plan.parts[0], "backends", ("decode",))
        assert fit(CFG, bucket, shape, specs, Needs.of(bucket, plan, plan.levels()), SMS).level_of == level_of


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        (lambda: GraphShape((), ()), r"own=\(\): name one or more"),
        (lambda: GraphShape((), ("fa2", "fa2")), "name one or more different kernels"),
        (lambda: GraphShape(("decode",), ("fa2",)), "decode takes one row a group"),
        (lambda: GraphShape((), ("fa4",)), "kernel 'fa4': use fa2, fa2_uncut, fa3 or decode"),
        (lambda: launch_specs(CFG, make_bucket(CFG, 4), GraphShape((), ("decode",)), SMS), "decode: with 4 rows"),
        (
            lambda: launch_specs(CFG, make_bucket(CFG, None, 9), GraphShape((), ("fa2", "decode")), SMS),
            "fa2 or decode: the decode kernel takes one row a request",
        ),
        (
            lambda: launch_specs(
                config(kv_dtype="float8_e4m3fn"), make_bucket(CFG, 4), GraphShape(("fa3",), ("fa2",)), SMS
            ),
            r"fa3 \+ fa2: fa3 takes KV of q's dtype",
        ),
    ],
)
def test_shapes_that_are_refused(shape, match):
    with pytest.raises(UnsupportedError, match=match):
        shape()


def test_a_mixed_batch_asks_for_the_kernel_of_most_of_its_rows():
    plan = CascadePlanner(CFG).plan([[0], [1, 2, 3, 4, 5, 6, 7]], [9, 100], [1, 90])
    decode, append = plan.parts
    object.__setattr__(decode, "backends", ("decode",))
    object.__setattr__(append, "backends", ("fa3",))
    assert level_backends(plan) == ["fa3"]


def test_tiles():
    assert [fa2_tile(CFG, rows) for rows in (1, 4, 5, 16, 17, 999)] == [16, 16, 64, 64, 128, 128]
    assert fa2_tile(config(head_dim=256), 999) == TILES[1]
    spec = LaunchSpec.of(CFG, "fa2_uncut", make_bucket(CFG, 64), 64, 16, is_shared=False, is_only=True)
    assert spec.is_fixed
    assert not LaunchSpec.of(CFG, "fa2_uncut", make_bucket(CFG, 64), 64, 16, is_shared=False).is_fixed

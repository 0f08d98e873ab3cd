"""What segment graphs read, laid out in host memory: run for one plan after another by Triton's interpreter."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from flashinfer_cascade import CapacityError, CascadeConfig, CascadePlanner, PlannerPolicy
from flashinfer_cascade.lower import Tiling
from flashinfer_cascade.runtime import GraphState, SegmentShape
from flashinfer_cascade.runtime.fit import Needs
from flashinfer_cascade.runtime.shapes import SegmentRoom, make_bucket
from flashinfer_cascade.testing import (
    assert_close,
    assert_lse_close,
    dense_attention,
    make_kv_cache,
    make_q,
    plain_attention,
    random_batch,
)

pytest.importorskip("triton", reason="triton is not installed")

# These import triton.
from flashinfer_cascade.runtime.graph_levels import GraphBuffers
from flashinfer_cascade.runtime.graph_segments import CapturedSegments, SegmentLayout, as_one_part
from flashinfer_cascade.runtime.segment_kernels import Partials, SegmentKernels

TILING = Tiling(num_sms=4, min_cut=64, short_tokens=64)
# The interpreter multiplies no bfloat16.
BASE = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "float16"}
CPU = torch.device("cpu")
NUM_PAGES = 1200


class HostBuffers(GraphBuffers):
    """`GraphBuffers` without a GPU: copies are done at once."""

    def __init__(self, num_pages, num_entries):
        self.device = -1  # to torch, no device
        self.num_pages = num_pages
        self.on_device = torch.zeros(num_pages + num_entries, dtype=torch.int32)
        self.pinned = [torch.zeros_like(self.on_device) for _ in range(2)]
        self.turn = 0

    def begin(self):
        self.turn = 1 - self.turn
        return self.turn

    def end(self, turn):
        assert turn == self.turn


def captured(config, bucket, *, shares=True):
    shape, num_pages = SegmentShape(shares), 2048
    room = SegmentRoom.of(config, bucket, TILING, shares)
    buffers = HostBuffers(num_pages, SegmentLayout.of(config, bucket, shape, TILING, 0).end)
    heads = room.num_partials, config.num_qo_heads
    partials = Partials(
        torch.full((*heads, config.head_dim), math.nan, dtype=torch.float16), torch.full(heads, math.nan)
    )
    kernels = SegmentKernels(config, TILING, interpreted=True)
    return CapturedSegments(config, bucket, shape, TILING, kernels, buffers, partials)


# Changes to the configuration; requests and rows of the bucket; most new tokens of a request.
CASES = {
    "decode": ({}, 16, None, 1),
    "appends": ({"page_size": 1}, 11, 40, 3),
    "group 16": ({"num_qo_heads": 16, "num_kv_heads": 1, "kv_layout": "HND"}, 11, None, 1),
}
# How plans are made for a graph that takes them all; appends of more than a row are a second part in some.
POLICIES = [
    PlannerPolicy(executor="segments", fold=False, max_decode_rows=64),
    PlannerPolicy(executor="levels", fold=False, max_levels=64, max_decode_rows=1),
    PlannerPolicy(executor="flat", max_decode_rows=1),
    PlannerPolicy(executor="segments", max_decode_rows=2),
]


def check_case(changes, requests, rows, max_new):
    config = CascadeConfig(**(BASE | changes))
    bucket = make_bucket(config, requests) if rows is None else make_bucket(config, None, rows, requests)
    graph = captured(config, bucket)
    state = GraphState(config, CPU, graph)
    rng = np.random.default_rng(rows or requests)
    sinks = torch.linspace(-2, 2, config.num_qo_heads)
    kv_cache = make_kv_cache(config, NUM_PAGES)
    steps, parts, had_wide = [], set(), False
    for number, policy in enumerate(POLICIES):
        count = requests - 3 * number
        batch = random_batch(rng, page_size=config.page_size, num_requests=count, max_len=100, max_new=max_new)
        batch = batch.permuted(rng.permutation(count).tolist())
        plan = CascadePlanner(config, policy).plan(*batch, capacity=state.capacity)
        parts.add(len(plan.parts))
        assert batch.num_pages <= NUM_PAGES
        live = make_q(config, batch.num_rows, seed=number)
        q = torch.full((bucket.num_rows, *live.shape[1:]), math.nan, dtype=live.dtype)
        q[: len(live)] = live
        state.load(plan)
        had_wide |= bool(graph._arrays.num_wide[0])
        out, lse = state.run(q, kv_cache, sinks=sinks, out=torch.full_like(q, math.nan), return_lse=True)
        oracle, oracle_lse = dense_attention(config, live, kv_cache, *batch, sinks=sinks)
        plain = plain_attention(config, live, kv_cache, *batch, sinks=sinks)
        assert_close(out[: len(live)], oracle, plain)
        assert_lse_close(lse[: len(live)], oracle_lse, q.dtype)
        assert (out[len(live) :] == 0).all()
        assert torch.allclose(lse[len(live) :], (sinks * math.log2(math.e)).expand_as(lse[len(live) :]))
        steps.append((plan, q, out))
    assert parts == ({1} if max_new == 1 else {1, 2})
    assert had_wide == (config.group_size == 16)
    for plan, q, out in steps[:2]:
        state.load(plan)
        assert torch.equal(state.run(q, kv_cache, sinks=sinks), out)
    state.load_nothing()
    out, lse = state.run(q, kv_cache, return_lse=True)
    assert not out.any()
    assert lse.isneginf().all()


def test_any_plan_in_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    script = f"import sys; sys.path[:0] = {[os.path.dirname(__file__), *sys.path]!r}\n" + (
        "from test_graph_segments import CASES, check_case\n"
        "for name, case in CASES.items():\n    check_case(*case)\n    print(name)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == list(CASES)


CONFIG = CascadeConfig(**BASE)


def plan_of(tables, qo_lens=None, **policy):
    lens = [16 * len(table) for table in tables]
    return CascadePlanner(CONFIG, PlannerPolicy(fold=False, max_levels=64, **policy)).plan(tables, lens, qo_lens)


PAIRS = [[r // 2, 100 + r] for r in range(8)]


@pytest.mark.parametrize(
    ("executor", "tables", "with_sharing", "without"),
    [
        ("segments", PAIRS, 0, None),
        ("segments", [[r] for r in range(8)], 1, 0),
        ("levels", PAIRS, 2, None),
        ("flat", PAIRS, 3, 2),
    ],
)
def test_distances(executor, tables, with_sharing, without):
    bucket = make_bucket(CONFIG, 8)
    plan = plan_of(tables, executor=executor)
    levels = plan.levels(with_pages=False)
    for shares, distance in (True, with_sharing), (False, without):
        laid = captured(CONFIG, bucket, shares=shares).lay(plan, levels, Needs.of(bucket, plan, levels))
        assert (None if laid is None else laid.distance) == distance


def test_what_does_not_fit_is_refused_before_anything_is_written():
    bucket = make_bucket(CONFIG, 8)
    executor = captured(CONFIG, bucket, shares=False)
    state = GraphState(CONFIG, CPU, executor)
    state.load(plan_of([[r] for r in range(8)], executor="segments"))
    before = executor._buffers.on_device.clone()
    shared = plan_of(PAIRS, executor="segments")
    with pytest.raises(
        CapacityError, match=r"a graph for decode 8 \(segments, nothing shared\): .*num_segments 12 > 8"
    ):
        state.load(shared)
    assert torch.equal(executor._buffers.on_device, before)
    assert CascadePlanner(CONFIG).plan(PAIRS, [32] * 8, capacity=state.capacity).num_levels == 1


def test_plans_of_more_partial_results_than_there_is_room_for():
    """A chain of prefixes: request r shares r pages with all behind it."""
    bucket = make_bucket(CONFIG, 256)
    state = GraphState(CONFIG, CPU, captured(CONFIG, bucket))
    tables = [[*range(r + 1), 1000 + r] for r in range(60)]
    deep = plan_of(tables, executor="segments")
    assert deep.usage().num_partials > 1800
    tight = make_bucket(CONFIG, 60)
    small = GraphState(CONFIG, CPU, captured(CONFIG, tight))
    assert small.capacity.num_partials < 1800
    with pytest.raises(CapacityError, match=r"num_partials \d+ > \d+\. Plan with the capacity of this graph"):
        small.load(deep)
    state.load(deep)
    lens = [16 * len(table) for table in tables]
    policy = PlannerPolicy(executor="segments", fold=False, max_levels=64)
    fitted = CascadePlanner(CONFIG, policy).plan(tables, lens, capacity=small.capacity)
    assert fitted.num_levels > 2
    small.load(fitted)


def test_parts_become_one():
    tables = [[0, 1, 10], [0, 1, 11], [0, 12], [0, 2, 13], [0, 2, 14], [3, 15], [3, 16], [4]]
    plan = plan_of(tables, [3, 3, 3, 1, 1, 1, 1, 3], executor="levels", max_decode_rows=1)
    assert [part.num_levels for part in plan.parts] == [2, 3]
    whole = as_one_part(plan)
    (part,) = whole.parts
    assert (part.row_begin, part.row_end) == (0, plan.num_rows)
    assert (part.seg_begin, part.seg_end) == (0, plan.num_segments)
    assert (np.diff(whole.seg_level) >= 0).all()

    def segments(of):
        ids = [of.pages.ids[b : b + n].tolist() for b, n in zip(of.seg_page_begin, of.seg_num_pages, strict=True)]
        names = ("seg_row_begin", "seg_num_rows", "seg_kv_start", "seg_kv_len", "seg_level")
        return sorted(zip(*(getattr(of, name).tolist() for name in names), ids, strict=True))

    assert segments(whole) == segments(plan)
    single = plan_of(tables, executor="levels")
    assert as_one_part(single) is single

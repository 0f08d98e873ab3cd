"""Every executor on every kernel against the fp64 oracle."""

import math
import secrets

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig, CascadePlanner, CascadeRuntime, PlannerPolicy, UnsupportedError
from flashinfer_cascade.config import MAX_INT32
from flashinfer_cascade.cost import DECODE_GROUP_SIZES
from flashinfer_cascade.testing import RandomBatch, random_batch

pytestmark = pytest.mark.gpu

# FlashInfer compiles each (dtypes, head_dim, soft cap, window) and kernel on its own, for 20 to 90 s: these and no
# others are used in all tests here.
MODULES = {
    "bf16": ({"dtype": "bfloat16", "head_dim": 128}, ["fa2", "fa2_uncut", "fa3", "decode"]),
    "fp16": ({"dtype": "float16", "head_dim": 128}, ["fa2", "fa2_uncut"]),
    "fp16, 64, soft cap": (
        {"dtype": "float16", "head_dim": 64, "logits_soft_cap": 4.0},
        ["fa2", "fa2_uncut", "fa3", "decode"],
    ),
    "bf16, 256, soft cap": ({"dtype": "bfloat16", "head_dim": 256, "logits_soft_cap": 4.0}, ["fa2", "decode"]),
    "fp16, 256": ({"dtype": "float16", "head_dim": 256}, ["fa2", "fa2_uncut"]),
    "bf16, e4m3": ({"dtype": "bfloat16", "head_dim": 128, "kv_dtype": "float8_e4m3fn"}, ["fa2", "decode"]),
    "fp16, 64, e5m2": ({"dtype": "float16", "head_dim": 64, "kv_dtype": "float8_e5m2"}, ["fa2", "fa2_uncut"]),
    "bf16, 64, wide window": ({"dtype": "bfloat16", "head_dim": 64, "window_left": 4096}, ["fa2", "fa2_uncut"]),
}
# Group sizes 1, 2, 3, 4, 5, 7, 8 and 16; few numbers of query heads, for each of which the merge is compiled.
HEADS = [(8, 8), (14, 7), (15, 5), (16, 4), (15, 3), (14, 2), (8, 1), (16, 1)]
PAGE_SIZES = [1, 16, 32, 64, 128]
FORMS = ["tensor", "pair", "permuted"]
# Most new tokens of a request, and from how many on it is planned apart.
KINDS = {"decode": (1, 16), "append": (40, MAX_INT32), "both": (40, 16)}

BF16 = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}


def bf16(**changes):
    return CascadeConfig(**(BF16 | changes))


def planned(config, batch, executor, fold=True, max_decode_rows=16):
    policy = PlannerPolicy(executor=executor, fold=fold, max_levels=64, max_decode_rows=max_decode_rows)
    return CascadePlanner(config, policy).plan(*batch)


def poisoned(q, number):
    """Where to write, and what lies between that must not be written to."""
    rows, heads, dim = q.shape
    if number % 3 == 0:
        return q.new_full(q.shape, math.nan), q.new_empty(0)
    if number % 3 == 1:
        whole = q.new_full((rows, 2 * heads, dim), math.nan)
        return whole[:, :heads], whole[:, heads:]
    whole = q.new_full((rows, heads, dim + 8), math.nan)
    return whole[..., :dim], whole[..., dim:]


def check(runtime, plan, problem, q=None, number=0):
    """Load, and run into poisoned memory; some also without `out` and the log-sum-exp."""
    q = problem.q if q is None else q
    runtime.load(plan)
    out, between = poisoned(q, number)
    if any(part.executor == "stock" for part in plan.parts):
        assert runtime.run(q, problem.kv_cache, out=out, **problem.options) is out
        problem.check(out)
    else:
        got, lse = runtime.run(q, problem.kv_cache, out=out, return_lse=True, **problem.options)
        assert got is out
        problem.check(out, lse)
    assert between.isnan().all()
    if number % 4 == 0:
        problem.check(runtime.run(q, problem.kv_cache, **problem.options))
    for part in plan.parts:
        assert runtime.stats.parts_run[part.name, part.executor] > 0


@pytest.mark.parametrize("number", [*range(16), "fresh"])
@pytest.mark.parametrize("module", MODULES)
def test_random_forests(module, number, device, make_problem, with_backends, kernels):
    if number == "fresh":
        number = secrets.randbelow(2**32)
    fields, compiled = MODULES[module]
    rng = np.random.default_rng([number, *module.encode()])
    page_size = PAGE_SIZES[number % 5]
    heads = HEADS[number % 8]
    kind = list(KINDS)[number % 3]
    max_new, max_decode_rows = KINDS[kind]
    config = CascadeConfig(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        page_size=page_size,
        kv_layout=["NHD", "HND"][(number // 8 + number) % 2],
        **fields,
    )
    num_requests = int(rng.integers(1, 13))
    max_len = int(rng.choice([5 * page_size, 300]))
    batch = random_batch(rng, page_size=page_size, num_requests=num_requests, max_len=max_len, max_new=max_new)
    batch = batch.permuted(rng.permutation(num_requests).tolist())
    options = {}
    if number % 4 == 3 or (config.kv_dtype != config.dtype and number % 2):
        options |= {"k_scale": 0.25, "v_scale": 3.0}
    if number // 8 % 2:
        options["sinks"] = torch.linspace(-4, 4, heads[0], device=device)
    problem = make_problem(config, batch, form=FORMS[number // 3 % 3], seed=number, **options)
    q = problem.q if number % 2 else torch.cat((problem.q, problem.q), 1)[:, : heads[0]]
    runtime = CascadeRuntime(config, device)
    for executor, fold in ("flat", True), ("levels", False), ("levels", True), ("stock", False):
        plan = planned(config, batch, executor, fold, max_decode_rows)
        if executor == "stock" and (options or all(part.executor != "stock" for part in plan.parts)):
            continue
        for backend in [name for name in compiled if name in kernels] if executor != "stock" else ["fa2"]:
            forced = with_backends(plan, backend)
            used = [part.backends for part in forced.parts]
            # pytest shows this when the test fails: the last line is what failed.
            print(f"number={number}: {kind}, {executor}, fold={fold}, {used}")
            if backend == "decode":
                possible = kind == "decode" and config.group_size in DECODE_GROUP_SIZES
                assert not possible or used[0][-1] == "decode"
                if not any("decode" in levels for levels in used):
                    continue
            check(runtime, forced, problem, q, number)


@pytest.mark.parametrize("qo_len", [1, 20])
@pytest.mark.parametrize("num_qo_heads", [96, 128])
def test_many_query_heads(num_qo_heads, qo_len, device, make_problem, with_backends, tree_batch, kernels):
    config = bf16(num_qo_heads=num_qo_heads, num_kv_heads=8)
    batch = tree_batch("1,2,4_128,64,60", qo_len=qo_len)
    problem = make_problem(config, batch)
    runtime = CascadeRuntime(config, device)
    for executor in "flat", "levels":
        plan = planned(config, batch, executor, fold=False)
        assert plan.num_levels == (3 if executor == "levels" else 1)
        for backend in kernels:
            check(runtime, with_backends(plan, backend), problem)
    plan = planned(config, batch, "segments", fold=False)
    assert plan.num_levels == 3
    check(runtime, plan, problem)


@pytest.mark.parametrize(("num_qo_heads", "head_dim"), [(128, 128), (96, 128), (40, 256)])
def test_stock_refuses_more_heads_than_it_can_merge(
    num_qo_heads, head_dim, device, make_problem, with_backends, tree_batch
):
    dtype = {128: "bfloat16", 256: "float16"}[head_dim]
    config = bf16(num_qo_heads=num_qo_heads, num_kv_heads=8, head_dim=head_dim, dtype=dtype)
    batch = tree_batch("1,3_64,40")
    runtime = CascadeRuntime(config, device)
    limit = 8192 // head_dim
    message = f"num_qo_heads={num_qo_heads}: .* merges at most {limit} at head_dim={head_dim}. Use executor='levels'"
    with pytest.raises(UnsupportedError, match=message):
        runtime.load(planned(config, batch, "stock"))
    torch.cuda.synchronize()
    plan = planned(config, batch, "levels")
    check(runtime, with_backends(plan, "fa2"), make_problem(config, batch))


@pytest.mark.parametrize(("name", "value"), [("sinks", None), ("k_scale", 0.5), ("v_scale", 2.0), ("return_lse", True)])
def test_stock_refuses_what_it_would_ignore(name, value, device, make_problem, tree_batch):
    config = bf16()
    batch = tree_batch("1,3_64,40")
    problem = make_problem(config, batch)
    runtime = CascadeRuntime(config, device)
    runtime.load(planned(config, batch, "stock"))
    options = {name: torch.zeros(8, device=device) if value is None else value}
    with pytest.raises(UnsupportedError, match=f"{name}: FlashInfer's multi-level wrapper does not take it"):
        runtime.run(problem.q, problem.kv_cache, **options)
    problem.check(runtime.run(problem.q, problem.kv_cache))


@pytest.mark.parametrize("qo_lens", [[1, 1, 1], [3, 1, 20]])
def test_rows_that_see_nothing(qo_lens, device, make_problem, with_backends, kernels):
    config = bf16()
    batch = RandomBatch([[], [0, 0], []], [0, 0, 0], qo_lens)
    problem = make_problem(config, batch)
    runtime = CascadeRuntime(config, device)
    plan = planned(config, batch, "levels")
    plans = {backend: with_backends(plan, backend) for backend in kernels}
    plans["segments"] = planned(config, batch, "segments")
    assert {part.executor for part in plans["segments"].parts} == {"segments"}
    some = torch.tensor([0.0, 1.0, -1.0, 5.0, 2.0, 9.0, -9.0, 0.5], device=device)
    for backend, forced in plans.items():
        runtime.load(forced)
        for sinks, lse_of_a_row in (None, torch.full_like(some, -math.inf)), (some, some * math.log2(math.e)):
            out, _ = poisoned(problem.q, 0)
            _, lse = runtime.run(problem.q, problem.kv_cache, out=out, return_lse=True, sinks=sinks)
            assert (out == 0).all(), backend
            torch.testing.assert_close(
                lse, lse_of_a_row.expand_as(lse), msg=lambda text, backend=backend: backend + text
            )


@pytest.mark.parametrize("backend", ["fa2", "fa2_uncut", "decode"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_slots_behind_a_request_may_hold_anything(page_size, backend, device, make_problem, with_backends):
    config = bf16(page_size=page_size)
    batch = random_batch(np.random.default_rng(page_size), page_size=page_size, num_requests=12, max_len=200)
    problem = make_problem(config, batch)
    unread = torch.ones(batch.num_pages, page_size, dtype=torch.bool)
    for table, seq_len, _ in zip(*batch, strict=True):
        for token in range(seq_len):
            unread[table[token // page_size], token % page_size] = False
    assert unread.any()
    problem.kv_cache.transpose(1, 2)[unread.to(device)] = math.nan
    runtime = CascadeRuntime(config, device)
    for executor in "flat", "levels", "segments":
        check(runtime, with_backends(planned(config, batch, executor, fold=False), backend), problem)


@pytest.mark.parametrize("qo_len", [1, 6, 40])
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 100, 378])
def test_a_window_smaller_than_the_context_is_flat(window_left, qo_len, device, make_problem, with_backends):
    config = bf16(num_qo_heads=4, head_dim=64, window_left=window_left)
    shared = list(range(20))
    tables = [[*shared, *range(20 + 5 * r, 25 + 5 * r)] for r in range(5)]
    batch = RandomBatch(tables, [380, 365, 350, 361, 45], [qo_len, qo_len, qo_len, 1, qo_len])
    plan = CascadePlanner(config).plan(*batch)
    assert plan.num_levels == 1
    assert f"window_left={window_left} does not cover the longest context of 380 tokens" in plan.explain()
    runtime = CascadeRuntime(config, device)
    problem = make_problem(config, batch)
    for backend in "fa2", "fa2_uncut":
        check(runtime, with_backends(plan, backend), problem)


@pytest.mark.parametrize("qo_len", [1, 6, 40])
@pytest.mark.parametrize("window_left", [379, MAX_INT32])
def test_a_window_that_covers_the_context_is_cascaded(window_left, qo_len, device, make_problem, with_backends):
    config = bf16(num_qo_heads=4, head_dim=64, window_left=window_left)
    tables = [[*range(20), *range(20 + 5 * r, 25 + 5 * r)] for r in range(4)]
    batch = RandomBatch(tables, [380, 365, 350, 361], [qo_len, qo_len, 1, qo_len])
    plan = planned(config, batch, "levels", fold=False)
    assert plan.num_levels == 2
    check(CascadeRuntime(config, device), with_backends(plan, "fa2"), make_problem(config, batch))


LARGE = {
    "decode under 8192": ("1,64_8192,200", 1, [["fa2", "decode"], ["fa2_uncut", "fa2"], ["fa3", "fa2"]]),
    "append under 8192": ("1,16_8192,300", 128, [["fa2"], ["fa3"], ["fa3", "fa2_uncut"]]),
    "five levels": ("1,2,8,32,64_4096,2048,512,100,70", 1, [["fa2"], ["fa3", "fa3", "fa2", "fa2", "decode"]]),
    "nothing shared": ("8_8000", 1, [["fa2"], ["decode"], ["fa3"]]),
}


@pytest.mark.parametrize("name", LARGE)
def test_large(name, device, make_problem, with_backends, tree_batch, kernels):
    spec, qo_len, choices = LARGE[name]
    config = bf16(num_qo_heads=32, num_kv_heads=4)
    batch = tree_batch(spec, qo_len=qo_len)
    judged = [0, 3, len(batch.seq_lens) - 1]
    problem = make_problem(config, batch, form="fast", judged=judged)
    runtime = CascadeRuntime(config, device)
    for executor in "flat", "levels":
        plan = planned(config, batch, executor, fold=False)
        for backends in choices:
            if set(backends) <= set(kernels):
                print(executor, backends)
                check(runtime, with_backends(plan, *backends), problem)
    print("segments")
    check(runtime, planned(config, batch, "segments", fold=False), problem)


def test_prefixes_nested_twenty_deep(device, make_problem, with_backends):
    """Request r shares r pages with all behind it, and its last page with none."""
    depth = 20
    config = bf16(page_size=1)
    batch = RandomBatch([[*range(r + 1), 30 + r] for r in range(depth)], [r + 2 for r in range(depth)], [1] * depth)
    runtime, problem = CascadeRuntime(config, device), make_problem(config, batch)
    for executor in "levels", "segments":
        plan = planned(config, batch, executor, fold=False)
        assert plan.num_levels >= depth - 1
        check(runtime, with_backends(plan, "fa2"), problem)


@pytest.mark.parametrize("spec", ["4_100", "1,4_64,100", "1,2,6_64,32,100", "1,2,4,8_64,32,48,100"])
@pytest.mark.parametrize("qo_len", [1, 20])
@pytest.mark.parametrize(("more_levels", "more_slots"), [(0, 0), (2, 0), (0, 3), (1, 5)])
def test_to_flashinfer(spec, qo_len, more_levels, more_slots, device, make_problem, tree_batch):
    """What plans hand to FlashInfer is right by itself, without this package's runtime."""
    import flashinfer

    config = bf16(num_qo_heads=16, num_kv_heads=4)
    batch = tree_batch(spec, qo_len=qo_len, seed=3)
    plan = planned(config, batch, "levels", fold=False)
    assert plan.num_levels == spec.count(",") // 2 + 1
    num_levels = plan.num_levels + more_levels
    groups = max(len(lens) for lens in plan.to_flashinfer()["paged_kv_last_page_len"])
    slots = groups + more_slots if more_slots else None
    problem = make_problem(config, batch)
    workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(num_levels, workspace, config.kv_layout)
    for level in wrapper._batch_prefill_wrappers:
        level._backend = "fa2"
    wrapper.plan(**plan.to_flashinfer(num_levels, slots))
    order = torch.arange(batch.num_rows) if plan.row_order is None else torch.tensor(plan.row_order)
    assert plan.num_levels <= 2 or plan.row_order is not None
    order = order.long().to(device)
    out = torch.full_like(problem.q, math.nan)
    out[order] = wrapper.run(problem.q[order], problem.kv_cache)
    problem.check(out)


def test_partials_beyond_the_range_of_int32(device):
    """The merge of nine levels whose partial results hold more than 2**31 numbers."""
    from flashinfer_cascade.runtime.kernels.merge import merge

    levels, shape = 9, (16400, 64, 256)
    assert (levels - 1) * math.prod(shape) > MAX_INT32
    partials = torch.empty(levels, *shape, dtype=torch.bfloat16, device=device)
    for level in range(levels):
        partials[level] = level
    out = torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)
    merge(partials, torch.zeros(levels, *shape[:2], device=device), out)
    assert (out == (levels - 1) / 2).all()

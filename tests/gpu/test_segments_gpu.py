"""The segments executor against the fp64 oracle, eagerly and in graphs; few shapes, for each compiles its kernels."""

import math

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig, CascadePlanner, CascadeRuntime, PlannerPolicy
from flashinfer_cascade.runtime import SegmentShape, cuda
from flashinfer_cascade.testing import RandomBatch, random_batch

pytestmark = pytest.mark.gpu

BASE = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}

# Changes to the configuration, most new tokens of a request.
CASES = {
    "plain": ({}, 1),
    "appends": ({}, 4),
    "page 1, appends": ({"page_size": 1}, 3),
    "page 8, HND": ({"page_size": 8, "kv_layout": "HND"}, 1),
    "page 64, fp16, HND": ({"page_size": 64, "dtype": "float16", "kv_layout": "HND"}, 2),
    "page 24": ({"page_size": 24}, 1),
    "page 128": ({"page_size": 128}, 1),
    "dim 64, soft cap": ({"head_dim": 64, "logits_soft_cap": 5.0}, 1),
    "dim 256, appends": ({"head_dim": 256}, 3),
    "group 8": ({"num_qo_heads": 16}, 1),
    "group 16": ({"num_qo_heads": 16, "num_kv_heads": 1}, 2),
    "group 5": ({"num_qo_heads": 10}, 1),
    "group 1": ({"num_qo_heads": 3, "num_kv_heads": 3}, 16),
    "e4m3": ({"kv_dtype": "float8_e4m3fn"}, 1),
    "fp16, e5m2, appends": ({"dtype": "float16", "kv_dtype": "float8_e5m2"}, 3),
}


def planned(config, batch, **changes):
    policy = PlannerPolicy(**({"executor": "segments", "max_levels": 64} | changes))
    return CascadePlanner(config, policy).plan(*batch)


def nan_like(q):
    return q.new_full(q.shape, math.nan)


@pytest.mark.parametrize("name", CASES)
def test_random_forests(name, device, make_problem):
    changes, max_new = CASES[name]
    config = CascadeConfig(**(BASE | changes))
    runtime = CascadeRuntime(config, device)
    for seed in range(4):
        rng = np.random.default_rng([seed, *name.encode()])
        batch = random_batch(rng, page_size=config.page_size, num_requests=24, max_len=300, max_new=max_new)
        batch = batch.permuted(rng.permutation(24).tolist())
        options = {"k_scale": 0.5, "v_scale": 3.0} if config.kv_dtype != config.dtype or seed % 2 else {}
        if seed > 1:
            options["sinks"] = torch.linspace(-4, 4, config.num_qo_heads, device=device)
        form = ["tensor", "pair", "permuted", "tensor"][seed] if changes == {} else "tensor"
        problem = make_problem(config, batch, form=form, seed=seed, **options)
        for fold in False, True:
            plan = planned(config, batch, fold=fold)
            assert {part.executor for part in plan.parts} == {"segments"}
            print(name, seed, fold)
            runtime.load(plan)
            out, lse = runtime.run(
                problem.q, problem.kv_cache, out=nan_like(problem.q), return_lse=True, **problem.options
            )
            problem.check(out, lse)
            again = runtime.run(problem.q, problem.kv_cache, out=nan_like(problem.q), **problem.options)
            assert torch.equal(again, out)


@pytest.mark.parametrize("name", ["plain", "appends", "page 1, appends", "e4m3", "group 16"])
def test_graphs(name, device, make_problem):
    """One graph takes any plan, and gives it the same bits whatever it ran before; padding rows hold NaN."""
    changes, max_new = CASES[name]
    config = CascadeConfig(**(BASE | changes), max_kv_pages=100_000, max_kv_indices=100_000)
    runtime = CascadeRuntime(config, device)
    rows = 40 * max_new
    decode = max_new == 1
    size = {"batch_size": rows} if decode else {"num_tokens": rows, "max_requests": 40}
    state = runtime.graph_state(**size, shape=SegmentShape())
    q = torch.full((rows, config.num_qo_heads, config.head_dim), math.nan, device=device, dtype=torch.bfloat16)
    cache = torch.empty(0)
    out, graph, results, seen = nan_like(q), None, None, []
    for seed in range(6):
        rng = np.random.default_rng([seed, *name.encode()])
        count = int(rng.integers(1, 41))
        batch = random_batch(rng, page_size=config.page_size, num_requests=count, max_len=300, max_new=max_new)
        problem = make_problem(config, batch, seed=seed)
        if graph is None:
            cache = torch.zeros(100_000 // config.page_size, *problem.kv_cache.shape[1:], device=device).to(
                problem.kv_cache.dtype
            )
            state.run(q, cache, out=out, return_lse=True)
            assert not out.any()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = state.run(q, cache, out=out, return_lse=True)
        used = problem.kv_cache.shape[0]
        cache[:used].copy_(problem.kv_cache)
        live = slice(batch.num_rows)
        for fold in False, True:
            plan = planned(config, batch, fold=fold, max_decode_rows=64)
            q.fill_(math.nan)
            q[live] = problem.q
            out.fill_(math.nan)
            state.load(plan)
            graph.replay()
            problem.check(out[live], results[1][live])
            assert not out[batch.num_rows :].any()
            assert results[1][batch.num_rows :].isneginf().all()
            seen.append((plan, q.clone(), problem.kv_cache, out[live].clone()))
    for plan, before, kv, expected in seen:
        q.copy_(before)
        cache[: kv.shape[0]].copy_(kv)
        state.load(plan)
        graph.replay()
        assert torch.equal(out[: plan.num_rows], expected)


@pytest.mark.parametrize(("page_size", "qo_len"), [(16, 1), (16, 3), (1, 1), (24, 1)])
def test_one_long_request(page_size, qo_len, device, make_problem):
    """KV cut into pieces over the whole GPU; bits do not depend on what is in the way."""
    config = CascadeConfig(
        **(BASE | {"num_qo_heads": 16, "num_kv_heads": 4, "page_size": page_size}), max_kv_pages=2**17
    )
    pages = np.random.default_rng(0).permutation(-(-131_072 // page_size)).tolist()
    batch = RandomBatch([pages], [131_072 - 7], [qo_len])
    problem = make_problem(config, batch, form="fast")
    runtime = CascadeRuntime(config, device)
    runtime.load(planned(config, batch))
    out, lse = runtime.run(problem.q, problem.kv_cache, out=nan_like(problem.q), return_lse=True)
    problem.check(out, lse)
    for _ in range(5):
        assert torch.equal(runtime.run(problem.q, problem.kv_cache, out=nan_like(problem.q)), out)


@pytest.mark.parametrize("spec", ["64_600", "1,64_2048,40", "1,2,64_1024,64,500", "1_30000"])
def test_what_comes_behind_sees_all(spec, device, make_problem, tree_batch):
    """A kernel right behind the last one reads what any of them wrote, however late it did."""
    config = CascadeConfig(**BASE)
    batch = tree_batch(spec)
    problem = make_problem(config, batch, form="fast", judged=[0])
    runtime = CascadeRuntime(config, device)
    runtime.load(planned(config, batch))
    out = nan_like(problem.q)
    expected = runtime.run(problem.q, problem.kv_cache)
    problem.check(expected)
    copies = []
    for _ in range(50):
        out.fill_(math.nan)
        runtime.run(problem.q, problem.kv_cache, out=out)
        copies.append(out.clone())
    assert all(torch.equal(copy, expected) for copy in copies)


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (12, 3)], ids=str)
def test_groups_of_warps_that_are_late(heads, late, device, make_problem, monkeypatch):
    """Blocks of the wide kernel take several items, of which its groups do tiles by turns or a head each."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("the wide kernel is Hopper's")
    defines = cuda._defines
    monkeypatch.setattr(cuda, "_defines", lambda *args: defines(*args) | {"LATE": late})
    config = CascadeConfig(**(BASE | {"num_qo_heads": heads[0], "num_kv_heads": heads[1]}), max_batch_size=2000)
    # 400 nodes of 3 to 5 requests, over 64 to 256 tokens.
    tables, fresh = [], 10_000
    for node in range(400):
        shared = range(16 * node, 16 * node + 4 * (1 + node % 4))
        for _ in range(3 + node % 3):
            tables.append([*shared, fresh])
            fresh += 1
    batch = RandomBatch(tables, [16 * len(table) - 3 for table in tables], [1] * len(tables))
    problem = make_problem(config, batch, form="fast", judged=[*range(0, 1600, 16)])
    runtime = CascadeRuntime(config, device)
    runtime.load(planned(config, batch, fold=False))
    for _ in range(3):
        problem.check(runtime.run(problem.q, problem.kv_cache, out=nan_like(problem.q)))


def test_a_request_that_is_nan_spoils_no_other(device, make_problem):
    """Items follow one another in a block."""
    config = CascadeConfig(**BASE)
    batch = RandomBatch([[0, 1, 2, 100 + 3 * r, 101 + 3 * r] for r in range(64)], [70] * 64, [1] * 64)
    problem = make_problem(config, batch)
    spoilt = [5, 6, 40]
    for request in spoilt:
        problem.kv_cache[batch.block_tables[request][3]] = math.nan
    runtime = CascadeRuntime(config, device)
    runtime.load(planned(config, batch))
    out = runtime.run(problem.q, problem.kv_cache, out=nan_like(problem.q))
    assert out[spoilt].isnan().flatten(1).any(1).all()
    rest = [row for row in range(64) if row not in spoilt]
    assert (out[rest] - problem.oracle[rest]).norm() / problem.oracle[rest].norm() < 1e-2

"""What a pool's default graphs and one graph of segments take: plans of any executor, depth and number of parts."""

import math

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig, CascadePlanner, CascadeRuntime, PlannerPolicy, capture_cuda_graphs
from flashinfer_cascade.runtime import SegmentShape
from flashinfer_cascade.testing import RandomBatch, random_batch

pytestmark = pytest.mark.gpu

CFG = CascadeConfig(num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype="bfloat16", max_kv_pages=4096)
NUM_PAGES = 1024
# The last two make two parts of appends.
POLICIES = [
    {"executor": "segments", "max_decode_rows": 64},
    {"executor": "levels", "max_decode_rows": 64},
    {"executor": "flat", "max_decode_rows": 64},
    {"executor": "levels", "max_decode_rows": 2},
    {"executor": "segments", "max_decode_rows": 1},
]


def planner_of(**policy):
    return CascadePlanner(CFG, PlannerPolicy(fold=False, max_levels=64, **policy))


def in_cache(problem, cache):
    """Put a problem's pages where the graph reads."""
    used = len(problem.kv_cache)
    assert used <= len(cache)
    cache[:used].copy_(problem.kv_cache)
    return cache


@pytest.mark.parametrize("max_new", [1, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_one_graph_takes_plans_of_all_executors(max_new, with_sinks, device, make_problem):
    rows = 32 * max_new
    size = {"batch_size": 32} if max_new == 1 else {"num_tokens": rows, "max_requests": 32}
    state = CascadeRuntime(CFG, device).graph_state(**size, shape=SegmentShape())
    cache = torch.zeros(NUM_PAGES, 2, 16, 2, 128, dtype=torch.bfloat16, device=device)
    q = torch.full((rows, 8, 128), math.nan, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(q)
    options = {"sinks": torch.linspace(-2, 2, 8, device=device)} if with_sinks else {}
    state.run(q, cache, out=out, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = state.run(q, cache, out=out, return_lse=True, **options)
    seen, parts = [], set()
    for number, policy in enumerate(POLICIES * 2):
        rng = np.random.default_rng([number, max_new])
        count = int(rng.integers(2, 33))
        batch = random_batch(rng, page_size=16, num_requests=count, max_len=200, max_new=max_new)
        batch = batch.permuted(rng.permutation(count).tolist())
        problem = make_problem(CFG, batch, seed=number, **options)
        in_cache(problem, cache)
        plan = planner_of(**policy).plan(*batch, capacity=state.capacity)
        parts.add(len(plan.parts))
        live = slice(plan.num_rows)
        q.fill_(math.nan)
        q[live] = problem.q
        out.fill_(math.nan)
        state.load(plan)
        graph.replay()
        problem.check(out[live], lse[live])
        assert not out[plan.num_rows :].any()
        seen.append((plan, problem, out[live].clone()))
    assert parts == ({1} if max_new == 1 else {1, 2})
    for plan, problem, expected in [*seen, *seen[::-1]]:
        in_cache(problem, cache)
        q[: plan.num_rows] = problem.q
        state.load(plan)
        graph.replay()
        assert torch.equal(out[: plan.num_rows], expected)


def deep(count, own=2):
    """A tree of five levels: pages shared by all, halves, quarters, eighths, and own ones."""
    ids = iter(range(NUM_PAGES))
    tables = [[] for _ in range(count)]
    for groups in (1, 2, 4, 8, count):
        pages = [[next(ids) for _ in range(own)] for _ in range(groups)]
        for request in range(count):
            tables[request] += pages[request * groups // count]
    return tables


@pytest.mark.parametrize("max_new", [1, 4])
def test_plans_made_with_a_pool_s_capacity_replay(max_new, device, make_problem):
    """On its default graphs; deep cascades, and those of two parts, are not folded to what graphs of levels hold."""
    cache = torch.zeros(NUM_PAGES, 2, 16, 2, 128, dtype=torch.bfloat16, device=device)
    runtime = CascadeRuntime(CFG, device)
    sizes = {"batch_sizes": [32]} if max_new == 1 else {"token_sizes": [128], "max_requests": 32}
    inputs = {"q": torch.zeros(128, 8, 128, dtype=torch.bfloat16, device=device)}
    pool = capture_cuda_graphs(
        runtime, lambda inputs: runtime.run(inputs["q"], cache), inputs=inputs, progress=False, **sizes
    )
    tables = deep(24)
    qo_lens = [1] * 24 if max_new == 1 else [1 + 3 * (r % 2) for r in range(24)]
    batch = RandomBatch(tables, [16 * len(table) - 3 for table in tables], qo_lens)
    problem = make_problem(CFG, batch)
    in_cache(problem, cache)
    capacity = pool.capacity(batch.num_rows, 24)
    for policy in POLICIES:
        plan = planner_of(**policy).plan(*batch, capacity=capacity)
        assert plan.num_levels == (1 if policy["executor"] == "flat" else 5)
        problem.check(pool.replay(plan, q=problem.q))
    bucket = "decode 32" if max_new == 1 else "append 128"
    assert pool.stats.replays[bucket, "segments"] == len(POLICIES) - 1
    exact = planner_of(executor="segments", max_decode_rows=64).plan(*batch, capacity=capacity)
    before = pool.stats.inexact
    problem.check(pool.replay(exact, q=problem.q))
    assert pool.stats.inexact == before
    alone = RandomBatch([[r] for r in range(20)], [9] * 20, [1] * 20)
    plan = planner_of(executor="segments").plan(*alone, capacity=pool.capacity(20, 20))
    single = make_problem(CFG, alone)
    in_cache(single, cache)
    fitting = bucket, "segments, nothing shared" if max_new == 1 else "segments"
    before = pool.stats.replays[fitting]
    single.check(pool.replay(plan, q=single.q))
    assert pool.stats.replays[fitting] == before + 1


@pytest.mark.parametrize("num_qo_heads", [2, 8, 10, 32])
def test_what_comes_behind_a_replay_sees_all(num_qo_heads, device, make_problem):
    """Nothing shared, one row each: the last kernel of the graph is often through before those in front of it."""
    config = CFG.model_copy(update={"num_qo_heads": num_qo_heads})
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 400, 48).tolist()
    tables, begin = [], 0
    for seq_len in lens:
        count = -(-seq_len // 16)
        tables.append([*range(begin, begin + count)])
        begin += count
    batch = RandomBatch(tables, lens, [1] * 48)
    problem = make_problem(config, batch)
    policy = PlannerPolicy(executor="segments")
    for shape in SegmentShape(), SegmentShape(shares=False):
        state = CascadeRuntime(config, device).graph_state(64, shape=shape)
        q = torch.zeros(64, num_qo_heads, 128, dtype=torch.bfloat16, device=device)
        q[:48] = problem.q
        out, copy = torch.empty_like(q), torch.empty_like(q)
        state.run(q, problem.kv_cache, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.fill_(math.nan)
            state.run(q, problem.kv_cache, out=out)
            copy.copy_(out)
        state.load(CascadePlanner(config, policy).plan(*batch, capacity=state.capacity))
        for _ in range(50):
            graph.replay()
            problem.check(copy[:48])
            assert torch.equal(copy, out)

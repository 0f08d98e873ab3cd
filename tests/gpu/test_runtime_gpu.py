"""The runtime on a GPU: plans replace each other, on any streams, without allocating; strict at its edge."""

import math

import numpy as np
import pytest
import torch

from flashinfer_cascade import (
    CapacityError,
    CascadeConfig,
    CascadeError,
    CascadePlanner,
    CascadeRuntime,
    InvalidBatchError,
    PlannerPolicy,
    UnsupportedError,
)
from flashinfer_cascade.runtime.buffers import StagingBuffer
from flashinfer_cascade.testing import RandomBatch, make_kv_cache, random_batch

pytestmark = pytest.mark.gpu

SHARED = list(range(12))
# Requests that share stand side by side: plan rows are the rows of q. In the other they alternate.
IN_ORDER = RandomBatch(
    [[*SHARED, 20 + r] for r in range(4)] + [[30 + r] for r in range(3)], [200] * 4 + [9] * 3, [1] * 7
)
ALTERNATING = IN_ORDER.permuted([4, 0, 5, 1, 6, 2, 3])
# Requests with many new tokens make a part of their own, with its own prefix.
TWO_PARTS = RandomBatch(
    [[0, 1, 2], [3, 4, 5, 11], [0, 1, 6], [3, 4, 7, 8, 9], [], [10]], [40, 60, 44, 75, 0, 3], [1, 25, 2, 40, 1, 1]
)
LARGER = random_batch(np.random.default_rng(8), page_size=16, num_requests=40, max_len=300, max_new=12)


def config(**changes):
    values = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    return CascadeConfig(**(values | changes))


CFG = config()


def planned(batch, executor="levels", cfg=CFG):
    return CascadePlanner(cfg, PlannerPolicy(executor=executor, fold=False)).plan(*batch)


def nan_like(q):
    return q.new_full(q.shape, math.nan)


@pytest.mark.parametrize(
    ("executor", "backend"),
    [
        ("flat", "fa2"),
        ("flat", "decode"),
        ("levels", "fa2"),
        ("levels", "decode"),
        ("levels", "fa3"),
        ("segments", "segments"),
        ("stock", "fa2"),
    ],
)
def test_a_plan_gives_the_same_bits_whatever_ran_before(
    executor, backend, device, make_problem, with_backends, kernels
):
    if backend not in (*kernels, "segments"):
        backend = "fa2"
    small, large = (
        (with_backends(planned(batch, executor), backend), make_problem(CFG, batch)) for batch in (ALTERNATING, LARGER)
    )
    runtime = CascadeRuntime(CFG, device)

    def run(plan, problem, load=True):
        if load:
            runtime.load(plan)
        out = runtime.run(problem.q, problem.kv_cache, out=nan_like(problem.q))
        problem.check(out)
        return out

    first, first_large = run(*small), run(*large)
    assert torch.equal(run(*small), first)
    assert torch.equal(run(*small, load=False), first)
    assert torch.equal(run(*large), first_large)
    assert torch.equal(runtime.run(large[1].q, large[1].kv_cache), first_large)


@pytest.mark.parametrize("executor", ["flat", "levels", "segments", "stock"])
def test_parts_together_are_the_whole(executor, device, make_problem, with_backends):
    plan = with_backends(planned(TWO_PARTS, executor), "fa2")
    assert [part.executor for part in plan.parts] == [executor] * 2
    problem = make_problem(CFG, TWO_PARTS)
    runtime = CascadeRuntime(CFG, device)
    runtime.load(plan)
    whole = runtime.run(problem.q, problem.kv_cache, out=nan_like(problem.q))
    problem.check(whole)
    append_rows = torch.tensor(TWO_PARTS.rows_of([1, 3]), device=device)
    out = nan_like(problem.q)
    runtime.run(problem.q, problem.kv_cache, part="append", out=out)
    assert torch.equal(out[append_rows], whole[append_rows])
    assert out.isnan().flatten(1).any(1).sum() == len(out) - len(append_rows)
    runtime.run(problem.q, problem.kv_cache, part=plan.parts[0], out=out)
    assert torch.equal(out, whole)
    assert (runtime.run(problem.q, problem.kv_cache, part="decode")[append_rows] == 0).all()


def test_layers(device, make_problem, with_backends):
    """One load serves all layers, each with tensors of its own."""
    layers = [
        make_problem(CFG, TWO_PARTS, seed=seed, form=form) for seed, form in enumerate(["tensor", "pair", "permuted"])
    ]
    runtime = CascadeRuntime(CFG, device)
    runtime.load(with_backends(planned(TWO_PARTS), "fa2"))
    outs = [runtime.run(layer.q, layer.kv_cache, return_lse=True) for layer in layers]
    for layer, out in zip(layers, outs, strict=True):
        layer.check(*out)
    assert runtime.stats.loads == 1
    assert runtime.stats.runs == 3


@pytest.mark.parametrize("where", ["one stream", "load beside run", "each step elsewhere"])
@pytest.mark.parametrize("executor", ["flat", "levels", "segments", "stock"])
def test_loading_while_runs_are_queued(executor, where, device, make_problem, with_backends, delay):
    """Ten steps without waiting for the GPU: each load comes while the run before it has not begun."""
    batches = [ALTERNATING, LARGER, TWO_PARTS]
    cases = [(with_backends(planned(batch, executor), "fa2"), make_problem(CFG, batch)) for batch in batches]
    runtime = CascadeRuntime(CFG, device)
    for plan, problem in cases:  # compiles, and reserves what the largest needs
        runtime.load(plan)
        runtime.run(problem.q, problem.kv_cache)
    steps = [cases[step % 3] for step in range(10)]
    outs = [nan_like(problem.q) for _, problem in steps]
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    torch.cuda.synchronize()
    for step, ((plan, problem), out) in enumerate(zip(steps, outs, strict=True)):
        load_on = second if where == "each step elsewhere" and step % 2 else first
        run_on = second if where == "load beside run" else load_on
        with torch.cuda.stream(load_on):
            runtime.load(plan)
        with torch.cuda.stream(run_on):
            delay()
            runtime.run(problem.q, problem.kv_cache, out=out)
    torch.cuda.synchronize()
    for step, ((_, problem), out) in enumerate(zip(steps, outs, strict=True)):
        print(f"step {step}")
        problem.check(out)


def test_a_run_waits_for_a_load_on_another_stream(device, make_problem, with_backends, delay):
    plan, problem = with_backends(planned(ALTERNATING), "fa2"), make_problem(CFG, ALTERNATING)
    runtime = CascadeRuntime(CFG, device)
    runtime.load(with_backends(planned(LARGER), "fa2"))
    out = nan_like(problem.q)
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        delay()
        runtime.load(plan)
    with torch.cuda.stream(second):
        runtime.run(problem.q, problem.kv_cache, out=out)
    torch.cuda.synchronize()
    problem.check(out)


def test_a_runtime_made_on_a_busy_stream_serves_others_at_once(device, make_problem, with_backends, delay):
    plan, problem = with_backends(planned(ALTERNATING), "fa2"), make_problem(CFG, ALTERNATING)
    other = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    delay()
    runtime = CascadeRuntime(CFG, device)
    with torch.cuda.stream(other):
        runtime.load(plan)
        first = runtime.run(problem.q, problem.kv_cache)
    torch.cuda.synchronize()
    problem.check(first)
    # What was initialised on the busy stream must not have come after the load.
    problem.check(runtime.run(problem.q, problem.kv_cache))


def test_two_runtimes_side_by_side(device, make_problem, with_backends, delay):
    tokens = config(page_size=1)
    one_by_one = random_batch(np.random.default_rng(2), page_size=1, num_requests=12, max_len=60)
    cases = [
        (CascadeRuntime(cfg, device), with_backends(planned(batch, cfg=cfg), "fa2"), make_problem(cfg, batch))
        for cfg, batch in ((CFG, LARGER), (tokens, one_by_one))
    ]
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    torch.cuda.synchronize()
    outs = []
    for _ in range(4):
        for stream, (runtime, plan, problem) in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                runtime.load(plan)
                delay()
                outs.append((problem, runtime.run(problem.q, problem.kv_cache)))
    torch.cuda.synchronize()
    for problem, out in outs:
        problem.check(out)


RUNS = {
    "flat": (IN_ORDER, "flat", False),
    "flat, sinks": (IN_ORDER, "flat", True),
    "levels in order": (IN_ORDER, "levels", False),
    "levels, rows permuted": (ALTERNATING, "levels", False),
    "two parts, sinks": (TWO_PARTS, "levels", True),
    "segments in order": (IN_ORDER, "segments", False),
    "segments, rows permuted, sinks": (ALTERNATING, "segments", True),
    "segments, two parts": (TWO_PARTS, "segments", False),
}


def prepared(name, device, make_problem, with_backends):
    """A runtime with its plan loaded, warmed up, and what to run."""
    batch, executor, with_sinks = RUNS[name]
    plan = with_backends(planned(batch, executor), "fa2", "decode")
    options = {"sinks": torch.linspace(-3, 3, 8, device=device)} if with_sinks else {}
    problem = make_problem(CFG, batch, k_scale=0.5, v_scale=2.0, **options)
    runtime = CascadeRuntime(CFG, device)
    runtime.load(plan)
    out = nan_like(problem.q)
    runtime.run(problem.q, problem.kv_cache, out=out, **problem.options)
    return runtime, plan, problem, out


def test_what_the_runs_below_cover():
    assert planned(IN_ORDER).row_order is None
    assert planned(IN_ORDER).num_levels == 2
    assert planned(ALTERNATING).row_order is not None
    assert len(planned(TWO_PARTS).parts) == 2


@pytest.mark.parametrize("name", RUNS)
def test_running_allocates_nothing(name, device, make_problem, with_backends):
    runtime, _, problem, out = prepared(name, device, make_problem, with_backends)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for _ in range(3):
        runtime.run(problem.q, problem.kv_cache, out=out, **problem.options)
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    problem.check(out)


@pytest.mark.parametrize("name", RUNS)
def test_a_loaded_plan_can_be_captured(name, device, make_problem, with_backends):
    runtime, _, problem, out = prepared(name, device, make_problem, with_backends)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runtime.run(problem.q, problem.kv_cache, out=out, **problem.options)
    for seed in 5, 6:
        other = make_problem(CFG, problem.batch, seed=seed, **problem.options)
        problem.q.copy_(other.q)
        problem.kv_cache.copy_(other.kv_cache)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        other.check(out)


@pytest.mark.parametrize(
    ("name", "changed", "match"),
    [
        ("q", lambda x: x.cpu(), r"q is torch.bfloat16 \[7, 8, 128\] on cpu; expected .* on cuda:0"),
        ("q", lambda x: x.half(), "q is torch.float16"),
        ("q", lambda x: x[1:], r"q is torch.bfloat16 \[6, 8, 128\] on cuda:0"),
        ("q", lambda x: x.flatten(1), r"q is torch.bfloat16 \[7, 1024\]"),
        ("kv_cache", lambda x: x.cpu(), "kv_cache is .* on cpu"),
        ("kv_cache", lambda x: x.half(), "kv_cache is torch.float16"),
        ("kv_cache", lambda x: x[:-1], "the plan reads page 32, but kv_cache holds 32 pages"),
        ("kv_cache", lambda x: (x[:, 0], x[:, 1].cpu()), r"kv_cache\[1\] is .* on cpu"),
        ("kv_cache", lambda x: x.transpose(2, 3), r"kv_cache is torch.bfloat16 \[33, 2, 2, 16, 128\]"),
        ("out", lambda x: x.float(), "out is torch.float32"),
        ("out", lambda x: x.cpu(), "out is .* on cpu"),
        ("sinks", lambda x: x.cpu(), "sinks is .* on cpu"),
        ("sinks", lambda x: x[1:], r"sinks is torch.float32 \[7\]"),
    ],
)
def test_the_edge_is_checked(name, changed, match, device, make_problem, with_backends):
    problem = make_problem(CFG, ALTERNATING)
    out = nan_like(problem.q)
    given = {"q": problem.q, "kv_cache": problem.kv_cache, "out": out, "sinks": torch.zeros(8, device=device)}
    runtime = CascadeRuntime(CFG, device)
    runtime.load(with_backends(planned(ALTERNATING), "fa2"))
    with pytest.raises(InvalidBatchError, match=match):
        runtime.run(**(given | {name: changed(given[name])}))
    assert out.isnan().all(), "nothing is written before everything is checked"


def spread(x):
    """The same values, with a gap behind each."""
    return torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0]


@pytest.mark.parametrize("executor", ["flat", "levels", "segments"])
@pytest.mark.parametrize("name", ["q", "kv_cache", "out", "sinks"])
@pytest.mark.parametrize("batch", [IN_ORDER, ALTERNATING], ids=["in order", "permuted"])
def test_gaps_between_elements_are_refused(batch, name, executor, device, make_problem, with_backends):
    problem = make_problem(CFG, batch, sinks=torch.linspace(-3, 3, 8, device=device))
    runtime = CascadeRuntime(CFG, device)
    runtime.load(with_backends(planned(batch, executor), "fa2"))
    given = {"q": problem.q, "kv_cache": problem.kv_cache, "out": nan_like(problem.q), **problem.options}
    with pytest.raises(InvalidBatchError, match=f"{name} has a stride of 2 in its last dimension"):
        runtime.run(**(given | {name: spread(given[name])}))


def test_a_plan_larger_than_the_staging_buffer(device):
    staging = StagingBuffer(16, device)
    (before,) = staging.copy([np.arange(7, dtype=np.int32)])
    with pytest.raises(CapacityError, match="arrays hold 20 entries, above the 16 reserved"):
        staging.copy([np.arange(9, dtype=np.int32), np.arange(5, dtype=np.int32)])
    assert before.tolist() == list(range(7))
    views = staging.copy([np.arange(9, dtype=np.int32), np.arange(50, 54, dtype=np.int32)])
    assert [view.tolist() for view in views] == [list(range(9)), list(range(50, 54))]
    assert all(view.data_ptr() % 16 == 0 for view in views)


def test_a_refused_plan_leaves_none_loaded(device, make_problem, with_backends, tree_batch):
    cfg = config(num_qo_heads=96, num_kv_heads=8)
    refused, fine = tree_batch("1,3_64,40"), tree_batch("1,6_64,40")
    problem = make_problem(cfg, fine)
    runtime = CascadeRuntime(cfg, device)
    runtime.load(with_backends(planned(fine, cfg=cfg), "fa2"))
    with pytest.raises(UnsupportedError, match="num_qo_heads=96"):
        runtime.load(planned(refused, "stock", cfg))
    assert runtime.stats.loads == 1
    with pytest.raises(CascadeError, match="no plan is loaded"):
        runtime.run(problem.q, problem.kv_cache)
    runtime.load(with_backends(planned(fine, cfg=cfg), "fa2"))
    problem.check(runtime.run(problem.q, problem.kv_cache))


def test_a_plan_of_another_configuration(device):
    runtime = CascadeRuntime(CFG, device)
    with pytest.raises(InvalidBatchError, match="the plan was made with num_kv_heads=4"):
        runtime.load(planned(ALTERNATING, cfg=config(num_kv_heads=4)))


def test_the_device_gets_its_number():
    runtime = CascadeRuntime(CFG, "cuda")
    assert runtime.device == torch.device("cuda", torch.cuda.current_device())


def test_run_before_load(device, make_problem):
    problem = make_problem(CFG, ALTERNATING)
    with pytest.raises(CascadeError, match="no plan is loaded"):
        CascadeRuntime(CFG, device).run(problem.q, problem.kv_cache)


def test_hnd(device, make_problem, with_backends):
    """The same values in the other layout give the same bits."""
    cfg = config(kv_layout="HND")
    problem = make_problem(CFG, ALTERNATING)
    outs = []
    for layout, cache in ((CFG, problem.kv_cache), (cfg, problem.kv_cache.transpose(2, 3))):
        runtime = CascadeRuntime(layout, device)
        runtime.load(with_backends(planned(ALTERNATING, cfg=layout), "fa2"))
        outs.append(runtime.run(problem.q, cache))
    problem.check(outs[0])
    assert torch.equal(*outs)
    with pytest.raises(InvalidBatchError, match="the layout is HND"):
        runtime.run(problem.q, make_kv_cache(CFG, 40, device=device))

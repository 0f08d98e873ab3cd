"""The pool, on the CPU, where replays call the step again: buckets, inputs, padding, refusals, statistics."""

import math
from typing import NamedTuple

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
    capture_cuda_graphs,
)
from flashinfer_cascade.bench.traffic import Traffic
from flashinfer_cascade.runtime import Bucket, SegmentShape
from flashinfer_cascade.runtime.graph_state import GraphState
from flashinfer_cascade.runtime.ops import attention
from flashinfer_cascade.testing import RandomBatch, make_kv_cache, make_q

CFG = CascadeConfig(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=4,
    dtype="bfloat16",
    max_batch_size=16,
    max_num_rows=64,
    max_kv_pages=300,
)
CACHE = make_kv_cache(CFG, 300)
LEVELS = PlannerPolicy(executor="levels", fold=False)


class Outputs(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


@pytest.fixture(name="runtime")
def runtime_fixture():
    return CascadeRuntime(CFG, "cpu")


def pool_of(runtime, **arguments):
    sizes = {"batch_sizes": [2, 8], "token_sizes": [32]} | arguments

    def step(inputs):
        return Outputs(*runtime.run(inputs["q"], CACHE, return_lse=True))

    return capture_cuda_graphs(runtime, step, inputs={"q": make_q(CFG, 40)}, progress=False, **sizes)


@pytest.mark.parametrize("max_new", [1, 6])
def test_replays_are_what_the_runtime_gives(max_new, runtime):
    pool = pool_of(runtime)
    traffic = Traffic(np.random.default_rng(max_new), 4, 300, 8 if max_new == 1 else 5, max_new, max_len=40)
    eager = CascadeRuntime(CFG, "cpu")
    for number in range(12):
        batch = traffic.step()
        plan = CascadePlanner(CFG, LEVELS).plan(*batch, capacity=pool.capacity(batch.num_rows, len(batch.seq_lens)))
        q = make_q(CFG, batch.num_rows, seed=number)
        got = pool.replay(plan, q=q)
        assert isinstance(got, Outputs)
        eager.load(plan)
        out, lse = eager.run(q, CACHE, return_lse=True)
        assert torch.equal(got.out, out)
        assert torch.equal(got.lse, lse)
    assert sum(pool.stats.replays.values()) == 12
    assert pool.stats.captures == 3
    assert pool.memory_bytes == 0


def test_plans_that_are_loaded_ahead(runtime, monkeypatch):
    pool, eager = pool_of(runtime), CascadeRuntime(CFG, "cpu")
    traffic = Traffic(np.random.default_rng(3), 4, 300, 8, 1, max_len=40)
    loaded = []
    load = GraphState.load
    monkeypatch.setattr(
        GraphState, "load", lambda state, plan, laid=None: loaded.append(plan) or load(state, plan, laid)
    )

    def check(plan, method):
        q = make_q(CFG, plan.num_rows, seed=len(loaded))
        eager.load(plan)
        assert torch.equal(method(plan, q=q).out, eager.run(q, CACHE))

    plans = [CascadePlanner(CFG, LEVELS).plan(*traffic.step()) for _ in range(3)]
    for method in pool.replay, pool.run:
        loaded.clear()
        pool.load(plans[0])
        check(plans[0], method)
        assert [plans.index(plan) for plan in loaded] == [0], "once"
        check(plans[0], method)
        assert [plans.index(plan) for plan in loaded] == [0, 0], "what was loaded ahead has been used"
        pool.load(plans[1])
        check(plans[2], method)
        check(plans[1], method)
        assert [plans.index(plan) for plan in loaded] == [0, 0, 1, 2, 1], "another came between"
    wide = CascadePlanner(CFG).plan([[page] for page in range(16)], [1] * 16)
    pool.load(plans[0])
    with pytest.raises(CapacityError, match="rows"):
        pool_of(runtime, token_sizes=[]).load(wide)
    assert pool.stats.replays.total() == 8


def test_the_smallest_bucket_that_holds_the_batch(runtime):
    pool = pool_of(runtime, batch_sizes=[8, 2, 8])
    assert pool.buckets == [Bucket("append", 32, 16), Bucket("decode", 2, 2), Bucket("decode", 8, 8)]
    planner = CascadePlanner(CFG)
    for seq_lens, qo_lens, bucket in (
        ([3], [1], "decode 2"),
        ([3] * 3, [1] * 3, "decode 8"),
        ([3] * 9, [1] * 9, "append 32"),
        ([9], [9], "append 32"),
    ):
        plan = planner.plan([[r, 20 + r, 40 + r] for r in range(len(seq_lens))], seq_lens, qo_lens)
        before = pool.stats.replays[bucket, "None"]
        pool.replay(plan, q=make_q(CFG, plan.num_rows))
        assert pool.stats.replays[bucket, "None"] == before + 1


def test_rows_of_padding_hold_what_they_were_captured_with(runtime):
    seen = []

    def step(inputs):
        seen.append(inputs["slot"].tolist())
        return [{"q": runtime.run(inputs["q"], CACHE)}, None]

    inputs = {"q": make_q(CFG, 8), "slot": torch.full((8,), -1)}
    pool = capture_cuda_graphs(runtime, step, inputs=inputs, batch_sizes=[4, 8], progress=False)
    planner = CascadePlanner(CFG)
    for size in (8, 2, 3, 8, 4, 6):
        plan = planner.plan([[r] for r in range(size)], [2] * size)
        (got, nothing) = pool.replay(plan, q=make_q(CFG, size), slot=torch.arange(size))
        assert nothing is None
        assert len(got["q"]) == size
        assert seen[-1] == [*range(size), *[-1] * ((4 if size <= 4 else 8) - size)]
    assert inputs["slot"].tolist() == [-1] * 8


def test_what_does_not_fit_runs_eagerly_and_is_counted(runtime):
    pool = pool_of(runtime, token_sizes=[])
    plan = CascadePlanner(CFG).plan([[r] for r in range(9)], [3] * 9)
    q = make_q(CFG, 9)
    with pytest.raises(CapacityError, match=r"a batch of 9 requests .* rows in decode graphs 9 > 8\. Capture a larger"):
        pool.replay(plan, q=q)
    got = pool.run(plan, q=q)
    runtime.load(plan)
    assert torch.equal(got.out, runtime.run(q, CACHE))
    assert pool.stats.eager == {"rows in decode graphs": 1}
    assert not pool.stats.replays
    with pytest.raises(CapacityError, match="rows in append graphs 3 > 0"):
        pool.capacity(3, 1)
    with pytest.raises(InvalidBatchError, match="plan is 'plan': give the CascadePlan that planner"):
        pool.run("plan", q=q)
    crowded = pool_of(runtime, batch_sizes=[], max_requests=4)
    with pytest.raises(
        CapacityError, match=r"a batch of 5 requests does not fit the pool: requests in append graphs 5 > 4\."
    ):
        crowded.capacity(20, 5)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({}, r"inputs \[\] given, but the graphs were captured with \['q'\]"),
        (
            {"q": make_q(CFG, 3)},
            r"input q is torch.bfloat16 \[3, 4, 64\] on cpu; expected .* \[2, 4, 64\] on cpu: one row",
        ),
        (
            {"q": make_q(CFG, 2).to("meta")},
            r"input q is torch.bfloat16 \[2, 4, 64\] on meta; expected .* on cpu: one row",
        ),
        ({"q": None}, r"input q is None; expected a tensor, torch.bfloat16 \[2, 4, 64\] on cpu"),
        ({"q": make_q(CFG, 2).float()}, "input q is torch.float32"),
        ({"q": make_q(CFG, 2), "x": make_q(CFG, 2)}, r"inputs \['q', 'x'\] given"),
    ],
)
@pytest.mark.parametrize("method", ["replay", "run"])
def test_wrong_inputs(inputs, match, method, runtime):
    pool = pool_of(runtime)
    plan = CascadePlanner(CFG).plan([[0], [1]], [3, 3])
    with pytest.raises(InvalidBatchError, match=match):
        getattr(pool, method)(plan, **inputs)
    assert not pool.stats.replays


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "no bucket: give batch_sizes"),
        ({"batch_sizes": [17]}, "a decode bucket of 17 requests: give 1 to 16"),
        ({"batch_sizes": [0]}, "a decode bucket of 0 rows"),
        ({"batch_sizes": [True]}, "a decode bucket of True rows"),
        ({"batch_sizes": [2.0]}, r"a decode bucket of 2\.0 rows"),
        ({"token_sizes": [65]}, "an append bucket of 65 rows: give 1 to 64, or raise max_num_rows in CascadeConfig"),
        ({"token_sizes": [8], "max_requests": 17}, "bucket of 17 requests"),
        ({"batch_sizes": [9]}, r"input q is \[8, 4, 64\] on cpu: give a tensor of at least 9 rows"),
        ({"batch_sizes": [4], "inputs": {}}, "inputs is empty"),
        ({"batch_sizes": [4], "inputs": [make_q(CFG, 8)]}, "inputs is a list: give tensors by name"),
        ({"batch_sizes": [4], "inputs": {"q": [0] * 8}}, "input q is a list: give a tensor of at least 4 rows on cpu"),
        ({"batch_sizes": 4}, "batch_sizes is 4: give a list"),
        ({"token_sizes": None}, "token_sizes is None: give a list"),
        ({"batch_sizes": [4], "lazy": -1}, "lazy is -1: give an integer of at least 0"),
        ({"batch_sizes": [4], "shapes": SegmentShape()}, "shapes is a SegmentShape: give a list"),
        ({"batch_sizes": [4], "shapes": ["fa2"]}, "shape is 'fa2': give a SegmentShape, GraphShape or StockShape"),
        ({"batch_sizes": [4], "runtime": None}, "runtime is None: give the CascadeRuntime"),
        ({"batch_sizes": [4], "step_fn": None}, "step_fn is None: give a function"),
        ({"batch_sizes": [4], "shapes": []}, "no shapes for the bucket of decode 4"),
    ],
)
def test_wrong_buckets(arguments, match, runtime):
    given = {"runtime": runtime, "step_fn": lambda inputs: inputs["q"], "inputs": {"q": make_q(CFG, 8)}} | arguments
    with pytest.raises(InvalidBatchError, match=match):
        capture_cuda_graphs(progress=False, **given)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((0,), "num_rows is 0: give an integer of at least 1"),
        ((-1,), "num_rows is -1: give an integer of at least 1"),
        (("a",), "num_rows is 'a': give an integer"),
        ((True,), "num_rows is True: give an integer"),
        ((4, 0), "num_requests is 0: give an integer of at least 1"),
        ((4, 2.0), r"num_requests is 2\.0: give an integer"),
        ((4, 5), "num_requests=5 exceeds num_rows=4"),
    ],
)
def test_capacities_of_batches_that_cannot_be(sizes, match, runtime):
    with pytest.raises(InvalidBatchError, match=match):
        pool_of(runtime).capacity(*sizes)


def test_capture_calls_the_step_with_rows_of_padding(runtime):
    seen = []

    def step(inputs):
        seen.append((len(inputs["q"]), inputs["slot"].unique().tolist()))
        out = runtime.run(inputs["q"], CACHE)
        assert not out.any()  # no row sees any KV
        return out

    inputs = {"q": make_q(CFG, 8), "slot": torch.full((8,), -1)}
    capture_cuda_graphs(runtime, step, inputs=inputs, batch_sizes=[2, 8], token_sizes=[4], progress=False)
    assert seen == [(8, [-1]), (4, [-1]), (2, [-1])]
    assert runtime.stats.runs == 0
    with pytest.raises(CascadeError, match="no plan is loaded"):
        runtime.run(inputs["q"], CACHE)


def test_a_step_that_fails_says_so_when_it_is_captured(runtime):
    with pytest.raises(KeyError, match="tokens"):
        capture_cuda_graphs(
            runtime, lambda inputs: inputs["tokens"], inputs={"q": make_q(CFG, 4)}, batch_sizes=[4], progress=False
        )


def test_a_plan_beyond_the_captured_cache_leaves_the_inputs_alone(runtime):
    seen = []

    def step(inputs):
        seen.append(inputs["slot"].tolist())
        return runtime.run(inputs["q"], CACHE[:50])

    inputs = {"q": make_q(CFG, 4), "slot": torch.full((4,), -1)}
    pool = capture_cuda_graphs(runtime, step, inputs=inputs, batch_sizes=[4], progress=False)
    planner = CascadePlanner(CFG)
    with pytest.raises(InvalidBatchError, match="the plan reads page 50, but kv_cache holds 50 pages"):
        pool.replay(planner.plan([[1], [50]], [2, 2]), q=make_q(CFG, 2), slot=torch.arange(2))
    assert pool._static["slot"].tolist() == [-1] * 4
    pool.replay(planner.plan([[49]], [2]), q=make_q(CFG, 1), slot=torch.arange(1))
    assert seen[-1] == [0, -1, -1, -1]


@pytest.mark.parametrize("output", [torch.zeros(()), torch.zeros(100), torch.zeros(1, 4)], ids=str)
def test_outputs_without_a_row_for_each_input(output, runtime):
    with pytest.raises(InvalidBatchError, match=r"the step returned a tensor of .* for inputs of 4 rows"):
        capture_cuda_graphs(
            runtime, lambda _: {"loss": output}, inputs={"q": make_q(CFG, 4)}, batch_sizes=[4], progress=False
        )


def test_progress_is_shown_on_stderr(runtime, capfd):
    arguments = {"inputs": {"q": make_q(CFG, 8)}, "batch_sizes": [4]}
    capture_cuda_graphs(runtime, lambda inputs: runtime.run(inputs["q"], CACHE), **arguments)
    out, _ = capfd.readouterr()
    assert not out


def test_a_state_holds_any_plan_of_its_size(runtime):
    state = runtime.graph_state(4)
    q = make_q(CFG, 4)
    out, lse = state.run(q, CACHE, return_lse=True)
    assert not out.any()
    assert lse.isneginf().all()
    batch = RandomBatch([[0, 1, 2], [0, 1, 3], [4]], [10, 11, 2], [1, 1, 1])
    plan = CascadePlanner(CFG, LEVELS).plan(*batch, capacity=state.capacity)
    assert plan.num_levels == 2
    state.load(plan)
    sinks = torch.linspace(-1, 1, 4)
    with runtime.using(state):
        got, lse = runtime.run(q, CACHE, sinks=sinks, return_lse=True)
        with pytest.raises(UnsupportedError, match="a captured graph runs all parts"):
            runtime.run(q, CACHE, part="decode")
    assert torch.allclose(lse[3], sinks * math.log2(math.e))
    runtime.load(plan)
    assert torch.equal(got[:3], runtime.run(q[:3], CACHE, sinks=sinks))
    assert not got[3].any()


def test_a_state_refuses_what_does_not_fit(runtime):
    state = runtime.graph_state(4)
    planner = CascadePlanner(CFG)
    state.load(planner.plan([[0]], [3]))
    before = state.run(make_q(CFG, 4), CACHE)
    with pytest.raises(
        CapacityError, match=r"the plan does not fit a graph for decode 4: num_rows 5 > 4, num_requests 5 > 4"
    ):
        state.load(planner.plan([[r] for r in range(5)], [3] * 5))
    with pytest.raises(CapacityError, match="rows a request 2 > 1"):
        state.load(planner.plan([[0]], [3], [2]))
    with pytest.raises(InvalidBatchError, match="plan is 'plan': give the CascadePlan that planner"):
        state.load("plan")
    with pytest.raises(InvalidBatchError, match="v_scale is nan: give a finite number"):
        state.run(make_q(CFG, 4), CACHE, v_scale=math.nan)
    with pytest.raises(InvalidBatchError, match="q is torch"):
        state.run(make_q(CFG, 3), CACHE)
    assert torch.equal(state.run(make_q(CFG, 4), CACHE), before)
    state.run(make_q(CFG, 4), CACHE[:299])
    with pytest.raises(InvalidBatchError, match="the plan reads page 299, but kv_cache holds 299 pages"):
        state.load(planner.plan([[299]], [3]))


def test_a_state_after_a_failed_load(runtime, monkeypatch):
    state = runtime.graph_state(4)
    plan = CascadePlanner(CFG).plan([[0]], [3])
    with monkeypatch.context() as patch:
        patch.setattr(state._executor, "load", lambda plan, laid: 1 / 0)
        with pytest.raises(ZeroDivisionError, match="division"):
            state.load(plan)
    with pytest.raises(CascadeError, match="the last load into this graph state failed"):
        state.run(make_q(CFG, 4), CACHE)
    state.load(plan)
    state.run(make_q(CFG, 4), CACHE)


def test_the_operator_in_a_compiled_model(runtime):
    plan = CascadePlanner(CFG).plan([[0, 1], [0, 2]], [7, 8])
    runtime.load(plan)
    q = make_q(CFG, 2)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(q, k, v):
        return attention(runtime.number, q * 2, (k, v), k_scale=0.5) * 2

    pair = CACHE[:, 0].contiguous(), CACHE[:, 1].contiguous()
    assert torch.equal(layer(q, *pair), runtime.run(q * 2, pair, k_scale=0.5) * 2)
    arguments = (runtime.number, q, [CACHE], torch.empty_like(q), 1.0, 1.0, None)
    torch.library.opcheck(torch.ops.flashinfer_cascade.attention, arguments)
    with pytest.raises(CascadeError, match="runtime 0 is gone"):
        attention(0, q, CACHE)

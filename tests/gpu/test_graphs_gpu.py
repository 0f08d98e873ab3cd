"""Captured graphs: any plan, in any order, within the error budget; and the races that serving has."""

import math
import os

import numpy as np
import pytest
import torch

from flashinfer_cascade import (
    CapacityError,
    CascadeConfig,
    CascadePlanner,
    CascadeRuntime,
    InvalidBatchError,
    PlannerPolicy,
    UnsupportedError,
    capture_cuda_graphs,
)
from flashinfer_cascade.bench.traffic import Traffic
from flashinfer_cascade.runtime import GraphShape, SegmentShape, StockShape, graph_levels
from flashinfer_cascade.runtime.ops import attention
from flashinfer_cascade.testing import (
    RandomBatch,
    dense_attention,
    error_budget,
    make_kv_cache,
    make_q,
    plain_attention,
    relative_errors,
)

pytestmark = pytest.mark.gpu

NUM_PAGES = 400
KV = {
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "e4m3": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"},
}
CASCADES = PlannerPolicy(executor="levels", fold=False)


def config(**changes):
    values = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    values |= {"max_batch_size": 64, "max_num_rows": 512, "max_kv_pages": NUM_PAGES, "max_kv_indices": 8192}
    return CascadeConfig(**(values | changes))


CFG = config()


def batches_of(max_requests, max_new=1, seed=0, num=8, cfg=CFG):
    rng = np.random.default_rng(seed)
    traffic = Traffic(rng, cfg.page_size, NUM_PAGES, max_requests, max_new, max_len=90)
    return [traffic.step() for _ in range(num)]


def check(cfg, cache, q, batch, out, **options):
    """Hold a result for all of a batch's rows against the oracle."""
    oracle, _ = dense_attention(cfg, q, cache, *batch, **options)
    plain = plain_attention(cfg, q, cache, *batch, **options)
    assert out.shape == q.shape
    assert float(relative_errors(out, oracle).amax()) <= error_budget(oracle, plain)


def attention_pool(cfg, device, cache, **arguments):
    """A pool whose step is one attention call."""
    runtime = CascadeRuntime(cfg, device)
    rows = max((*arguments.get("batch_sizes", ()), *arguments.get("token_sizes", ())))
    options = arguments.pop("options", {})
    pool = capture_cuda_graphs(
        runtime,
        lambda inputs: runtime.run(inputs["q"], cache, **options),
        inputs={"q": make_q(cfg, rows, device=device)},
        progress=False,
        **arguments,
    )
    return pool, runtime


# What the planner chooses for fp16 would compile more modules.
CASES = [("bf16", "auto"), ("bf16", "levels"), ("fp16", "levels"), ("e4m3", "auto"), ("bf16", "segments")]
POLICIES = {"auto": PlannerPolicy(), "levels": CASCADES, "segments": PlannerPolicy(executor="segments")}


@pytest.mark.parametrize(("kv", "policy"), CASES)
def test_random_traffic_in_decode(kv, policy, device, with_backends):
    cfg = config(**KV[kv])
    options = {"k_scale": 0.5, "v_scale": 0.25} if kv == "e4m3" else {}
    cache = make_kv_cache(cfg, NUM_PAGES, device=device, **options)
    pool, runtime = attention_pool(cfg, device, cache, batch_sizes=[4, 16, 48], options=options)
    planner = CascadePlanner(cfg, POLICIES[policy])
    seen = []
    for number, batch in enumerate(batches_of(48, num=10, cfg=cfg) + batches_of(4, seed=1, num=4, cfg=cfg)):
        q = make_q(cfg, batch.num_rows, seed=number, device=device)
        plan = planner.plan(*batch, capacity=pool.capacity(batch.num_rows))
        out = pool.replay(plan, q=q).clone()
        check(cfg, cache, q, batch, out, **options)
        runtime.load(plan if kv != "fp16" else with_backends(plan, "fa2"))
        check(cfg, cache, q, batch, runtime.run(q, cache, **options), **options)
        seen.append((plan, q, out))
    for plan, q, out in reversed(seen):
        assert torch.equal(pool.replay(plan, q=q), out)
    assert len({bucket for bucket, _ in pool.stats.replays}) == 3
    assert sum(pool.stats.replays.values()) == 2 * len(seen)
    assert not pool.stats.eager


@pytest.mark.parametrize(("kv", "policy"), CASES)
def test_random_traffic_with_appends(kv, policy, device, with_backends):
    cfg = config(**KV[kv])
    cache = make_kv_cache(cfg, NUM_PAGES, device=device)
    fa2 = [GraphShape((), ("fa2",)), GraphShape(("fa2", "fa2_uncut"), ("fa2",))]
    pool, runtime = attention_pool(
        cfg, device, cache, token_sizes=[32, 128, 512], max_requests=24, shapes=None if kv == "bf16" else fa2
    )
    planner = CascadePlanner(cfg, POLICIES[policy])
    seen = []
    for number, batch in enumerate(batches_of(20, 40, num=10, cfg=cfg) + batches_of(3, 9, seed=1, num=4, cfg=cfg)):
        q = make_q(cfg, batch.num_rows, seed=number, device=device)
        plan = planner.plan(*batch, capacity=pool.capacity(batch.num_rows, len(batch.seq_lens)))
        out = pool.replay(plan, q=q).clone()
        check(cfg, cache, q, batch, out)
        runtime.load(plan if kv != "fp16" else with_backends(plan, "fa2"))
        check(cfg, cache, q, batch, runtime.run(q, cache))
        seen.append((plan, q, out))
    for plan, q, out in reversed(seen):
        assert torch.equal(pool.replay(plan, q=q), out)
    assert len({bucket for bucket, _ in pool.stats.replays}) == 3


SHAPES = [
    GraphShape((), ("fa2",)),
    GraphShape((), ("fa2_uncut", "decode")),
    GraphShape(("fa2",), ("fa2",)),
    GraphShape(("fa2_uncut",), ("fa2_uncut",)),
    GraphShape(("fa3",), ("fa2",)),
    GraphShape(("fa2", "fa2_uncut"), ("decode", "fa2")),
    GraphShape(("fa3", "fa2", "fa2_uncut", "fa2_uncut"), ("fa2", "fa2_uncut", "decode")),
    SegmentShape(),
    SegmentShape(shares=False),
    StockShape(1),
    StockShape(3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, device, kernels):
    """Plans made to fit replay on any kernels, in a graph that is captured by hand, with padding rows of NaN."""
    if isinstance(shape, GraphShape) and "fa3" in shape.shared and "fa3" not in kernels:
        with pytest.raises(UnsupportedError, match="fa3, which runs on Hopper GPUs only"):
            CascadeRuntime(CFG, device).graph_state(40, shape=shape)
        return
    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    runtime = CascadeRuntime(CFG, device)
    state = runtime.graph_state(40, shape=shape)
    q = make_q(CFG, 40, device=device)
    out = torch.full_like(q, math.nan)
    stock = isinstance(shape, StockShape)
    with runtime.using(state):
        runtime.run(q, cache, out=out, return_lse=not stock)
    assert not out.any()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = state.run(q, cache, out=out, return_lse=not stock)
    # One shares nothing, one as deep as the shape goes.
    alone = RandomBatch([[r, 100 + r] for r in range(40)], [32] * 40, [1] * 40)
    chain = RandomBatch([[*range(d), 50 + d] for d in range(9)], [16 * d + 3 for d in range(9)], [1] * 9)
    seen = []
    for number, batch in enumerate([*batches_of(40, seed=2), alone, chain, *batches_of(40, seed=3, num=4)]):
        plan = CascadePlanner(CFG, CASCADES).plan(*batch, capacity=state.capacity)
        q.fill_(math.nan)
        q[: batch.num_rows] = make_q(CFG, batch.num_rows, seed=number, device=device)
        out.fill_(math.nan)
        state.load(plan)
        graph.replay()
        live = slice(batch.num_rows)
        check(CFG, cache, q[live], batch, out[live])
        if not stock:
            assert not out[batch.num_rows :].any()
            assert result[1][batch.num_rows :].isneginf().all()
            assert not result[1][live].isinf().any()
        seen.append((plan, q.clone(), out[live].clone()))
    for plan, before, expected in seen:
        q.copy_(before)
        state.load(plan)
        graph.replay()
        assert torch.equal(out[: plan.num_rows], expected)
    if isinstance(shape, StockShape):
        assert shape.num_levels == 1 or any(plan.num_levels > 1 for plan, *_ in seen)
    elif isinstance(shape, SegmentShape):
        assert shape.shares == any(plan.num_levels > 1 for plan, *_ in seen)
    else:
        assert max(plan.num_levels for plan, *_ in seen) == len(shape.shared) + 1


def test_a_stock_graph_for_appends(device):
    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    state = CascadeRuntime(CFG, device).graph_state(num_tokens=256, max_requests=12, shape=StockShape(2))
    q = torch.zeros(256, 8, 128, dtype=torch.bfloat16, device=device)
    state.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = state.run(q, cache)
    for number, batch in enumerate(batches_of(11, 20, seed=4)):
        q[: batch.num_rows] = make_q(CFG, batch.num_rows, seed=number, device=device)
        state.load(CascadePlanner(CFG, CASCADES).plan(*batch, capacity=state.capacity))
        graph.replay()
        check(CFG, cache, q[: batch.num_rows], batch, out[: batch.num_rows])


@pytest.mark.parametrize("feature", ["sinks", "soft cap", "hnd", "page 1", "mqa"])
def test_features(feature, device):
    changes = {
        "sinks": {},
        "soft cap": {"dtype": "float16", "head_dim": 64, "logits_soft_cap": 4.0},
        "hnd": {"kv_layout": "HND"},
        "page 1": {"page_size": 1, "max_kv_pages": 4000, "max_kv_indices": 20000},
        "mqa": {"num_kv_heads": 1},
    }[feature]
    cfg = config(**changes)
    options = {"sinks": torch.linspace(-3, 3, 8, device=device)} if feature == "sinks" else {}
    cache = make_kv_cache(cfg, cfg.max_kv_pages, device=device)
    pool, _ = attention_pool(cfg, device, cache, batch_sizes=[24], options=options)
    traffic = Traffic(np.random.default_rng(5), cfg.page_size, cfg.max_kv_pages, 24, max_len=60)
    for number in range(4):
        batch = traffic.step()
        plan = CascadePlanner(cfg, CASCADES).plan(*batch, capacity=pool.capacity(batch.num_rows))
        q = make_q(cfg, batch.num_rows, seed=number, device=device)
        out = pool.replay(plan, q=q)
        # FlashInfer caps logits with an approximate tanh.
        tolerant = cfg.model_copy(update={"logits_soft_cap": cfg.logits_soft_cap * (1 + 2.0**-11)})
        oracle, _ = dense_attention(cfg, q, cache, *batch, **options)
        plain = plain_attention(tolerant, q, cache, *batch, **options)
        assert float(relative_errors(out, oracle).amax()) <= error_budget(oracle, plain)


@pytest.fixture(name="served", params=["levels", "segments"])
def served_fixture(request, device):
    """A pool, its cache, and steps with what they must give."""
    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    shapes = [GraphShape((), ("fa2",)), GraphShape(("fa2", "fa2_uncut"), ("fa2",))]
    shapes = [SegmentShape()] if request.param == "segments" else shapes
    pool, runtime = attention_pool(CFG, device, cache, batch_sizes=[8, 32], shapes=shapes)
    steps = []
    for number, batch in enumerate(batches_of(32, seed=6, num=12)):
        plan = CascadePlanner(CFG, CASCADES).plan(*batch, capacity=pool.capacity(batch.num_rows))
        q = make_q(CFG, batch.num_rows, seed=number, device=device)
        out = pool.replay(plan, q=q).clone()
        check(CFG, cache, q, batch, out)
        steps.append((plan, q, out))
    torch.cuda.synchronize()
    return pool, steps, cache, runtime


@pytest.mark.parametrize("where", ["one stream", "each step elsewhere"])
def test_planning_ahead_of_the_gpu(where, served, device, delay):
    """Twelve steps are loaded while the first still waits, without the host waiting for any."""
    pool, steps, *_ = served
    streams = [torch.cuda.Stream(device) for _ in range(3 if where == "each step elsewhere" else 1)]
    outs = []
    for number, (plan, q, _) in enumerate(steps):
        with torch.cuda.stream(streams[number % len(streams)]):
            if number % 4 == 0:
                delay()
            outs.append(pool.replay(plan, q=q).clone())
    torch.cuda.synchronize()
    for (_, _, expected), out in zip(steps, outs, strict=True):
        assert torch.equal(out, expected)


def test_the_host_waits_for_nothing(served, delay):
    pool, steps, *_ = served
    torch.cuda.set_sync_debug_mode("error")
    try:
        delay()
        done = torch.cuda.Event()
        for plan, q, _ in steps[:2]:
            pool.replay(plan, q=q)
        done.record()
        assert not done.query(), "the delay is over already: it shows nothing"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_pools(served, device, delay):
    pool, steps, cache, _ = served
    other, _ = attention_pool(CFG, device, cache, batch_sizes=[32])
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    outs = []
    for number, (plan, q, _) in enumerate(steps):
        for which, one in enumerate((pool, other)):
            with torch.cuda.stream(streams[which]):
                if (number + which) % 3 == 0:
                    delay()
                outs.append((number, which, one.replay(plan, q=q).clone()))
    torch.cuda.synchronize()
    by_other = {}
    for number, which, out in outs:
        if which == 0:
            assert torch.equal(out, steps[number][2])
        else:
            by_other[number] = out
    for number, (plan, q, _) in enumerate(steps):
        assert torch.equal(other.replay(plan, q=q), by_other[number])


def test_padding_rows_write_nowhere(device):
    """Rows of an earlier, larger batch must not be written again: the step writes the KV of all its rows."""
    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    runtime = CascadeRuntime(CFG, device)
    written = torch.zeros(1000, device=device)

    def step(inputs):
        written.index_add_(0, inputs["slot"], torch.ones_like(inputs["slot"], dtype=torch.float32))
        return runtime.run(inputs["q"], cache)

    inputs = {
        "q": make_q(CFG, 32, device=device),
        "slot": torch.full((40,), 999, device=device),
    }
    pool = capture_cuda_graphs(runtime, step, inputs=inputs, batch_sizes=[8, 32], progress=False)
    planner = CascadePlanner(CFG, PlannerPolicy(executor="flat"))
    at = 0
    for size in (32, 20, 3, 8, 1, 30, 32):
        plan = planner.plan([[r] for r in range(size)], [3] * size)
        written.zero_()
        slots = torch.arange(at, at + size, device=device)
        pool.replay(plan, q=make_q(CFG, size, device=device), slot=slots)
        expected = torch.zeros(999)
        expected[at : at + size] = 1
        assert torch.equal(written[:999].cpu(), expected)
        at += size


@pytest.mark.parametrize("served", ["levels"], indirect=True)
def test_refusals_touch_nothing(served, device):
    pool, steps, cache, _ = served
    plan, q, expected = steps[0]
    out = pool.replay(plan, q=q)
    large = CascadePlanner(CFG).plan([[r] for r in range(33)], [3] * 33)
    with pytest.raises(CapacityError, match=r"rows in decode graphs 33 > 32\. Capture a larger bucket"):
        pool.replay(large, q=make_q(CFG, 33, device=device))
    deep = RandomBatch([[*range(d), 50 + d] for d in range(12)], [16 * d + 3 for d in range(12)], [1] * 12)
    unfit = CascadePlanner(CFG, PlannerPolicy(executor="levels", fold=False, max_levels=64)).plan(*deep)
    with pytest.raises(CapacityError, match="num_levels 11 > 3"):
        pool.replay(unfit, q=make_q(CFG, 12, device=device))
    appends = CascadePlanner(CFG).plan([[1]], [3], [3])
    with pytest.raises(CapacityError, match="rows in append graphs 3 > 0"):
        pool.replay(appends, q=make_q(CFG, 3, device=device))
    with pytest.raises(
        InvalidBatchError, match=r"input q is torch.bfloat16 \[5, 8, 128\] on cuda:0; expected a tensor"
    ):
        pool.replay(plan, q=make_q(CFG, 5, device=device))
    with pytest.raises(InvalidBatchError, match=r"inputs \['x'\] given, but the graphs were captured with \['q'\]"):
        pool.replay(plan, x=q)
    assert torch.equal(out, expected)
    q12 = make_q(CFG, 12, device=device)
    check(CFG, cache, q12, deep, pool.run(unfit, q=q12))
    assert pool.stats.eager == {"num_levels": 1}
    assert torch.equal(pool.replay(plan, q=q), expected)


def test_a_plan_beyond_the_captured_cache(device):
    cache = make_kv_cache(CFG, 20, device=device)
    state = CascadeRuntime(CFG, device).graph_state(4)
    state.run(make_q(CFG, 4, device=device), cache)
    with pytest.raises(InvalidBatchError, match="the plan reads page 20, but kv_cache holds 20 pages"):
        state.load(CascadePlanner(CFG).plan([[20]], [3]))
    state.load(CascadePlanner(CFG).plan([[19]], [3]))


def test_lazy_capture(device, with_backends):
    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    flat = [GraphShape((), ("fa2",))]
    pool, _ = attention_pool(CFG, device, cache, batch_sizes=[16], shapes=flat, lazy=1)
    batch = RandomBatch([[0, 1, 2, 10 + r] for r in range(12)], [55] * 12, [1] * 12)
    q = make_q(CFG, 12, device=device)
    plan = with_backends(CascadePlanner(CFG, CASCADES).plan(*batch), "fa2_uncut", "fa2")
    check(CFG, cache, q, batch, pool.replay(plan, q=q))
    assert pool.stats.captures == 2
    assert pool.shapes(pool.buckets[0])[1] == GraphShape(("fa2_uncut",), ("fa2",))
    assert pool.stats.inexact == 0
    deeper = RandomBatch([[0, *([1] if r < 6 else []), 2, 10 + r] for r in range(12)], [35] * 12, [1] * 12)
    deeper_plan = CascadePlanner(CFG, CASCADES).plan(*deeper)
    with pytest.raises(CapacityError, match="num_levels 3 > 2"):
        pool.replay(deeper_plan, q=q)
    assert pool.stats.captures == 2


@pytest.mark.parametrize("mirrored", [True, False])
def test_sessions(mirrored, device, delay, monkeypatch):
    """Plans of a session replay as one-shot plans do, page ids followed on the device or gathered on the host."""
    monkeypatch.setattr(graph_levels, "MIN_MIRRORED_PAGES", 0 if mirrored else 10**9)
    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    pool, _ = attention_pool(CFG, device, cache, batch_sizes=[8, 32])
    other, _ = attention_pool(CFG, device, cache, batch_sizes=[8, 32])
    planner = CascadePlanner(CFG, CASCADES)
    session = planner.session()
    rng = np.random.default_rng(7)
    free = rng.permutation(NUM_PAGES).tolist()
    number, moves = 0, set()
    for step in range(120):
        if step % 24 == 23:  # all change, the array of page ids too
            session = planner.session()
            free = rng.permutation(NUM_PAGES).tolist()
        live = session.ids
        if len(live) > 20 or (len(live) > 3 and rng.random() < 0.2):
            session.remove(live[rng.integers(len(live))])
        if len(session):
            needs = [name for name in session.ids if session.seq_len(name) % 16 == 0]
            session.step({name: free.pop() for name in needs})
        while len(session) < 3 or (len(session) < 24 and rng.random() < 0.3):
            number += 1
            if len(session) and rng.random() < 0.5:
                parent = session.ids[rng.integers(len(session))]
                full = session.seq_len(parent) // 16
                shared = session.block_table(parent)[:full].tolist()
                length = 16 * full + int(rng.integers(1, 40))
            else:
                shared, length = [], int(rng.integers(1, 90))
            own = -(-length // 16) - len(shared)
            if own > len(free) - 60:
                break
            pages = shared + [free.pop() for _ in range(own)]
            session.add(number, pages, length, computed_len=length - 1)
        plan = session.plan(capacity=pool.capacity(len(session)))
        tables = [session.block_table(name) for name in session.ids]
        lens = [session.seq_len(name) for name in session.ids]
        q = make_q(CFG, plan.num_rows, seed=step, device=device)
        if step % 10 == 0:
            delay()
        got = pool.replay(plan, q=q).clone()
        moves.add(plan.pages.pool_id)
        expected = other.replay(planner.plan(tables, lens, capacity=other.capacity(len(lens))), q=q)
        assert torch.equal(got, expected)
    check(CFG, cache, q, RandomBatch([t.tolist() for t in tables], lens, [1] * len(lens)), got)
    assert len(moves) > 3


def test_a_capture_while_serving_writes_nowhere(device, with_backends):
    """It warms the step up: not with the slots of the batch before."""
    runtime = CascadeRuntime(CFG, device)
    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    written = torch.zeros(100, device=device)

    def step(inputs):
        written.index_add_(0, inputs["slot"], torch.ones(len(inputs["slot"]), device=device))
        return runtime.run(inputs["q"], cache)

    inputs = {"q": make_q(CFG, 8, device=device), "slot": torch.full((8,), 99, device=device)}
    flat = [GraphShape((), ("fa2",))]
    pool = capture_cuda_graphs(runtime, step, inputs=inputs, batch_sizes=[8], shapes=flat, lazy=1, progress=False)
    tables = [[0, 1, 10 + r] for r in range(6)]
    q, slot = make_q(CFG, 6, device=device), torch.arange(6, device=device)
    pool.replay(with_backends(CascadePlanner(CFG).plan(tables, [40] * 6), "fa2"), q=q, slot=slot)
    written.zero_()
    plan = with_backends(CascadePlanner(CFG, CASCADES).plan(tables, [40] * 6), "fa2_uncut", "fa2")
    pool.replay(plan, q=q, slot=slot + 20)
    assert pool.stats.captures == 2
    assert written[:99].nonzero()[:, 0].tolist() == list(range(20, 26))


def test_ten_thousand_steps_leave_no_memory_behind(served, device):
    pool, steps, *_ = served
    before = torch.cuda.memory_stats(device)
    free = torch.cuda.mem_get_info(device)[0]
    for number in range(10_000):
        plan, q, expected = steps[number % len(steps)]
        out = pool.replay(plan, q=q)
        if number % 997 == 0:
            assert torch.equal(out, expected)
    after = torch.cuda.memory_stats(device)
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other tests at the same time take memory of the same GPU
        assert free - torch.cuda.mem_get_info(device)[0] < 2**22


def test_a_captured_operator(served, device):
    """The opaque operator goes to the graph's state as well."""
    before, steps, cache, runtime = served
    plan, q, expected = next(step for step in steps if step[0].num_rows > 8)
    pool = capture_cuda_graphs(
        runtime,
        lambda inputs: attention(runtime.number, inputs["q"], cache),
        inputs={"q": make_q(CFG, 32, device=device)},
        batch_sizes=[32],
        shapes=before.shapes(before.buckets[-1]),
        progress=False,
    )
    assert torch.equal(pool.replay(plan, q=q), expected)


def test_captured_fa2_equals_flashinfer_s_own_graph(device):
    """The direct call plans what the public one does: the same bits."""
    import flashinfer

    cache = make_kv_cache(CFG, NUM_PAGES, device=device)
    state = CascadeRuntime(CFG, device).graph_state(16, shape=GraphShape((), ("fa2",)))
    workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
    pages = torch.zeros(8192, dtype=torch.int32, device=device)
    buffers = [torch.zeros(size, dtype=torch.int32, device=device) for size in (17, 17, 16)]
    own = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=buffers[0],
        paged_kv_indptr_buf=buffers[1],
        paged_kv_indices_buf=pages,
        paged_kv_last_page_len_buf=buffers[2],
        backend="fa2",
    )
    for number, batch in enumerate([batches_of(16, seed=seed, num=1)[0] for seed in range(5)]):
        plan = CascadePlanner(CFG, PlannerPolicy(executor="flat")).plan(*batch)
        q = make_q(CFG, 16, seed=number, device=device)
        state.load(plan)
        level = plan.levels()[0]
        missing = 16 - plan.num_rows
        own.plan(
            torch.arange(17, dtype=torch.int32),
            torch.from_numpy(np.append(level.kv_indptr, [level.kv_indptr[-1]] * missing).astype(np.int32)),
            torch.tensor(level.kv_indices),
            torch.from_numpy(np.append(level.kv_last_page_len, [0] * missing).astype(np.int32)),
            8,
            2,
            128,
            16,
            causal=False,
            q_data_type=torch.bfloat16,
        )
        assert torch.equal(state.run(q, cache), own.run(q, cache))

"""EngineAdapter: which plans go where, sessions and groups of layers beside it, graphs that are not there."""

import pickle

import pytest
import torch

from flashinfer_cascade import CascadeConfig, CascadeError, InvalidBatchError, PlannerPolicy
from flashinfer_cascade.integrations import EngineAdapter
from flashinfer_cascade.testing import (
    RandomBatch,
    assert_close,
    dense_attention,
    make_kv_cache,
    make_q,
    plain_attention,
)

FORCED = PlannerPolicy(executor="levels", fold=False)
BATCH = RandomBatch([[0, 1, 2, 10 + r] for r in range(5)], [14] * 5, [1] * 5)


def config(**changes):
    values = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "dtype": "bfloat16"}
    return CascadeConfig(**(values | {"max_batch_size": 16, "max_kv_pages": 64} | changes))


CFG = config()
CACHE = make_kv_cache(CFG, 64)


def check(out, q, cfg=CFG, batch=BATCH):
    oracle = dense_attention(cfg, q, CACHE, *batch)[0]
    assert_close(out[: len(oracle)], oracle, plain_attention(cfg, q, CACHE, *batch))
    assert (out[len(oracle) :] == 0).all()


@pytest.mark.parametrize("graph", [None, 5, 8])
def test_plans_go_where_they_are_loaded(graph):
    adapter = EngineAdapter(CFG, "cpu", policy=FORCED)
    adapter.reserve([8, 5])
    attention = adapter.attention(graph=graph)
    plan = pickle.loads(pickle.dumps(adapter.plan(BATCH.block_tables, BATCH.seq_lens, graph=graph)))
    adapter.load(plan, graph=graph)
    q = make_q(CFG, graph or 5)
    check(attention(q, CACHE), q[:5])
    assert adapter.runtime.stats.loads == (graph is None)


def test_graph_sizes():
    adapter = EngineAdapter(CFG, "cpu")
    assert adapter.graph_size(1) is None
    adapter.reserve([8, 2, 16])
    assert adapter.graph_sizes == [2, 8, 16]
    assert [adapter.graph_size(n) for n in (1, 2, 3, 8, 16, 17)] == [2, 2, 8, 8, 16, None]
    run = adapter.attention(graph=8)
    adapter.reserve([8, 4])
    assert adapter.graph_sizes == [2, 4, 8, 16]
    assert adapter.attention(graph=8) == run, "what a captured graph reads stays"


def test_graphs_that_are_not_there():
    adapter = EngineAdapter(CFG, "cpu")
    adapter.reserve([4])
    plan = adapter.plan(BATCH.block_tables, BATCH.seq_lens)
    for call in (
        lambda: adapter.plan(BATCH.block_tables, BATCH.seq_lens, graph=8),
        lambda: adapter.load(plan, graph=8),
        lambda: adapter.attention(graph=8),
        lambda: adapter.graph_state(8),
    ):
        with pytest.raises(CascadeError, match=r"no graph of batch size 8 is reserved, only \[4\]: call reserve"):
            call()
    for sizes, match in (
        ([17], "17"),
        (4, "batch_sizes is 4: give a list"),
        ([4, "x"], "a batch size is 'x': give an integer"),
    ):
        with pytest.raises(InvalidBatchError, match=match):
            adapter.reserve(sizes)
    with pytest.raises(InvalidBatchError, match="num_requests is None: give an integer"):
        adapter.graph_size(None)
    with pytest.raises(CascadeError, match=r"no graph of batch size \[4\] is reserved"):
        adapter.graph_state([4])


def test_plans_of_a_session():
    adapter = EngineAdapter(CFG, "cpu", policy=FORCED)
    adapter.reserve([8])
    session = adapter.planner.session()
    for r, table in enumerate(BATCH.block_tables):
        session.add(r, table, 14, computed_len=13)
    plan = session.plan(capacity=adapter.graph_state(8).capacity)
    assert plan == adapter.plan(BATCH.block_tables, BATCH.seq_lens, graph=8)
    adapter.load(plan, graph=8)
    q = make_q(CFG, 8)
    check(adapter.attention(graph=8)(q, CACHE), q[:5])


def test_groups_of_layers():
    """As docs/integration.md has it: layers with a sliding window beside those without."""
    policy = PlannerPolicy()
    full, windowed = (EngineAdapter(cfg, "cpu", policy=policy) for cfg in (CFG, config(window_left=3)))
    plans = full.planner.plan_groups([full.config, windowed.config], *BATCH)
    q = make_q(CFG, 5)
    for adapter, plan in zip((full, windowed), plans, strict=True):
        adapter.load(plan)
        check(adapter.attention()(q, CACHE), q, adapter.config)


def test_the_operator_for_compiled_models():
    from flashinfer_cascade.runtime import ops

    adapter = EngineAdapter(CFG, "cpu", policy=FORCED)
    adapter.load(adapter.plan(*BATCH))
    q = make_q(CFG, 5)
    number, expected = adapter.runtime.number, adapter.attention()(q, CACHE)
    assert torch.equal(ops.attention(number, q, CACHE), expected)
    adapter.reserve([5])
    with adapter.runtime.using(adapter.graph_state(5)):
        assert not ops.attention(number, q, CACHE).any(), "in a graph that nothing was loaded for"
        adapter.load(adapter.plan(*BATCH, graph=5), graph=5)
        assert torch.equal(ops.attention(number, q, CACHE), expected)

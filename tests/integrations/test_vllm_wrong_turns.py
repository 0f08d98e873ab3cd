"""What earlier attempts at cascade attention in vLLM got wrong, one test each."""

import numpy as np
import pytest
import torch

from flashinfer_cascade.integrations.vllm_v0 import make_backend


def runner_of(v0, *, graphs=False, **options):
    runner = v0.Runner(**options)
    runner.init_cache()
    if graphs:
        runner.capture()
    return runner


def decode(v0, seq_id, table, length):
    return v0.Group([v0.Seq(seq_id, length, length - 1, table)], False)


def levels_of(metadata):
    """Page ids of each level, and rows that read them."""
    plan = metadata.plan
    return [(level.kv_indices.tolist(), np.diff(level.qo_indptr).tolist()) for level in plan.levels()]


def test_1_an_outlier_does_not_disable_sharing(v0):
    runner = runner_of(v0)
    groups = [decode(v0, r, [0, 1, 2, 3, 10 + r], 18) for r in range(6)]
    groups.insert(3, decode(v0, 9, [90, 91], 7))
    (pages, rows), _ = levels_of(v0.check_step(runner, groups))
    assert pages == [0, 1, 2, 3]
    assert rows == [6, 1]


def test_2_block_ids_need_not_be_consecutive(v0):
    runner = runner_of(v0)
    prefix = [400, 7, 311, 5, 260]
    (pages, _), _ = levels_of(v0.check_step(runner, [decode(v0, r, [*prefix, 50 - r], 22) for r in range(4)]))
    assert pages == prefix


@pytest.mark.parametrize("qo_lens", [[8, 8], [3, 8], [1, 14]])
def test_3_prefill_rows_within_the_prefix_see_no_future(qo_lens, v0):
    """Both prompts are computed here, over blocks that both hold: only what was computed before is shared."""
    runner = runner_of(v0)
    table = [0, 1, 2, 3]
    groups = [v0.Group([v0.Seq(r, 14, 14 - n, table)], True, chunk=n) for r, n in enumerate(qo_lens)]
    # The same tokens at the same places, so that it does not matter who writes them last.
    q, k, v = runner.random_qkv(14)
    rows = torch.cat([torch.arange(14 - n, 14) for n in qo_lens])
    runner.random_qkv = lambda num_rows, seed: [q[rows], k[rows], v[rows]]
    levels = levels_of(v0.check_step(runner, groups))
    computed_pages = (14 - max(qo_lens)) // runner.block_size
    assert [page for pages, _ in levels[:-1] for page in pages] == table[:computed_pages]


@pytest.mark.parametrize("length", [9, 11, 12, 13])
def test_4_a_partial_last_block_is_not_a_full_shared_page(length, v0):
    """Identical tables: the block of the newest token is each request's own, so that no suffix is empty."""
    runner = runner_of(v0)
    # As copy-on-write would have it: the last block, which both write to, differs.
    full = (length - 1) // 4
    groups = [decode(v0, r, [*range(full), 100 + r], length) for r in range(3)]
    metadata = v0.check_step(runner, groups)
    own = metadata.plan.levels()[-1]
    assert (own.kv_last_page_len == (length - 1) % 4 + 1).all()
    assert (np.diff(own.kv_indptr) == 1).all()
    identical = [decode(v0, r, [*range(full + 1)], length) for r in range(3)]
    own = runner.prepare(identical).attn_metadata.plan.levels()[-1]
    assert (np.diff(own.kv_indptr) >= 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_5_q_has_the_models_dtype(dtype, v0):
    runner = runner_of(v0, dtype=dtype)
    metadata = v0.check_step(runner, [decode(v0, r, [0, 1, 2, 3 + r], 14) for r in range(4)])
    assert metadata.q_data_type == dtype
    kwargs = metadata.plan.to_flashinfer()
    assert (kwargs["q_data_type"], kwargs["kv_data_type"]) == (dtype, dtype)


def test_6_cuda_graph_methods_work(v0):
    runner = runner_of(v0, graphs=True)
    for step in range(6):  # while the sharing changes
        groups = [decode(v0, r, [*range(step), *range(50 + 10 * r, 56 + 10 * r)], 4 * step + 9) for r in range(5)]
        metadata = v0.check_step(runner, groups, seed=step)
        assert metadata.use_cuda_graph
        assert metadata.plan.num_levels == (2 if step else 1)
    assert runner.attn_state.adapter.runtime.stats.runs == 0, "all of them ran in the graph"


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_7_the_cache_is_passed_in_its_order_in_memory(layout, graphs, v0):
    """With as many heads as tokens in a block no check of shapes could tell one order from the other."""
    backend = make_backend(kv_layout=layout, policy=v0.FORCED)
    runner = runner_of(v0, graphs=graphs, num_kv_heads=4, block_size=4, backend=backend)
    cache = runner.model.layers[0].kv_cache
    assert cache.is_contiguous() == (layout == "NHD")
    assert cache.permute(*backend.get_kv_cache_stride_order()).is_contiguous()
    v0.check_step(runner, [decode(v0, r, [0, 1, 2, 3 + r], 14) for r in range(4)])


def test_8_sharing_is_judged_by_ids_when_sharers_leave(v0):
    """Of 15 requests 8 share A and finish; the 7 others, which never did, are read on their own."""
    runner = runner_of(v0)
    sharing = [decode(v0, r, [0, 1, 2, 10 + r], 15) for r in range(8)]
    others = [decode(v0, 8 + r, [*range(100 + 4 * r, 104 + 4 * r)], 15) for r in range(7)]
    (pages, rows), _ = levels_of(v0.check_step(runner, [*sharing, *others]))
    assert pages == [0, 1, 2]
    assert rows[0] == 8
    ((_, rows),) = levels_of(v0.check_step(runner, others))
    assert rows == [1] * 7


def test_9_a_shared_level_has_a_group_a_prefix(v0):
    runner = runner_of(v0)
    groups = [decode(v0, r, [*range(4), 100 + r], 18) for r in range(5)]
    groups += [decode(v0, 5 + r, [*range(50, 53), 200 + r], 15) for r in range(3)]
    metadata = v0.check_step(runner, groups)
    level = metadata.plan.levels()[0]
    assert level.qo_indptr.tolist() == [0, 5, 8]
    assert level.kv_indptr.tolist() == [0, 4, 7]
    assert len(level.kv_last_page_len) == 2


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("what", ["soft cap", "sinks", "scale"])
def test_10_soft_cap_sinks_and_scale_reach_the_cascade(what, graphs, v0):
    options = {
        "soft cap": {"soft_cap": 2.0},
        "sinks": {"sinks": torch.tensor([3.0, -1.0, 2.0, 0.0])},
        "scale": {"scale": 0.5},
    }[what]
    runner = runner_of(v0, graphs=graphs, **options)
    metadata = v0.check_step(runner, [decode(v0, r, [0, 1, 2, 3 + r], 14) for r in range(4)])
    assert metadata.plan.num_levels == 2

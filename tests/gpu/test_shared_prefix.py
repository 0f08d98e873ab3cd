"""The ranges of FlashInfer's own shared-prefix tests, and beyond: against one plain launch, and the fp64 oracle.

Source: FlashInfer, tests/attention/test_shared_prefix_kernels.py.
"""

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig, CascadePlanner, CascadeRuntime, PlannerPolicy
from flashinfer_cascade.testing import RandomBatch, error_budget, relative_errors

pytestmark = pytest.mark.gpu


def shared_prefix(batch_size, unique, shared, page_size, new):
    """Page tables of requests that share `shared` tokens and have `unique` of their own."""
    prefix, own = shared // page_size, -(-unique // page_size)
    assert prefix * page_size == shared
    tables = [[*range(prefix), *range(prefix + r * own, prefix + (r + 1) * own)] for r in range(batch_size)]
    return RandomBatch(tables, [shared + unique] * batch_size, [new] * batch_size)


def single_level(config, batch, problem, device):
    """FlashInfer without a cascade, planned by hand from the block tables."""
    import flashinfer

    page = config.page_size
    counts = [-(-seq_len // page) for seq_len in batch.seq_lens]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(2**28, dtype=torch.uint8, device=device), config.kv_layout, backend="fa2"
    )
    wrapper.plan(
        torch.tensor([0, *np.cumsum(batch.qo_lens)], dtype=torch.int32),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        torch.tensor([p for table, n in zip(batch.block_tables, counts, strict=True) for p in table[:n]]).int(),
        torch.tensor([(seq_len - 1) % page + 1 for seq_len in batch.seq_lens], dtype=torch.int32),
        config.num_qo_heads,
        config.num_kv_heads,
        config.head_dim,
        page,
        causal=True,
        q_data_type=problem.q.dtype,
        kv_data_type=problem.kv_cache.dtype,
    )
    return wrapper.run(problem.q, problem.kv_cache)


def check_against_both(runtime, plan, problem, plain_launch):
    runtime.load(plan)
    out = runtime.run(problem.q, problem.kv_cache, out=torch.full_like(problem.q, float("nan")))
    problem.check(out)
    # Both may differ from the oracle by the budget, in opposite directions.
    assert relative_errors(out, plain_launch.double()).max() < 2 * error_budget(problem.oracle, problem.plain)


@pytest.mark.parametrize("stage", ["decode", "append"])
@pytest.mark.parametrize("batch_size", [12, 37])
@pytest.mark.parametrize("num_heads", [8, 16])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfers_ranges(stage, batch_size, num_heads, head_dim, page_size, device, make_problem, with_backends):
    config = CascadeConfig(
        num_qo_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, page_size=page_size, dtype="float16"
    )
    runtime = CascadeRuntime(config, device)
    for unique in 17, 37:
        for shared in 128, 512, 2048:
            print(f"unique={unique}, shared={shared}")
            batch = shared_prefix(batch_size, unique, shared, page_size, 1 if stage == "decode" else unique)
            problem = make_problem(config, batch, form="fast", judged=[0, batch_size - 1])
            plain_launch = single_level(config, batch, problem, device)
            for executor in "levels", "stock":
                plan = CascadePlanner(config, PlannerPolicy(executor=executor, fold=False)).plan(*batch)
                assert plan.parts[0].executor == executor
                assert plan.num_levels == 2
                check_against_both(runtime, with_backends(plan, "fa2"), problem, plain_launch)


TREES = {
    "three levels": "1,4,16_256,128,50",
    "four levels": "2,4,12,24_512,64,100,37",
    "five levels": "1,2,4,8,16_300,64,70,48,17",
}


@pytest.mark.parametrize("spec", TREES.values(), ids=TREES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("qo_len", [1, 17])
def test_grouped_heads_and_deep_trees(spec, layout, qo_len, device, make_problem, with_backends, tree_batch, kernels):
    config = CascadeConfig(
        num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", kv_layout=layout
    )
    batch = tree_batch(spec, qo_len=qo_len, seed=1)
    problem = make_problem(config, batch, form="fast", judged=[0, 5, len(batch.seq_lens) - 1])
    plain_launch = single_level(config, batch, problem, device)
    runtime = CascadeRuntime(config, device)
    plan = CascadePlanner(config, PlannerPolicy(executor="levels", fold=False)).plan(*batch)
    assert plan.num_levels == spec.split("_")[0].count(",") + 1
    for backend in kernels:
        check_against_both(runtime, with_backends(plan, backend), problem, plain_launch)


@pytest.mark.parametrize("policy", [PlannerPolicy(), PlannerPolicy(executor="levels"), PlannerPolicy(executor="stock")])
@pytest.mark.parametrize("new", [(1,), (1, 1, 5, 30)])
def test_ragged_trees(policy, new, device, make_problem, with_backends):
    """Branches of all depths and lengths, requests that end inside a shared run, and some that share nothing."""
    config = CascadeConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    rng = np.random.default_rng(11)
    tables, seq_lens, qo_lens = [], [], []
    used = 0
    for number in range(30):
        prefix = []
        if number % 7:
            parent = int(rng.integers(number))
            full = (seq_lens[parent] - qo_lens[parent]) // 16
            prefix = tables[parent][: int(rng.integers(full // 2, full + 1))]
        own = int(rng.integers(40, 400))
        pages = -(-own // 16)
        tables.append([*prefix, *range(used, used + pages)])
        used += pages
        seq_lens.append(16 * len(prefix) + own)
        qo_lens.append(new[number % len(new)])
    batch = RandomBatch(tables, seq_lens, qo_lens).permuted(rng.permutation(30).tolist())
    problem = make_problem(config, batch, form="fast")
    plain_launch = single_level(config, batch, problem, device)
    plan = CascadePlanner(config, policy).plan(*batch)
    assert policy.executor == "auto" or plan.num_levels > 1
    check_against_both(CascadeRuntime(config, device), with_backends(plan, "fa2"), problem, plain_launch)

"""The reference executor computes what the oracle does, whatever the plan cuts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy
from flashinfer_cascade.runtime import reference
from flashinfer_cascade.runtime.reference import ReferenceExecutor, apply_sinks, merge_partials
from flashinfer_cascade.testing import RandomBatch, dense_attention, make_kv_cache, make_q, random_batch

FORCED = PlannerPolicy(executor="levels", fold=False, max_levels=64)
FOLDED = PlannerPolicy(executor="levels")
FLAT = PlannerPolicy(executor="flat")


def config(**changes):
    values = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "dtype": "float16"}
    return CascadeConfig(**(values | changes))


def execute(plan, q, kv_cache, accumulate=torch.float64, **options):
    """All parts, as float64 (or whatever is accumulated in) and with every row poisoned beforehand."""
    out = torch.full(q.shape, math.nan, dtype=accumulate)
    lse = torch.full(q.shape[:2], math.nan, dtype=accumulate)
    for part in plan.parts:
        executor = ReferenceExecutor(plan.config, accumulate=accumulate)
        executor.load(plan, part)
        executor.run(q, kv_cache, out, lse, **options)
    return out, lse


def check(cfg, batch, policy=FORCED, form="tensor", **options):
    """In float64 the executor and the oracle differ by rounding alone: no tolerance hides a token."""
    plan = CascadePlanner(cfg, policy).plan(*batch)
    q = make_q(cfg, batch.num_rows)
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    cache = make_kv_cache(cfg, batch.num_pages, form=form, **scales)
    expected, expected_lse = dense_attention(cfg, q, cache, *batch, **options)
    out, lse = execute(plan, q, cache, **options)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-11)
    return plan


@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 2, 16, 64]),
    heads=st.sampled_from([(2, 2), (4, 1), (8, 1), (8, 2)]),
    kv=st.sampled_from([("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]),
    layout=st.sampled_from(["NHD", "HND"]),
    form=st.sampled_from(["tensor", "pair", "permuted"]),
    max_new=st.sampled_from([1, 4, 40]),
    policy=st.sampled_from([FORCED, FOLDED, FLAT, PlannerPolicy()]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    sinks=st.sampled_from([None, torch.linspace(-4, 8, 8)]),
)
def test_random_batches(seed, page_size, heads, kv, layout, form, max_new, policy, soft_cap, sinks):
    batch = random_batch(np.random.default_rng(seed), page_size=page_size, max_new=max_new)
    cfg = config(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        page_size=page_size,
        dtype=kv[0],
        kv_dtype=kv[1],
        kv_layout=layout,
        logits_soft_cap=soft_cap,
    )
    options = {} if kv[0] == kv[1] else {"k_scale": 0.25, "v_scale": 3.0}
    if sinks is not None:
        options["sinks"] = sinks[: heads[0]]
    check(cfg, batch, policy, form, **options)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("policy", [FORCED, FLAT])
@pytest.mark.parametrize(
    ("tables", "lengths_in_pages"),
    [
        ([[3]], [1]),
        ([[3, 1]] * 3, [2, 2, 2]),
        ([[0, 1, 2], [0, 1, 3], [0, 1, 2]], [3, 3, 3]),
        ([[0, 1, 0, 1, 2], [0, 1, 0, 1, 3]], [5, 5]),
        ([[], [0, 1], [], [0, 2]], [0, 2, 0, 2]),
        ([[], []], [0, 0]),
    ],
    ids=["one", "identical", "full last page", "repeated ids", "padding between", "padding alone"],
)
def test_corners(page_size, policy, tables, lengths_in_pages):
    lens = [pages * page_size for pages in lengths_in_pages]
    check(config(page_size=page_size), RandomBatch(tables, lens, [1] * len(lens)), policy)


def test_hundreds_of_nested_prefixes():
    depth = 200
    batch = RandomBatch(
        [[*range(r + 1), 300 + r] for r in range(depth)], [r + 2 for r in range(depth)], [1] * depth
    )  # request r shares r pages with all behind it
    plan = check(config(page_size=1), batch)
    assert plan.parts[0].forest.num_nodes > depth - 10
    assert plan.num_levels == 64


def test_new_tokens_straddle_pages_and_cuts():
    batch = RandomBatch([[0, 1, 2, 3], [0, 1, 4, 5, 6], [0, 1, 7]], [15, 18, 9], [7, 10, 1])
    plan = check(config(), batch)
    assert plan.causal
    assert plan.num_levels == 2


@pytest.mark.parametrize("window_left", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("qo_len", [1, 6])
def test_a_window_smaller_than_the_context_is_flat(window_left, qo_len):
    tables = [[*range(4), 4 + r] for r in range(4)]
    batch = RandomBatch(tables, [20, 19, 18, 17], [qo_len] * 4)
    plan = check(config(window_left=window_left), batch, PlannerPolicy())
    assert plan.num_levels == 1


def test_a_window_that_covers_the_context_is_cascaded():
    batch = RandomBatch([[*range(4), 4 + r] for r in range(4)], [20, 19, 18, 17], [1] * 4)
    assert check(config(window_left=19), batch).num_levels == 2


def test_many_rows_are_computed_in_pieces(monkeypatch):
    monkeypatch.setattr(reference, "MAX_LOGITS", 1000)
    batch = RandomBatch([[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 7, 8]], [23, 24], [11, 9])
    check(config(), batch)


def test_slots_behind_a_request_are_never_read():
    cfg = config()
    batch = RandomBatch([[1, 2, 5], [1, 3], [1, 4, 6]], [9, 6, 11], [1, 1, 3])
    cache = make_kv_cache(cfg, 8)
    unread = torch.ones(8, cfg.page_size, dtype=torch.bool)
    for table, seq_len, _ in zip(*batch, strict=True):
        for token in range(seq_len):
            unread[table[token // 4], token % 4] = False
    cache.transpose(1, 2)[unread] = math.nan
    out, lse = execute(CascadePlanner(cfg, FORCED).plan(*batch), make_q(cfg, batch.num_rows), cache)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_a_row_may_see_nothing_of_a_segment():
    cfg = config()
    batch = RandomBatch([[1, 2], [1, 3]], [8, 8], [2, 2])
    plan = CascadePlanner(cfg, FORCED).plan(*batch)
    q, cache = make_q(cfg, 4), make_kv_cache(cfg, 4)
    expected, expected_lse = execute(plan, q, cache)
    out, lse = execute(replace(plan, row_pos=np.array([-1, 7, 6, -1], np.int32)), q, cache)
    assert (out[[0, 3]] == 0).all()
    assert (lse[[0, 3]] == -math.inf).all()
    torch.testing.assert_close(out[1:3], expected[1:3])
    torch.testing.assert_close(lse[1:3], expected_lse[1:3])


def test_a_part_writes_its_own_rows_alone():
    cfg = config()
    batch = RandomBatch([[0, 1, 2], [0, 3, 4], [0, 1, 5], [0, 3, 6, 7, 8, 9]], [9, 10, 12, 22], [1, 2, 1, 17])
    plan = CascadePlanner(cfg, FORCED).plan(*batch)
    decode, append = plan.parts
    q, cache = make_q(cfg, batch.num_rows), make_kv_cache(cfg, batch.num_pages)
    out, lse = torch.full(q.shape, math.nan), torch.full(q.shape[:2], math.nan)
    executor = ReferenceExecutor(cfg)
    executor.load(plan, append)
    executor.run(q, cache, out, lse)
    assert out[:4].isnan().all()
    assert lse[:4].isnan().all()
    executor.load(plan, decode)
    executor.run(q, cache, out, lse)
    expected, expected_lse = dense_attention(cfg, q, cache, *batch)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-5)


def test_merging_halves_equals_the_whole():
    logits = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    values = torch.randn(4, 64, dtype=torch.float64)

    def attend(keep):
        return (logits[keep].softmax(0) @ values[keep])[None, None], logits[keep].logsumexp(0)[None, None] / math.log(2)

    parts = [attend(keep) for keep in ([0], [1, 3], [2])]
    merged = merge_partials(*(torch.stack(column) for column in zip(*parts, strict=True)))
    for got, expected in zip(merged, attend([0, 1, 2, 3]), strict=True):
        torch.testing.assert_close(got, expected)


def test_merging_is_safe_at_the_extremes():
    inf = math.inf
    # Rows: nothing anywhere; nothing in one; far apart; equal and huge.
    lse = torch.tensor([[-inf, -inf, 5000.0, 9000.0], [-inf, 7.0, -5000.0, 9000.0]])[..., None]
    partials = torch.tensor([[0.0, 0.0, 2.0, 1.0], [0.0, 3.0, 4.0, 2.0]])[..., None, None]
    out, merged = merge_partials(partials, lse)
    assert out.flatten().tolist() == [0.0, 3.0, 2.0, 1.5]
    assert merged.flatten().tolist() == [-inf, 7.0, 5000.0, 9001.0]


def test_sinks_join_the_denominator():
    inf = math.inf
    log2e = math.log2(math.e)
    lse = torch.tensor([[3.0, 3.0, -inf, -inf, 500.0]])
    sinks = torch.tensor([0.0, -inf, 2.0, -inf, 0.0])
    out, merged = apply_sinks(torch.tensor([9.0, 9.0, 0.0, 0.0, 9.0]).view(1, 5, 1), lse, sinks)
    torch.testing.assert_close(out.flatten(), torch.tensor([8.0, 9.0, 0.0, 0.0, 9.0]))
    torch.testing.assert_close(merged.flatten(), torch.tensor([math.log2(9), 3.0, 2 * log2e, -inf, 500.0]))

"""The oracle against torch's own attention and against sums done by hand; builders; the error budget."""

import ast
import math
import pathlib

import numpy as np
import pytest
import torch

import flashinfer_cascade.testing as subject
from flashinfer_cascade import CascadeConfig
from flashinfer_cascade.testing import (
    RandomBatch,
    assert_close,
    assert_lse_close,
    dense_attention,
    make_kv_cache,
    make_q,
    plain_attention,
    random_batch,
    relative_errors,
)

LOG2E = math.log2(math.e)


def config(**changes):
    values = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "dtype": "float16"}
    return CascadeConfig(**(values | changes))


def scattered(cfg, lens, tables, seed=0):
    """K and V of every request in plain order, and a 5-D NHD cache that holds them in the tables' pages."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1 + max(max(table) for table in tables), 2, cfg.page_size, cfg.num_kv_heads, cfg.head_dim)
    cache = torch.zeros(shape, dtype=getattr(torch, cfg.dtype))
    dense = []
    for seq_len, table in zip(lens, tables, strict=True):
        kv = torch.randn(2, seq_len, *shape[3:], generator=generator).to(cache)
        dense.append(kv)
        for number, page in enumerate(table):
            tokens = kv[:, number * cfg.page_size : (number + 1) * cfg.page_size]
            cache[page, :, : tokens.shape[1]] = tokens
    return dense, cache


@pytest.mark.parametrize("window_left", [-1, 0, 3, 100])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(8, 2), (4, 4), (8, 1)])
def test_oracle_equals_torch(window_left, layout, num_qo_heads, num_kv_heads):
    cfg = config(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, window_left=window_left, kv_layout=layout)
    lens, qo_lens, tables = [9, 4, 21], [1, 4, 6], [[5, 0, 3], [7], [1, 2, 4, 6, 8, 9]]
    dense, cache = scattered(cfg, lens, tables)
    if layout == "HND":
        cache = cache.transpose(2, 3)
    q = make_q(cfg, sum(qo_lens))
    out, _ = dense_attention(cfg, q, cache, tables, lens, qo_lens)
    begin = 0
    for (k, v), seq_len, qo_len in zip(dense, lens, qo_lens, strict=True):
        age = torch.arange(seq_len - qo_len, seq_len)[:, None] - torch.arange(seq_len)
        mask = (age >= 0) & ((age <= window_left) if window_left >= 0 else True)
        heads_first = [x.double().transpose(0, 1) for x in (q[begin : begin + qo_len], k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out[begin : begin + qo_len], expected.transpose(0, 1), rtol=1e-12, atol=1e-12)
        begin += qo_len


@pytest.mark.parametrize("window_left", [-1, 2])
def test_a_zero_query_averages_what_it_sees(window_left):
    cfg = config(window_left=window_left)
    (kv,), cache = scattered(cfg, [10], [[3, 1, 2]])
    q = make_q(cfg, 4).zero_()
    out, lse = dense_attention(cfg, q, cache, [[3, 1, 2]], [10], [4])
    for row, position in enumerate(range(6, 10)):
        first = 0 if window_left < 0 else position - window_left
        mean = kv[1, first : position + 1].double().mean(0).repeat_interleave(4, 0)
        torch.testing.assert_close(out[row], mean)
        torch.testing.assert_close(lse[row], torch.full((8,), math.log2(position + 1 - first), dtype=torch.float64))


def logits_of(cfg, *values):
    """A query, a cache of one page and its table, so that token t has the logit ``values[t]`` and the value t + 1."""
    q = torch.zeros(1, cfg.num_qo_heads, cfg.head_dim, dtype=getattr(torch, cfg.dtype))
    q[..., 0] = 1
    cache = torch.zeros(1, 2, cfg.page_size, cfg.num_kv_heads, cfg.head_dim, dtype=getattr(torch, cfg.kv_dtype))
    for token, value in enumerate(values):
        cache[0, 0, token, :, 0] = value
        cache[0, 1, token] = token + 1
    return q, cache, [[0]], [len(values)], [1]


def test_lse_and_weights_by_hand():
    out, lse = dense_attention(config(sm_scale=0.5), *(args := logits_of(config(), 2.0, -4.0)))
    total = math.exp(1) + math.exp(-2)
    assert lse[0].tolist() == pytest.approx([math.log2(total)] * 8)
    assert out[0, :, 7].tolist() == pytest.approx([(math.exp(1) + 2 * math.exp(-2)) / total] * 8)
    assert relative_errors(plain_attention(config(sm_scale=0.5), *args), out).max() < 1e-3


def test_soft_cap_by_hand():
    cfg = config(sm_scale=1.0, logits_soft_cap=3.0)
    _, lse = dense_attention(cfg, *logits_of(cfg, 2.0, 10.0))
    expected = math.log2(math.exp(3 * math.tanh(2 / 3)) + math.exp(3 * math.tanh(10 / 3)))
    assert lse[0].tolist() == pytest.approx([expected] * 8)


def test_sinks_by_hand():
    cfg = config(sm_scale=1.0)
    sinks = torch.tensor([0.0, 1.5, -2.0, 40.0, -math.inf, 3.0, 0.5, 0.25])
    out, lse = dense_attention(cfg, *logits_of(cfg, 1.0, 2.0), sinks=sinks)
    for head, sink in enumerate(sinks.tolist()):
        total = math.exp(1) + math.exp(2) + math.exp(sink)
        assert lse[0, head].item() == pytest.approx(math.log2(total))
        assert out[0, head, 0].item() == pytest.approx((math.exp(1) + 2 * math.exp(2)) / total)


def test_scales_multiply_keys_and_values():
    cfg = config(sm_scale=1.0, kv_dtype="float8_e4m3fn")
    out, lse = dense_attention(cfg, *logits_of(cfg, 0.5, -0.25), k_scale=4.0, v_scale=3.0)
    total = math.exp(2) + math.exp(-1)
    assert lse[0, 0].item() == pytest.approx(math.log2(total))
    assert out[0, 0, 0].item() == pytest.approx(3 * (math.exp(2) + 2 * math.exp(-1)) / total)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-3, 3, 8)])
def test_padding_sees_nothing(sinks):
    cfg = config()
    q, cache = make_q(cfg, 4), make_kv_cache(cfg, 2)
    batch = ([[], [1], [0, 0]], [0, 2, 0], [2, 1, 1])
    out, lse = dense_attention(cfg, q, cache, *batch, sinks=sinks)
    for row in (0, 1, 3):
        assert (out[row] == 0).all()
        expected = torch.full((8,), -math.inf) if sinks is None else sinks * LOG2E
        torch.testing.assert_close(lse[row].float(), expected)
    assert lse[2].isfinite().all()
    assert_close(plain_attention(cfg, q, cache, *batch, sinks=sinks), out, out.to(q.dtype))


@pytest.mark.parametrize("form", ["tensor", "pair", "permuted"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_caches(form, layout, kv_dtype):
    cfg = config(kv_dtype=kv_dtype, kv_layout=layout)
    cache = make_kv_cache(cfg, 3, form=form, seed=5, k_scale=0.5, v_scale=2.0)
    page = (4, 2, 64) if layout == "NHD" else (2, 4, 64)
    if form == "pair":
        assert [x.shape for x in cache] == [(3, *page)] * 2
        assert not cache[0].is_contiguous()
        cache = torch.stack(cache, 1)
        assert torch.equal(cache.float(), make_kv_cache(cfg, 3, seed=5, k_scale=0.5, v_scale=2.0).float())
    assert cache.shape == (3, 2, *page)
    assert cache.dtype == getattr(torch, kv_dtype)
    assert cache.is_contiguous() == (form != "permuted")
    assert cache[:, 0].double().std().item() == pytest.approx(2.0, rel=0.1)
    assert cache[:, 1].double().std().item() == pytest.approx(0.5, rel=0.1)


def test_the_seed_decides():
    cfg = config()
    assert torch.equal(make_q(cfg, 3, seed=1), make_q(cfg, 3, seed=1))
    assert not torch.equal(make_q(cfg, 3, seed=1), make_q(cfg, 3, seed=2))
    assert not torch.equal(make_kv_cache(cfg, 3, seed=1), make_kv_cache(cfg, 3, seed=2))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_batches_are_what_an_engine_gives(page_size):
    seen = set()
    for seed in range(60):
        batch = random_batch(np.random.default_rng(seed), page_size=page_size, max_new=1 + 20 * (seed % 2))
        assert batch == random_batch(np.random.default_rng(seed), page_size=page_size, max_new=1 + 20 * (seed % 2))
        requests = list(zip(*batch, strict=True))
        assert len(requests) == 8
        for number, (table, seq_len, qo_len) in enumerate(requests):
            assert qo_len >= 1
            assert qo_len <= seq_len or seq_len == 0
            assert len(table) * page_size >= seq_len
            assert all(0 <= page < batch.num_pages for page in table)
            full = (seq_len - qo_len) // page_size
            written = set(table[full : -(-seq_len // page_size)])
            others = [other for place, other in enumerate(requests) if place != number and other[0] != table]
            for other, other_len, _ in others:
                assert not written & set(other[: other_len // page_size]), "another request reads what this one writes"
                if table[:1] == other[:1]:
                    seen.add("shared")
            found = {
                "padding": seq_len == 0,
                "repeat": len(set(table[:full])) < full,
                "identical": (table, seq_len, qo_len) in requests[:number] and seq_len > 0,
                "append": qo_len > 1,
                "spare page": len(table) * page_size >= seq_len + page_size and seq_len > 0,
                "mid-page": seq_len % page_size > 0 or page_size == 1,
                f"length {seq_len}": True,
            }
            seen |= {name for name, holds in found.items() if holds}
    lengths = {f"length {n}" for n in (1, page_size - 1, page_size, page_size + 1) if n}
    assert seen >= lengths | {"shared", "padding", "repeat", "identical", "append", "spare page", "mid-page"}


def test_permuted_batches():
    batch = RandomBatch([[0], [1, 2], [3]], [1, 5, 2], [1, 3, 2])
    assert batch.permuted([2, 0, 1]) == ([[3], [0], [1, 2]], [2, 1, 5], [2, 1, 3])
    assert batch.rows_of([2, 0, 1]) == [4, 5, 0, 1, 2, 3]
    assert (batch.num_rows, batch.num_pages) == (6, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_budget_admits_one_more_rounding_and_no_more(dtype):
    cfg = config(dtype=dtype)
    batch = random_batch(np.random.default_rng(3), page_size=4)
    q, cache = make_q(cfg, batch.num_rows), make_kv_cache(cfg, batch.num_pages)
    oracle, _ = dense_attention(cfg, q, cache, *batch)
    plain = plain_attention(cfg, q, cache, *batch)
    assert 0 < relative_errors(plain, oracle).max() < torch.finfo(plain.dtype).eps
    assert_close(plain, oracle, plain, factor=1.0)
    assert_close(plain.double() * (1 + torch.finfo(plain.dtype).eps / 4), oracle, plain)
    row = batch.seq_lens.index(max(batch.seq_lens))
    wrong = plain.clone()
    wrong[row, 3] *= 1 + 8 * torch.finfo(plain.dtype).eps
    with pytest.raises(AssertionError, match=rf"row {row}, head 3: relative L2 error .* as do 1 of"):
        assert_close(wrong, oracle, plain)


def test_exact_plain_attention_leaves_room_for_rounding():
    cfg = config()
    oracle, _ = dense_attention(cfg, *(args := logits_of(cfg, 1.0)))
    plain = plain_attention(cfg, *args)
    assert relative_errors(plain, oracle).max() == 0
    assert_close(plain.double() * (1 + torch.finfo(plain.dtype).eps / 4), oracle, plain)
    with pytest.raises(AssertionError, match="row 0, head 0"):
        assert_close(plain * 1.01, oracle, plain)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-6])
def test_rows_that_see_nothing_must_be_zero(value):
    oracle = torch.zeros(3, 2, 64, dtype=torch.float64)
    plain = oracle.half()
    assert_close(plain, oracle, plain)
    wrong = plain.clone()
    wrong[1, 1, 5] = value
    with pytest.raises(AssertionError, match="row 1, head 1: relative L2 error inf"):
        assert_close(wrong, oracle, plain)


def test_shapes_must_agree():
    out = torch.zeros(3, 2, 64)
    with pytest.raises(AssertionError, match=r"shape \(3, 2, 64\), the oracle \(2, 2, 64\)"):
        assert_close(out, out[:2].double(), out.half())
    with pytest.raises(AssertionError, match=r"shape \(3, 2\), the oracle \(3, 1\)"):
        assert_lse_close(out[..., 0], out[:, :1, 0], out.dtype)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1.01])
def test_lse_is_compared(value):
    oracle = torch.tensor([[1.0, 2.0], [-math.inf, 3.0]], dtype=torch.float64)
    assert_lse_close(oracle.float() + 5e-4, oracle, torch.float16)
    wrong = oracle.float()
    wrong[0, 0] = value
    with pytest.raises(AssertionError, match=r"row 0, head 0: lse .*, oracle 1\.0.* 1 of 4"):
        assert_lse_close(wrong, oracle, torch.float16)
    with pytest.raises(AssertionError, match=r"row 1, head 0: lse 0\.0"):
        assert_lse_close(torch.tensor([[1.0, 2.0], [0.0, 3.0]]), oracle, torch.float16)


def test_the_oracle_shares_no_code_with_what_it_judges():
    tree = ast.parse(pathlib.Path(subject.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {name for name in imported if name.startswith("flashinfer_cascade")}
    assert ours == {"flashinfer_cascade.config"}
    package = pathlib.Path(subject.__file__).parent
    users = [path.name for path in package.rglob("*.py") if "flashinfer_cascade.testing" in path.read_text()]
    assert not [name for name in users if name in ("reference.py", "runtime.py", "plan.py", "planner.py", "forest.py")]

"""The roof, by hand on small batches and as published on large ones."""

import pytest

from flashinfer_cascade.bench.cases import Case
from flashinfer_cascade.bench.roof import roof, unique_tokens, visible_tokens
from flashinfer_cascade.bench.workloads import append, tree


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decode_reads_each_shared_token_once(page_size):
    batch = tree("1,2_128,64", page_size)
    assert unique_tokens(batch) == 128 + 2 * 64
    assert visible_tokens(batch) == 2 * 192
    config = batch.config(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    # 256 tokens of K and V, 2 heads of 64 in 2 bytes; 2 rows of q and of the output, 8 heads of 64 in 2 bytes.
    assert roof(config, batch).num_bytes == 256 * 2 * 2 * 64 * 2 + 2 * 2 * 8 * 64 * 2
    assert roof(config, batch).flops == 4 * 384 * 8 * 64
    assert roof(config, batch).us == pytest.approx(roof(config, batch).num_bytes / 4.47e6)


def test_appends_see_up_to_themselves_and_read_pages_as_far_as_they_are_filled():
    batch = append(requests=2, shared=20, own=3, new=4, page_size=16)
    # One full page of 16 is shared; each request has the other 11 of its 27 tokens for itself.
    assert unique_tokens(batch) == 16 + 2 * 11
    assert visible_tokens(batch) == 2 * (24 + 25 + 26 + 27)


def test_fp8_halves_the_kv_and_leaves_q():
    batch = tree("1,2_128,64")
    whole = roof(batch.config(), batch).num_bytes
    q_and_out = 2 * 2 * 32 * 128 * 2
    assert roof(batch.config(kv_dtype="float8_e4m3fn"), batch).num_bytes - q_and_out == (whole - q_and_out) / 2


@pytest.mark.parametrize(
    ("suite", "name", "us"),
    [("decode", "P10", 20.6), ("decode", "P20", 961.8), ("append", "A1", 22.8), ("append", "A5", 706.8)],
)
def test_large_batches(suite, name, us):
    work, config = Case(suite, name, 32, 8, 16, "bfloat16").build()
    assert roof(config, work).us == pytest.approx(us, abs=0.05)

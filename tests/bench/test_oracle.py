"""The batched oracle is the oracle of `testing`, however it is cut into chunks."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashinfer_cascade.bench import oracle  # noqa: E402
from flashinfer_cascade.bench.oracle import choose, make_oracle  # noqa: E402
from flashinfer_cascade.bench.workloads import append, tree, workload  # noqa: E402
from flashinfer_cascade.testing import (  # noqa: E402
    dense_attention,
    error_budget,
    make_kv_cache,
    make_q,
    plain_attention,
    relative_errors,
)

UNEVEN = workload(
    "uneven",
    [[("root", 40), (0, 3)], [("root", 40), (1, 77)], [(2, 5)], [("root", 40), (3, 20)]],
    page_size=16,
    description="lengths and rows of all kinds",
    qo_lens=[1, 9, 5, 1],
)


@pytest.mark.parametrize("chunk", [2**26, 20_000, 1])
@pytest.mark.parametrize(
    ("work", "kv_dtype"),
    [
        (tree("1,3,12_20,35,7", 4), "bfloat16"),
        (append(3, 40, 5, 9, page_size=4), "bfloat16"),
        (UNEVEN, "bfloat16"),
        (UNEVEN, "float8_e4m3fn"),
    ],
    ids=["tree", "append", "uneven", "fp8"],
)
def test_it_computes_what_dense_attention_does(work, kv_dtype, chunk, monkeypatch):
    monkeypatch.setattr(oracle, "CHUNK_ELEMENTS", chunk)
    config = work.config(8, 2, 64, kv_dtype=kv_dtype)
    q, cache = make_q(config, work.num_rows), make_kv_cache(config, work.num_pages)
    qo_lens = [1] * work.num_requests if work.qo_lens is None else work.qo_lens.tolist()
    step = (work.block_tables.tolist(), work.seq_lens.tolist(), qo_lens)
    expected, _ = dense_attention(config, q, cache, *step)
    plain = plain_attention(config, q, cache, *step)
    found = make_oracle(config, work, q, cache)
    assert found.rows.tolist() == list(range(work.num_rows))
    assert torch.allclose(found.out, expected, rtol=0, atol=1e-13)
    assert found.budget == pytest.approx(error_budget(expected, plain), rel=0.02)
    assert found.max_error(plain) == pytest.approx(float(relative_errors(plain, expected).amax()))
    assert found.max_error(plain) <= found.budget


def test_a_wrong_row_and_a_missing_one_are_seen():
    config = UNEVEN.config(8, 2, 64)
    q, cache = make_q(config, UNEVEN.num_rows), make_kv_cache(config, UNEVEN.num_pages)
    found = make_oracle(config, UNEVEN, q, cache)
    out = found.out.bfloat16()
    assert found.max_error(out) < found.budget
    swapped = out.clone()
    swapped[[3, 4]] = out[[4, 3]]
    assert found.max_error(swapped) > found.budget
    out[15, 7, 63] = float("nan")
    assert found.max_error(out) is None


def test_what_takes_too_long_is_sampled_evenly():
    work = tree("1,64_64,16")
    config = work.config(8, 2, 64)
    one = 80 * (2 * 2 * 64 + 8)
    assert choose(config, work, 64 * one).tolist() == list(range(64))
    assert choose(config, work, 4 * one).tolist() == [0, 21, 42, 63]
    assert choose(config, work, 1).tolist() == [0]
    q, cache = make_q(config, 64), make_kv_cache(config, work.num_pages)
    some, every = make_oracle(config, work, q, cache, 4 * one), make_oracle(config, work, q, cache)
    assert some.rows.tolist() == [0, 21, 42, 63]
    assert np.allclose(some.out, every.out[some.rows], rtol=0, atol=1e-13)

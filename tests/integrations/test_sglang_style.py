"""The backend in docs/integration.md, driven as SGLang drives one: page size 1, req_to_token, K and V apart."""

import pathlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig
from flashinfer_cascade.testing import assert_close, dense_attention, make_kv_cache, make_q, plain_attention

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "integration.md"
NUM_SLOTS = 600
CONFIG = CascadeConfig(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=1,
    dtype="bfloat16",
    max_batch_size=16,
    max_kv_pages=NUM_SLOTS,
)


class Pool:
    """token_to_kv_pool, of one layer."""

    def __init__(self):
        k, v = make_kv_cache(CONFIG, NUM_SLOTS, form="pair")
        self.k, self.v = k.squeeze(1).contiguous(), v.squeeze(1).contiguous()

    def set_kv_buffer(self, layer_id, slots, k, v):
        self.k[slots], self.v[slots] = k, v

    def get_kv_buffer(self, layer_id):
        return self.k, self.v


def make_backend():
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    req_to_token = torch.zeros(32, 128, dtype=torch.int32)
    backend = names["CascadeAttnBackend"](CONFIG, Pool(), req_to_token, [1, 2, 4, 8], device="cpu")
    backend.init_cuda_graph_state(8, 8)
    return backend


def fill(backend, rng, num):
    """Requests in random rows of req_to_token, in two groups with a prefix each: indices, lengths."""
    slots = iter(rng.permutation(np.arange(1, NUM_SLOTS)).tolist())
    prefixes = [[next(slots) for _ in range(length)] for length in (37, 11)]
    indices, lens = rng.permutation(32)[:num], []
    for index in indices:
        prefix = prefixes[rng.integers(2)]
        row = prefix[: int(rng.integers(1, len(prefix) + 1))] + [next(slots) for _ in range(int(rng.integers(1, 30)))]
        backend.req_to_token[index] = -7  # what lies behind a request's end says nothing
        backend.req_to_token[index, : len(row)] = torch.tensor(row)
        lens.append(len(row))
    return torch.from_numpy(indices), torch.tensor(lens)


def check(backend, out, q, indices, lens, qo_lens):
    pool = backend.kv_pool
    tables = [backend.req_to_token[index, :length].tolist() for index, length in zip(indices, lens, strict=True)]
    args = CONFIG, q, (pool.k.unsqueeze(1), pool.v.unsqueeze(1)), tables, lens.tolist(), qo_lens
    assert_close(out, dense_attention(*args)[0], plain_attention(*args))


def new_slots(backend, indices, lens, qo_lens):
    spans = [backend.req_to_token[i, n - new : n] for i, n, new in zip(indices, lens, qo_lens, strict=True)]
    return torch.cat(spans).long()


@pytest.mark.parametrize("mode", ["decode", "extend"])
@pytest.mark.parametrize("seed", range(5))
def test_without_graphs(mode, seed):
    backend, rng = make_backend(), np.random.default_rng(seed)
    indices, lens = fill(backend, rng, 9)
    qo_lens = [1 if mode == "decode" else int(rng.integers(1, min(n, 20) + 1)) for n in lens.tolist()]
    if mode == "extend":  # new tokens are not shared
        qo_lens = [1] * 3 + [min(new, 2) for new in qo_lens[3:]]
    batch = SimpleNamespace(
        req_pool_indices_cpu=indices,
        seq_lens_cpu=lens,
        extend_seq_lens_cpu=None if mode == "decode" else torch.tensor(qo_lens),
        out_cache_loc=new_slots(backend, indices, lens, qo_lens),
    )
    backend.init_forward_metadata(batch)
    q, k, v = (make_q(CONFIG, sum(qo_lens), seed=seed + i)[:, : [4, 2, 2][i]] for i in range(3))
    out = backend.forward(q, k, v, 0, batch)
    assert torch.equal(backend.kv_pool.k[batch.out_cache_loc[-1]], k[-1])
    check(backend, out, q, indices, lens, qo_lens)


@pytest.mark.parametrize("num_live", [1, 3, 5, 8])
def test_replays(num_live):
    backend, rng = make_backend(), np.random.default_rng(num_live)
    bs = backend.adapter.graph_size(num_live)
    backend.init_forward_metadata_capture_cuda_graph(bs, bs, None, None, None, None, None)
    captured = backend.attention
    for step in range(3):
        indices, lens = fill(backend, rng, num_live)
        padded = torch.zeros(bs, dtype=torch.int64), torch.ones(bs, dtype=torch.int64)  # the fill value is 1
        padded[0][:num_live], padded[1][:num_live] = indices, lens
        backend.init_forward_metadata_replay_cuda_graph(bs, *padded, num_live)
        backend.attention = captured  # what a graph replays
        slots = torch.zeros(bs, dtype=torch.int64)  # slot 0 takes what nobody reads
        slots[:num_live] = new_slots(backend, indices, lens, [1] * num_live)
        q, k, v = (make_q(CONFIG, bs, seed=step + i)[:, : [4, 2, 2][i]] for i in range(3))
        out = backend.forward(q, k, v, 0, SimpleNamespace(out_cache_loc=slots))
        assert (out[num_live:] == 0).all()
        check(backend, out[:num_live], q[:num_live], indices, lens, [1] * num_live)

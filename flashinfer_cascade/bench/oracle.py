"""The fp64 oracle for batches of thousands of rows: the attention of `testing.dense_attention`, many requests at once.

Where even that takes too long, some of the requests are chosen, evenly over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from flashinfer_cascade.bench.workloads import Workload
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int64Array, ranges
from flashinfer_cascade.testing import error_budget, relative_errors

MAX_ELEMENTS = 2**32
"""Keys, values and logits that are computed for a batch; more take seconds on an H200."""

CHUNK_ELEMENTS = 2**26
"""Of them at once, in keys, values or logits: half a gigabyte each."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """What results are judged by.

    Attributes:
        rows: int64[checked rows], on the device, ascending: which rows of q.
        out: float64[checked rows, heads, head_dim], exact.
        budget: see `testing.error_budget`.
    """

    rows: torch.Tensor
    out: torch.Tensor
    budget: float

    def max_error(self, out: torch.Tensor) -> float | None:
        """Largest relative L2 error over rows and heads; None where that is no number.

        Args:
            out: all rows, in the order of q.
        """
        error = float(relative_errors(out[self.rows], self.out).amax())
        return error if math.isfinite(error) else None


def make_oracle(
    config: CascadeConfig, work: Workload, q: torch.Tensor, kv_cache: torch.Tensor, max_elements: int = MAX_ELEMENTS
) -> Oracle:
    """Compute what attention must give, and by how much it may be off.

    Args:
        config: NHD, without window, soft cap and scales.
        work: the batch.
        q: all its rows.
        kv_cache: ``[pages, 2, page_size, num_kv_heads, head_dim]``.
        max_elements: see `MAX_ELEMENTS`.
    """
    chosen = choose(config, work, max_elements)
    qo_lens = _qo_lens(work)
    begin = np.cumsum(qo_lens) - qo_lens
    rows = torch.from_numpy(ranges(begin[chosen], qo_lens[chosen]).astype(np.int64)).to(q.device)
    exact = attend(config, work, chosen, q[rows], kv_cache, torch.float64, torch.float64)
    plain = attend(config, work, chosen, q[rows], kv_cache, torch.float32, q.dtype).to(q.dtype)
    return Oracle(rows, exact, error_budget(exact, plain))


def choose(config: CascadeConfig, work: Workload, max_elements: int = MAX_ELEMENTS) -> Int64Array:
    """Requests to check, ascending: all, or as many, evenly over the batch, as take no more than `max_elements`."""
    costs = work.seq_lens * (2 * config.num_kv_heads * config.head_dim + _qo_lens(work) * config.num_qo_heads)
    share = min(max_elements / float(costs.sum()), 1.0)
    count = max(int(share * work.num_requests), 1)
    return np.linspace(0, work.num_requests - 1, count).round().astype(np.int64)


def attend(
    config: CascadeConfig,
    work: Workload,
    requests: Int64Array,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> torch.Tensor:
    """Attention of some requests, computed in `dtype`, with weights and result rounded to `rounded`.

    Args:
        config: as in `make_oracle`.
        work: the batch.
        requests: which of its requests.
        q: their rows.
        kv_cache: as in `make_oracle`.
        dtype: of all sums.
        rounded: what `testing.plain_attention` rounds to; `dtype` for an exact result.

    Returns:
        Shape of q, dtype.
    """
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    tables = torch.from_numpy(work.block_tables).to(q.device)
    end = 0
    for chosen in _chunks(config, work, requests):
        seq_lens, qo_len = work.seq_lens[chosen], int(_qo_lens(work)[chosen[0]])
        begin, end = end, end + len(chosen) * qo_len
        tokens = torch.arange(int(seq_lens.max()), device=q.device)
        # Padding of a table, -1, lies behind what any row sees.
        pages = tables[torch.from_numpy(chosen).to(q.device)][:, tokens // config.page_size].clamp_(min=0).long()
        kv = kv_cache[pages, :, tokens % config.page_size].to(dtype)  # request, token, K or V, head, dim
        k, v = (half.contiguous() for half in kv.permute(2, 0, 3, 1, 4))
        rows = q[begin:end].to(dtype).unflatten(0, (-1, qo_len)).unflatten(2, (config.num_kv_heads, -1))
        result = out[begin:end].unflatten(0, (-1, qo_len)).unflatten(2, (config.num_kv_heads, -1))
        positions = torch.from_numpy(seq_lens).to(q.device)[:, None] - qo_len + torch.arange(qo_len, device=q.device)
        step = max(CHUNK_ELEMENTS // (len(chosen) * config.num_qo_heads * len(tokens)), 1)
        for first in range(0, qo_len, step):
            some = slice(first, first + step)
            grouped = rows[:, some].permute(0, 2, 3, 1, 4)  # request, KV head, query head of it, row, dim
            logits = grouped.flatten(2, 3) @ k.transpose(-1, -2) * config.softmax_scale
            logits = logits.unflatten(2, grouped.shape[2:4])
            logits.masked_fill_(tokens > positions[:, None, None, some, None], -math.inf)
            logits.sub_(logits.amax(-1, keepdim=True)).exp_()
            total = logits.sum(-1, keepdim=True)
            weighted = logits.to(rounded).to(dtype).flatten(2, 3) @ v
            result[:, some] = (weighted.view_as(grouped) / total).to(rounded).to(dtype).permute(0, 3, 1, 2, 4)
    return out


def _chunks(config: CascadeConfig, work: Workload, requests: Int64Array) -> Iterator[Int64Array]:
    """Consecutive requests with as many rows each, and so little KV that it is read at once."""
    qo_lens = _qo_lens(work)[requests]
    begin, longest = 0, 0
    for end, request in enumerate(requests.tolist()):
        longest = max(longest, int(work.seq_lens[request]))
        elements = (end - begin + 1) * longest * config.num_kv_heads * config.head_dim
        if end > begin and (elements > CHUNK_ELEMENTS or qo_lens[end] != qo_lens[begin]):
            yield requests[begin:end]
            begin, longest = end, int(work.seq_lens[request])
    yield requests[begin:]


def _qo_lens(work: Workload) -> Int64Array:
    return np.ones(work.num_requests, np.int64) if work.qo_lens is None else work.qo_lens

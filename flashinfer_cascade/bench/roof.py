"""The least time that a workload's attention can take: every byte moved once, every FLOP done at the tensor peak."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashinfer_cascade.bench.workloads import Workload
from flashinfer_cascade.config import DTYPE_BYTES, CascadeConfig

HBM_TB_PER_S, TENSOR_TFLOPS = 4.47, 790.0
"""Ceilings that the roof divides by, the same in every record: streaming reads of HBM, and dense bf16 matmul, both as
measured on an H200."""


class Roof(NamedTuple):
    """What one layer's attention has to move and to compute.

    Attributes:
        num_bytes: unique KV, q and output.
        flops: of both products, for what each row sees.
    """

    num_bytes: int
    flops: int

    @property
    def us(self) -> float:
        """Microseconds: the longer of both."""
        return max(self.num_bytes / HBM_TB_PER_S, self.flops / TENSOR_TFLOPS) / 1e6


def roof(config: CascadeConfig, work: Workload) -> Roof:
    """Of one layer."""
    q_bytes = work.num_rows * config.num_qo_heads * config.head_dim * DTYPE_BYTES[config.dtype]
    return Roof(
        num_bytes=unique_tokens(work) * config.kv_token_bytes + 2 * q_bytes,
        flops=4 * visible_tokens(work) * config.num_qo_heads * config.head_dim,
    )


def unique_tokens(work: Workload) -> int:
    """KV tokens over all pages that the batch reads, each page counted once and as far as any request fills it."""
    seq_lens = work.seq_lens[:, None]
    begin = np.arange(work.block_tables.shape[1]) * work.page_size
    filled = np.clip(seq_lens - begin, 0, work.page_size)
    read = filled > 0
    most = np.zeros(work.num_pages, np.int64)
    np.maximum.at(most, work.block_tables[read], filled[read])
    return int(most.sum())


def visible_tokens(work: Workload) -> int:
    """KV tokens that each row sees, added up over rows: a new token sees those before it and itself."""
    rows = np.ones(work.num_requests, np.int64) if work.qo_lens is None else work.qo_lens
    return int((rows * work.seq_lens - rows * (rows - 1) // 2).sum())

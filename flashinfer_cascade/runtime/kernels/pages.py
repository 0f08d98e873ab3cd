"""Page ids on the device: write single entries, and copy runs one behind the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["at", "values"])
def _scatter_kernel(at, values, ids, num, block: tl.constexpr):
    entries = tl.program_id(0) * block + tl.arange(0, block)
    real = entries < num
    tl.store(ids + tl.load(at + entries, mask=real, other=0), tl.load(values + entries, mask=real, other=0), mask=real)


@triton.jit(do_not_specialize_on_alignment=["begin", "out", "into"])
def _gather_kernel(begin, out, ids, into, block: tl.constexpr):
    run = tl.program_id(0)
    first = tl.load(out + run)
    count = tl.load(out + run + 1) - first
    pages = tl.program_id(1) * block + tl.arange(0, block)
    real = pages < count
    page = tl.load(ids + tl.load(begin + run) + pages, mask=real, other=0)
    tl.store(into + first + pages, page, mask=real)


def scatter(at: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> None:
    """``ids[at] = values``, int32 all; no place is named twice."""
    _scatter_kernel[(triton.cdiv(len(at), BLOCK),)](at, values, ids, len(at), block=BLOCK)


def gather(begin: torch.Tensor, out: torch.Tensor, ids: torch.Tensor, into: torch.Tensor, longest: int) -> None:
    """Copy runs of `ids`: ``into[out[r]:out[r + 1]] = ids[begin[r]:]``.

    Args:
        begin: int32[num_runs], into ids.
        out: int32[num_runs + 1], into `into`, non-decreasing.
        ids: int32[*].
        into: int32[*].
        longest: entries of the longest run.
    """
    if longest:
        _gather_kernel[(len(begin), triton.cdiv(longest, BLOCK))](begin, out, ids, into, block=BLOCK)

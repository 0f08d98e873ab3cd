"""What a GPU reaches at its simplest, to hold times of attention against: streaming reads, copies, a large matmul."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from flashinfer_cascade.bench.results import Ceilings

NUM_BYTES = 2**31
"""Read and copied: many times any L2."""

MATMUL_SIZE = 8192
BLOCK, ROUNDS = 2048, 16
REPEATS = 20


@triton.jit
def _sum_kernel(x, out, block: tl.constexpr, rounds: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * block * rounds
    total = tl.zeros([block], tl.int32)
    for number in tl.static_range(rounds):
        total += tl.load(x + begin + number * block + tl.arange(0, block))
    tl.store(out + tl.program_id(0), tl.sum(total))


def read_all(x: torch.Tensor) -> torch.Tensor:
    """Read every element once, and write little: sums of consecutive elements.

    Args:
        x: int32, a multiple of ``BLOCK * ROUNDS`` elements.
    """
    out = torch.empty(len(x) // (BLOCK * ROUNDS), dtype=torch.int32, device=x.device)
    _sum_kernel[(len(out),)](x, out, BLOCK, ROUNDS, num_warps=8)
    return out


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes about a second, and twice `NUM_BYTES` of memory."""
    with torch.cuda.device(device):
        x = torch.zeros(NUM_BYTES // 4, dtype=torch.int32, device=device)
        y = torch.empty_like(x)
        read_us, copy_us = _median_us(lambda: read_all(x)), _median_us(lambda: y.copy_(x))
        a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device).bfloat16()
        matmul_us = _median_us(lambda: a @ b)
    return Ceilings(
        read_tb_per_s=round(NUM_BYTES / read_us / 1e6, 3),
        copy_tb_per_s=round(2 * NUM_BYTES / copy_us / 1e6, 3),
        matmul_tflops=round(2 * MATMUL_SIZE**3 / matmul_us / 1e6, 1),
    )


def _median_us(call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return statistics.median(times)

#!/usr/bin/env python
"""Measure lowering: a plan in, the tables of the segments' kernels out, as a decode loop does at every step.

    python scripts/bench_lower.py [--repeats 1000]

Times are medians of one thread. "in place" fills one room again and again, as a captured graph's staging area;
"allocated" makes new arrays; "numpy" is that without the native core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from flashinfer_cascade import CascadePlanner, PlannerPolicy
from flashinfer_cascade.bench.workloads import Workload, grid, workload
from flashinfer_cascade.csr import indptr
from flashinfer_cascade.lower import Tiling, lower, lower_into
from flashinfer_cascade.native import load_core
from flashinfer_cascade.native_lower import allocate, make_tiles

NUM_SMS = 132
"""Of an H200."""

COLUMNS = ("requests", "segments", "wide", "short", "narrow", "partials", "in place", "allocated", "numpy")


def batches() -> Iterator[Workload]:
    yield from grid(["P2", "P10", "P14"])
    rng = np.random.default_rng(0)
    for num in (256, 1024):
        alone = [[(r, int(rng.integers(100, 8000)))] for r in range(num)]
        yield workload(f"none-{num}", alone, 16, seed=0, description=f"{num} requests, none shared")


def time_us(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    return median(taken)


def measure(batch: Workload, repeats: int) -> list[float]:
    config = batch.config(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    plan = CascadePlanner(config, PlannerPolicy(executor="segments")).plan(batch.block_tables, batch.seq_lens)
    (part,) = plan.parts
    tiling = Tiling.of(config, NUM_SMS, is_native=True, has_native_wide=True)
    page_begin = indptr(plan.seg_num_pages)[:-1]
    lowered = lower(plan, part, tiling, page_begin)
    room = allocate(make_tiles(config, tiling), plan, part, lowered.num_partials)
    sizes = lower_into(plan, part, tiling, page_begin, room)
    native = load_core() is not None
    return [
        batch.num_requests,
        plan.num_segments,
        *(sizes.num_wide, sizes.num_short, sizes.num_narrow, sizes.num_partials),
        time_us(lambda: lower_into(plan, part, tiling, page_begin, room), repeats) if native else np.nan,
        time_us(lambda: lower(plan, part, tiling, page_begin), repeats) if native else np.nan,
        time_us(lambda: lower(plan, part, tiling, page_begin, native=False), repeats),
    ]


def main(repeats: Annotated[int, typer.Option(min=1, help="Measured calls of each kind.")] = 1000) -> None:
    """Measure lowering."""
    table = Table("workload", title="lowering, microseconds")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for batch in batches():
        table.add_row(batch.name, *(f"{value:.0f}" for value in measure(batch, repeats)))
    Console(width=max(Console().width, 110)).print(table)


if __name__ == "__main__":
    typer.run(main)

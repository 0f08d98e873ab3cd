#!/usr/bin/env python
"""Measure one-shot planning: block tables in, plan out, nothing kept from step to step.

    python scripts/bench_planner.py [--repeats 200] [--lists] [--json PATH]

Times are of one thread. "validate" and "forest" are the public steps timed on their own; "total" is a whole
`CascadePlanner.plan`, and "choose" is what remains of it: the choice and the plan's arrays. "lower" is what the
segments executor does with the plan on top: its tables for a GPU of 132 SMs.
"""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flashinfer_cascade import CascadePlanner, __version__
from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.bench import traces
from flashinfer_cascade.bench.workloads import Workload, grid, workload
from flashinfer_cascade.forest import build_forest
from flashinfer_cascade.lower import Tiling, lower

# Microseconds that a published C++ planner (PAT's) states for batches of these sizes, on its own machine:
# 256 requests in 2 to 4 levels, 1024 in 2, 1024 in 6 to 7.
PUBLISHED = {"P2": (86, 108), "P3": (330, 330), "P12": (560, 660), "P14": (560, 660)}
WARM_UP = 5
WORDS = ("workload", "order", "executor")
NUMBERS = ("requests", "pages", "nodes")
TIMES = ("validate", "forest", "choose", "total", "p90", "lower")


def batches() -> Iterator[Workload]:
    yield from grid(["P2", "P3", "P10", "P12", "P14", "S1", "S6"])
    alone = [[(r, 2048 * 16)] for r in range(256)]
    yield workload("none-256", alone, 16, seed=0, description="256 requests of 2048 pages, none shared")
    for name, path in (("conversation", traces.CONVERSATION), ("synthetic", traces.SYNTHETIC)):
        for batch, samples in ((256, 1), (32, 8)):
            first = next(traces.mooncake_batches(path, batch, samples=samples))
            yield replace(first, name=f"{name}-{batch}x{samples}")
    yield from traces.tot_batches(traces.TREE_OF_THOUGHT, "sorting128ToT", [1000])


def time_us(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 90th percentile."""
    for _ in range(WARM_UP):
        call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    return round(median(taken), 1), round(float(np.quantile(taken, 0.9)), 1)


def measure(batch: Workload, order: str, repeats: int, lists: bool) -> dict[str, Any]:
    config = batch.config(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    planner = CascadePlanner(config)
    tables = batch.block_tables
    given = [row[row >= 0].tolist() for row in tables] if lists else tables
    valid = make_batch(config, given, batch.seq_lens)
    plan = planner.plan(given, batch.seq_lens)
    part = plan.parts[0]
    validate, _ = time_us(lambda: make_batch(config, given, batch.seq_lens), repeats)
    forest, _ = time_us(lambda: build_forest(valid), repeats)
    total, p90 = time_us(lambda: planner.plan(given, batch.seq_lens), repeats)
    tiling = Tiling.of(config, 132, is_native=True, has_native_wide=True)
    lowered, _ = time_us(lambda: lower(plan, part, tiling), repeats)
    published = PUBLISHED.get(batch.name)
    return {
        "workload": batch.name,
        "order": order,
        "requests": batch.num_requests,
        "pages": valid.num_pages,
        "nodes": part.forest.num_nodes,
        "executor": part.executor,
        "validate_us": validate,
        "forest_us": forest,
        "choose_us": round(max(total - validate - forest, 0.0), 1),
        "total_us": total,
        "p90_us": p90,
        "lower_us": lowered,
        "published_us": published,
        "ratio": published and round(total / (sum(published) / 2), 2),
    }


def table_of(records: list[dict[str, Any]]) -> Table:
    title = "one-shot planning, microseconds"
    table = Table(title=title, caption="published: a C++ planner, on its own machine")
    for column in WORDS:
        table.add_column(column)
    for column in (*NUMBERS, *TIMES, "published", "ratio"):
        table.add_column(column, justify="right")
    for record in records:
        low_high = record["published_us"]
        table.add_row(
            *(str(record[key]) for key in (*WORDS, *NUMBERS)),
            *(f"{record[f'{key}_us']:.0f}" for key in TIMES),
            "-".join(str(us) for us in dict.fromkeys(low_high)) if low_high else "",
            f"{record['ratio']:.1f}x" if low_high else "",
        )
    return table


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Measured calls of each step.")] = 200,
    lists: Annotated[bool, typer.Option("--lists", help="Give lists, not a padded array.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the records here too.")] = None,
) -> None:
    """Measure one-shot planning."""
    console = Console(width=max(Console().width, 130))
    work = [(batch, order) for batch in batches() for order in ("grouped", "shuffled")]
    gc.collect()
    gc.disable()  # its pauses are the application's, not the planner's
    records = [
        measure(batch.shuffled() if order == "shuffled" else batch, order, repeats, lists)
        for batch, order in track(work, "measuring", console=Console(stderr=True))
    ]
    console.print(table_of(records))
    if json_path is not None:
        environment = {
            "package": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "repeats": repeats,
            "lists": lists,
        }
        json_path.write_text(json.dumps({"environment": environment, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

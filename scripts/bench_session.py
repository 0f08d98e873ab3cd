#!/usr/bin/env python
"""Measure incremental planning, or prove that it does not drift.

    python scripts/bench_session.py [--steps 1000] [--requests 256] [--python] [--json PATH]
    python scripts/bench_session.py --soak 100000

The first plays decode loops: a quarter of each context is shared by all requests, half by a sixteenth of them, a
quarter is a request's own. Each step adds a token to every request; with churn, 2% of them leave and as many join, too.
A step's time is that of all calls of the session: removals, the step, additions, the plan. "one-shot" plans the same
states from scratch, from a padded numpy table.

The second makes random calls, and compares every plan with the one-shot plan of the Python planner.
"""

from __future__ import annotations

import gc
import json
import platform
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flashinfer_cascade import CascadeConfig, CascadePlan, CascadePlanner, PlannerPolicy, __version__
from flashinfer_cascade.session import PlanSession

PAGE_SIZE = 16
FAMILIES = 16
CHURN = 0.02
WARM_UP = 20
ONE_SHOT_EVERY = 50


class Loop:
    """An engine's side of a decode loop: who leaves, who joins, and which pages they get."""

    def __init__(self, num_requests: int, context: int, churn: float, native: bool) -> None:
        self.rng = np.random.default_rng(0)
        shared = context // 4 // PAGE_SIZE
        num_pages = 2 * (3 * shared * FAMILIES + num_requests * (shared * 2 + 200))
        self.config = CascadeConfig(
            num_qo_heads=32,
            num_kv_heads=8,
            head_dim=128,
            page_size=PAGE_SIZE,
            dtype="bfloat16",
            max_batch_size=num_requests,
            max_kv_pages=num_pages,
            max_kv_indices=2 * num_requests * (context // PAGE_SIZE + 200),
        )
        self.planner = CascadePlanner(self.config, native=native)
        self.session = self.planner.session()
        self.free = deque(self.rng.permutation(num_pages).astype(np.int32).tolist())
        root = self.take(shared)
        self.prefixes = [np.concatenate((root, self.take(2 * shared))) for _ in range(FAMILIES)]
        self.own = shared * PAGE_SIZE
        self.count, self.leaving, self.churn = 0, 0.0, churn * num_requests
        self.tables: dict[int, tuple[int, list[int]]] = {}
        self.lens: dict[int, int] = {}
        for _ in range(num_requests):
            self.session.add(*(joining := self.join())[:3], computed_len=joining[2] - 1)
        self.session.plan()

    def take(self, num: int) -> np.ndarray:
        return np.array([self.free.popleft() for _ in range(num)], np.int32)

    def join(self) -> tuple[int, np.ndarray, int]:
        self.count += 1
        prefix = self.prefixes[int(self.rng.integers(FAMILIES))]
        own = int(self.own * self.rng.uniform(0.75, 1.25)) + 1
        pages = self.take(-(-own // PAGE_SIZE))
        self.lens[self.count] = len(prefix) * PAGE_SIZE + own
        self.tables[self.count] = (len(prefix) + len(pages), pages.tolist())
        return self.count, np.concatenate((prefix, pages)), self.lens[self.count]

    def step(self) -> tuple[float, CascadePlan]:
        """Microseconds of the session's calls, and the plan."""
        self.leaving += self.churn
        num, live = int(self.leaving), list(self.lens)
        self.leaving -= num
        leave = [live[i] for i in self.rng.choice(len(live), num, replace=False)]
        for id in leave:
            self.free.extend(self.tables.pop(id)[1])
            del self.lens[id]
        new_pages = {}
        for id, length in self.lens.items():
            if length % PAGE_SIZE == 0:
                page = self.free.popleft()
                self.tables[id][1].append(page)
                new_pages[id] = page
            self.lens[id] = length + 1
        joining = [self.join() for _ in range(num)]
        session = self.session
        start = time.perf_counter_ns()
        for id in leave:
            session.remove(id)
        session.step(new_pages)
        for id, table, length in joining:
            session.add(id, table, length, computed_len=length - 1)
        plan = session.plan()
        return (time.perf_counter_ns() - start) / 1e3, plan

    def one_shot(self, plan: CascadePlan) -> float:
        """Microseconds of planning the same from scratch."""
        tables = [self.session.block_table(id) for id in self.session.ids]
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        lens = np.array([self.session.seq_len(id) for id in self.session.ids])
        start = time.perf_counter_ns()
        other = self.planner.plan(padded, lens)
        taken = (time.perf_counter_ns() - start) / 1e3
        assert other == plan
        return taken


def measure(num_requests: int, context: int, churn: float, steps: int, native: bool) -> dict[str, Any]:
    loop = Loop(num_requests, context, churn, native)
    taken, one_shot, structures = [], [], set()
    gc.collect()
    gc.disable()  # its pauses are the application's, not the planner's
    for number in range(WARM_UP + steps):
        us, plan = loop.step()
        if number >= WARM_UP:
            taken.append(us)
            structures.add(plan.structure_id)
            if number % ONE_SHOT_EVERY == 0:
                one_shot.append(loop.one_shot(plan))
    gc.enable()
    return {
        "requests": num_requests,
        "context": context,
        "churn": churn,
        "executor": plan.parts[0].executor,
        "levels": plan.num_levels,
        "median_us": round(median(taken), 1),
        "p99_us": round(float(np.quantile(taken, 0.99)), 1),
        "one_shot_us": round(median(one_shot), 1),
        "structures": len(structures),
        "pool_entries": loop.session.pool_entries,
        "page_ids": int(sum(count for count, _ in loop.tables.values())),
    }


def table_of(records: list[dict[str, Any]]) -> Table:
    table = Table(title="planning a step, microseconds", caption="one-shot: the same states from scratch, median")
    words = ("requests", "context", "churn", "plan", "median", "p99", "one-shot", "ratio")
    for column in words:
        table.add_column(column, justify="left" if column == "plan" else "right")
    for record in records:
        table.add_row(
            str(record["requests"]),
            str(record["context"]),
            f"{record['churn']:.0%}",
            f"{record['executor']}, {record['levels']}",
            f"{record['median_us']:.0f}",
            f"{record['p99_us']:.0f}",
            f"{record['one_shot_us']:.0f}",
            f"{record['one_shot_us'] / record['median_us']:.1f}x",
        )
    return table


class Soak:
    """Random calls on a session, and the same on plain lists that are planned from scratch."""

    policies = (
        PlannerPolicy(),
        PlannerPolicy(min_speedup=1.0, max_decode_rows=2),
        PlannerPolicy(executor="levels"),
        PlannerPolicy(executor="levels", fold=False),
    )

    def __init__(self, seed: int, native: bool) -> None:
        self.rng = np.random.default_rng(seed)
        policy = self.policies[seed % len(self.policies)]
        self.page_size = int(self.rng.choice([1, 4, 16]))
        config = CascadeConfig(
            num_qo_heads=32,
            num_kv_heads=8,
            head_dim=128,
            page_size=self.page_size,
            dtype="bfloat16",
            max_batch_size=64,
            max_num_rows=2**17,
            max_kv_pages=2**20,
        )
        self.session: PlanSession = CascadePlanner(config, policy, native=native).session()
        self.planner = CascadePlanner(config, policy, native=False)
        self.tables: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}
        self.calls: list[Callable[[], None]] = [self.join, self.join, self.fork, self.leave, self.append, self.truncate]
        self.calls += [self.replace, self.reorder, self.leave]
        self.count = self.fresh = 0
        self.target = int(self.rng.integers(2, 60))
        self.prefixes = [self.pages(int(self.rng.integers(1, 400))) for _ in range(3)]

    def pages(self, num: int) -> list[int]:
        self.fresh = (self.fresh + num) % (2**20 - num)
        return list(range(self.fresh, self.fresh + num))

    def any(self) -> int:
        return int(self.rng.choice(list(self.tables)))

    def join(self) -> None:
        if len(self.tables) >= self.target:
            return
        kind = self.rng.random()
        prefix = self.prefixes[int(self.rng.integers(3))] if kind < 0.7 or not self.tables else self.tables[self.any()]
        prefix = prefix[: int(len(prefix) * self.rng.choice([0.5, 1.0, 1.0]))]
        own = int(self.rng.integers(0 if kind > 0.95 else 1, 8 * self.page_size + 1))
        length = len(prefix) * self.page_size + own
        self.count += 1
        self.tables[self.count] = prefix + self.pages(-(-own // self.page_size))
        self.lens[self.count] = length
        table = np.array(self.tables[self.count], np.int32)
        self.session.add(self.count, table, length, computed_len=max(length - 1, 0))

    def fork(self) -> None:
        if self.tables and len(self.tables) < self.target:
            id, self.count = self.any(), self.count + 1
            self.tables[self.count], self.lens[self.count] = list(self.tables[id]), self.lens[id]
            self.session.fork(id, self.count)

    def leave(self) -> None:
        if len(self.tables) > 1:
            id = self.any()
            del self.tables[id], self.lens[id]
            self.session.remove(id)

    def append(self) -> None:
        id, num = self.any(), int(self.rng.integers(1, 20))
        pages = self.pages(max(-(-(self.lens[id] + num) // self.page_size) - len(self.tables[id]), 0))
        self.tables[id] += pages
        self.lens[id] += num
        self.session.append(id, num, pages)

    def truncate(self) -> None:
        id = self.any()
        self.lens[id] -= int(min(self.lens[id], self.rng.choice([1, 2, 5, 200])))
        del self.tables[id][-(-self.lens[id] // self.page_size) :]
        self.session.truncate(id, self.lens[id])

    def replace(self) -> None:
        id = self.any()
        if self.tables[id]:
            index = int(self.rng.integers(len(self.tables[id])))
            self.tables[id][index] = self.pages(1)[0]
            self.session.replace_page(id, index, self.tables[id][index])

    def reorder(self) -> None:
        ids = self.rng.permutation(list(self.tables)).tolist()
        self.tables, self.lens = {id: self.tables[id] for id in ids}, {id: self.lens[id] for id in ids}
        self.session.reorder(ids)

    def step(self) -> CascadePlan:
        if not self.tables:
            self.join()
        if self.rng.random() < 0.3:
            for _ in range(int(self.rng.integers(1, 4))):
                self.calls[int(self.rng.integers(len(self.calls)))]()
        new_pages = {}
        same = self.pages(1)[0] if self.rng.random() < 0.1 else None  # forks that have not parted get one page
        for id, length in self.lens.items():
            if length and length == len(self.tables[id]) * self.page_size:
                new_pages[id] = self.pages(1)[0] if same is None else same
                self.tables[id].append(new_pages[id])
            self.lens[id] += length > 0
        self.session.step(new_pages)
        plan = self.session.plan()
        rows = np.diff(plan.qo_indptr)[np.argsort(plan.request_order)]
        expected = self.planner.plan([np.array(t, np.int32) for t in self.tables.values()], [*self.lens.values()], rows)
        assert plan == expected
        for part, other in zip(plan.parts, expected.parts, strict=True):
            assert (part.reason, part.predicted_us) == (other.reason, other.predicted_us)
            assert (part.forest.block == other.forest.block).all()
        return plan


def soak(steps: int, native: bool, console: Console) -> None:
    """Sessions of 1000 steps each, so that every policy and page size has its turn."""
    compared = reused = cascades = entries = 0
    memory = []
    for seed in track(range(-(-steps // 1000)), "soaking", console=Console(stderr=True)):
        run, last = Soak(seed, native), 0
        for _ in range(min(1000, steps - 1000 * seed)):
            plan = run.step()
            compared += 1
            reused += plan.structure_id == last
            cascades += plan.num_levels > 1
            last = plan.structure_id
        entries = max(entries, run.session.pool_entries)
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    early = memory[min(len(memory) // 10, len(memory) - 1)]
    console.print(
        f"{compared} steps, each plan equal to the one-shot plan; {reused} re-used the structure before, "
        f"{cascades} cascade.\nLargest pool {entries} entries. Peak memory {early} MB after a tenth of the steps, "
        f"{memory[-1]} MB at the end."
    )


def main(
    steps: Annotated[int, typer.Option(min=100, help="Measured steps of each loop.")] = 1000,
    requests: Annotated[list[int] | None, typer.Option(help="Batch sizes; 64, 256 and 1024 by default.")] = None,
    contexts: Annotated[list[int] | None, typer.Option(help="Contexts; 1024, 8192 and 65536 by default.")] = None,
    python: Annotated[bool, typer.Option("--python", help="Without the native core.")] = False,
    soak_steps: Annotated[int, typer.Option("--soak", help="Compare so many random steps instead.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the records here too.")] = None,
) -> None:
    """Measure incremental planning."""
    console = Console(width=max(Console().width, 100))
    if soak_steps:
        soak(soak_steps, not python, console)
        return
    work = [
        (num, context, churn)
        for num in requests or (64, 256, 1024)
        for churn in (0.0, CHURN)
        for context in contexts or (1024, 8192, 65536)
    ]
    records = [measure(*loop, steps, not python) for loop in track(work, "measuring", console=Console(stderr=True))]
    console.print(table_of(records))
    if json_path is not None:
        environment = {
            "package": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "steps": steps,
            "native": not python,
        }
        json_path.write_text(json.dumps({"environment": environment, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

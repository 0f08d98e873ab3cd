"""The command ``flashinfer-cascade bench``: rows as they come, tables at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashinfer_cascade.bench import harness, tables
from flashinfer_cascade.bench.cases import Case
from flashinfer_cascade.bench.records import machine_line
from flashinfer_cascade.bench.results import OURS, Ceilings, Record, Row
from flashinfer_cascade.errors import BackendUnavailableError

PIPE_WIDTH = 150
"""Columns of the tables where no terminal says how many it has."""


def bench(
    cases: Sequence[Case],
    path: Path | None,
    *,
    resume: bool,
    deadline_s: float | None,
    repeats: int,
    pool_bytes: int,
    commit: str | None,
) -> bool:
    """Measure on the current GPU, print, write the record; whether every result of ours is within its error budget.

    Args:
        cases: what to measure.
        path: of the record; None writes none.
        resume: continue the record at `path`.
        deadline_s: seconds after which no case is begun.
        repeats: interleaved turns.
        pool_bytes: GPU memory for KV caches.
        commit: of the code that is measured; None asks git.

    Raises:
        BackendUnavailableError: there is no CUDA GPU.
        InvalidBatchError: the record exists and may not be continued.
    """
    started = time.monotonic()
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"torch {torch.__version__} sees no CUDA device: bench measures on a GPU, 'plan' and 'demo' need none"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    record = harness.begin_record(path, resume=resume, commit=commit)
    if record.ceilings is None:
        record = record.model_copy(update={"ceilings": _ceilings(device)})
    typer.echo(f"{machine_line(record.model_dump())}; {tables.ceilings(record)}")
    measure = harness.Gpu(device, pool_bytes, repeats).measure
    deadline = None if deadline_s is None else started + deadline_s
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task("measuring", total=len(cases))
        for case, outcome in harness.run(cases, record, path, measure, deadline):
            if isinstance(outcome, Row):
                typer.echo(tables.in_one_line(outcome))
            elif outcome is not None:
                typer.echo(f"{case}: left out: {outcome}")
            progress.advance(task)
    _print(record)
    typer.echo(f"{len(record.rows)} rows, {time.monotonic() - started:.0f} s{f', in {path}' if path else ''}")
    return not any(name in OURS for row in record.rows for name in row.wrong())


def _ceilings(device: torch.device) -> Ceilings:
    from flashinfer_cascade.bench.ceilings import measure_ceilings

    found = measure_ceilings(device)
    torch.cuda.empty_cache()
    return found


def _print(record: Record) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    for rows in record.groups():
        console.print()
        console.print(tables.terminal(rows))
        for note in (*tables.means(rows), *tables.remarks(rows)):
            console.print(note, highlight=False)

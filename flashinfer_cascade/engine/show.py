"""A run on the terminal: live progress, and tables of what came of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from flashinfer_cascade.bench.records import machine_line
from flashinfer_cascade.engine.account import RunStats
from flashinfer_cascade.engine.cases import Case
from flashinfer_cascade.engine.engine import OnStep
from flashinfer_cascade.engine.scheduler import Scheduler

REFRESH_SECONDS = 0.25


@contextlib.contextmanager
def live_progress(console: Console, case: Case) -> Iterator[OnStep | None]:
    """A bar that is drawn a few times a second, between steps: a thread that draws would slow them down."""
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}")
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        total = sum(request.max_new_tokens * request.num_samples for request in case.requests)
        task = progress.add_task(case.name, total=total, now="")
        shown = 0.0

        def on_step(stats: RunStats, scheduler: Scheduler) -> None:
            nonlocal shown
            now = time.perf_counter()
            if now - shown >= REFRESH_SECONDS:
                shown = now
                text = (
                    f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, {stats.tokens_per_s:.0f} "
                    f"tokens/s, KV read 1/{stats.flat_tokens / max(stats.read_tokens, 1):.1f}"
                )
                progress.update(task, completed=stats.new_tokens, now=text)
                progress.refresh()

        yield on_step


def print_case(case: dict[str, Any], console: Console) -> None:
    """A case's runs as a table, and what they come to against each other."""
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
        title_justify="left",
        title_style="bold",
        title=f"\n{case['name']}: {case['description']}",
    )
    table.add_column("")
    for column in ("tokens/s", "decode\ntokens/s", "KV read", "of flat", "plan us", "graph\nsteps", "eager"):
        table.add_column(column, justify="right", no_wrap=True)
    named = {name: case[key] for name, key in (("flat", "flat"), ("cascade", "cascade"), ("", "runs")) if key in case}
    for name, runs in named.items():
        last = runs[-1]
        table.add_row(
            name,
            f"{_median(runs, 'tokens_per_s'):.0f}",
            f"{_median(runs, 'decode_tokens_per_s'):.0f}",
            f"{last['kv_read_bytes'] / 1e9:.3g} GB",
            f"{last['kv_read_bytes'] / last['kv_flat_bytes']:.0%}",
            f"{statistics.median(run['plan_us']['median'] for run in runs):.0f}",
            str(last["graph_replays"]),
            str(sum(last["eager_steps"].values())),
        )
    console.print(table)
    last = [*named.values()][-1][-1]
    executors = ", ".join(f"{executor} in {steps} steps" for executor, steps in last["executors"].items())
    lines = [
        f"ran {executors}",
        f"pages: at most {last['max_held_pages']} held, {last['copied_pages']} copied on write, "
        f"{last['cached_tokens']} tokens from the cache, {last['preemptions']} preemptions",
    ]
    if "agreement" in case:
        found, gain = case["agreement"], case["gain"]
        verdict = "[green]ok[/]" if found["ok"] else "[bold red]FAILED[/]"
        lines += [
            f"cascade against flat: {gain['tokens_per_s']:.2f}x tokens/s, {gain['decode_tokens_per_s']:.2f}x in decode "
            f"steps (median of {len(case['flat'])} turns)",
            f"logits of {found['num_rows']} rows: at most {found['max_error']:.4f} apart, bound {found['bound']:.4f} "
            f"{verdict}; from dense float32: flat {found['flat_error']:.4f}, cascade {found['cascade_error']:.4f}",
        ]
    for line in lines:
        console.print(line, highlight=False)


def markdown(record: dict[str, Any]) -> str:
    """A record of comparisons as a table for a document, its machine in front."""
    model, engine = record["model"], record["engine"]
    lines = [
        machine_line(record),
        "",
        f"{model['num_layers']} layers of {model['hidden_size']}, {model['num_qo_heads']}/{model['num_kv_heads']} "
        f"heads of {model['head_dim']}, {model['dtype']}; {engine['num_pages']} pages of {engine['page_size']} tokens; "
        f"{record['captured']['graphs']} graphs captured; medians of {len(record['cases'][0]['flat'])} turns.",
        "",
        "| requests | tokens/s, flat | tokens/s, cascade | gain | gain in decode steps | KV read | planning, us "
        "| steps in graphs | eager | logits apart | bound |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        last, found, gain = case["cascade"][-1], case["agreement"], case["gain"]
        flat, cascade = (f"{_median(case[name], 'tokens_per_s'):.0f}" for name in ("flat", "cascade"))
        read = last["kv_read_bytes"] / last["kv_flat_bytes"]
        plan_us = statistics.median(run["plan_us"]["median"] for run in case["cascade"])
        lines.append(
            f"| {case['name']}: {case['description']} | {flat} | {cascade} | {gain['tokens_per_s']:.2f}x "
            f"| {gain['decode_tokens_per_s']:.2f}x | {read:.0%} | {plan_us:.0f} | {last['graph_replays']} "
            f"| {sum(last['eager_steps'].values())} | {found['max_error']:.4f} | {found['bound']:.4f} |"
        )
    return "\n".join(lines)


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))

"""A record as tables: Markdown for documents, rich for terminals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flashinfer_cascade.bench.cases import COUNTED
from flashinfer_cascade.bench.results import BASELINES, OURS, Record, Row, geomean
from flashinfer_cascade.bench.roof import HBM_TB_PER_S, TENSOR_TFLOPS

COLUMNS = tuple(dict.fromkeys((*BASELINES[1:], *OURS)))
"""Candidates from left to right: FlashInfer's, then ours."""

TITLES = {
    "decode": "Decode",
    "heads": "Decode",
    "append": "Appends",
    "fp8": "Decode, fp8 KV",
    "irregular": "Irregular batches",
}


def title(rows: Sequence[Row]) -> str:
    """Of a table: what its rows have in common."""
    suite, num_qo_heads, num_kv_heads, page_size, kv_dtype = rows[0].group
    parts = [TITLES[suite], f"{num_qo_heads} query heads, {num_kv_heads} KV heads"]
    if page_size != 16:
        parts.append(f"page size {page_size}")
    if kv_dtype != "bfloat16":
        parts.append(f"{kv_dtype} KV")
    return ", ".join(dict.fromkeys(parts))


def columns(rows: Sequence[Row]) -> list[str]:
    """Candidates that some of the rows have a time for."""
    return [name for name in COLUMNS if any(name in row.results for row in rows)]


def markdown(record: Record) -> str:
    """A section for each group of rows: a table, the geometric means, what was refused or wrong."""
    return "\n\n".join("\n".join((f"### {title(rows)}", "", *section(rows))) for rows in record.groups())


def section(rows: Sequence[Row]) -> list[str]:
    """One table in Markdown, and what is to be said of it."""
    names = columns(rows)
    heads = ["workload", "roof", *(name.replace("_", " ") for name in names), "auto is", "x roof", "vs best stock"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        us = [f"{row.results[name].us:.1f}" if name in row.results else "-" for name in names]
        chosen = row.choices["auto"].executor if "auto" in row.choices else "-"
        cells = [row.label, f"{row.roof_us:.1f}", *us, chosen, _times(row.ratio("auto"), 1, ""), _speedup(row)]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {note}" for note in (*means(rows), *remarks(rows))]
    return [*lines, "", *notes] if notes else lines


def means(rows: Sequence[Row]) -> list[str]:
    """Geometric means over the counted trees; none where there are none."""
    counted = [row for row in rows if row.workload in COUNTED]
    said = []
    for name in OURS[1:]:
        gains = [gain for row in counted if (gain := row.speedup(name)) is not None]
        if gains:
            ratios = [ratio for row in counted if (ratio := row.ratio(name)) is not None]
            said.append(f"{name} {geomean(gains):.2f}x as fast as the best stock way, {geomean(ratios):.2f}x roof")
    if not said:
        return []
    over = []
    for name in BASELINES:
        both = [row for row in counted if name in row.results and "auto" in row.results]
        if both:
            gain = geomean(row.results[name].us / row.results["auto"].us for row in both)
            over.append(f"{gain:.2f}x as fast as {name.replace('_', ' ')}")
    trees = f"Geometric means over {len(counted)} trees (P1-P12, P14, P16-P18): "
    return [trees + "; ".join(said) + "."] + ([f"By these means auto is {', '.join(over)}."] if over else [])


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of the table: rows lost, results that are off, who refused, rows unchecked."""
    lost = [row.label for row in rows if row.lost()]
    notes = [f"Lost by more than 2% and the spread: {', '.join(lost)}."] if lost else []
    wrong = [
        f"{row.label} {name} ({row.results[name].max_error}, allowed {row.error_budget})"
        for row in rows
        for name in row.wrong()
    ]
    if wrong:
        notes.append(f"Beyond the error budget: {', '.join(wrong)}.")
    refused = Counter((name, reason) for row in rows for name, reason in row.refused.items())
    notes += [f"{name} refused {count} of {len(rows)}: {reason}" for (name, reason), count in refused.items()]
    sampled = sum(row.checked_rows < row.num_rows for row in rows)
    if sampled:
        notes.append(f"Checked against fp64 for some of the requests only: {sampled} of {len(rows)} workloads.")
    return notes


def ceilings(record: Record) -> str:
    """The ceilings of the roof, beside those of the run."""
    fixed = f"roof: {HBM_TB_PER_S} TB/s, {TENSOR_TFLOPS:.0f} TFLOP/s"
    if record.ceilings is None:
        return fixed
    found = record.ceilings
    return (
        f"{fixed}; in this run: reads {found.read_tb_per_s:.2f} TB/s, copies {found.copy_tb_per_s:.2f} TB/s, "
        f"bf16 matmul {found.matmul_tflops:.0f} TFLOP/s"
    )


def terminal(rows: Sequence[Row]) -> Table:
    """Times over the roof, the gain over the best stock way, rows lost in red."""
    names = columns(rows)
    table = Table(title=f"{title(rows)}: times over the roof", title_justify="left", box=None, header_style="dim")
    table.add_column("workload", no_wrap=True)
    for name in ("roof us", *names, "vs stock"):
        table.add_column(name.replace("_", "\n"), justify="right")
    table.add_column("")
    for row in rows:
        cells = [_times(row.ratio(name), 1, "") for name in names]
        is_wrong = any(name in OURS for name in row.wrong())
        verdict = Text("WRONG", "bold red") if is_wrong else Text("lost", "red") if row.lost() else Text("")
        table.add_row(row.label, f"{row.roof_us:.1f}", *cells, _times(row.speedup()), verdict)
    return table


def in_one_line(row: Row) -> str:
    """A row while others are still being measured."""
    us = " ".join(f"{name} {row.results[name].us:.1f}" for name in columns([row]))
    chosen = f" -> {row.choices['auto'].executor}" if "auto" in row.choices else ""
    marks = (" LOST" if row.lost() else "") + (f" WRONG: {', '.join(row.wrong())}" if row.wrong() else "")
    return f"{row.case}: roof {row.roof_us:.1f} {us}{chosen}, {_times(row.speedup())} the best stock way{marks}"


def _speedup(row: Row) -> str:
    return f"**{_times(row.speedup())}, lost**" if row.lost() else _times(row.speedup())


def _times(value: float | None, digits: int = 2, unit: str = "x") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"

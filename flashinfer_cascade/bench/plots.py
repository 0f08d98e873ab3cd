"""A record as SVG files: for each group of rows, times over the roof and the gain over the best stock way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from flashinfer_cascade import draw
from flashinfer_cascade.bench.results import OURS, Record, Row
from flashinfer_cascade.bench.tables import columns, title

LINE = 18.0
"""Pixels a row."""

LABEL, ROOF, GAIN, GAP, TOP = 96.0, 520.0, 260.0, 40.0, 84.0
"""Widths of the labels and of both panels, the gap between them, and where rows begin."""

COLOURS = {
    "decode": "#8a919c",
    "prefill_fa2": "#8a919c",
    "prefill_fa3": "#c9a227",
    "stock_default": "#b07aa1",
    "stock_fa2": "#d1495b",
    "flat": "#2b2f36",
    "levels": "#2d6c9e",
    "segments": "#349678",
    "auto": "#263e7a",
}
"""Ours are squares, auto an empty one; FlashInfer's are circles."""

STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;fill:#2b2f36}
.title{font-size:16px;font-weight:600}.quiet{fill:#68707c}.end{text-anchor:end}
.tick{text-anchor:middle;fill:#68707c;font-size:11px}
.grid{stroke:#e3e6ea;stroke-width:1}.one{stroke:#68707c;stroke-width:1}
.lost{fill:#d1495b}.gain{fill:#349678}
"""


def write_plots(record: Record, folder: Path) -> list[Path]:
    """Write a file for each group of rows into a folder, which is made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in plots(record).items():
        paths.append(folder / name)
        paths[-1].write_text(content, encoding="utf-8")
    return paths


def plots(record: Record) -> dict[str, str]:
    """Names of files and what they hold."""
    return {file_name(rows): svg(rows) for rows in record.groups()}


def file_name(rows: Sequence[Row]) -> str:
    """Of a group's plot."""
    suite, num_qo_heads, num_kv_heads, page_size, kv_dtype = rows[0].group
    name = f"bench-{suite}-{num_qo_heads}-{num_kv_heads}"
    name += f"-page{page_size}" if page_size != 16 else ""
    return name + (f"-{kv_dtype}" if kv_dtype != "bfloat16" and suite != "fp8" else "") + ".svg"


def svg(rows: Sequence[Row]) -> str:
    """One group's plot."""
    height = TOP + LINE * len(rows) + 34
    width = LABEL + ROOF + GAP + GAIN + 56
    names = columns(rows)
    head = title(rows)
    body = [*_legend(names), *_roof_panel(rows, names), *_gain_panel(rows)]
    for number, row in enumerate(rows):
        body.append(draw.text(LABEL - 10, _middle(number) + 4, row.label, "end"))
    size = f'width="{draw.num(width)}" height="{draw.num(height)}" viewBox="0 0 {draw.num(width)} {draw.num(height)}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(head)}</title><style>{STYLE}</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            draw.text(12, 26, head, "title"),
            *body,
            "</svg>\n",
        )
    )


def _middle(number: int) -> float:
    return TOP + LINE * (number + 0.5)


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = LABEL
    for name in names:
        yield _mark(name, x, 48)
        label = name.replace("_", " ")
        yield draw.text(x + 9, 52, label)
        x += 28 + 6.4 * len(label)


def _mark(name: str, x: float, y: float, tip: str = "") -> str:
    colour = COLOURS[name]
    if name == "auto":  # a frame, so that what it chose shows in it
        shape = draw.rect(
            x - 5, y - 5, 10, 10, tip, f' fill="{colour}" fill-opacity="0" stroke="{colour}" stroke-width="2"'
        )
    elif name in OURS:
        shape = draw.rect(x - 3.5, y - 3.5, 7, 7, tip, f' fill="{colour}" fill-opacity=".75"')
    else:
        title = f"<title>{escape(tip)}</title>" if tip else ""
        shape = (
            f'<circle cx="{draw.num(x)}" cy="{draw.num(y)}" r="3.5" fill="{colour}" fill-opacity=".75">{title}</circle>'
        )
    return shape


def _roof_panel(rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    """A mark for each candidate, along a logarithmic axis of time over roof."""
    highest = max((row.ratio(name) or 1.0 for row in rows for name in names), default=1.0)
    decades = math.log(max(highest * 1.08, 2.0))

    def at(ratio: float) -> float:
        return LABEL + ROOF * math.log(ratio) / decades

    bottom = TOP + LINE * len(rows)
    for tick in (1, 2, 3, 5, 10, 20, 30, 50, 100, 200):
        if at(tick) <= LABEL + ROOF:
            kind = "one" if tick == 1 else "grid"
            yield f'<path class="{kind}" d="M{draw.num(at(tick))} {draw.num(TOP - 4)}V{draw.num(bottom)}"/>'
            yield draw.text(at(tick), bottom + 15, f"{tick}x", "tick")
    yield draw.text(LABEL + ROOF / 2, TOP - 10, "time over roof", "tick")
    for number, row in enumerate(rows):
        for name in names:
            ratio = row.ratio(name)
            if ratio is not None:
                # What is measured below the roof, by rounding say, stands on it.
                tip = f"{row.label}, {name}: {row.results[name].us:.1f} us, {ratio:.2f}x roof"
                yield _mark(name, at(max(ratio, 1.0)), _middle(number), tip)


def _gain_panel(rows: Sequence[Row]) -> Iterator[str]:
    """A bar for each row: how many times faster auto is than the best stock way."""
    left = LABEL + ROOF + GAP
    longest = max((row.speedup() or 1.0 for row in rows), default=1.0)
    scale = GAIN / max(longest, 1.5)
    bottom = TOP + LINE * len(rows)
    yield draw.text(left + GAIN / 2, TOP - 10, "auto: speed-up over the best stock way", "tick")
    for number, row in enumerate(rows):
        gain = row.speedup()
        if gain is None:
            yield draw.text(left + 4, _middle(number) + 4, "-", "quiet")
            continue
        kind, mark = ("lost", ", lost") if row.lost() else ("gain", "")
        tip = f"{row.label}: {gain:.2f}x as fast as {row.best_baseline()}{mark}"
        more = f' class="{kind}" fill-opacity=".8"'
        yield draw.rect(left, _middle(number) - 6, gain * scale, 12, tip, more)
        yield draw.text(left + gain * scale + 5, _middle(number) + 4, f"{gain:.2f}x{mark}", kind if mark else "quiet")
    x = left + scale
    yield f'<path class="one" d="M{draw.num(x)} {draw.num(TOP - 4)}V{draw.num(bottom)}"/>'
    yield draw.text(x, bottom + 15, "1x", "tick")

"""A plan's forest as a self-contained SVG: what is read once, what again and again, and what is private.

Requests stand side by side in plan order, and tokens run downwards. Each coloured rectangle is one read of KV by the
requests that it spans; hatching marks shared runs that several segments read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade import draw
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.errors import InvalidBatchError
from flashinfer_cascade.fold import cut_at
from flashinfer_cascade.plan import CascadePlan, PlanPart
from flashinfer_cascade.report import PartFacts, count_of, format_bytes, kv_read, part_facts, span, summary

HEIGHT = 440.0
"""Of the plot, in pixels; y is counted from its top."""

LEFT, RIGHT, GAP, LINE = 76.0, 28.0, 36.0, 19.0
CHAR_WIDTH = 6.4  # of the 12-pixel text, on average

MAX_SINGLE_TAILS = 256
"""With more requests, the own KV of neighbours becomes one shape with steps, and the file stays small."""

# From dark blue to light green: levels differ in lightness, so also for colour-blind eyes.
RAMP = np.array([(38, 62, 122), (45, 108, 158), (52, 150, 160), (98, 190, 150), (176, 219, 140)], np.float64)
STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;fill:#2b2f36}
.title{font-size:20px;font-weight:600}.head{font-size:13px;font-weight:600}.quiet{fill:#68707c}
.tick{text-anchor:end;fill:#68707c;font-size:11px}.label{text-anchor:middle;pointer-events:none}
.light{fill:#fff}.halo{stroke:#fff;stroke-width:3px;stroke-opacity:.9;paint-order:stroke}
rect,path{stroke:#fff;stroke-width:.5}.own{fill:#ecdfc6}.thin,.thin path{stroke:none}.merged{fill:url(#hatch)}
.grid{stroke:#e3e6ea;stroke-width:1}
"""
HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" style="fill:#fff;fill-opacity:.5;stroke:none"/>'
    '<rect width="1" height="7" style="fill:#8a919c;stroke:none"/></pattern>'
)


def write_picture(plan: CascadePlan, path: str | os.PathLike[str]) -> None:
    """Draw the plan's forest into an SVG file.

    Raises:
        InvalidBatchError: the file's name does not end in .svg.
    """
    target = Path(path)
    if target.suffix.lower() != ".svg":
        raise InvalidBatchError(
            f"{str(target)!r} does not end in .svg, the only format: write {target.stem}.svg instead"
        )
    target.write_text(svg(plan), encoding="utf-8")


def svg(plan: CascadePlan) -> str:
    """The plan's forest as the text of an SVG file."""
    numbers = summary(plan)
    facts = [part_facts(plan, part) for part in plan.parts]
    shares = np.array([max(part.num_requests / plan.num_requests, 0.35) for part in plan.parts])
    plot_width = min(1120.0, max(420.0 * len(shares) + 200.0, 16.0 * plan.num_requests))
    widths = (shares / shares.sum() * (plot_width - GAP * (len(shares) - 1))).tolist()
    heads = [_head(part, width, len(widths) > 1) for part, width in zip(numbers["parts"], widths, strict=True)]
    top = 64 + LINE * max(map(len, heads))
    title = f"KV read a layer: {_arrow(kv_read(numbers))}"
    scale = _Scale.fit(plan, facts)
    body = list(_axis(scale, LEFT + plot_width))
    left = LEFT
    for part, fact, head, width in zip(plan.parts, facts, heads, widths, strict=True):
        for number, (line, classes) in enumerate(head):
            body.append(draw.text(left, LINE * number - top + 66, line, classes))
        body += _Panel(plan, part, fact, scale, left, width).draw()
        left += width + GAP
    body += _legend(plan)
    box = f"{LEFT + plot_width + RIGHT:.0f} {top + HEIGHT + 84:.0f}"
    size = 'width="{}" height="{}"'.format(*box.split())
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {box}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{HATCH}</defs>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            draw.text(LEFT, 36, title, "title"),
            f'<g transform="translate(0 {top:.0f})">',
            *body,
            "</g></svg>\n",
        )
    )


def _head(numbers: dict[str, Any], width: float, with_kv: bool) -> list[tuple[str, str]]:
    """What stands above a panel, wrapped, with the class of each line."""
    sizes = (count_of(numbers[f"num_{noun}s"], noun) for noun in ("level", "request", "row"))
    predicted = ", ".join(f"{name} {us:.1f} us" for name, us in numbers["predicted_us"].items())
    nodes = f"{count_of(numbers['nodes_found'], 'shared node')}, {numbers['nodes_kept']} kept"
    kv = f"KV read {_arrow(kv_read(numbers))}, " if with_kv else "KV read would be "
    texts = (
        (f"{numbers['name']}: {numbers['executor']}, {', '.join(sizes)}", "head"),
        (f"predicted {predicted} a layer: {numbers['reason']}", ""),
        (f"{nodes}; {kv}{format_bytes(numbers['kv_unique_bytes'])} with every page once", "quiet"),
    )
    return [(line, classes) for text, classes in texts for line in wrap(text, int(width / CHAR_WIDTH * 0.9))]


def _arrow(text: str) -> str:
    return text.replace("->", "→")


def _level_colours(num_levels: int) -> list[tuple[str, bool]]:
    """A colour for each shared level, and whether it takes white text."""
    at = np.linspace(0, len(RAMP) - 1, num_levels) if num_levels > 2 else [1.0, 3.0][:num_levels]
    rgb = np.column_stack([np.interp(at, np.arange(len(RAMP)), channel) for channel in RAMP.T])
    light = (rgb @ (0.299, 0.587, 0.114) < 140).tolist()
    css = ["#" + "".join(f"{round(channel):02x}" for channel in colour) for colour in rgb.tolist()]
    return list(zip(css, light, strict=True))


class _Scale(NamedTuple):
    """Where tokens lie on the vertical axis: linear between knots."""

    tokens: Int64Array
    y: NDArray[np.float64]
    ticks: list[int]

    @classmethod
    def fit(cls, plan: CascadePlan, facts: list[PartFacts]) -> _Scale:
        """Linear, unless that would leave most runs too thin to see."""
        longest = max(1, *(int(f.seq_lens.max()) for f in facts))
        runs = np.concatenate([np.concatenate((f.node_tokens, f.own_tokens)) for f in facts])
        typical = max(float(np.median(runs)), 1.0)
        if typical * HEIGHT / longest >= 6 or runs.max() < 8 * typical:
            step = next(s for e in range(10) for s in (10**e, 2 * 10**e, 5 * 10**e) if longest <= 8 * s)
            return cls(np.array([0, longest]), np.array([0, HEIGHT]), list(range(0, longest + 1, step)))
        ends = [(part.forest.page_begin + part.forest.num_pages) * plan.config.page_size for part in plan.parts]
        marks = np.unique(np.concatenate([[0, longest], *ends]))
        lengths = np.concatenate([fact.seq_lens for fact in facts])
        tokens = np.unique(np.concatenate((marks, np.quantile(lengths, (0.25, 0.5, 0.75), method="nearest"))))
        heights = np.cumsum(np.sqrt(np.diff(tokens)))
        scale = cls(tokens, np.concatenate(([0], heights)) * HEIGHT / heights[-1], [])
        for mark in marks.tolist():
            if not scale.ticks or scale.at(mark) - scale.at(scale.ticks[-1]) >= 18:
                scale.ticks.append(mark)
        return scale

    def at(self, tokens: Any) -> NDArray[np.float64]:
        """Pixels from the top of the plot."""
        y: NDArray[np.float64] = np.interp(tokens, self.tokens, self.y)
        return y


def _axis(scale: _Scale, right: float) -> Iterator[str]:
    for token in scale.ticks:
        y = float(scale.at(token))
        yield f'<path class="grid" d="M{LEFT - 4:.0f} {draw.num(y)}H{right:.0f}"/>'
        yield draw.text(LEFT - 8, y + 4, str(token), "tick")
    label = "tokens along the sequence"
    if len(scale.tokens) > 2:
        label += " (heights: square roots of lengths)"
    yield f'<g transform="translate(20 {HEIGHT / 2:.0f}) rotate(-90)">{draw.text(0, 0, label, "label quiet")}</g>'


def _legend(plan: CascadePlan) -> Iterator[str]:
    shared = plan.num_levels - 1
    x, y = LEFT, HEIGHT + 48
    if shared:
        for colour, _ in _level_colours(shared):
            yield draw.rect(x, y, max(24 / shared, 10), 14, more=f' fill="{colour}"')
            x += max(24 / shared, 10)
        text = f"kept: read once (level {f'0 to {shared - 1}' if shared > 1 else 0})"
        yield draw.text(x + 7, y + 11, text)
        x += 7 + CHAR_WIDTH * len(text) + 22
    if any(not part.kept.all() for part in plan.parts):
        yield draw.rect(x, y, 24, 14, more=' class="own"') + draw.rect(x, y, 24, 14, more=' class="merged"')
        text = "merged: shared, but read again by each segment below"
        yield draw.text(x + 31, y + 11, text)
        x += 31 + CHAR_WIDTH * len(text) + 22
    yield draw.rect(x, y, 24, 14, more=' class="own"') + draw.text(x + 31, y + 11, "own KV of a request")


class _Panel:
    """One part: x is the request, y the token."""

    def __init__(
        self, plan: CascadePlan, part: PlanPart, facts: PartFacts, scale: _Scale, left: float, width: float
    ) -> None:
        self.part, self.facts, self.scale, self.left = part, facts, scale, left
        self.page, self.token_bytes = plan.config.page_size, plan.config.kv_token_bytes
        self.requests = part.forest.order
        self.step = width / part.num_requests
        self.cut = cut_at(part.forest, part.kept)
        self.colours = _level_colours(plan.num_levels - 1)

    def draw(self) -> Iterator[str]:
        """Segments, hatching on what is read again, labels."""
        forest, kept = self.part.forest, self.part.kept
        begin = forest.page_begin.astype(np.int64) * self.page
        end = begin + self.facts.node_tokens
        yield from self._tails()
        yield draw.text(self.left + self.step * self.part.num_requests / 2, HEIGHT + 20, self._caption(), "label quiet")
        for level in range(self.part.num_levels - 1):
            yield f'<g fill="{self.colours[level][0]}">'
            for node in np.flatnonzero(kept & (self.cut.node_level == level)).tolist():
                start = int(self.cut.node_start[node]) * self.page
                read = count_of(int(end[node]) - start, "token")
                title = f"kept, level {level}: {self._describe(node)}, one read of {read}"
                yield self._box(node, start, int(end[node]), title)
            yield "</g>"
        yield '<g class="merged">'
        for node in np.flatnonzero(~kept).tolist():
            times = int(self.facts.readers[node].sum())
            yield self._box(
                node, int(begin[node]), int(end[node]), f"merged: {self._describe(node)}, read {times} times"
            )
        yield "</g>"
        for node in range(forest.num_nodes):
            yield from self._label(node, int(begin[node]), int(end[node]))

    def _caption(self) -> str:
        padding = int((self.facts.seq_lens == 0).sum())
        own = self.facts.own_tokens[self.facts.seq_lens > 0]
        caption = f"{count_of(self.part.num_requests, 'request')} in plan order"
        caption += f", {padding} of them padding" if padding else ""
        return caption + (f"; own KV: {span(own, 'token')}" if len(own) else "")

    def _describe(self, node: int) -> str:
        tokens = int(self.facts.node_tokens[node])
        requests = count_of(int(self.facts.node_requests[node]), "request")
        return f"{requests} share {count_of(tokens, 'token')} ({format_bytes(tokens * self.token_bytes)})"

    def _box(self, node: int, start: int, end: int, title: str) -> str:
        x = self.left + self.part.forest.begin[node] * self.step
        y_0, y_1 = self.scale.at((start, end)).tolist()
        width = self.facts.node_requests[node] * self.step
        return draw.rect(x, y_0, width, y_1 - y_0, title, ' class="thin"' if min(width, y_1 - y_0) < 3 else "")

    def _label(self, node: int, begin: int, end: int) -> Iterator[str]:
        tokens, requests = int(self.facts.node_tokens[node]), int(self.facts.node_requests[node])
        width, (y_0, y_1) = requests * self.step, self.scale.at((begin, end)).tolist()
        if y_1 - y_0 < 13:
            return
        times = f", read {self.facts.readers[node].sum()} times"
        short = f"{tokens} \N{MULTIPLICATION SIGN} {requests}"
        long = f"{count_of(tokens, 'token')} \N{MULTIPLICATION SIGN} {count_of(requests, 'request')}"
        merged = not self.part.kept[node]
        for text in (long + times if merged else long, long, short, str(tokens)):
            if len(text) * CHAR_WIDTH < width - 6:
                white = not merged and self.colours[int(self.cut.node_level[node])][1]
                classes = "label" + (" halo" if merged else " light" if white else "")
                x = self.left + self.part.forest.begin[node] * self.step + width / 2
                yield draw.text(x, (y_0 + y_1) / 2 + 4, text, classes)
                return

    def _tails(self) -> Iterator[str]:
        """The requests' own segments, one by one or together where they hang below the same node."""
        count, node = self.part.num_requests, self.part.forest.tail_node
        group = 1 if count <= MAX_SINGLE_TAILS else count // 64
        edges = [0]
        for at in range(1, count):
            if group == 1 or (node[at] != node[at - 1] and at - edges[-1] >= group):
                edges.append(at)
        top = self.scale.at(self.cut.tail_start * self.page).tolist()
        bottom = self.scale.at(self.facts.seq_lens).tolist()
        yield f'<g class="own{" thin" if group > 1 or self.step < 3 else ""}">'
        for first, last in zip(edges, [*edges[1:], count], strict=True):
            own = self.facts.own_tokens[first:last]
            who = count_of(last - first, "request") if last - first > 1 else f"request {self.requests[first]}"
            path = f"M{self._x(first)} {draw.num(top[first])}" + self._steps(range(first, last), top, 1)
            path += f"V{draw.num(bottom[last - 1])}" + self._steps(range(last - 1, first - 1, -1), bottom, 0) + "z"
            yield f'<path d="{path}"><title>own KV of {who}: {span(own, "token")}</title></path>'
        yield "</g>"

    def _x(self, position: int) -> str:
        return draw.num(self.left + position * self.step)

    def _steps(self, positions: range, heights: list[float], side: int) -> str:
        """A line along `heights`, from position to position; `side` 1 goes right, 0 left."""
        path = ""
        for at, after in zip(positions, [*positions[1:], None], strict=True):
            if after is None or draw.num(heights[after]) != draw.num(heights[at]):
                path += f"H{self._x(at + side)}" + ("" if after is None else f"V{draw.num(heights[after])}")
        return path

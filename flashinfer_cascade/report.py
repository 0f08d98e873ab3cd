"""What a plan does and why: as numbers, as plain text and for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashinfer_cascade.csr import Int64Array, indptr
from flashinfer_cascade.fold import cut_at
from flashinfer_cascade.plan import CascadePlan, PlanPart

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_NODES, MAX_DEPTH = 12, 8
"""Nodes that get a line of their own, over all parts, and how deep they may lie; the others are summarised."""


class PartFacts(NamedTuple):
    """What a part holds and reads. Positions are those of the part's forest.

    Attributes:
        seq_lens: int64[num_requests], KV tokens of the request at each position; 0 for padding.
        own_tokens: int64[num_requests], those that it shares with nobody.
        node_requests: int64[num_nodes], requests that share each node.
        node_rows: int64[num_nodes], their rows.
        node_tokens: int64[num_nodes], tokens of its run.
        readers: int64[num_nodes, 2], what reads the run of a node that is not kept: segments of kept nodes below
            it, and requests' own segments.
    """

    seq_lens: Int64Array
    own_tokens: Int64Array
    node_requests: Int64Array
    node_rows: Int64Array
    node_tokens: Int64Array
    readers: Int64Array


def part_facts(plan: CascadePlan, part: PlanPart) -> PartFacts:
    """Derive a part's facts from the plan's arrays."""
    forest, page = part.forest, plan.config.page_size
    # A part's segments are sorted by level, so the requests' own ones come last, in the order of its requests.
    requests = plan.request_order[part.request_begin : part.request_end]
    at = np.argsort(requests)[np.searchsorted(np.sort(requests), forest.order)]
    own = part.seg_end - part.num_requests + at
    seq_lens = plan.seg_kv_start[own].astype(np.int64) + plan.seg_kv_len[own]
    qo_indptr = indptr(np.diff(plan.qo_indptr)[part.request_begin + at])
    readers = np.zeros((forest.num_nodes, 2), np.int64)
    readers[:, 1] = np.bincount(forest.tail_node[forest.tail_node >= 0], minlength=forest.num_nodes)
    for node in range(forest.num_nodes - 1, -1, -1):  # children before parents
        if (above := forest.parent[node]) >= 0:
            readers[above] += (1, 0) if part.kept[node] else readers[node]
    return PartFacts(
        seq_lens=seq_lens,
        own_tokens=seq_lens - forest.tail_begin.astype(np.int64) * page,
        node_requests=forest.end.astype(np.int64) - forest.begin,
        node_rows=qo_indptr[forest.end] - qo_indptr[forest.begin],
        node_tokens=forest.num_pages.astype(np.int64) * page,
        readers=readers,
    )


def summary(plan: CascadePlan) -> dict[str, Any]:
    """The plan's numbers, ready for JSON. Bytes and microseconds are those of one layer.

    "flat" counts every request's whole context, "read" what the plan's segments read, "unique" every page once.
    """
    token_bytes, page = plan.config.kv_token_bytes, plan.config.page_size
    parts, flat_pages = [], 0
    for part in plan.parts:
        facts = part_facts(plan, part)
        flat_pages += int((-(-facts.seq_lens // page)).sum())
        read = plan.seg_kv_len[part.seg_begin : part.seg_end].sum(dtype=np.int64)
        parts.append(
            {
                "name": part.name,
                "executor": part.executor,
                "reason": part.reason,
                "num_requests": part.num_requests,
                "num_rows": part.row_end - part.row_begin,
                "num_levels": part.num_levels,
                "backends": list(part.backends),
                "num_segments": part.seg_end - part.seg_begin,
                "nodes_found": part.forest.num_nodes,
                "nodes_kept": int(part.kept.sum()),
                "kv_flat_bytes": int(facts.seq_lens.sum()) * token_bytes,
                "kv_read_bytes": int(read) * token_bytes,
                "kv_unique_bytes": int(facts.own_tokens.sum() + facts.node_tokens.sum()) * token_bytes,
                "predicted_us": {name: float(us) for name, us in part.predicted_us.items()},
            }
        )
    totals = ("nodes_found", "nodes_kept", "kv_flat_bytes", "kv_read_bytes", "kv_unique_bytes")
    return {
        "num_requests": plan.num_requests,
        "num_rows": plan.num_rows,
        "num_levels": plan.num_levels,
        "num_segments": plan.num_segments,
        "page_size": page,
        "pages_flat": flat_pages,
        "pages_read": len(plan.seg_pages),
        **{name: sum(part[name] for part in parts) for name in totals},
        "parts": parts,
    }


def explain(plan: CascadePlan) -> str:
    """The forest, what was merged, bytes read against flat, predicted times and why, as plain text."""
    numbers = summary(plan)
    blocks = [f"{headline(numbers)}, KV read {kv_read(numbers)}"] if len(plan.parts) > 1 else []
    for part, part_numbers in zip(plan.parts, numbers["parts"], strict=True):
        lines = (lead + text for lead, text, _ in _lines(plan, part, part_numbers))
        blocks.append("\n  ".join((headline(part_numbers), *lines)))
    return "\n\n".join(blocks)


def render(plan: CascadePlan) -> RenderableType:
    """The content of `explain` for a terminal, as a rich renderable."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    numbers = summary(plan)
    blocks: list[RenderableType] = []
    if len(plan.parts) > 1:
        blocks.append(Text(f"{headline(numbers)}, KV read {kv_read(numbers)}"))
    for part, part_numbers in zip(plan.parts, numbers["parts"], strict=True):
        body = (
            Text.assemble((lead, "" if style else "dim"), (text, style), no_wrap=bool(style), overflow="ellipsis")
            for lead, text, style in _lines(plan, part, part_numbers)
        )
        blocks.append(Panel(Group(*body), title=Text(headline(part_numbers)), title_align="left"))
    return Group(*blocks)


def _lines(plan: CascadePlan, part: PlanPart, numbers: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What is said of a part, line by line: a lead, what follows it, and in which style."""
    predicted = ", ".join(f"{name} {us:.1f} us" for name, us in numbers["predicted_us"].items())
    yield "predicted  ", f"{predicted} a layer", ""
    yield "why        ", numbers["reason"], ""
    yield "KV read    ", f"{kv_read(numbers)}, {format_bytes(numbers['kv_unique_bytes'])} with every page once", ""
    yield "forest     ", f"{count_of(numbers['nodes_found'], 'shared node')}, {numbers['nodes_kept']} kept", ""
    tree = list(_Outline(plan, part).draw(-1, ""))
    width = max((len(label) for label, fate in tree if fate), default=0) + 2
    for label, fate in tree:
        yield label.ljust(width if fate else 0), fate, "green" if fate.startswith("kept") else "dim"
    table = _level_table(plan, part)
    first, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
    for level, *cells in table:
        yield level.ljust(first), "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True)), "none"


def format_bytes(count: float) -> str:
    """Three digits and a decimal unit."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.5 and unit != "TB":
        count, unit = count / 1000, next(units)
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def count_of(count: int, noun: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(values: Int64Array, noun: str = "") -> str:
    """``8 tokens`` where all are equal, else ``8 to 12 tokens``."""
    low, high = int(values.min()), int(values.max())
    numbers = f"{low}" if low == high else f"{low} to {high}"
    return f"{numbers} {noun}{'' if high == 1 else 's'}" if noun else numbers


def headline(numbers: dict[str, Any]) -> str:
    """A plan or one of its parts in a line, from its `summary`."""
    name = f"{numbers['name']}: {numbers['executor']}" if "name" in numbers else "plan"
    sizes = (count_of(numbers[f"num_{noun}s"], noun) for noun in ("level", "request", "row"))
    return f"{name}, {', '.join(sizes)}"


def kv_read(numbers: dict[str, Any]) -> str:
    """KV read a layer against flat, of a plan or one of its parts."""
    flat, read = numbers["kv_flat_bytes"], numbers["kv_read_bytes"]
    return f"{format_bytes(flat)} flat -> {format_bytes(read)} ({read / max(flat, 1):.1%})"


def _level_table(plan: CascadePlan, part: PlanPart) -> list[tuple[str, ...]]:
    segs = np.arange(part.seg_begin, part.seg_end)
    segs = segs[plan.seg_kv_len[segs] > 0]
    begin, rows = plan.seg_row_begin[segs], plan.seg_num_rows[segs]
    requests = np.searchsorted(plan.qo_indptr, begin + rows) - np.searchsorted(plan.qo_indptr, begin)
    table: list[tuple[str, ...]] = [("level", "segments", "rows", "tokens in each", "KV read", "flat reads", "kernel")]
    for level in np.unique(plan.seg_level[segs]):
        at = plan.seg_level[segs] == level
        tokens = plan.seg_kv_len[segs][at].astype(np.int64)
        name = str(level) if level < part.num_levels - 1 else f"{level}, own KV"
        read, flat = (format_bytes(int(n.sum()) * plan.config.kv_token_bytes) for n in (tokens, tokens * requests[at]))
        table.append((name, str(len(tokens)), str(rows[at].sum()), span(tokens), read, flat, part.backends[level]))
    return table


class _Outline:
    """A part's forest in few lines: siblings that look alike once, the heaviest nodes first, the rest summarised.

    Merged nodes, each the only one below the other, make one run, known by its first node.
    """

    def __init__(self, plan: CascadePlan, part: PlanPart) -> None:
        self.part, self.facts, self.config = part, part_facts(plan, part), plan.config
        facts, forest = self.facts, part.forest
        self.level = cut_at(forest, part.kept).node_level
        self.children: list[list[int]] = [[] for _ in range(forest.num_nodes + 1)]  # the roots at -1
        for node, above in enumerate(forest.parent.tolist()):
            self.children[above].append(node)
        self.last = np.arange(forest.num_nodes)  # node of each run
        self.tokens = facts.node_tokens.copy()
        self.extra = facts.node_tokens * (facts.readers.sum(axis=1) - 1)
        self.weight = facts.node_requests * facts.node_tokens
        self.size = np.ones(forest.num_nodes, np.int64)
        self.kind = [0] * forest.num_nodes
        kinds: dict[Any, int] = {}
        for node in range(forest.num_nodes - 1, -1, -1):  # children before parents
            children = self.children[node]
            if len(children) == 1 and not part.kept[[node, *children]].any():
                self.last[node] = self.last[children[0]]
                for total in (self.tokens, self.extra):
                    total[node] += total[children[0]]
            for total in (self.weight, self.size):
                total[node] += total[children].sum()
            sizes = round(math.log2(facts.node_requests[node])), round(math.log2(self.tokens[node]))
            key = (*sizes, part.kept[node], frozenset(self.kind[n] for n in self.children[self.last[node]]))
            self.kind[node] = kinds.setdefault(key, len(kinds))
        self.shown = self._choose(MAX_NODES // len(plan.parts))

    def alike(self, node: int) -> list[list[int]]:
        """Nodes right below a run, by kind; of -1, the roots."""
        groups: dict[int, list[int]] = {}
        for child in self.children[self.last[node] if node >= 0 else -1]:
            groups.setdefault(self.kind[child], []).append(child)
        return list(groups.values())

    def _choose(self, count: int) -> set[int]:
        """The heaviest nodes. What lies above a node weighs more, so that none hangs in the air."""
        candidates, stack = [], [(-1, 0)]
        while stack:
            node, depth = stack.pop()
            firsts = [group[0] for group in self.alike(node)] if depth < MAX_DEPTH else []
            candidates += firsts
            stack += [(first, depth + 1) for first in firsts]
        return set(sorted(candidates, key=lambda node: (-self.weight[node], node))[:count])

    def draw(self, node: int, indent: str) -> Iterator[tuple[str, str]]:
        """Lines below a run: what is there, and what the plan does with it."""
        entries: list[tuple[str, str, int | None]] = []  # a node's with the node itself
        rest: list[int] = []
        for first, *others in self.alike(node):
            if first not in self.shown:
                rest += (first, *others)
                continue
            entries.append((self._sizes([first]), self._fate(first), first))
            if others:
                entries.append((f"… and {len(others)} more like it: {self._sizes(others)}", "", None))
        if rest:
            deeper = int(self.size[rest].sum()) - len(rest)
            also = f"{self.part.kept[rest].sum()} kept" + (f", {count_of(deeper, 'node')} below" if deeper else "")
            entries.append((f"… and {len(rest)} more ({also}): {self._sizes(rest)}", "", None))
        entries += [(text, "", None) for text in self._own(node)]
        for number, (label, fate, child) in enumerate(entries, 1):
            last = number == len(entries)
            yield f"{indent}{'└─' if last else '├─'} {label}", fate
            if child is not None:
                yield from self.draw(child, indent + ("   " if last else "│  "))

    def _sizes(self, nodes: list[int]) -> str:
        tokens = self.tokens[nodes]
        pages = span(tokens // self.config.page_size, "page")
        return f"{span(self.facts.node_requests[nodes], 'request')} share {span(tokens, 'token')} ({pages})"

    def _fate(self, node: int) -> str:
        if self.part.kept[node]:
            return f"kept: level {self.level[node]}"
        nodes, requests = self.facts.readers[node].tolist()
        into = " and ".join(count_of(n, what) for n, what in ((nodes, "node"), (requests, "request")) if n)
        more = format_bytes(int(self.extra[node]) * self.config.kv_token_bytes)
        if self.part.executor == "flat":
            return f"read by each of {into}: +{more} read"
        return f"merged into {into} below: +{more} read, -{self.facts.node_rows[node]} row merges"

    def _own(self, node: int) -> Iterator[str]:
        tail, own = self.part.forest.tail_node, self.facts.own_tokens
        here = self.last[tail] == self.last[node] if node >= 0 else self.facts.seq_lens > 0
        tokens = own[(tail < 0 if node < 0 else tail >= 0) & here]
        if len(tokens):
            who = count_of(len(tokens), "request")
            median = f", median {np.median(tokens):.0f}" if tokens.min() < tokens.max() else ""
            yield f"{f'own KV of {who}' if node >= 0 else f'no sharing: {who}'}, {span(tokens, 'token')}{median}"
        if node < 0 and (padding := int((self.facts.seq_lens == 0).sum())):
            yield count_of(padding, "padding request")

"""What a plan does and why: as numbers, as plain text and for a terminal."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flashinfer_cascade.batch import Int64Array
from flashinfer_cascade.fold import Cut, cut_at
from flashinfer_cascade.plan import CascadePlan, PlanPart

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

MAX_TREE_LINES = 36
"""Lines of all forests together, about; what does not fit is summarised."""

MAX_TREE_DEPTH = 8


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What a part reads, and how often.

    Attributes:
        cut: the segments that its kept nodes make.
        seq_lens: int64[num_requests], KV tokens of the request at each position of the part; 0 for padding.
        own_tokens: int64[num_requests], those that it shares with nobody.
        node_requests: int64[num_nodes], requests that share each node.
        node_rows: int64[num_nodes], their rows.
        node_tokens: int64[num_nodes], tokens of its run.
        read_by: int64[num_nodes, 2], segments of kept nodes and requests' own segments below that would hold the
            node's run if it were merged.
        read_tokens: KV tokens that the part's segments read.
        flat_tokens: KV tokens read when every request reads its whole context.
        unique_tokens: KV tokens read when every shared run is read once.
    """

    cut: Cut
    seq_lens: Int64Array
    own_tokens: Int64Array
    node_requests: Int64Array
    node_rows: Int64Array
    node_tokens: Int64Array
    read_by: Int64Array
    read_tokens: int
    flat_tokens: int
    unique_tokens: int


def part_facts(plan: CascadePlan, part: PlanPart) -> PartFacts:
    """Derive a part's facts from the plan's arrays."""
    forest, page = part.forest, plan.config.page_size
    # A part's segments are sorted by level, so the requests' own ones come last, in the order of positions.
    own = slice(part.seg_end - part.num_requests, part.seg_end)
    seq_lens = plan.seg_kv_start[own].astype(np.int64) + plan.seg_kv_len[own]
    own_tokens = seq_lens - forest.tail_begin.astype(np.int64) * page
    node_tokens = forest.num_pages.astype(np.int64) * page
    qo_indptr = plan.qo_indptr[part.request_begin : part.request_end + 1].astype(np.int64)
    read_by = np.zeros((forest.num_nodes, 2), np.int64)
    read_by[:, 1] = np.bincount(forest.tail_node[forest.tail_node >= 0], minlength=forest.num_nodes)
    for node in range(forest.num_nodes - 1, -1, -1):  # children before parents
        if (above := forest.parent[node]) >= 0:
            read_by[above] += (1, 0) if part.kept[node] else read_by[node]
    return PartFacts(
        cut=cut_at(forest, part.kept),
        seq_lens=seq_lens,
        own_tokens=own_tokens,
        node_requests=forest.end.astype(np.int64) - forest.begin,
        node_rows=qo_indptr[forest.end] - qo_indptr[forest.begin],
        node_tokens=node_tokens,
        read_by=read_by,
        read_tokens=int(plan.seg_kv_len[part.seg_begin : part.seg_end].sum(dtype=np.int64)),
        flat_tokens=int(seq_lens.sum()),
        unique_tokens=int(own_tokens.sum() + node_tokens.sum()),
    )


def summary(plan: CascadePlan) -> dict[str, Any]:
    """The plan's numbers, ready for JSON. Bytes and microseconds are those of one layer."""
    token_bytes, page = plan.config.kv_token_bytes, plan.config.page_size
    parts, flat_pages = [], 0
    for part in plan.parts:
        facts = part_facts(plan, part)
        flat_pages += int((-(-facts.seq_lens // page)).sum())
        parts.append(
            {
                "name": part.name,
                "executor": part.executor,
                "reason": part.reason,
                "num_requests": part.num_requests,
                "num_rows": part.row_end - part.row_begin,
                "num_levels": part.num_levels,
                "num_segments": part.seg_end - part.seg_begin,
                "nodes_found": part.forest.num_nodes,
                "nodes_kept": int(part.kept.sum()),
                "kv_read_bytes": facts.read_tokens * token_bytes,
                "kv_flat_bytes": facts.flat_tokens * token_bytes,
                "kv_unique_bytes": facts.unique_tokens * token_bytes,
                "predicted_us": {name: float(us) for name, us in part.predicted_us.items()},
            }
        )
    totals = ("nodes_found", "nodes_kept", "kv_read_bytes", "kv_flat_bytes", "kv_unique_bytes")
    return {
        "num_requests": plan.num_requests,
        "num_rows": plan.num_rows,
        "num_levels": plan.num_levels,
        "num_segments": plan.num_segments,
        "page_size": page,
        "pages_read": len(plan.seg_pages),
        "pages_flat": flat_pages,
        **{name: sum(part[name] for part in parts) for name in totals},
        "structure_id": plan.structure_id,
        "generation": plan.generation,
        "parts": parts,
    }


def explain(plan: CascadePlan) -> str:
    """The forest, what was merged, bytes read against flat, predicted times and why, as plain text."""
    lines = [_headline(plan)]
    for part in plan.parts:
        facts = part_facts(plan, part)
        lines += ["", _part_title(part), *(f"  {name:<9}  {text}" for name, text in _part_notes(plan, part, facts))]
        rows = list(_tree_rows(_forest_entries(plan, part, facts)))
        width = max((len(label) for label, entry in rows if entry.status), default=0)
        lines += [f"  {label:<{width}}  {entry.status}" if entry.status else f"  {label}" for label, entry in rows]
        if part.num_levels > 1:
            table = [LEVEL_COLUMNS, *_level_rows(plan, part, facts)]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in table]
    return "\n".join(lines)


def render(plan: CascadePlan) -> RenderableType:
    """The content of `explain` for a terminal, as a rich renderable."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    def grow(tree: Tree, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            label = Text.assemble(entry.label, "  " if entry.status else "", (entry.status, entry.style))
            grow(tree.add(label), entry.children)

    blocks: list[RenderableType] = [Text(_headline(plan))]
    for part in plan.parts:
        facts = part_facts(plan, part)
        notes = Table.grid(padding=(0, 2))
        for name, text in _part_notes(plan, part, facts):
            notes.add_row(Text(name, "dim"), Text(text))
        forest = _forest_entries(plan, part, facts)
        tree = Tree(Text(forest.label), guide_style="dim")
        grow(tree, forest.children)
        body: list[RenderableType] = [notes, tree]
        if part.num_levels > 1:
            table = Table(*LEVEL_COLUMNS, box=None, header_style="dim", padding=(0, 2, 0, 0))
            for column in table.columns:
                column.justify = "right"
            for row in _level_rows(plan, part, facts):
                table.add_row(*row)
            body.append(table)
        blocks.append(Panel(Group(*body), title=Text(_part_title(part), "bold"), title_align="left"))
    return Group(*blocks)


def format_bytes(count: float) -> str:
    """Three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # noqa: PLR2004 - shown as 1.00 of the next unit
            break
        count /= 1000
    else:
        unit = "TB"
    if unit == "B":
        return f"{count:.0f} B"
    return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} {unit}"  # noqa: PLR2004


def count_of(count: int, noun: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _span(values: Sequence[int] | Int64Array, noun: str) -> str:
    low, high = int(min(values)), int(max(values))
    return count_of(low, noun) if low == high else f"{low} to {high} {noun}s"


def _headline(plan: CascadePlan) -> str:
    numbers = summary(plan)
    read, flat = numbers["kv_read_bytes"], numbers["kv_flat_bytes"]
    return (
        f"{' + '.join(part.executor for part in plan.parts)}: {count_of(plan.num_requests, 'request')}, "
        f"{count_of(plan.num_rows, 'row')}, {count_of(plan.num_levels, 'level')}; "
        f"KV read a layer {format_bytes(flat)} -> {format_bytes(read)}"
    )


def _part_title(part: PlanPart) -> str:
    rows = part.row_end - part.row_begin
    return f"{part.name}: {count_of(part.num_requests, 'request')}, {count_of(rows, 'row')}, {part.executor}"


def _part_notes(plan: CascadePlan, part: PlanPart, facts: PartFacts) -> Iterator[tuple[str, str]]:
    token_bytes = plan.config.kv_token_bytes
    yield "why", part.reason
    yield "predicted", ", ".join(f"{name} {us:.1f} us" for name, us in part.predicted_us.items()) + " a layer"
    flat, read, once = (
        format_bytes(tokens * token_bytes) for tokens in (facts.flat_tokens, facts.read_tokens, facts.unique_tokens)
    )
    share = facts.read_tokens / max(facts.flat_tokens, 1)
    yield "KV read", f"{flat} flat -> {read} a layer ({share:.1%}); {once} if each shared page were read once"


LEVEL_COLUMNS = ("level", "segments", "rows", "tokens in each", "KV read", "flat reads")


def _level_rows(plan: CascadePlan, part: PlanPart, facts: PartFacts) -> Iterator[tuple[str, ...]]:
    token_bytes = plan.config.kv_token_bytes
    segs = np.arange(part.seg_begin, part.seg_end)
    segs = segs[plan.seg_kv_len[segs] > 0]
    row_begin, num_rows = plan.seg_row_begin[segs], plan.seg_num_rows[segs]
    requests = np.searchsorted(plan.qo_indptr, row_begin + num_rows) - np.searchsorted(plan.qo_indptr, row_begin)
    for level in range(part.num_levels):
        at = plan.seg_level[segs] == level
        tokens = plan.seg_kv_len[segs][at].astype(np.int64)
        if not len(tokens):
            continue
        yield (
            str(level) if level < part.num_levels - 1 else f"{level}, own KV",
            str(len(tokens)),
            str(int(num_rows[at].sum())),
            _span(tokens, "").removesuffix(" s").removesuffix(" "),
            format_bytes(int(tokens.sum()) * token_bytes),
            format_bytes(int((tokens * requests[at]).sum()) * token_bytes),
        )

"""From what was decided on each part to the arrays of a plan."""

from __future__ import annotations

import itertools
from ctypes import PyDLL
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.cost import Backend
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr, ranges
from flashinfer_cascade.fold import Cut
from flashinfer_cascade.forest import PrefixForest
from flashinfer_cascade.native import lay_out_columns
from flashinfer_cascade.plan import CascadePlan, Executor, PartName, PlanPart

_structure_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided on one part, before it is laid out; `tokens_left` and `raw` are those of `native.Rated`."""

    name: PartName
    executor: Executor
    reason: str
    forest: PrefixForest
    cut: Cut
    backends: tuple[Backend, ...]
    predicted_us: dict[str, float]
    tokens_left: int
    raw: Int64Array | None = None

    @property
    def order(self) -> Int64Array:
        """Requests in the order of the plan: the forest's where it matters, the batch's own when flat."""
        return self.forest.order if self.cut.kept.any() else np.sort(self.forest.order)

    def same_as(self, other: Choice) -> bool:
        """Whether it comes to the same plan as another choice on the same forest."""
        return (
            self.executor == other.executor
            and self.backends == other.backends
            and self.cut.num_levels == other.cut.num_levels
            and bool((self.cut.kept == other.cut.kept).all())
        )


def lay_out(
    config: CascadeConfig,
    batch: Batch,
    choices: list[Choice],
    *,
    core: PyDLL | None = None,
    last: CascadePlan | None = None,
) -> CascadePlan:
    """Lay out all parts' requests, rows and segments in one set of arrays.

    Args:
        config: the attention.
        batch: what is planned.
        choices: its parts.
        core: does it faster, and the same.
        last: a plan whose structure, where this one has the same, is used again.
    """
    kept = [int(np.count_nonzero(choice.cut.kept)) for choice in choices]
    if core is None or any(num and choice.raw is None for num, choice in zip(kept, choices, strict=True)):
        columns = _columns(batch, choices)
    else:
        cuts = [(choice.forest, num, choice.raw) for num, choice in zip(kept, choices, strict=True)]
        row_order, rest = lay_out_columns(core, batch, cuts)
        columns = Columns(row_order, *rest)
    parts = []
    begin = seg = 0
    for choice, num in zip(choices, kept, strict=True):
        forest, cut = choice.forest, choice.cut
        end = begin + len(forest.order)
        seg_end = seg + end - begin + num
        row_begin, row_end = int(columns.qo_indptr[begin]), int(columns.qo_indptr[end])
        parts.append(
            PlanPart(
                name=choice.name,
                executor=choice.executor,
                reason=choice.reason,
                request_begin=begin,
                request_end=end,
                row_begin=row_begin,
                row_end=row_end,
                seg_begin=seg,
                seg_end=seg_end,
                num_levels=cut.num_levels,
                backends=choice.backends,
                causal=row_end - row_begin > end - begin and _is_causal(batch, forest),
                forest=forest,
                kept=cut.kept,
                predicted_us=choice.predicted_us,
            )
        )
        begin, seg = end, seg_end
    structure_id, generation = 0, 0
    if last is not None and _same_structure(columns, parts, last):
        columns = columns._replace(row_order=last.row_order, **{name: getattr(last, name) for name in STRUCTURE})
        structure_id, generation = last.structure_id, last.generation + 1
    return CascadePlan(
        config=config,
        parts=tuple(parts),
        pages=batch.pages,
        structure_id=structure_id or next(_structure_ids),
        generation=generation,
        **columns._asdict(),
    )


STRUCTURE = ("request_order", "qo_indptr", "seg_row_begin", "seg_num_rows", "seg_kv_start", "seg_level")
"""Arrays of a plan that plans of one structure share, beside `row_order`, which follows from the first two."""


class Columns(NamedTuple):
    """Arrays of a plan: int32, named and shaped as there."""

    row_order: Int32Array | None
    request_order: Int32Array
    qo_indptr: Int32Array
    row_pos: Int32Array
    seg_row_begin: Int32Array
    seg_num_rows: Int32Array
    seg_page_begin: Int32Array
    seg_num_pages: Int32Array
    seg_kv_start: Int32Array
    seg_kv_len: Int32Array
    seg_level: Int32Array


def _same_structure(columns: Columns, parts: list[PlanPart], last: CascadePlan) -> bool:
    return (
        len(columns.seg_level) == last.num_segments
        and len(parts) == len(last.parts)
        and all(
            (a.name, a.executor, a.seg_end, a.backends) == (b.name, b.executor, b.seg_end, b.backends)
            for a, b in zip(parts, last.parts, strict=True)
        )
        and all(getattr(columns, name).tobytes() == getattr(last, name).tobytes() for name in STRUCTURE)
    )


def _is_causal(batch: Batch, forest: PrefixForest) -> bool:
    return bool(((batch.qo_lens > 1) & (batch.seq_lens > 0))[forest.order].any())


def _columns(batch: Batch, choices: list[Choice]) -> Columns:
    order = np.concatenate([choice.order for choice in choices])
    identity = bool((order[1:] > order[:-1]).all())
    qo_lens = batch.qo_lens[order]
    qo_indptr = indptr(qo_lens)
    row_order = None if identity else ranges(indptr(batch.qo_lens)[order], qo_lens).astype(np.int32)
    seq_lens = batch.seq_lens[order]
    row_pos = seq_lens - 1
    if batch.num_rows > batch.num_requests:
        row_pos = ranges(seq_lens - qo_lens, qo_lens)
        row_pos[(seq_lens == 0).repeat(qo_lens)] = -1
    segments = []
    begin = 0
    for choice in choices:
        end = begin + len(choice.forest.order)
        segments.append(_segments(batch, choice, qo_indptr[begin : end + 1]))
        begin = end
    joined = segments[0] if len(segments) == 1 else map(np.concatenate, zip(*segments, strict=True))
    return Columns(row_order, *(array.astype(np.int32) for array in (order, qo_indptr, row_pos, *joined)))


class _Segments(NamedTuple):
    """Columns of a part's segments, int64[num_segments] each."""

    row_begin: Int64Array
    num_rows: Int64Array
    page_from: Int64Array
    page_counts: Int64Array
    kv_start: Int64Array
    kv_len: Int64Array
    level: Int64Array


def _segments(batch: Batch, choice: Choice, qo_indptr: Int64Array) -> _Segments:
    """A part's segments by level and row: kept nodes, then each request's own KV."""
    forest, cut, page, order = choice.forest, choice.cut, batch.page_size, choice.order
    nodes = np.flatnonzero(cut.kept)
    nodes = nodes[np.lexsort((forest.begin[nodes], cut.node_level[nodes]))]
    begin, end = forest.begin[nodes], forest.end[nodes]
    node_start = cut.node_start[nodes]
    node_pages = forest.page_begin[nodes] + forest.num_pages[nodes] - node_start
    table = batch.page_begin[order]
    own_pages = batch.page_counts[order] - cut.tail_start
    return _Segments(
        row_begin=np.concatenate((qo_indptr[begin], qo_indptr[:-1])),
        num_rows=np.concatenate((qo_indptr[end] - qo_indptr[begin], qo_indptr[1:] - qo_indptr[:-1])),
        page_from=np.concatenate((table[begin] + node_start, table + cut.tail_start)),
        page_counts=np.concatenate((node_pages, own_pages)),
        kv_start=np.concatenate((node_start, cut.tail_start)) * page,
        kv_len=np.concatenate((node_pages * page, batch.seq_lens[order] - cut.tail_start * page)),
        level=np.concatenate((cut.node_level[nodes], np.full(len(own_pages), cut.num_levels - 1))),
    )

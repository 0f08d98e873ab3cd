"""From what was decided on each part to the arrays of a plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.cost import Backend, PartShape
from flashinfer_cascade.csr import Int64Array, indptr, ranges
from flashinfer_cascade.fold import Cut
from flashinfer_cascade.forest import PrefixForest
from flashinfer_cascade.plan import CascadePlan, Executor, PartName, PlanPart

_structure_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided on one part, before it is laid out."""

    name: PartName
    executor: Executor
    reason: str
    shape: PartShape
    cut: Cut
    backends: tuple[Backend, ...]
    predicted_us: dict[str, float]

    @property
    def forest(self) -> PrefixForest:
        """All sharing among the part's requests."""
        return self.shape.forest

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


def lay_out(config: CascadeConfig, batch: Batch, choices: list[Choice]) -> CascadePlan:
    """Lay out all parts' requests, rows and segments in one set of arrays."""
    order = np.concatenate([choice.order for choice in choices])
    identity = bool((order[1:] > order[:-1]).all())
    qo_lens = batch.qo_lens[order]
    qo_indptr = indptr(qo_lens)
    row_order = None if identity else ranges(indptr(batch.qo_lens)[order], qo_lens)
    seq_lens = batch.seq_lens[order]
    row_pos = seq_lens - 1
    if batch.num_rows > batch.num_requests:
        row_pos = ranges(seq_lens - qo_lens, qo_lens)
        row_pos[(seq_lens == 0).repeat(qo_lens)] = -1
    segments = []
    parts = []
    begin = seg = 0
    for choice in choices:
        end = begin + len(choice.forest.order)
        segments.append(_segments(batch, choice, qo_indptr[begin : end + 1]))
        num = len(segments[-1].row_begin)
        parts.append(
            PlanPart(
                name=choice.name,
                executor=choice.executor,
                reason=choice.reason,
                request_begin=begin,
                request_end=end,
                row_begin=int(qo_indptr[begin]),
                row_end=int(qo_indptr[end]),
                seg_begin=seg,
                seg_end=seg + num,
                num_levels=choice.cut.num_levels,
                backends=choice.backends,
                causal=bool(((qo_lens > 1) & (seq_lens > 0))[begin:end].any()),
                forest=choice.forest,
                kept=choice.cut.kept,
                predicted_us=choice.predicted_us,
            )
        )
        begin, seg = end, seg + num
    joined = segments[0] if len(segments) == 1 else map(np.concatenate, zip(*segments, strict=True))
    row_begin, num_rows, page_from, page_counts, kv_start, kv_len, level = joined
    return CascadePlan(
        config=config,
        parts=tuple(parts),
        row_order=None if row_order is None else row_order.astype(np.int32),
        row_pos=row_pos.astype(np.int32),
        request_order=order.astype(np.int32),
        qo_indptr=qo_indptr.astype(np.int32),
        seg_row_begin=row_begin.astype(np.int32),
        seg_num_rows=num_rows.astype(np.int32),
        pages=batch.pages,
        seg_page_begin=page_from.astype(np.int32),
        seg_num_pages=page_counts.astype(np.int32),
        seg_kv_start=kv_start.astype(np.int32),
        seg_kv_len=kv_len.astype(np.int32),
        seg_level=level.astype(np.int32),
        structure_id=next(_structure_ids),
    )


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

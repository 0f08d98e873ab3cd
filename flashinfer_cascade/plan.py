"""The immutable result of planning, and its two views: logical segments and FlashInfer's levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from flashinfer_cascade.capacity import PlanCapacity, capacity_error, level_edges
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.cost import Backend
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr, ranges
from flashinfer_cascade.errors import BackendUnavailableError, CapacityError, InvalidBatchError, check_count, check_type
from flashinfer_cascade.forest import PrefixForest
from flashinfer_cascade.pages import INDEX_SLACK, PageView, gather_runs

if TYPE_CHECKING:
    from rich.console import RenderableType

Executor = Literal["flat", "levels", "segments", "stock"]
PartName = Literal["decode", "append"]


class Level(NamedTuple):
    """One level in the form of FlashInfer's paged-prefill ``plan``; every row of q lies in exactly one group.

    Attributes:
        qo_indptr: int32[num_groups + 1], CPU, in rows of ``q[row_order]``, ends at the number of rows.
        kv_indptr: int32[num_groups + 1], CPU, in pages, starts at 0, non-decreasing.
        kv_indices: int32[kv_indptr[-1]], CPU, page ids.
        kv_last_page_len: int32[num_groups], CPU, in tokens, 1..page_size; 0 for a group without KV.
    """

    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class PlanPart:
    """A subset of the batch's requests with one executor.

    Attributes:
        name: "decode" (requests with few new tokens) or "append" (the others).
        executor: how the part runs.
        reason: why, in one sentence.
        request_begin, request_end: its requests, as positions of `CascadePlan.request_order`.
        row_begin, row_end: its plan rows.
        seg_begin, seg_end: its segments.
        num_levels: levels of its own view, 1 when flat.
        backends: kernel of each level.
        causal: whether some request appends more than one token, so that the last level needs a causal mask.
        forest: all sharing found among its requests. Its order of requests is the plan's, unless the part is flat:
            then the plan keeps the batch's.
        kept: bool[forest.num_nodes], nodes that end a segment; the others are merged into what lies below.
        predicted_us: predicted GPU time a layer of each candidate, by executor.
    """

    name: PartName
    executor: Executor
    reason: str
    request_begin: int
    request_end: int
    row_begin: int
    row_end: int
    seg_begin: int
    seg_end: int
    num_levels: int
    backends: tuple[Backend, ...]
    causal: bool
    forest: PrefixForest
    kept: np.ndarray[Any, np.dtype[np.bool_]]
    predicted_us: dict[str, float]

    @property
    def num_requests(self) -> int:
        """Requests of the part."""
        return self.request_end - self.request_begin

    def told_again(self, reason: str, predicted_us: dict[str, float]) -> PlanPart:
        """The same part, for a reason and with predicted times of now."""
        copy = object.__new__(PlanPart)  # in a decode loop, where dataclasses.replace takes its time
        for name in _PART_FIELDS:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "reason", reason)
        object.__setattr__(copy, "predicted_us", predicted_us)
        return copy


_PART_FIELDS = tuple(f.name for f in fields(PlanPart))


@dataclass(frozen=True, slots=True, eq=False)
class CascadePlan:
    """A batch's attention, cut into segments: runs of KV, each attended by a contiguous run of plan rows.

    Every row's visible KV is the disjoint union of its segments. A row at position p of its sequence sees the first
    ``clip(p + 1 - seg_kv_start, 0, seg_kv_len)`` tokens of each: all of a shared segment, and of its request's
    own one (the last) all up to itself. Arrays are read-only; two plans are equal when they do the same.

    Attributes:
        config: the configuration it was made for.
        parts: consecutive in requests, rows and segments.
        row_order: int32[num_rows], row of q at each plan row; None when that is the identity.
        row_pos: int32[num_rows], position of each plan row in its sequence; -1 for padding, which sees nothing.
        request_order: int32[num_requests], request at each position.
        qo_indptr: int32[num_requests + 1], plan rows of the request at each position.
        seg_row_begin: int32[num_segments], first plan row.
        seg_num_rows: int32[num_segments], plan rows, at least 1.
        pages: the page ids that segments refer to, for device copies that follow them.
        seg_page_begin: int32[num_segments], where the run of each segment begins in `pages.ids`.
        seg_num_pages: int32[num_segments], pages of it; 0 for padding.
        seg_kv_start: int32[num_segments], in tokens, a multiple of page_size: where the run lies in its sequences.
        seg_kv_len: int32[num_segments], in tokens; 0 for padding.
        seg_level: int32[num_segments], level within the part; segments are sorted by part, level and row.
        structure_id: names the structure within this process; plans that share it differ in lengths alone. A
            one-shot plan has one of its own.
        generation: how many plans of this structure came before.
    """

    config: CascadeConfig
    parts: tuple[PlanPart, ...]
    row_order: Int32Array | None
    row_pos: Int32Array
    request_order: Int32Array
    qo_indptr: Int32Array
    seg_row_begin: Int32Array
    seg_num_rows: Int32Array
    pages: PageView
    seg_page_begin: Int32Array
    seg_num_pages: Int32Array
    seg_kv_start: Int32Array
    seg_kv_len: Int32Array
    seg_level: Int32Array
    structure_id: int = 0
    generation: int = 0
    _seg_pages: Int32Array | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for array in (*self._arrays(), self.seg_page_begin, *(part.kept for part in self.parts)):
            if array is not None:
                array.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that a copy's arrays are read-only too; with its own page ids alone.
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        ids = np.concatenate((self.seg_pages, np.full(INDEX_SLACK, -1, np.int32)))
        values["pages"] = PageView(ids, len(self.seg_pages))
        values["seg_page_begin"] = self.seg_page_indptr[:-1]
        return CascadePlan, tuple(values.values())

    def _arrays(self) -> Iterator[Int32Array | None]:
        """All but the page ids that makes two plans of one configuration and one choice of kernels the same."""
        yield from (self.row_order, self.row_pos, self.request_order, self.qo_indptr)
        yield from (self.seg_row_begin, self.seg_num_rows, self.seg_num_pages)
        yield from (self.seg_kv_start, self.seg_kv_len, self.seg_level)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CascadePlan):
            return NotImplemented
        return (
            self.config == other.config
            and [(p.name, p.executor, p.seg_end, p.backends) for p in self.parts]
            == [(p.name, p.executor, p.seg_end, p.backends) for p in other.parts]
            and all(
                a is b or (a is not None and b is not None and np.array_equal(a, b))
                for a, b in zip(self._arrays(), other._arrays(), strict=True)
            )
            and np.array_equal(self.seg_pages, other.seg_pages)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, and large

    @property
    def num_requests(self) -> int:
        """Requests, padding included."""
        return len(self.request_order)

    @property
    def num_rows(self) -> int:
        """Query tokens."""
        return len(self.row_pos)

    @property
    def num_segments(self) -> int:
        """Segments over all parts."""
        return len(self.seg_num_rows)

    @property
    def num_levels(self) -> int:
        """Levels of the whole-batch view; 1 when nothing is cascaded."""
        return max(part.num_levels for part in self.parts)

    @property
    def causal(self) -> bool:
        """Whether some request appends more than one token, so that the last level needs a causal mask."""
        return any(part.causal for part in self.parts)

    @property
    def row_rank(self) -> Int32Array | None:
        """int32[num_rows]: plan row of each row of q, the inverse of `row_order`; None when the identity."""
        if self.row_order is None:
            return None
        rank = np.empty_like(self.row_order)
        rank[self.row_order] = np.arange(len(rank), dtype=np.int32)
        return rank

    @property
    def seg_row_indptr(self) -> Int32Array:
        """int32[num_segments + 1], into `seg_rows`."""
        return indptr(self.seg_num_rows).astype(np.int32)

    @property
    def seg_rows(self) -> Int32Array:
        """int32[seg_row_indptr[-1]]: rows of q of each segment, segment after segment."""
        rows = ranges(self.seg_row_begin, self.seg_num_rows)
        return (rows if self.row_order is None else self.row_order[rows]).astype(np.int32)

    @property
    def seg_page_indptr(self) -> Int32Array:
        """int32[num_segments + 1], into `seg_pages`."""
        return indptr(self.seg_num_pages).astype(np.int32)

    @property
    def seg_pages(self) -> Int32Array:
        """int32[seg_page_indptr[-1]], read-only: page ids of each segment, segment after segment.

        Gathered on first use, which costs time in proportion to the context.
        """
        if self._seg_pages is None:
            gathered = gather_runs(self.pages.ids, self.seg_page_begin, self.seg_num_pages)
            gathered.setflags(write=False)
            object.__setattr__(self, "_seg_pages", gathered)
        assert self._seg_pages is not None
        return self._seg_pages

    def levels(
        self, part: PlanPart | None = None, num_levels: int | None = None, *, with_pages: bool = True
    ) -> list[Level]:
        """The plan in FlashInfer's form, most shared level first; the last holds each request's own KV.

        Args:
            part: this part alone, its rows counted from `PlanPart.row_begin`; None is the whole batch.
            num_levels: pad to this many with levels that hold no KV.
            with_pages: gather kv_indices, which takes time in proportion to the context; else they are left empty,
                and `level_runs` says where they lie.

        Raises:
            CapacityError: the plan has more than `num_levels` levels.
            InvalidBatchError: `part` belongs to another plan, or is none, or `num_levels` is no number.
        """
        if part is not None and not any(part is own for own in self.parts):
            check_type("part", part, PlanPart, "take it from the plan's parts")
            raise InvalidBatchError(f"the part {part.name!r} belongs to another plan: take it from this one's parts")
        if num_levels is not None:
            check_count("num_levels", num_levels, 1)
        parts = self.parts if part is None else (part,)
        used = max(p.num_levels for p in parts)
        total = used if num_levels is None else num_levels
        if used > total:
            raise capacity_error(
                "the plan", {"num_levels": (used, total)}, "Plan with PlannerPolicy.max_levels or capacity="
            )
        return [self._level(parts, level - total, with_pages) for level in range(total)]

    def level_runs(self, level: int) -> tuple[Int32Array, Int32Array]:
        """Where the page ids of a level of the whole batch lie in ``pages.ids``: begins and lengths of its runs.

        One run after the other they are ``levels()[level].kv_indices``.
        """
        segs = self._segs(self.parts, level - self.num_levels)
        return self.seg_page_begin[segs], self.seg_num_pages[segs]

    def level_pages(self, part: PlanPart, level: int) -> tuple[int, int]:
        """Where a level of one part has its page ids: ``levels(part)[level].kv_indices == seg_pages[begin:end]``."""
        low, high = self._level_segments(part, level)
        begin = int(self.seg_num_pages[:low].sum())
        return begin, begin + int(self.seg_num_pages[low:high].sum())

    def _level_segments(self, part: PlanPart, level: int) -> tuple[int, int]:
        if part.num_levels == 1:
            return (part.seg_begin, part.seg_end) if level == 0 else (part.seg_begin, part.seg_begin)
        levels = self.seg_level[part.seg_begin : part.seg_end]
        low, high = levels.searchsorted((level, level + 1)).tolist()
        return part.seg_begin + low, part.seg_begin + high

    def _level(self, parts: Sequence[PlanPart], from_last: int, with_pages: bool) -> Level:
        """All parts' segments at one level, counted back from the last (-1)."""
        segs, borders = self._level_groups(parts, from_last)
        counts, kv_len = self.seg_num_pages[segs], self.seg_kv_len[segs]
        last_page_len = np.where(kv_len > 0, (kv_len - 1) % self.config.page_size + 1, 0)
        kv_indices = self.pages.ids[:0]
        if with_pages:
            kv_indices = np.array(gather_runs(self.pages.ids, self.seg_page_begin[segs], counts))
        if len(borders) - 1 > len(counts):  # groups between the segments have no KV
            group = np.searchsorted(borders, self.seg_row_begin[segs] - parts[0].row_begin)
            of_segs = counts, last_page_len
            counts, last_page_len = np.zeros((2, len(borders) - 1), np.int32)
            counts[group], last_page_len[group] = of_segs
        return Level(
            borders.astype(np.int32), indptr(counts).astype(np.int32), kv_indices, last_page_len.astype(np.int32)
        )

    def _segs(self, parts: Sequence[PlanPart], from_last: int) -> slice | Int64Array:
        """Segments of a level of some parts, sorted by row: as they lie by level in a part, and parts by rows."""
        if len(parts) == 1:
            return slice(*self._level_segments(parts[0], parts[0].num_levels + from_last))
        spans = (self._level_segments(part, part.num_levels + from_last) for part in parts)
        return np.concatenate([np.arange(low, high) for low, high in spans])

    def _level_groups(self, parts: Sequence[PlanPart], from_last: int) -> tuple[slice | Int64Array, Int64Array]:
        """Segments of a level, and the borders of its groups in rows of the parts."""
        segs = self._segs(parts, from_last)
        row_0, num_rows = parts[0].row_begin, parts[-1].row_end - parts[0].row_begin
        begin = self.seg_row_begin[segs] - row_0
        return segs, level_edges(begin, begin + self.seg_num_rows[segs], num_rows)

    def usage(self) -> PlanCapacity:
        """What the plan needs reserved."""
        shared = [self._level_groups(self.parts, level)[1] for level in range(-self.num_levels, -1)]
        return PlanCapacity(
            num_rows=self.num_rows,
            num_segments=self.num_segments,
            num_partials=int(self.seg_num_rows.sum()),
            num_page_indices=int(self.seg_num_pages.sum()),
            num_levels=self.num_levels,
            num_slots=max((len(borders) - 1 for borders in shared), default=0),
        )

    def to_flashinfer(
        self,
        num_levels: int | None = None,
        slots: int | Sequence[int] | None = None,
        part: PlanPart | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of ``flashinfer.MultiLevelCascadeAttentionWrapper.plan``, for ``q[row_order]``.

        All tensors are int32 on the CPU, where FlashInfer reads them without waiting for the GPU.

        Args:
            num_levels: levels of the wrapper; missing ones are added without KV.
            slots: groups of each level, or one number for all: what a wrapper built for CUDA graphs fixes.
                Missing groups are added without rows. In CUDA graphs FlashInfer needs at least as many rows, in the
                first plan of a wrapper, as it has groups.
            part: this part alone, for its rows of ``q[row_order]``; None is the whole batch.

        Raises:
            CapacityError: the plan has more levels or groups.
            BackendUnavailableError: torch is missing.
        """
        try:
            import torch
        except ImportError as error:
            raise BackendUnavailableError("to_flashinfer needs torch: pip install torch") from error
        levels = self.levels(part, num_levels)
        given: Any = slots
        is_array = isinstance(given, np.ndarray) and given.ndim > 0
        is_list = is_array or (isinstance(given, Sequence) and not isinstance(given, str))
        per_level = list(given) if is_list else [given] * len(levels)
        for count in per_level:
            if count is not None:
                check_count("slots", count, 0)
        if len(per_level) != len(levels):
            raise CapacityError(f"slots names {len(per_level)} levels, but there are {len(levels)}: give one per level")
        padded = [
            level if count is None else _pad_groups(level, int(count))
            for level, count in zip(levels, per_level, strict=True)
        ]
        names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
        config = self.config
        return {
            **{name: [torch.tensor(level[i]) for level in padded] for i, name in enumerate(names)},
            "num_qo_heads": config.num_qo_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": config.page_size,
            "causal": self.causal if part is None else part.causal,
            "sm_scale": config.softmax_scale,
            "window_left": config.window_left,
            "logits_soft_cap": config.logits_soft_cap,
            "q_data_type": getattr(torch, config.dtype),
            "kv_data_type": getattr(torch, config.kv_dtype),
        }

    def explain(self) -> str:
        """The forest, what was merged and why, bytes read against flat, predicted times: as plain text."""
        from flashinfer_cascade.report import explain

        return explain(self)

    def __rich__(self) -> RenderableType:
        from flashinfer_cascade.report import render

        return render(self)


def _pad_groups(level: Level, slots: int) -> Level:
    missing = slots - len(level.kv_last_page_len)
    if missing < 0:
        raise capacity_error(
            "a level", {"num_slots": (slots - missing, slots)}, "Plan with capacity=, or reserve more slots"
        )
    repeat = np.full(missing, level.qo_indptr[-1], np.int32)
    return Level(
        np.concatenate((level.qo_indptr, repeat)),
        np.concatenate((level.kv_indptr, np.full(missing, level.kv_indptr[-1], np.int32))),
        level.kv_indices,
        np.concatenate((level.kv_last_page_len, np.zeros(missing, np.int32))),
    )

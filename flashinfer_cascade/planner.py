"""From block tables to a plan: the one place that puts the steps together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from flashinfer_cascade.batch import Batch, make_batch
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.cost import PROFILES, Backend, CostModel, DeviceProfile, PartShape
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr, ranges
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.fold import BoolArray, Cut, best_cuts, cut_at, no_cut
from flashinfer_cascade.forest import PrefixForest, build_forest
from flashinfer_cascade.plan import CascadePlan, Executor, PartName, PlanCapacity, PlanPart, capacity_error

SLICE_COPY_PAGES = 24
"""Runs longer than this on average are copied one by one rather than gathered page by page."""


class CascadePlanner:
    """Plans batches of one configuration. Keeps no state of a batch; one planner serves one thread.

    Args:
        config: the attention and the limits.
        policy: how to choose; None is `PlannerPolicy()`.
        profile: the GPU that will run the plans: a name in `cost.PROFILES` or a profile of your own.

    Raises:
        UnsupportedError: `profile` names no built-in profile.
    """

    def __init__(
        self,
        config: CascadeConfig,
        policy: PlannerPolicy | None = None,
        profile: str | DeviceProfile = "h200",
    ) -> None:
        self.config = config
        self.policy = PlannerPolicy() if policy is None else policy
        if isinstance(profile, str):
            if profile not in PROFILES:
                raise UnsupportedError(
                    f"profile {profile!r} is not built in ({', '.join(PROFILES)}): pass a DeviceProfile"
                )
            profile = PROFILES[profile]
        self.profile = profile
        self._cost = CostModel(config, profile)
        self._structures = 0

    def plan(
        self, block_tables: Any, seq_lens: Any, qo_lens: Any = None, *, capacity: PlanCapacity | None = None
    ) -> CascadePlan:
        """Plan one step.

        Args:
            block_tables: one table per request, in any form that `batch.make_batch` takes.
            seq_lens: int[num_requests], KV tokens with this step's new ones; 0 marks a padding request.
            qo_lens: int[num_requests], query rows of this step; None is one each.
            capacity: what the plan must fit into; nodes are merged, the least useful first, until it does.

        Raises:
            InvalidBatchError: wrong input; names the request and the position.
            UnsupportedError: the policy forces a cascade that a sliding window makes wrong.
            CapacityError: not even the flat plan fits.
        """
        batch = make_batch(self.config, block_tables, seq_lens, qo_lens)
        choices = self._choose_parts(batch)
        plan = self._assemble(batch, choices)
        if capacity is not None and capacity.lacks(plan.usage()):
            plan = self._fit(batch, choices, capacity)
        return plan

    def _choose_parts(self, batch: Batch) -> list[_Choice]:
        append = batch.qo_lens > self.policy.max_decode_rows
        if not append.any():
            return [self._choose("decode", batch, None)]
        if append.all():
            return [self._choose("append", batch, None)]
        return [
            self._choose("decode", batch, np.flatnonzero(~append)),
            self._choose("append", batch, np.flatnonzero(append)),
        ]

    def _choose(self, name: PartName, batch: Batch, requests: Int64Array | None) -> _Choice:
        """Decide on one part: its sharing, its segments, its executor."""
        forest = build_forest(batch, requests)
        shape = PartShape.of(batch, forest)
        flat_us, flat_backends = self._cost.flat(shape)

        def flat(reason: str, **others: float) -> _Choice:
            return _Choice(name, "flat", reason, shape, no_cut(forest), flat_backends, {"flat": flat_us, **others})

        policy, window = self.policy, self.config.window_left
        if policy.executor == "flat":
            return flat("the policy asks for flat")
        longest = int(batch.seq_lens[forest.order].max())
        if 0 <= window < longest - 1:
            if policy.executor != "auto":
                raise UnsupportedError(
                    f"window_left={window} does not cover a context of {longest} tokens, and a cascade over part "
                    "of a window is wrong: use executor='auto', which plans such batches flat"
                )
            return flat(f"window_left={window} does not cover the longest context of {longest} tokens")
        if not forest.num_nodes:
            return flat("no full page is shared")
        cuts = self._candidate_cuts(shape)
        if not cuts:
            return flat("every shared run is too small to pay for a level")
        rated = [(*self._cost.levels(shape, cut), cut) for cut in cuts]
        levels_us, backends, cut = min(rated, key=lambda item: item[0])
        predicted = {"flat": flat_us, "levels": levels_us}
        if policy.executor != "auto":
            reason = f"the policy asks for {policy.executor}"
            return _Choice(name, policy.executor, reason, shape, cut, backends, predicted)
        gain = flat_us / levels_us
        if gain < policy.min_speedup:
            return flat(
                f"a cascade is predicted {gain:.2f}x as fast, below min_speedup={policy.min_speedup:g}",
                levels=levels_us,
            )
        reason = f"predicted {gain:.2f}x as fast as flat"
        return _Choice(name, "levels", reason, shape, cut, backends, predicted)

    def _candidate_cuts(self, shape: PartShape) -> list[Cut]:
        forest = shape.forest
        everything = np.ones(forest.num_nodes, np.bool_)
        masks = list(best_cuts(forest, self._cost.fold_costs(shape))) if self.policy.fold else [everything]
        distinct = {mask.tobytes(): mask for mask in masks if mask.any()}
        if not distinct and self.policy.executor != "auto":
            distinct = {b"": everything}
        cuts = []
        for mask in distinct.values():
            cut = cut_at(forest, mask)
            if cut.num_levels > self.policy.max_levels:
                kept = _drop_until(
                    lambda kept: cut_at(forest, kept).num_levels <= self.policy.max_levels, mask, _usefulness(forest)
                )
                cut = cut_at(forest, kept)
            cuts.append(cut)
        return cuts

    def _fit(self, batch: Batch, choices: list[_Choice], capacity: PlanCapacity) -> CascadePlan:
        """Merge nodes over all parts, the least useful first, until the plan fits; flat is the last resort."""

        def plan_with(kept: BoolArray) -> CascadePlan:
            refitted, low = [], 0
            for choice in choices:
                high = low + choice.forest.num_nodes
                refitted.append(self._folded_to(choice, kept[low:high]))
                low = high
            return self._assemble(batch, refitted)

        kept = np.concatenate([choice.cut.kept for choice in choices])
        lacking = capacity.lacks(plan_with(np.zeros_like(kept)).usage())
        if lacking:
            raise capacity_error("the flat plan", lacking, "Reserve more, or run this batch eagerly")
        useful = np.concatenate([_usefulness(choice.forest) for choice in choices])
        return plan_with(_drop_until(lambda kept: not capacity.lacks(plan_with(kept).usage()), kept, useful))

    def _folded_to(self, choice: _Choice, kept: BoolArray) -> _Choice:
        if (kept == choice.cut.kept).all():
            return choice
        cut = cut_at(choice.forest, kept)
        executor: Executor = choice.executor if kept.any() else "flat"
        us, backends = self._cost.levels(choice.shape, cut) if kept.any() else self._cost.flat(choice.shape)
        return replace(
            choice,
            executor=executor,
            reason=f"merged {int(choice.cut.kept.sum() - kept.sum())} nodes to fit the capacity; {choice.reason}",
            cut=cut,
            backends=backends,
            predicted_us=choice.predicted_us | {"levels" if kept.any() else "flat": us},
        )

    def _assemble(self, batch: Batch, choices: list[_Choice]) -> CascadePlan:
        """Lay out all parts' requests, rows and segments in one set of arrays."""
        order = np.concatenate([choice.forest.order for choice in choices])
        identity = bool((order[1:] > order[:-1]).all())
        qo_lens = batch.qo_lens[order]
        qo_indptr = indptr(qo_lens)
        row_order = None if identity else ranges(indptr(batch.qo_lens)[order], qo_lens)
        seq_lens = batch.seq_lens[order]
        row_pos = ranges(np.where(seq_lens > 0, seq_lens - qo_lens, -1), qo_lens)
        row_pos[np.repeat(seq_lens == 0, qo_lens)] = -1
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
                    forest=choice.forest,
                    kept=choice.cut.kept,
                    predicted_us=choice.predicted_us,
                )
            )
            begin, seg = end, seg + num
        joined = [np.concatenate(column) for column in zip(*segments, strict=True)]
        row_begin, num_rows, page_from, page_counts, kv_start, kv_len, level = joined
        self._structures += 1
        return CascadePlan(
            config=self.config,
            parts=tuple(parts),
            row_order=None if row_order is None else row_order.astype(np.int32),
            row_pos=row_pos.astype(np.int32),
            request_order=order.astype(np.int32),
            qo_indptr=qo_indptr.astype(np.int32),
            seg_row_begin=row_begin.astype(np.int32),
            seg_num_rows=num_rows.astype(np.int32),
            seg_page_indptr=indptr(page_counts).astype(np.int32),
            seg_pages=_gather_runs(batch, page_from, page_counts),
            seg_kv_start=kv_start.astype(np.int32),
            seg_kv_len=kv_len.astype(np.int32),
            seg_level=level.astype(np.int32),
            structure_id=self._structures,
        )


@dataclass(frozen=True, slots=True)
class _Choice:
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
        return self.shape.forest


class _Segments(NamedTuple):
    """Columns of a part's segments, int64[num_segments] each."""

    row_begin: Int64Array
    num_rows: Int64Array
    page_from: Int64Array
    page_counts: Int64Array
    kv_start: Int64Array
    kv_len: Int64Array
    level: Int64Array


def _segments(batch: Batch, choice: _Choice, qo_indptr: Int64Array) -> _Segments:
    """A part's segments by level and row: kept nodes, then each request's own KV."""
    forest, cut, page = choice.forest, choice.cut, batch.page_size
    nodes = np.flatnonzero(cut.kept)
    nodes = nodes[np.lexsort((forest.begin[nodes], cut.node_level[nodes]))]
    begin, end = forest.begin[nodes], forest.end[nodes]
    node_start = cut.node_start[nodes]
    node_pages = forest.page_begin[nodes] + forest.num_pages[nodes] - node_start
    table = batch.kv_indptr[forest.order]
    own_pages = np.diff(batch.kv_indptr)[forest.order] - cut.tail_start
    return _Segments(
        row_begin=np.concatenate((qo_indptr[begin], qo_indptr[:-1])),
        num_rows=np.concatenate((qo_indptr[end] - qo_indptr[begin], np.diff(qo_indptr))),
        page_from=np.concatenate((table[begin] + node_start, table + cut.tail_start)),
        page_counts=np.concatenate((node_pages, own_pages)),
        kv_start=np.concatenate((node_start, cut.tail_start)) * page,
        kv_len=np.concatenate((node_pages * page, batch.seq_lens[forest.order] - cut.tail_start * page)),
        level=np.concatenate((cut.node_level[nodes], np.full(len(own_pages), cut.num_levels - 1))),
    )


def _gather_runs(batch: Batch, starts: Int64Array, counts: Int64Array) -> Int32Array:
    """Concatenate ``kv_indices[start:start + count]`` over all pairs."""
    pages, ends = batch.kv_indices, starts + counts
    if starts[0] == 0 and (starts[1:] == ends[:-1]).all():
        return pages[: ends[-1]]
    if counts.sum() > SLICE_COPY_PAGES * len(starts):
        return np.concatenate([pages[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
    return pages[ranges(starts, counts)]


def _usefulness(forest: PrefixForest) -> Int64Array:
    """Page reads that keeping each node saves."""
    return forest.num_pages * (forest.end - forest.begin - 1)


def _drop_until(fits: Callable[[BoolArray], bool], kept: BoolArray, useful: Int64Array) -> BoolArray:
    """Unkeep as few nodes as needed, the least useful first."""
    candidates = np.flatnonzero(kept)
    candidates = candidates[np.argsort(useful[candidates], kind="stable")]

    def without(count: int) -> BoolArray:
        rest = kept.copy()
        rest[candidates[:count]] = False
        return rest

    count = bisect_left(range(len(candidates)), True, key=lambda count: fits(without(count)))
    # Groups without KV can make a level larger with one node fewer: go on until it really fits.
    while count < len(candidates) and not fits(without(count)):
        count += 1
    return without(count)

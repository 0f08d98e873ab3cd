"""What to do with each part of a batch: which segments, which executor, and why."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import PyDLL
from dataclasses import replace

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.capacity import PlanCapacity, capacity_error, fit_cut, num_slots
from flashinfer_cascade.config import MAX_INT32, CascadeConfig, PlannerPolicy
from flashinfer_cascade.cost import Backend, CostModel, PartShape
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.fold import BoolArray, Cut, FoldCosts, best_cuts, cut_at, no_cut
from flashinfer_cascade.forest import PrefixForest, build_forest
from flashinfer_cascade.layout import Choice, lay_out
from flashinfer_cascade.native import Rated, Rater, Status
from flashinfer_cascade.plan import CascadePlan, Executor, PartName
from flashinfer_cascade.profile import DeviceProfile
from flashinfer_cascade.segment_cost import SegmentCost, why_no_segments

Groups = list[tuple[PartName, PrefixForest]]
"""The parts of a batch, each with all sharing among its requests."""


NOTHING_SHARED = "no full page is shared"

NO_CASCADE = {
    Status.NOTHING_PAYS: "every shared run is too small to pay for a level",
    Status.NO_ROOM: "the capacity has no room for a shared segment",
}


class Chooser:
    """Decides on batches of one configuration: a pure function of their forests and of rounded lengths.

    Args:
        config: the attention and the limits.
        policy: how to choose.
        profile: the GPU.
        core: decides faster, and the same; None is Python alone.
    """

    def __init__(
        self, config: CascadeConfig, policy: PlannerPolicy, profile: DeviceProfile, core: PyDLL | None = None
    ) -> None:
        self.config = config
        self.policy = policy
        self._cost = CostModel(config, profile)
        self._segments = SegmentCost(config, profile)
        self._rates_levels = policy.executor in ("auto", "levels", "stock")
        self._rates_segments = policy.executor == "segments" or (policy.executor == "auto" and self._segments.runs)
        why_not = why_no_segments(config, profile.capability)
        if policy.executor == "segments" and why_not is not None:
            raise UnsupportedError(f"executor='segments' with {why_not}, use executor='auto'")
        self.core = core
        which = self._rates_levels, self._rates_segments
        self.rater = None if core is None else Rater(core, self._cost, self._segments, policy, *which)

    def split(self, batch: Batch) -> Groups:
        """The parts of a batch, their sharing found from scratch."""
        append = batch.qo_lens > self.policy.max_decode_rows
        names = self.part_names(int(np.count_nonzero(append)), len(append))
        if len(names) == 1:
            return [(names[0], build_forest(batch))]
        return [(name, build_forest(batch, (append == number).nonzero()[0])) for number, name in enumerate(names)]

    def part_names(self, num_append: int, num_requests: int) -> list[PartName]:
        """Names of the parts of a batch, of which so many requests have more than `max_decode_rows` rows."""
        if 0 < num_append < num_requests:
            return ["decode", "append"]
        return ["append" if num_append else "decode"]

    def plan(
        self, batch: Batch, groups: Groups, capacity: PlanCapacity | None, last: CascadePlan | None = None
    ) -> tuple[CascadePlan, list[Choice] | None]:
        """Decide on all parts and lay them out; `last` is for `lay_out`.

        Returns:
            The plan, and what was decided; None for that if the capacity had a say.

        Raises:
            UnsupportedError: the policy forces a cascade that a sliding window makes wrong.
            CapacityError: not even flat fits.
        """
        free = [self.choose(name, batch, forest) for name, forest in groups]
        plan = lay_out(self.config, batch, free, core=self.core, last=last)
        if capacity is None or not capacity.lacks(plan.usage()):
            return plan, free
        flat = PlanCapacity(batch.num_rows, batch.num_requests, batch.num_rows, batch.num_pages, 1, 0)
        if lacking := capacity.lacks(flat):
            raise capacity_error("even a flat plan of this batch", lacking, "Reserve more, or run this batch eagerly")
        # What flat leaves over is given to the parts in turn.
        segments, partials = capacity.num_segments - flat.num_segments, capacity.num_partials - flat.num_partials
        slots = capacity.num_slots - (len(groups) - 1)
        choices = []
        for name, forest in groups:
            room = PlanCapacity(
                num_segments=len(forest.order) + segments,
                num_partials=int(batch.qo_lens[forest.order].sum()) + partials,
                num_levels=capacity.num_levels,
                num_slots=max(slots, 0),
            )
            choices.append(self.choose(name, batch, forest, room))
            cut = choices[-1].cut
            segments -= int(cut.kept.sum())
            partials -= int(PartShape.of(batch, forest).node_rows[cut.kept].sum())
            slots -= num_slots(forest, cut)
        return lay_out(self.config, batch, choices, core=self.core, last=last), None

    def choose(self, name: PartName, batch: Batch, forest: PrefixForest, room: PlanCapacity | None = None) -> Choice:
        """Decide on one part: its segments, its executor."""
        why_flat = self.why_flat(batch, forest)
        rated = self._rate(batch, forest, why_flat is None, room)
        cut, backends = rated.cut, rated.backends
        executor, reason, predicted = self.conclude(why_flat, rated, forest.num_nodes > 0)
        if executor == "flat" or cut is None:
            cut, backends = no_cut(forest), rated.flat_backends
        return Choice(name, executor, reason, forest, cut, backends, predicted, rated.tokens_left, rated.raw)

    def conclude(self, why_flat: str | None, rated: Rated, is_shared: bool) -> tuple[Executor, str, dict[str, float]]:
        """The executor of a part, why, and the predicted times that are told of.

        Args:
            why_flat: why nothing else was looked for; None when it was.
            rated: what came of that; its cut is not read.
            is_shared: whether any page is.
        """
        policy, flat_us, us = self.policy, rated.flat_us, rated.us
        if why_flat is not None:
            return "flat", why_flat, {"flat": flat_us}
        if rated.status != Status.FOUND:
            return "flat", NO_CASCADE[rated.status] if is_shared else NOTHING_SHARED, {"flat": flat_us}
        executor: Executor = "segments" if rated.backends[0] == "segments" else "levels"
        segments = "segment" if rated.merged == 1 else "segments"
        note = f"; {rated.merged} shared {segments} merged to fit the limits" if rated.merged else ""
        if not is_shared:
            note = f"; {NOTHING_SHARED}"
        if policy.executor != "auto":
            executor = policy.executor
            return executor, f"the policy asks for {executor}{note}", {"flat": flat_us, executor: us}
        gain = flat_us / us
        predicted: dict[str, float] = {"flat": flat_us, executor: us}
        if gain < policy.min_speedup:
            if not is_shared:
                return "flat", NOTHING_SHARED, predicted
            low = f"a cascade is predicted {gain:.2f}x as fast, below min_speedup={policy.min_speedup:g}"
            return "flat", low + note, predicted
        return executor, f"predicted {gain:.2f}x as fast as flat{note}", predicted

    def why_flat(self, batch: Batch, forest: PrefixForest) -> str | None:
        """Why no cascade is to be looked for; None when one is."""
        policy, window = self.policy, self.config.window_left
        if policy.executor == "flat":
            return "the policy asks for flat"
        if window >= 0:
            longest = int(batch.seq_lens[forest.order].max())
            if window < longest - 1:
                if policy.executor != "auto":
                    raise UnsupportedError(
                        f"window_left={window} does not cover a context of {longest} tokens, and a cascade over part "
                        "of a window is wrong: use executor='auto', which plans such batches flat"
                    )
                return f"window_left={window} does not cover the longest context of {longest} tokens"
        return None

    def _rate(self, batch: Batch, forest: PrefixForest, cascade: bool, room: PlanCapacity | None) -> Rated:
        """Predict the time of flat attention and, if a cascade is wanted, of the best one."""
        if self.rater is not None and room is None and self.policy.executor != "stock":
            rated = self.rater.rate(batch, forest, cascade)
            if rated.status in (Status.FOUND, Status.NOTHING_PAYS):
                return rated
        shape = PartShape.of(batch, forest)
        lens = batch.seq_lens[forest.order]
        tokens_left = int((shape.context - lens)[lens > 0].min(initial=MAX_INT32))
        flat = self._cost.flat(shape)
        found: list[tuple[float, tuple[Backend, ...], Cut, int]] = []
        wanted = 0
        if cascade and self._rates_levels:
            rate = self._cost.stock if self.policy.executor == "stock" else self._cost.levels
            for mask in self._masks(shape, self._cost.fold_costs):
                wanted += 1
                cut = self._fit(shape, cut_at(forest, mask), room)
                if cut.kept.any():
                    found.append((*rate(shape, cut), cut, int(mask.sum() - cut.kept.sum())))
        if cascade and self._rates_segments:
            (mask,) = self._masks(shape, self._segments.fold_costs) or [np.zeros(forest.num_nodes, np.bool_)]
            cut = self._fit(shape, cut_at(forest, mask), room)
            segments: Backend = "segments"
            merged = int(mask.sum() - cut.kept.sum())
            found.append((self._segments.predict(shape, cut), (segments,) * cut.num_levels, cut, merged))
        if not found:
            return Rated(Status.NO_ROOM if wanted else Status.NOTHING_PAYS, tokens_left, *flat)
        us, backends, cut, merged = min(found, key=lambda item: item[0])
        return Rated(Status.FOUND, tokens_left, *flat, us, backends, cut, merged)

    def _masks(self, shape: PartShape, costs: Callable[[PartShape], FoldCosts]) -> list[BoolArray]:
        """Different choices of nodes to keep, each of some."""
        forest = shape.forest
        everything = np.ones(forest.num_nodes, np.bool_)
        folds = self.policy.fold and forest.num_nodes > 1
        masks = list(best_cuts(forest, costs(shape))) if folds else [everything]
        distinct = {mask.tobytes(): mask for mask in masks if mask.any()}
        if not distinct and self.policy.executor in ("levels", "stock") and forest.num_nodes:
            return [everything]
        return list(distinct.values())

    def _fit(self, shape: PartShape, cut: Cut, room: PlanCapacity | None) -> Cut:
        if room is None and cut.num_levels <= self.policy.max_levels:
            return cut
        room = room or PlanCapacity()
        levels = min(room.num_levels, self.policy.max_levels)
        return fit_cut(shape.forest, shape.node_rows, int(shape.row_indptr[-1]), cut, replace(room, num_levels=levels))

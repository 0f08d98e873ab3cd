"""What to do with each part of a batch: which segments, which executor, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.capacity import PlanCapacity, capacity_error, fit_cut, num_slots
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.cost import CostModel, PartShape
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.fold import Cut, best_cuts, cut_at, no_cut
from flashinfer_cascade.forest import PrefixForest, build_forest
from flashinfer_cascade.layout import Choice, lay_out
from flashinfer_cascade.plan import CascadePlan, Executor, PartName
from flashinfer_cascade.profile import DeviceProfile

Groups = list[tuple[PartName, PrefixForest]]
"""The parts of a batch, each with all sharing among its requests."""


class Chooser:
    """Decides on batches of one configuration: a pure function of their forests and of rounded lengths."""

    def __init__(self, config: CascadeConfig, policy: PlannerPolicy, profile: DeviceProfile) -> None:
        self.config = config
        self.policy = policy
        self._cost = CostModel(config, profile)

    def parts(self, batch: Batch) -> tuple[list[PartName], Int64Array]:
        """Names of the parts of a batch, and which of them each request is in: int64[num_requests]."""
        append = batch.qo_lens > self.policy.max_decode_rows
        if append.any() and not append.all():
            return ["decode", "append"], append.astype(np.int64)
        return ["append" if append[0] else "decode"], np.zeros(len(append), np.int64)

    def split(self, batch: Batch) -> Groups:
        """The parts of a batch, their sharing found from scratch."""
        names, part = self.parts(batch)
        if len(names) == 1:
            return [(names[0], build_forest(batch))]
        return [(name, build_forest(batch, (part == number).nonzero()[0])) for number, name in enumerate(names)]

    def plan(
        self, batch: Batch, groups: Groups, capacity: PlanCapacity | None
    ) -> tuple[CascadePlan, list[Choice] | None]:
        """Decide on all parts and lay them out.

        Returns:
            The plan, and what was decided; None for that if the capacity had a say.

        Raises:
            UnsupportedError: the policy forces a cascade that a sliding window makes wrong.
            CapacityError: not even flat fits.
        """
        free = [self.choose(name, batch, forest) for name, forest in groups]
        plan = lay_out(self.config, batch, free)
        if capacity is None or not (over := capacity.lacks(plan.usage())):
            return plan, free
        flat = PlanCapacity(batch.num_rows, batch.num_requests, batch.num_rows, batch.num_pages, 1, 0)
        if capacity.lacks(flat):
            raise capacity_error("neither the plan nor flat attention", over, "Reserve more, or run this batch eagerly")
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
            cut, shape = choices[-1].cut, choices[-1].shape
            segments -= int(cut.kept.sum())
            partials -= int(shape.node_rows[cut.kept].sum())
            slots -= num_slots(forest, cut)
        return lay_out(self.config, batch, choices), None

    def choose(self, name: PartName, batch: Batch, forest: PrefixForest, room: PlanCapacity | None = None) -> Choice:
        """Decide on one part: its segments, its executor."""
        shape = PartShape.of(batch, forest)
        flat_us, flat_backends = self._cost.flat(shape)

        def flat(reason: str, **others: float) -> Choice:
            return Choice(name, "flat", reason, shape, no_cut(forest), flat_backends, {"flat": flat_us, **others})

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
        wanted = self._candidate_cuts(shape)
        if not wanted:
            return flat("every shared run is too small to pay for a level")
        cuts = [self._fit(shape, cut, room) for cut in wanted]
        if not any(cut.kept.any() for cut in cuts):
            return flat("the capacity has no room for a shared segment")
        cascade: Executor = "levels" if policy.executor == "auto" else policy.executor
        rate = self._cost.stock if cascade == "stock" else self._cost.levels
        rated = [(*rate(shape, cut), cut, i) for i, cut in enumerate(cuts) if cut.kept.any()]
        us, backends, cut, which = min(rated, key=lambda item: item[0])
        predicted: dict[str, float] = {"flat": flat_us, cascade: us}
        merged = int(wanted[which].kept.sum() - cut.kept.sum())
        note = f"; {merged} shared segments merged to fit the limits" if merged else ""
        if policy.executor != "auto":
            return Choice(name, cascade, f"the policy asks for {cascade}{note}", shape, cut, backends, predicted)
        gain = flat_us / us
        if gain < policy.min_speedup:
            low = f"a cascade is predicted {gain:.2f}x as fast, below min_speedup={policy.min_speedup:g}"
            return flat(low + note, levels=us)
        reason = f"predicted {gain:.2f}x as fast as flat{note}"
        return Choice(name, cascade, reason, shape, cut, backends, predicted)

    def _candidate_cuts(self, shape: PartShape) -> list[Cut]:
        forest = shape.forest
        everything = np.ones(forest.num_nodes, np.bool_)
        if self.policy.fold and forest.num_nodes > 1:
            masks = list(best_cuts(forest, self._cost.fold_costs(shape)))
        else:
            masks = [everything]
        distinct = {mask.tobytes(): mask for mask in masks if mask.any()}
        if not distinct and self.policy.executor != "auto":
            distinct = {b"": everything}
        return [cut_at(forest, mask) for mask in distinct.values()]

    def _fit(self, shape: PartShape, cut: Cut, room: PlanCapacity | None) -> Cut:
        if room is None and cut.num_levels <= self.policy.max_levels:
            return cut
        room = room or PlanCapacity()
        levels = min(room.num_levels, self.policy.max_levels)
        return fit_cut(shape.forest, shape.node_rows, int(shape.row_indptr[-1]), cut, replace(room, num_levels=levels))

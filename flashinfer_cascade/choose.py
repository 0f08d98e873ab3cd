"""What to do with each part of a batch: which segments, which executor, and why."""

from __future__ import annotations

from ctypes import PyDLL
from dataclasses import replace

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.capacity import PlanCapacity, capacity_error, fit_cut, num_slots
from flashinfer_cascade.config import MAX_INT32, CascadeConfig, PlannerPolicy
from flashinfer_cascade.cost import CostModel, PartShape
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.fold import Cut, best_cuts, cut_at, no_cut
from flashinfer_cascade.forest import PrefixForest, build_forest
from flashinfer_cascade.layout import Choice, lay_out
from flashinfer_cascade.native import Rated, Rater, Status
from flashinfer_cascade.plan import CascadePlan, Executor, PartName
from flashinfer_cascade.profile import DeviceProfile

Groups = list[tuple[PartName, PrefixForest]]
"""The parts of a batch, each with all sharing among its requests."""


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
        self.core = core
        self.rater = None if core is None else Rater(core, self._cost, policy)

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
            cut = choices[-1].cut
            segments -= int(cut.kept.sum())
            partials -= int(PartShape.of(batch, forest).node_rows[cut.kept].sum())
            slots -= num_slots(forest, cut)
        return lay_out(self.config, batch, choices, core=self.core, last=last), None

    def choose(self, name: PartName, batch: Batch, forest: PrefixForest, room: PlanCapacity | None = None) -> Choice:
        """Decide on one part: its segments, its executor."""
        why_flat = self.why_flat(batch, forest)
        rated = self._rate(batch, forest, why_flat is None, room)
        executor, reason, predicted = self.conclude(why_flat, rated.status, rated.flat_us, rated.us, rated.merged)
        cut, backends = rated.cut, rated.backends
        if executor == "flat" or cut is None:
            cut, backends = no_cut(forest), rated.flat_backends
        return Choice(name, executor, reason, forest, cut, backends, predicted, rated.tokens_left, rated.raw)

    def conclude(
        self, why_flat: str | None, status: Status, flat_us: float, us: float, merged: int = 0
    ) -> tuple[Executor, str, dict[str, float]]:
        """The executor of a part, why, and the predicted times that are told of.

        Args:
            why_flat: why no cascade was looked for; None when one was.
            status: what came of that.
            flat_us: predicted time of flat attention.
            us: of the best cascade, where there is one.
            merged: nodes that it had to give up.
        """
        if why_flat is not None:
            return "flat", why_flat, {"flat": flat_us}
        if status != Status.FOUND:
            return "flat", NO_CASCADE[status], {"flat": flat_us}
        policy = self.policy
        note = f"; {merged} shared segments merged to fit the limits" if merged else ""
        if policy.executor != "auto":
            executor = policy.executor
            return executor, f"the policy asks for {executor}{note}", {"flat": flat_us, executor: us}
        gain, predicted = flat_us / us, {"flat": flat_us, "levels": us}
        if gain < policy.min_speedup:
            low = f"a cascade is predicted {gain:.2f}x as fast, below min_speedup={policy.min_speedup:g}"
            return "flat", low + note, predicted
        return "levels", f"predicted {gain:.2f}x as fast as flat{note}", predicted

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
        return None if forest.num_nodes else "no full page is shared"

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
        wanted = self._candidate_cuts(shape) if cascade else []
        cuts = [self._fit(shape, cut, room) for cut in wanted]
        rate = self._cost.stock if self.policy.executor == "stock" else self._cost.levels
        rated_cuts = [(*rate(shape, cut), cut, i) for i, cut in enumerate(cuts) if cut.kept.any()]
        if not rated_cuts:
            return Rated(Status.NO_ROOM if wanted else Status.NOTHING_PAYS, tokens_left, *flat)
        us, backends, cut, which = min(rated_cuts, key=lambda item: item[0])
        merged = int(wanted[which].kept.sum() - cut.kept.sum())
        return Rated(Status.FOUND, tokens_left, *flat, us, backends, cut, merged)

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

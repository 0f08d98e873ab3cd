"""From block tables to a plan: the one place that puts the steps together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashinfer_cascade.batch import Batch, make_batch
from flashinfer_cascade.capacity import PlanCapacity, capacity_error, fit_cut, num_slots
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.cost import CostModel, PartShape
from flashinfer_cascade.errors import InvalidBatchError, UnsupportedError
from flashinfer_cascade.fold import Cut, best_cuts, cut_at, no_cut
from flashinfer_cascade.forest import PrefixForest, build_forest
from flashinfer_cascade.layout import Choice, lay_out
from flashinfer_cascade.plan import CascadePlan, Executor, PartName
from flashinfer_cascade.profile import PROFILES, DeviceProfile


class CascadePlanner:
    """Plans batches of one configuration. It keeps no state: any thread may use it.

    Args:
        config: the attention and the limits.
        policy: how to choose; None is `PlannerPolicy()`.
        profile: the GPU that will run the plans: a name in `profile.PROFILES` or a profile of your own.

    Raises:
        UnsupportedError: `profile` names no built-in profile.
        TypeError: an argument is of another type.
    """

    def __init__(
        self,
        config: CascadeConfig,
        policy: PlannerPolicy | None = None,
        profile: str | DeviceProfile = "h200",
    ) -> None:
        self.config = config
        self.policy = PlannerPolicy() if policy is None else policy
        for name, value, kind in (
            ("config", config, CascadeConfig),
            ("policy", self.policy, PlannerPolicy),
            ("profile", profile, str | DeviceProfile),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name} is a {type(value).__name__}: give a {getattr(kind, '__name__', kind)}")
        if isinstance(profile, str):
            if profile not in PROFILES:
                raise UnsupportedError(
                    f"profile {profile!r} is not built in ({', '.join(PROFILES)}): pass a DeviceProfile"
                )
            profile = PROFILES[profile]
        self.profile = profile
        self._cost = CostModel(config, profile)

    def plan(
        self, block_tables: Any, seq_lens: Any, qo_lens: Any = None, *, capacity: PlanCapacity | None = None
    ) -> CascadePlan:
        """Plan one step.

        Args:
            block_tables: one table per request: a sequence of sequences, a 2-D array or CPU tensor padded with
                anything (it may have more rows than there are requests: the first ones count), or `CsrTables`. Tables
                may be longer than their request. Arrays are taken much faster than lists.
            seq_lens: int[num_requests], KV tokens with this step's new ones; 0 marks a padding request.
            qo_lens: int[num_requests], query rows of this step; None is one each.
            capacity: what the plan must fit into; shared segments are merged into those below, the least useful
                first, until it does. Flat fits where the batch does.

        Raises:
            InvalidBatchError: wrong input; names the request and the position.
            UnsupportedError: the policy forces a cascade that a sliding window makes wrong.
            CapacityError: not even the flat plan fits.
        """
        batch = make_batch(self.config, block_tables, seq_lens, qo_lens)
        return self._plan(batch, self._split(batch), capacity)

    def plan_groups(
        self,
        configs: Sequence[CascadeConfig],
        block_tables: Any,
        seq_lens: Any,
        qo_lens: Any = None,
        *,
        capacity: PlanCapacity | None = None,
    ) -> list[CascadePlan]:
        """Plan one step for several groups of layers, such as those with a sliding window and those without.

        The batch is validated and its sharing found once; each group gets choices and a plan of its own, for a runtime
        of its own.

        Args:
            configs: one per group; they may differ in all but page_size and the limits.
            block_tables: as for `plan`.
            seq_lens: as for `plan`.
            qo_lens: as for `plan`.
            capacity: as for `plan`; every group's plan fits it.

        Raises:
            CapacityError: not even a flat plan fits.
            InvalidBatchError: wrong input, or a config with another page_size or other limits than this planner's.
            UnsupportedError: the policy forces a cascade that a sliding window makes wrong.
        """
        for config in configs:
            for name in ("page_size", "max_batch_size", "max_num_rows", "max_kv_pages", "max_kv_indices"):
                ours, theirs = getattr(self.config, name), getattr(config, name)
                if ours != theirs:
                    raise InvalidBatchError(
                        f"{name}={theirs} of a group differs from the planner's {ours}: groups of layers share block "
                        "tables, so give them the same"
                    )
        batch = make_batch(self.config, block_tables, seq_lens, qo_lens)
        groups = self._split(batch)
        return [CascadePlanner(config, self.policy, self.profile)._plan(batch, groups, capacity) for config in configs]

    def _split(self, batch: Batch) -> list[tuple[PartName, PrefixForest]]:
        """The parts of a batch, each with all sharing among its requests."""
        append = batch.qo_lens > self.policy.max_decode_rows
        if append.any() and not append.all():
            decode = build_forest(batch, np.flatnonzero(~append))
            return [("decode", decode), ("append", build_forest(batch, np.flatnonzero(append)))]
        return [("append" if append.all() else "decode", build_forest(batch))]

    def _plan(
        self, batch: Batch, groups: list[tuple[PartName, PrefixForest]], capacity: PlanCapacity | None
    ) -> CascadePlan:
        plan = lay_out(self.config, batch, [self._choose(name, batch, forest, None) for name, forest in groups])
        if capacity is None or not (over := capacity.lacks(plan.usage())):
            return plan
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
            choices.append(self._choose(name, batch, forest, room))
            cut, shape = choices[-1].cut, choices[-1].shape
            segments -= int(cut.kept.sum())
            partials -= int(shape.node_rows[cut.kept].sum())
            slots -= num_slots(forest, cut)
        return lay_out(self.config, batch, choices)

    def _choose(self, name: PartName, batch: Batch, forest: PrefixForest, room: PlanCapacity | None) -> Choice:
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

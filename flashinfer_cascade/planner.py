"""From block tables to a plan: the one place that puts the steps together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.capacity import PlanCapacity, check_capacity
from flashinfer_cascade.choose import Chooser
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.errors import InvalidBatchError, UnsupportedError, check_type, told
from flashinfer_cascade.native import load_core
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.profile import PROFILES, DeviceProfile
from flashinfer_cascade.session import PlanSession


class CascadePlanner:
    """Plans batches of one configuration. It keeps no state: any thread may use it, and it may be copied and pickled.

    Args:
        config: the attention and the limits.
        policy: how to choose; None is `PlannerPolicy()`.
        profile: the GPU that will run the plans: a name in `profile.PROFILES` or a profile of your own.
        native: use the native core where there is one; plans are the same without it, and take longer.

    Attributes:
        native: whether the native core is used.

    Raises:
        UnsupportedError: `profile` names no built-in profile.
        InvalidBatchError: an argument is of another type.
    """

    def __init__(
        self,
        config: CascadeConfig,
        policy: PlannerPolicy | None = None,
        profile: str | DeviceProfile = "h200",
        *,
        native: bool = True,
    ) -> None:
        self.config = config
        self.policy = PlannerPolicy() if policy is None else policy
        check_type("config", config, CascadeConfig, "give a CascadeConfig")
        check_type("policy", self.policy, PlannerPolicy, "give a PlannerPolicy")
        check_type("profile", profile, str | DeviceProfile, "give the name of a built-in profile, or a DeviceProfile")
        if isinstance(profile, str):
            if profile not in PROFILES:
                raise UnsupportedError(
                    f"profile {profile!r} is not built in ({', '.join(PROFILES)}): pass a DeviceProfile"
                )
            profile = PROFILES[profile]
        self.profile = profile
        self._may_be_native = native
        core = load_core() if native else None
        self.native = core is not None
        self._chooser = Chooser(config, self.policy, profile, core)

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew: the native core's state is of this process.
        make = functools.partial(type(self), native=self._may_be_native)
        return make, (self.config, self.policy, self.profile)

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
        check_capacity(capacity)
        batch = make_batch(self.config, block_tables, seq_lens, qo_lens)
        return self._chooser.plan(batch, self._chooser.split(batch), capacity)[0]

    def session(self) -> PlanSession:
        """A session that follows a decode loop: it is told what changes, and plans what changed."""
        return PlanSession(self._chooser)

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
        check_capacity(capacity)
        if not isinstance(configs, Sequence):
            raise InvalidBatchError(
                f"{told('configs', configs)}: give a list, one CascadeConfig for each group of layers"
            )
        for number, config in enumerate(configs):
            check_type(f"configs[{number}]", config, CascadeConfig, "give a CascadeConfig for each group of layers")
            for name in ("page_size", "max_batch_size", "max_num_rows", "max_kv_pages", "max_kv_indices"):
                ours, theirs = getattr(self.config, name), getattr(config, name)
                if ours != theirs:
                    raise InvalidBatchError(
                        f"{name}={theirs} of a group differs from the planner's {ours}: groups of layers share block "
                        "tables, so give them the same"
                    )
        batch = make_batch(self.config, block_tables, seq_lens, qo_lens)
        groups = self._chooser.split(batch)
        choosers = [Chooser(config, self.policy, self.profile, self._chooser.core) for config in configs]
        return [chooser.plan(batch, groups, capacity)[0] for chooser in choosers]

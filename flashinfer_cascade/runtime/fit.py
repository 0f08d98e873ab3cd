"""How a plan's levels are laid onto the launches of a captured graph."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.cost import MIN_SPLIT_TOKENS, Backend
from flashinfer_cascade.plan import CascadePlan, Level
from flashinfer_cascade.runtime.shapes import Bucket, GraphShape, LaunchSpec, decode_never_cuts


class Fit(NamedTuple):
    """How a plan is laid onto a shape.

    Attributes:
        level_of: level that each launch runs, None for idle ones.
        distance: 0 when the graph launches just what the plan asks for; the larger, the further from it.
    """

    level_of: tuple[int | None, ...]
    distance: int


class Laid(NamedTuple):
    """A plan that fits a graph.

    Attributes:
        distance: of the fit.
        levels: `CascadePlan.levels` of the whole batch.
        level_of: level that each launch runs.
    """

    distance: int
    levels: list[Level]
    level_of: tuple[int | None, ...]


IDLE, IDLE_CUT, OTHER_KERNEL, OTHER_CUT = 1, 2, 1, 4
"""Distances: a launch without a level, and one that would merge cut KV; a level on another kernel; on one that differs
in whether it cuts KV, or in the own KV's kernel."""


class Needs(NamedTuple):
    """All of a plan that decides how it fits a bucket's shapes.

    Attributes:
        backends: the kernel that it asks for on each level.
        groups: of each shared level, those for rows of padding included.
        is_short: whether the decode kernel never cuts its requests' own KV.
        num_segments: of the plan.
        num_partials: its (segment, row) pairs.
    """

    backends: tuple[Backend, ...]
    groups: tuple[int, ...]
    is_short: bool
    num_segments: int
    num_partials: int

    @classmethod
    def of(cls, bucket: Bucket, plan: CascadePlan, levels: list[Level]) -> Needs:
        """The needs of a plan whose rows and requests fit the bucket; levels are those of the whole batch."""
        is_padded = plan.num_rows < bucket.num_rows
        # Rows of padding stand behind the last group, in one of their own unless that has no KV either.
        groups = tuple(
            len(level.kv_last_page_len) + bool(is_padded and level.kv_last_page_len[-1] > 0) for level in levels[:-1]
        )
        # A decode batch is a single part, its own KV last.
        is_short = bucket.kind == "decode" and int(plan.seg_kv_len[-plan.num_requests :].max()) <= MIN_SPLIT_TOKENS
        sizes = plan.num_segments, int(plan.seg_num_rows.sum())
        return cls(tuple(level_backends(plan)), groups, is_short, *sizes)


def fit(
    config: CascadeConfig, bucket: Bucket, shape: GraphShape, specs: list[LaunchSpec], needs: Needs, num_sms: int
) -> Fit | None:
    """Lay a plan onto a shape; None when it does not fit.

    Args:
        config: the attention.
        bucket: what the graph is captured for.
        shape: the graph's.
        specs: the shape's launches in this bucket.
        needs: the plan's.
        num_sms: of the device.
    """
    wanted, groups = needs.backends, needs.groups
    num_shared = len(groups)
    best: Fit | None = None
    for chosen in itertools.combinations(range(len(shape.shared)), num_shared):
        if any(count > specs[at].num_slots for count, at in zip(groups, chosen, strict=True)):
            continue
        idle = (backend for at, backend in enumerate(shape.shared) if at not in chosen)
        distance = sum(IDLE_CUT if backend == "fa2" else IDLE for backend in idle)
        for at, backend in zip(chosen, wanted, strict=False):
            ours = shape.shared[at]
            if ours != backend:
                distance += OTHER_CUT if "fa2" in (ours, backend) else OTHER_KERNEL
        if best is None or distance < best.distance:
            best = Fit(tuple(chosen.index(i) if i in chosen else None for i in range(len(shape.shared))), distance)
    decodes = needs.is_short or decode_never_cuts(config, bucket, num_sms)
    possible = [backend for backend in shape.own if backend != "decode" or decodes]
    if best is None or not possible:
        return None
    own = _own_kernel(wanted[-1], possible)
    distance = best.distance + IDLE * (len(shape.own) - 1) + _own_distance(wanted[-1], own)
    return Fit((*best.level_of, *(num_shared if own == backend else None for backend in shape.own)), distance)


def _own_kernel(wanted: Backend, possible: list[Backend]) -> Backend:
    return min(possible, key=lambda backend: _own_distance(wanted, backend))


def _own_distance(wanted: Backend, ours: Backend) -> int:
    if wanted == ours:
        return 0
    return OTHER_KERNEL if {wanted, ours} == {"fa2", "fa2_uncut"} else OTHER_CUT


def level_backends(plan: CascadePlan) -> list[Backend]:
    """The kernel that a plan asks for on each level of the whole batch: that of the part with the most rows there."""
    if len(plan.parts) == 1:
        return list(plan.parts[0].backends)
    wanted: list[Backend] = []
    for from_last in range(-plan.num_levels, 0):
        parts = [part for part in plan.parts if part.num_levels + from_last >= 0]
        largest = max(parts, key=lambda part: part.row_end - part.row_begin)
        wanted.append(largest.backends[from_last])
    return wanted

"""Shapes of captured CUDA graphs: which kernels a graph launches, and how a plan's levels are laid onto them.

A captured graph cannot change its kernels, their grids or their query tiles. So a graph has a *shape*: launches for
shared levels, most shared first, and launches for the requests' own KV. A plan fits a shape when each of its levels
finds a launch with enough groups; launches that get no level do nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from flashinfer_cascade.capacity import PlanCapacity
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.cost import (
    BLOCKS_PER_SM,
    DECODE_BLOCKS_PER_SM,
    DECODE_GROUP_SIZES,
    MIN_SPLIT_TOKENS,
    TILES,
    Backend,
)
from flashinfer_cascade.errors import InvalidBatchError, UnsupportedError
from flashinfer_cascade.plan import CascadePlan, Level

MIN_WIDE_SLOTS = 4
"""Groups that a launch of wide tiles has at least, where there are so many."""


class Bucket(NamedTuple):
    """What a graph is captured for.

    Attributes:
        kind: "decode", one row a request; or "append", any rows.
        num_rows: rows of its static inputs.
        num_requests: most requests of a plan.
    """

    kind: Literal["decode", "append"]
    num_rows: int
    num_requests: int

    @property
    def num_groups(self) -> int:
        """Groups of the requests' own KV: in an append bucket the padding rows are one more."""
        return self.num_requests if self.kind == "decode" else self.num_requests + 1

    def __str__(self) -> str:
        return f"{self.kind} {self.num_rows}"


class SharedLaunch(NamedTuple):
    """A launch for a shared level.

    Attributes:
        backend: its kernel: fa2, fa2_uncut or fa3.
        tile: query rows times group size of a block, 64 or 128: what fa2 picks is fixed at capture. A tile of 128 suits
            few wide groups, one of 64 takes as many groups as there are rows.
    """

    backend: Backend
    tile: Literal[64, 128] = 128

    def __str__(self) -> str:
        return f"{self.backend}/{self.tile}"


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The attention kernels of a captured graph.

    Attributes:
        shared: one launch a shared level, most shared first; empty when flat.
        own: kernels for the requests' own KV; a plan uses one of them.
    """

    shared: tuple[SharedLaunch, ...]
    own: tuple[Backend, ...]

    def __post_init__(self) -> None:
        if not self.own or len(set(self.own)) < len(self.own):
            raise UnsupportedError(f"own={self.own!r}: name one or more different kernels for the requests' own KV")
        for launch in self.shared:
            if launch.backend == "decode" or launch.tile not in TILES[1:]:
                raise UnsupportedError(f"shared launch {launch}: use fa2, fa2_uncut or fa3 with a tile of 64 or 128")

    @property
    def is_flat(self) -> bool:
        """Whether it holds flat plans only."""
        return not self.shared

    def __str__(self) -> str:
        return " ".join((*map(str, self.shared), "|".join(self.own)))


class StockShape(NamedTuple):
    """A captured ``flashinfer.MultiLevelCascadeAttentionWrapper``, every level on fa2.

    Attributes:
        num_levels: its levels, the requests' own KV included.
        num_slots: groups of each shared level; None is one per group of the own KV. They decide its tile.
    """

    num_levels: int
    num_slots: int | None = None

    def __str__(self) -> str:
        return f"stock {self.num_levels} levels"


AnyShape = GraphShape | StockShape


class LaunchSpec(NamedTuple):
    """What is fixed of a captured launch.

    Attributes:
        backend: its kernel.
        is_shared: whether it holds a shared level.
        num_slots: groups, idle ones included.
        planned_rows: rows that FlashInfer is told of: at least the bucket's. It picks fa2's tile from
            ``planned_rows - num_slots + 1``.
        causal: whether each group's last rows are its new tokens.
    """

    backend: Backend
    is_shared: bool
    num_slots: int
    planned_rows: int
    causal: bool

    def tile(self, config: CascadeConfig) -> int:
        """Query rows times group size of one of its blocks."""
        if self.backend == "fa3":
            return TILES[2]
        packed = (self.planned_rows - self.num_slots + 1) * config.group_size
        if packed > TILES[1] and config.head_dim < 256:
            return TILES[2]
        return TILES[1] if packed > TILES[0] else TILES[0]

    def num_tiles(self, config: CascadeConfig) -> int:
        """Blocks over one KV head at most, KV uncut."""
        group = 1 if self.backend == "fa3" else config.group_size
        return -(-self.planned_rows * group // self.tile(config)) + self.num_slots - 1


def launch_specs(config: CascadeConfig, bucket: Bucket, shape: GraphShape, num_sms: int) -> list[LaunchSpec]:
    """The launches of a shape in a bucket: the shared ones, then the own ones.

    Raises:
        UnsupportedError: a kernel that this configuration or bucket does not allow.
    """
    group, rows = config.group_size, bucket.num_rows
    specs = []
    for backend, tile in shape.shared:
        slots = bucket.num_groups
        if tile == TILES[2]:
            slots = min(slots, max(MIN_WIDE_SLOTS, -(-rows * group // TILES[1])))
        # FlashInfer expects one group with all rows that the others leave: told of more rows, it takes the larger tile.
        planned = max(rows, slots + TILES[1] // group - (tile == TILES[1]))
        specs.append(LaunchSpec(backend, True, slots, planned, False))
    for backend in shape.own:
        if backend == "decode":
            if not _may_decode(config, bucket):
                raise UnsupportedError(
                    f"{shape}: the decode kernel takes one row a request, group sizes {DECODE_GROUP_SIZES} and no "
                    "window; use fa2"
                )
            if len(shape.own) == 1 and not _decode_never_cuts(config, bucket, num_sms):
                raise UnsupportedError(
                    f"{shape}: with {rows} rows the decode kernel may cut KV of more than {MIN_SPLIT_TOKENS} tokens, "
                    "which a graph cannot; add fa2 to own"
                )
        specs.append(LaunchSpec(backend, False, bucket.num_groups, rows, bucket.kind == "append"))
    return specs


def _may_decode(config: CascadeConfig, bucket: Bucket) -> bool:
    return bucket.kind == "decode" and config.group_size in DECODE_GROUP_SIZES and config.window_left < 0


def _decode_never_cuts(config: CascadeConfig, bucket: Bucket, num_sms: int) -> bool:
    return bucket.num_rows * config.num_kv_heads >= DECODE_BLOCKS_PER_SM * num_sms


def may_cut(config: CascadeConfig, bucket: Bucket, num_sms: int) -> bool:
    """Whether fa2 may cut the requests' own KV when the bucket is full: it does so while its blocks are few."""
    tiles = bucket.num_rows if bucket.kind == "decode" else -(-bucket.num_rows * config.group_size // TILES[2])
    return tiles * config.num_kv_heads <= BLOCKS_PER_SM * num_sms


class Fit(NamedTuple):
    """How a plan is laid onto a shape.

    Attributes:
        level_of: level that each launch runs, None for idle ones.
        distance: 0 when the graph launches just what the plan asks for; the larger, the further from it.
    """

    level_of: tuple[int | None, ...]
    distance: int


IDLE, OTHER_TILE, OTHER_KERNEL = 2, 3, 4
"""Distances: a launch without a level, a level on another tile, or on another kernel."""


def fit(
    config: CascadeConfig,
    bucket: Bucket,
    shape: GraphShape,
    specs: list[LaunchSpec],
    plan: CascadePlan,
    levels: list[Level],
    num_sms: int,
) -> Fit | None:
    """Lay a plan onto a shape; None when it does not fit.

    Args:
        config: the attention.
        bucket: what the graph is captured for; the plan's rows and requests are known to fit it.
        shape: the graph's.
        specs: the shape's launches in this bucket.
        plan: what to run.
        levels: `CascadePlan.levels` of the whole batch.
        num_sms: of the device.
    """
    wanted = level_backends(plan)
    shared = levels[:-1]
    if len(shared) > len(shape.shared):
        return None
    tiles = [_best_tile(config, level) for level in shared]
    # Rows of padding stand behind the last group, in one of their own unless that has no KV either.
    is_padded = plan.num_rows < bucket.num_rows
    groups = [len(level.kv_last_page_len) + (is_padded and level.kv_last_page_len[-1] > 0) for level in shared]
    best: Fit | None = None
    for chosen in itertools.combinations(range(len(shape.shared)), len(shared)):
        if any(count > specs[at].num_slots for count, at in zip(groups, chosen, strict=True)):
            continue
        distance = IDLE * (len(shape.shared) - len(shared))
        for at, backend, tile in zip(chosen, wanted, tiles, strict=False):
            launch = shape.shared[at]
            distance += OTHER_KERNEL * (launch.backend != backend) + OTHER_TILE * (launch.tile != tile)
        if best is None or distance < best.distance:
            level_of: list[int | None] = [None] * len(shape.shared)
            for number, at in enumerate(chosen):
                level_of[at] = number
            best = Fit(tuple(level_of), distance)
    if best is None:
        return None
    possible = [backend for backend in shape.own if backend != "decode" or _decodes(config, bucket, plan, num_sms)]
    if not possible:
        return None
    own = wanted[-1] if wanted[-1] in possible else possible[0]
    distance = best.distance + OTHER_KERNEL * (own != wanted[-1]) + IDLE * (len(shape.own) - 1)
    return Fit((*best.level_of, *(len(shared) if own == backend else None for backend in shape.own)), distance)


def level_backends(plan: CascadePlan) -> list[Backend]:
    """The kernel that a plan asks for on each level of the whole batch: that of the part with the most rows there."""
    wanted: list[Backend] = []
    for from_last in range(-plan.num_levels, 0):
        parts = [part for part in plan.parts if part.num_levels + from_last >= 0]
        largest = max(parts, key=lambda part: part.row_end - part.row_begin)
        wanted.append(largest.backends[from_last])
    return wanted


def _best_tile(config: CascadeConfig, level: Level) -> int:
    """The tile that fa2 would choose for a shared level by itself, among those of `SharedLaunch`."""
    average = int(level.qo_indptr[-1]) * config.group_size // len(level.kv_last_page_len)
    return TILES[2] if average > TILES[1] else TILES[1]


def _decodes(config: CascadeConfig, bucket: Bucket, plan: CascadePlan, num_sms: int) -> bool:
    """Whether the decode kernel leaves this plan's own KV uncut."""
    if _decode_never_cuts(config, bucket, num_sms):
        return True
    own = plan.seg_kv_len[-plan.num_requests :]  # a decode batch is a single part, its own KV last
    return len(plan.parts) == 1 and int(own.max()) <= MIN_SPLIT_TOKENS


def bucket_capacity(config: CascadeConfig, bucket: Bucket, specs: list[LaunchSpec]) -> PlanCapacity:
    """What a plan may use to fit: whatever stays within it does."""
    slots = [spec.num_slots for spec in specs if spec.is_shared]
    return PlanCapacity(
        num_rows=bucket.num_rows,
        num_page_indices=config.max_kv_indices,
        num_levels=len(slots) + 1,
        # One more group may be needed for rows of padding.
        num_slots=max(min(slots) - 1, 0) if slots else 0,
    )


def one_for_all(config: CascadeConfig, bucket: Bucket, num_sms: int) -> GraphShape:
    """One shape that takes any plan: for engines with one graph for each batch size."""
    fa2: Backend = "fa2" if may_cut(config, bucket, num_sms) else "fa2_uncut"
    own: tuple[Backend, ...] = (fa2, "decode") if _may_decode(config, bucket) else (fa2,)
    return GraphShape((SharedLaunch("fa2", 128), SharedLaunch("fa2_uncut", 64)), own)


def make_bucket(
    config: CascadeConfig, batch_size: int | None, num_tokens: int | None = None, max_requests: int | None = None
) -> Bucket:
    """A bucket for decode, or one for appends.

    Raises:
        InvalidBatchError: neither or both sizes are given, or one exceeds what the configuration admits.
    """
    if (batch_size is None) == (num_tokens is None):
        raise InvalidBatchError("give batch_size for a decode graph, or num_tokens for appends")
    if num_tokens is None:
        if max_requests is not None:
            raise InvalidBatchError("max_requests is for appends: in a decode graph each request has one row")
        bucket = Bucket("decode", batch_size, batch_size)  # type: ignore[arg-type]
    else:
        bucket = Bucket("append", num_tokens, config.max_batch_size if max_requests is None else max_requests)
    sizes: tuple[tuple[str, Any, int], ...] = (
        ("rows", bucket.num_rows, config.max_num_rows),
        ("requests", bucket.num_requests, config.max_batch_size),
    )
    for name, value, limit in sizes:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= limit:
            raise InvalidBatchError(
                f"a {bucket.kind} bucket of {value!r} {name}: give 1 to {limit}, or raise the limit in CascadeConfig"
            )
    return bucket

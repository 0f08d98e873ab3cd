"""Shapes of captured CUDA graphs: which kernels a graph launches.

A captured graph cannot change its kernels, nor their grids and query tiles. So a graph has a *shape*: launches for
shared levels, most shared first, and launches for the requests' own KV. A plan fits a shape when each of its levels
finds a launch that is large enough; launches that get no level do nothing.
"""

from __future__ import annotations

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
from flashinfer_cascade.errors import InvalidBatchError, UnsupportedError, check_type, with_article
from flashinfer_cascade.lower import Tiling
from flashinfer_cascade.segment_cost import why_no_segments

MIN_SLOTS = 4
"""Groups that a launch for a shared level takes at least, where the bucket has so many."""

MAX_NARROW_CUT_ROWS = 256
"""Rows of a decode bucket up to which shared levels with cut KV run on tiles of 64: FlashInfer takes that tile only for
so many groups that its workspace grows with the rows, 270 kB each at 32 query heads of 128."""

PARTIALS_PER_ROW = 8
"""Segments above a row, on average, that segment graphs have room for."""

MAX_SEGMENT_ROWS = 16
"""Rows a request up to which graphs for appends are captured on the segments' kernels by default: those of prefill are
bound by compute, for which FlashInfer's are better, and the room for partial results would be large."""

MIN_FA3_ROWS = 512
"""Query rows times group size below which no shape with fa3 is captured by default."""


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
    sizes: tuple[tuple[str, Any, str, int], ...] = (
        ("rows", bucket.num_rows, "max_num_rows", config.max_num_rows),
        ("requests", bucket.num_requests, "max_batch_size", config.max_batch_size),
    )
    for name, value, field, limit in sizes:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= limit:
            raise InvalidBatchError(
                f"{with_article(bucket.kind)} bucket of {value!r} {name}: give 1 to {limit}, or raise {field} in "
                "CascadeConfig"
            )
    return Bucket(bucket.kind, int(bucket.num_rows), min(int(bucket.num_requests), int(bucket.num_rows)))


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The attention kernels of a captured graph.

    Attributes:
        shared: kernels of shared levels, most shared first; empty when flat. fa2 suits few groups with long KV,
            fa2_uncut any groups, fa3 few groups with very many rows.
        own: kernels for the requests' own KV; a plan uses one of them.
    """

    shared: tuple[Backend, ...]
    own: tuple[Backend, ...]

    def __post_init__(self) -> None:
        if not self.own or len(set(self.own)) < len(self.own):
            raise UnsupportedError(f"own={self.own!r}: name one or more different kernels for the requests' own KV")
        for backend in (*self.shared, *self.own):
            if backend not in ("fa2", "fa2_uncut", "fa3", "decode"):
                raise UnsupportedError(f"kernel {backend!r}: use fa2, fa2_uncut, fa3 or decode")
        if "decode" in self.shared:
            raise UnsupportedError("decode takes one row a group: use fa2, fa2_uncut or fa3 for shared levels")

    def __str__(self) -> str:
        return " + ".join((*self.shared, " or ".join(self.own)))


class StockShape(NamedTuple):
    """A captured ``flashinfer.MultiLevelCascadeAttentionWrapper``, every level on fa2.

    Attributes:
        num_levels: its levels, the requests' own KV included.
        num_slots: groups of each shared level; None is one per group of the own KV. They decide its tile.
    """

    num_levels: int
    num_slots: int | None = None

    def __str__(self) -> str:
        return f"stock, {self.num_levels} levels"


class SegmentShape(NamedTuple):
    """The segments' kernels, which take any plan, its parts together.

    Attributes:
        shares: whether plans may have shared segments; without, two launches fewer idle, in decode graphs only.
    """

    shares: bool = True

    def __str__(self) -> str:
        return "segments" if self.shares else "segments, nothing shared"


AnyShape = GraphShape | SegmentShape | StockShape


def check_shape(shape: object) -> None:
    """Refuse what is no shape; None takes a default.

    Raises:
        InvalidBatchError: it is of another type.
    """
    if shape is not None:
        check_type(
            "shape", shape, AnyShape, "give a SegmentShape, GraphShape or StockShape of flashinfer_cascade.runtime"
        )


class SegmentRoom(NamedTuple):
    """What a bucket reserves for the segments' kernels.

    Attributes:
        num_segments: segments of a plan.
        num_partials: partial results; at least the (segment, row) pairs of a plan.
        num_wide: wide items, which no plan within the others exceeds.
    """

    num_segments: int
    num_partials: int
    num_wide: int

    @classmethod
    def of(cls, config: CascadeConfig, bucket: Bucket, tiling: Tiling, shares: bool) -> SegmentRoom:
        """Room for cascades of PARTIALS_PER_ROW segments above each row on average, and for all that cuts may add."""
        rows, requests = bucket.num_rows, bucket.num_requests
        per_tile = tiling.wide_rows // config.group_size
        runs = tiling.num_runs(tiling.narrow_blocks[-1], config.num_kv_heads)
        blocks = tiling.num_runs(tiling.wide_blocks, config.num_kv_heads)
        cut = runs * max(tiling.narrow_rows // config.group_size, 1) + (blocks + 1) * per_tile
        partials = (PARTIALS_PER_ROW if shares else 1) * rows + cut
        # A forest has fewer shared nodes than requests.
        segments = 2 * requests - 1 if shares else requests
        return cls(segments, partials, blocks + 2 * (partials // per_tile + segments))


def default_shapes(config: CascadeConfig, bucket: Bucket, num_sms: int, capability: tuple[int, int]) -> list[AnyShape]:
    """What is captured for a bucket unless told otherwise; docs/cuda_graphs.md says what each is worth."""
    levels: list[AnyShape] = [*level_shapes(config, bucket, num_sms, has_fa3=capability[0] == 9)]
    if not may_run_segments(config, capability):
        return levels
    if bucket.kind == "append":
        return [*levels, *([SegmentShape()] if bucket.num_rows <= MAX_SEGMENT_ROWS * bucket.num_requests else [])]
    flat: list[AnyShape] = [shape for shape in levels if isinstance(shape, GraphShape) and not shape.shared]
    return [*flat, SegmentShape(shares=False), *([SegmentShape()] if bucket.num_requests > 1 else [])]


def check_segments(
    config: CascadeConfig, bucket: Bucket, shape: SegmentShape, capability: tuple[int, int]
) -> SegmentShape:
    """Refuse what the segments' kernels do not take.

    Raises:
        UnsupportedError: a window, a large group size, KV that the GPU cannot convert, or a graph for appends without
            shared segments.
    """
    why_not = why_no_segments(config, capability)
    if why_not is None and config.window_left >= 0:
        why_not = f"window_left={config.window_left}: its kernels take no window in a graph"
    if why_not is not None:
        raise UnsupportedError(f"{shape} with {why_not}; use a GraphShape")
    if bucket.kind == "append" and not shape.shares:
        raise UnsupportedError(f"{shape} in a graph for appends: use SegmentShape(shares=True)")
    return shape


def may_run_segments(config: CascadeConfig, capability: tuple[int, int]) -> bool:
    """Whether the segments' kernels take a configuration on a GPU, in graphs."""
    return why_no_segments(config, capability) is None and config.window_left < 0


def level_shapes(config: CascadeConfig, bucket: Bucket, num_sms: int, has_fa3: bool) -> list[GraphShape]:
    """What is captured of FlashInfer's kernels where plans may be flat or levels."""
    is_small = _may_cut(config, bucket, num_sms)
    fa3_runs = has_fa3 and config.kv_dtype == config.dtype and config.head_dim <= 128 and config.window_left < 0
    shared: list[tuple[Backend, ...]] = []
    own: list[Backend] = ["fa2_uncut"]
    if bucket.num_requests > 1:
        shared.append(("fa2", "fa2_uncut"))
        if not is_small:
            shared.append(("fa2_uncut", "fa2_uncut"))
        if fa3_runs and bucket.num_rows * config.group_size >= MIN_FA3_ROWS:
            shared.append(("fa3", "fa2_uncut"))
    if is_small:
        own.insert(0, "fa2")
    elif _may_decode(config, bucket) and decode_never_cuts(config, bucket, num_sms):
        own.append("decode")
    if bucket.kind == "append" and fa3_runs:
        own.append("fa3")
    # A request's whole context is seldom so short that cutting does not pay, where blocks are few.
    flat = [kernel for kernel in own if not (is_small and kernel == "fa2_uncut")]
    return [GraphShape((), (kernel,)) for kernel in flat] + [
        GraphShape(levels, (kernel,)) for levels in shared for kernel in own
    ]


def one_for_all(
    config: CascadeConfig, bucket: Bucket, num_sms: int, capability: tuple[int, int]
) -> GraphShape | SegmentShape:
    """One shape that takes any plan: for engines with one graph for each batch size."""
    if bucket.kind == "decode" and may_run_segments(config, capability):
        return SegmentShape(shares=bucket.num_requests > 1)
    flat = [shape for shape in level_shapes(config, bucket, num_sms, has_fa3=False) if not shape.shared]
    shared: tuple[Backend, ...] = ("fa2", "fa2_uncut") if bucket.num_requests > 1 else ()
    return GraphShape(shared, tuple(kernel for shape in flat for kernel in shape.own))


class LaunchSpec(NamedTuple):
    """What is fixed of a captured launch.

    Attributes:
        backend: its kernel.
        is_shared: whether it holds a shared level.
        is_by_row: whether its groups are the rows, one by one.
        is_fixed: whether its schedule is the same for all plans.
        may_idle: whether some plans have nothing for it.
        num_rows: of the bucket.
        num_slots: groups, idle ones included.
        planned_rows: rows that FlashInfer is told of, at least num_rows: where it plans the launch, it picks the tile
            from ``planned_rows - num_slots + 1``.
        tile: query rows times group size of a block.
        num_blocks: over one KV head at most, KV uncut.
        causal: whether each group's last rows are its new tokens.
    """

    backend: Backend
    is_shared: bool
    is_by_row: bool
    is_fixed: bool
    may_idle: bool
    num_rows: int
    num_slots: int
    planned_rows: int
    tile: int
    num_blocks: int
    causal: bool

    @classmethod
    def of(
        cls,
        config: CascadeConfig,
        backend: Backend,
        bucket: Bucket,
        num_slots: int,
        tile: int,
        *,
        is_shared: bool,
        is_only: bool = False,
    ) -> LaunchSpec:
        """A launch of so many groups on a tile that FlashInfer can be brought to choose.

        `is_only` says that no other launch may run the requests' own KV in its place.
        """
        rows, group = bucket.num_rows, config.group_size
        # FlashInfer expects one group with all rows that the others leave: told of more, it takes a larger tile.
        planned = rows
        if is_shared and backend == "fa2":
            alone = TILES[1] // group + 1 if tile == TILES[2] else max(tile // group, 1)
            planned = max(rows, num_slots - 1 + alone)
        blocks = -(-planned * (1 if backend == "fa3" else group) // tile) + num_slots - 1
        by_row = bucket.kind == "decode" and not is_shared
        causal = bucket.kind == "append" and not is_shared
        fixed = by_row and (backend == "decode" or (backend == "fa2_uncut" and is_only))
        may_idle = is_shared or not is_only
        return cls(backend, is_shared, by_row, fixed, may_idle, rows, num_slots, planned, tile, blocks, causal)


def fa2_tile(config: CascadeConfig, rows: int) -> int:
    """The tile that FlashInfer picks for groups of so many rows."""
    packed = rows * config.group_size
    if packed > TILES[1] and config.head_dim < 256:
        return TILES[2]
    return TILES[1] if packed > TILES[0] else TILES[0]


def launch_specs(config: CascadeConfig, bucket: Bucket, shape: GraphShape, num_sms: int) -> list[LaunchSpec]:
    """The launches of a shape in a bucket: the shared ones, then the own ones.

    Raises:
        UnsupportedError: a kernel that this configuration or bucket does not allow.
    """
    group, rows, groups = config.group_size, bucket.num_rows, bucket.num_groups
    if "fa3" in (*shape.shared, *shape.own) and (config.kv_dtype != config.dtype or config.window_left >= 0):
        raise UnsupportedError(f"{shape}: fa3 takes KV of q's dtype and no window; use fa2 or fa2_uncut")
    specs = []
    for backend in shape.shared:
        # Were it free to choose, FlashInfer would use its smallest tile for more groups than these: there are hardly
        # ever so many, since a node has at least two requests.
        slots = min(groups, max(MIN_SLOTS, -(-rows * group // TILES[0])))
        tile = TILES[2] if backend == "fa3" else fa2_tile(config, rows)
        is_narrow = bucket.kind == "decode" and rows <= MAX_NARROW_CUT_ROWS and group <= TILES[1]
        if tile == TILES[2] and (backend == "fa2_uncut" or (backend == "fa2" and is_narrow)):
            # The larger tile gains little where blocks are all busy, and loses by half where some idle.
            tile = TILES[1]
            if backend == "fa2":  # so many that FlashInfer takes this tile
                slots = max(slots, rows + 1 - TILES[1] // group)
        specs.append(LaunchSpec.of(config, backend, bucket, slots, tile, is_shared=True))
    for backend in shape.own:
        if backend == "decode":
            if not _may_decode(config, bucket):
                raise UnsupportedError(
                    f"{shape}: the decode kernel takes one row a request, group sizes {DECODE_GROUP_SIZES} and no "
                    "window; use fa2"
                )
            if len(shape.own) == 1 and not decode_never_cuts(config, bucket, num_sms):
                raise UnsupportedError(
                    f"{shape}: with {rows} rows the decode kernel may cut KV of more than {MIN_SPLIT_TOKENS} tokens, "
                    "which a graph cannot; add fa2 to own"
                )
        tile = fa2_tile(config, 1 if bucket.kind == "decode" else rows - groups + 1)
        tile = TILES[2] if backend == "fa3" else tile
        is_only = len(shape.own) == 1
        specs.append(LaunchSpec.of(config, backend, bucket, groups, tile, is_shared=False, is_only=is_only))
    return specs


def _may_decode(config: CascadeConfig, bucket: Bucket) -> bool:
    return bucket.kind == "decode" and config.group_size in DECODE_GROUP_SIZES and config.window_left < 0


def decode_never_cuts(config: CascadeConfig, bucket: Bucket, num_sms: int) -> bool:
    """Whether the decode kernel leaves KV of any length uncut, since the bucket's blocks are many."""
    return bucket.num_rows * config.num_kv_heads >= DECODE_BLOCKS_PER_SM * num_sms


def _may_cut(config: CascadeConfig, bucket: Bucket, num_sms: int) -> bool:
    """Whether fa2 may cut the requests' own KV when the bucket is full: it does so while its blocks are few."""
    tiles = bucket.num_rows if bucket.kind == "decode" else -(-bucket.num_rows * config.group_size // TILES[2])
    return tiles * config.num_kv_heads <= BLOCKS_PER_SM * num_sms


def bucket_capacity(config: CascadeConfig, bucket: Bucket, specs: list[LaunchSpec]) -> PlanCapacity:
    """What a plan may use: whatever stays within it fits."""
    slots = [spec.num_slots for spec in specs if spec.is_shared]
    return PlanCapacity(
        num_rows=bucket.num_rows,
        num_page_indices=config.max_kv_indices,
        num_levels=len(slots) + 1,
        # One more group may be needed for rows of padding.
        num_slots=max(min(slots) - 1, 0) if slots else 0,
    )

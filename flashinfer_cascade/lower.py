"""What the segments executor launches for a plan: items by tile class, cuts of KV, runs of tiles, partial results.

Three classes by packed query rows (rows times query heads of a KV head): *wide* segments become blocks of a tile of
rows over a run of KV each, cut so that all SMs have work; *short* ones, of few rows and little KV, and *narrow* ones,
of the fewest rows, are streams: the tiles of KV of all of them in one line, cut into runs of equal length. Each cut is
a piece with a partial result of its own, in the row's range of partials; a row of one piece needs none.

Nothing here is part of a plan: the same plan may be lowered for another GPU, or for less room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.config import DTYPE_BYTES, MAX_INT32, CascadeConfig
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr
from flashinfer_cascade.cuts import cut_stream, cut_wide
from flashinfer_cascade.items import pieces_above, stream_items, stream_runs, wide_items
from flashinfer_cascade.native import load_core
from flashinfer_cascade.native_lower import (
    FIELDS,
    UNLIMITED,
    WINDOW,
    LoweredRoom,
    Sizes,
    allocate,
    lower_natively,
    make_tiles,
)
from flashinfer_cascade.plan import CascadePlan, PlanPart

LIGHT_TOKENS = 400
"""KV tokens of wide tiles for each SM, below which they had better leave it room for narrow items.

Source: of the trees that docs/benchmarks.md measures, those of 250 to 310 are 3 to 15% faster so, those of 530 slower.
"""
WIDE_ROWS, WIDE_TILES = 64, ((64, 3), (64, 2), (32, 2))
"""Packed rows of a wide tile; its KV tokens and its pipeline's stages, the fastest first, of which the first pair is
taken that fits shared memory. The last one needs 68 KiB at most, and every GPU from sm_80 on has 99."""

MAX_WIDE_BLOCKS = 2
"""Wide blocks that the registers of an SM hold."""

HOPPER, HOPPER_SHARED_BYTES = (9, 0), 232448


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of the kernels, and what decides who gets which. Defaults are those of Triton's kernels.

    Attributes:
        num_sms: of the GPU.
        wide_rows: packed rows of a wide tile.
        wide_tokens: KV tokens of a wide tile; cuts are multiples of it.
        wide_stages: stages of the pipeline that loads them, in Triton's kernel.
        wide_blocks: wide tiles that one SM works on at once.
        wide_tiles: tiles of rows of one segment that a block takes together, 1 or 2. Items are of so many, unless half
            the SMs would have none then.
        min_cut: KV tokens below which a wide segment is not cut.
        short_rows: packed rows of a short tile; a segment of more is wide. No more than narrow_rows: none is short.
        short_tokens: KV tokens above which a segment of more than narrow_rows is wide.
        narrow_rows: packed rows of a narrow tile.
        short_tile_tokens, narrow_tile_tokens: KV tokens of a short and of a narrow tile.
        short_blocks, narrow_blocks: blocks of a stream that one SM runs at once, each number of them more than the one
            before it and used where that makes the longest run shorter by a tenth.
        min_run_tiles: where a stream is cut, it is into a run for each so many tiles at most.
        max_finished: pieces above a narrow item of one row that it merges itself, rather than leave a piece to be
            merged; the kernels that wrote them must have run before.
        is_native: whether narrow items run on the CUDA kernel.
        has_native_wide: whether wide ones do.
    """

    num_sms: int
    wide_rows: int = WIDE_ROWS
    wide_tokens: int = 64
    wide_stages: int = 3
    wide_blocks: int = 2
    wide_tiles: int = 1
    min_cut: int = 384
    short_rows: int = 32
    short_tokens: int = 128
    narrow_rows: int = 16
    short_tile_tokens: int = 32
    narrow_tile_tokens: int = 32
    short_blocks: tuple[int, ...] = (4,)
    narrow_blocks: tuple[int, ...] = (8,)
    min_run_tiles: int = 2
    max_finished: int = 0
    is_native: bool = False
    has_native_wide: bool = False

    @classmethod
    def of(
        cls,
        config: CascadeConfig,
        num_sms: int,
        is_native: bool,
        has_native_wide: bool = False,
        *,
        capability: tuple[int, int] = HOPPER,
        shared_bytes: int = HOPPER_SHARED_BYTES,
    ) -> Tiling:
        """The tiles for a configuration.

        Args:
            config: the attention.
            num_sms: of the GPU.
            is_native: whether the CUDA kernel for narrow items can be compiled. It takes KV of 16 bits.
            has_native_wide: whether that for wide items can. It takes KV of 16 bits and a head_dim of 64 or 128.
            capability: compute capability of the GPU.
            shared_bytes: shared memory that a block of its may have.
        """
        wide_tokens, wide_stages, wide_blocks = _wide_tile(config, capability, shared_bytes)
        if not is_native or config.kv_dtype != config.dtype:
            return cls(num_sms, wide_tokens=wide_tokens, wide_stages=wide_stages, wide_blocks=wide_blocks)
        has_native_wide = has_native_wide and config.head_dim in (64, 128)
        narrow_rows = 8 if config.group_size <= 8 else 16
        return cls(
            num_sms,
            wide_tokens=wide_tokens,
            wide_stages=wide_stages,
            short_rows=narrow_rows if has_native_wide else 32,
            wide_blocks=wide_blocks,
            wide_tiles=2 if has_native_wide else 1,
            has_native_wide=has_native_wide,
            narrow_rows=narrow_rows,
            narrow_tile_tokens=16,
            narrow_blocks=(8, 10),
            min_run_tiles=4,
            max_finished=2,
            is_native=True,
        )

    def for_part(self, plan: CascadePlan, part: PlanPart) -> Tiling:
        """These tiles, or for little wide work beside more of narrow items, those of Triton's wide kernel.

        A block of the CUDA kernel fills its SM, and keeps narrow items from it until it ends.
        """
        if not self.has_native_wide:
            return self
        where = slice(part.seg_begin, part.seg_end)
        rows, kv_len = plan.seg_num_rows[where].astype(np.int64), plan.seg_kv_len[where].astype(np.int64)
        group_size, kv_heads = plan.config.group_size, plan.config.num_kv_heads
        is_wide = rows * group_size > self.narrow_rows
        tiles = -(-rows // (self.wide_rows // group_size))
        wide, narrow = int((tiles * kv_len)[is_wide].sum()), int(kv_len[~is_wide].sum())
        if not 0 < wide * kv_heads < LIGHT_TOKENS * self.num_sms or narrow < wide:
            return self
        return replace(self, wide_tiles=1, has_native_wide=False)

    def num_runs(self, blocks_per_sm: int, num_kv_heads: int) -> int:
        """Runs of a stream over each KV head."""
        return max(self.num_sms * blocks_per_sm // num_kv_heads, 1)


def wide_shared_bytes(config: CascadeConfig, capability: tuple[int, int], tokens: int, stages: int) -> int:
    """Shared memory of a wide block, as Triton compiles it."""
    stage = 2 * tokens * config.head_dim * DTYPE_BYTES[config.kv_dtype]
    queries = WIDE_ROWS * config.head_dim * 2
    if capability[0] in (9, 10):  # whose tensor cores read tiles where they lie
        return stages * stage + queries
    # Elsewhere a tile is in registers while it is multiplied, and the weights are passed through shared memory.
    return (stages - 1) * stage + queries + WIDE_ROWS * tokens * 2


def _wide_tile(config: CascadeConfig, capability: tuple[int, int], shared_bytes: int) -> tuple[int, int, int]:
    """KV tokens of a tile, its stages, and how many such blocks an SM runs at once."""
    for tokens, stages in WIDE_TILES:
        blocks = shared_bytes // wide_shared_bytes(config, capability, tokens, stages)
        if blocks:
            break
    return tokens, stages, min(max(blocks, 1), MAX_WIDE_BLOCKS)


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the kernels read: int32 arrays, read-only, rows counted from the part's first.

    An item has FIELDS numbers: its first row, its number of rows, where its segment's page ids begin, where its KV
    begins and ends in the segment and up to where all of its rows see all of it, its slot, and where the segment begins
    in the rows' sequences. The piece of row r goes to partial ``partial_indptr[r] + slot``, or to the output if the
    slot is -1: it is the only one.

    In place of begin, end and limit an item of a stream has the number of its KV's tokens, the first row's
    ``partial_indptr``, and a number: 0 if it leaves a piece, or 1 plus the number of pieces above it that it merges
    with its own, into the output. Its slot is counted from run 0.

    Attributes:
        wide: [num_wide, FIELDS], those of two tiles before the others, of each the longest first.
        num_double: of wide, those of two tiles.
        short: [num_short + WINDOW, FIELDS], in the order of the stream; ends with zeros.
        short_runs: [num_runs, FIELDS]: of the run's first item, what an item has to begin with; then its number, how
            many tiles the run has, and where in the item's KV it begins.
        narrow, narrow_runs: likewise.
        partial_indptr: [num_rows + 1].
        combined: [num_rows], pieces that are left to be merged; -1 if the row has its result by then.
    """

    wide: Int32Array
    num_double: int
    short: Int32Array
    short_runs: Int32Array
    narrow: Int32Array
    narrow_runs: Int32Array
    partial_indptr: Int32Array
    combined: Int32Array

    @property
    def num_partials(self) -> int:
        """Partial results to reserve."""
        return int(self.partial_indptr[-1])


def lower(
    plan: CascadePlan,
    part: PlanPart,
    tiling: Tiling,
    page_begin: NDArray[Any] | None = None,
    max_partials: int | None = None,
    *,
    native: bool = True,
) -> Lowered:
    """Lower one part of a plan.

    Args:
        plan: what to run.
        part: which part of it.
        tiling: the kernels'.
        page_begin: int[num_segments of the part], where the page ids of each segment begin on the device; None is
            where they lie in `CascadePlan.seg_pages`.
        max_partials: partial results that there is room for; KV is left uncut rather than exceed it.
        native: use the native core where there is one.

    Raises:
        CapacityError: there is not even room for the partial results of KV left uncut, or page ids begin where an
            int32 does not reach.
    """
    most = MAX_INT32 if max_partials is None else max_partials
    begins = _page_begin(plan, part, page_begin)
    core = load_core() if native else None
    if core is None:
        return _lower(plan, part, tiling, begins, UNLIMITED._replace(num_partials=min(most, MAX_INT32)))[0]
    tiles = make_tiles(plan.config, tiling)
    room = allocate(tiles, plan, part, most)
    sizes = lower_natively(core, tiles, plan, part, begins, room)
    return Lowered(
        room.wide[: sizes.num_wide],
        sizes.num_double,
        room.short[: sizes.num_short + WINDOW],
        room.short_runs,
        room.narrow[: sizes.num_narrow + WINDOW],
        room.narrow_runs,
        room.partial_indptr,
        room.combined,
    )


def lower_into(
    plan: CascadePlan,
    part: PlanPart,
    tiling: Tiling,
    page_begin: NDArray[Any] | None,
    room: LoweredRoom,
    *,
    native: bool = True,
) -> Sizes:
    """`lower` into arrays of the caller's, such as a captured graph's staging area.

    Args:
        plan: what to run.
        part: which part of it.
        tiling: the kernels'.
        page_begin: as for `lower`.
        room: where to; KV is left uncut rather than exceed its partial results.
        native: use the native core where there is one.

    Raises:
        CapacityError: something does not fit; nothing is written then.
    """
    begins = _page_begin(plan, part, page_begin)
    core = load_core() if native else None
    if core is not None:
        return lower_natively(core, make_tiles(plan.config, tiling), plan, part, begins, room)
    lowered, sizes = _lower(plan, part, tiling, begins, room.most)
    rows = sizes.num_rows
    room.wide[: sizes.num_wide], room.wide[sizes.num_wide :] = lowered.wide, 0
    for items, to in (lowered.short, room.short), (lowered.narrow, room.narrow):
        to[: len(items)] = items[: len(to)]
    for runs, to in (lowered.short_runs, room.short_runs), (lowered.narrow_runs, room.narrow_runs):
        to[: len(runs)], to[len(runs) :] = runs[: len(to)], 0
    room.partial_indptr[: rows + 1], room.partial_indptr[rows + 1 :] = lowered.partial_indptr, sizes.num_partials
    room.combined[:rows], room.combined[rows:] = lowered.combined, 0
    return sizes


def _page_begin(plan: CascadePlan, part: PlanPart, given: NDArray[Any] | None) -> Int64Array:
    if given is None:
        given = indptr(plan.seg_num_pages)[part.seg_begin : part.seg_end]
    return np.ascontiguousarray(given, np.int64)


def _lower(
    plan: CascadePlan, part: PlanPart, tiling: Tiling, page_begin: Int64Array, most: Sizes
) -> tuple[Lowered, Sizes]:
    """What the native core doubles: the tables, of which nothing may exceed `most`, and how large they are."""
    config = plan.config
    where = slice(part.seg_begin, part.seg_end)
    rows, level = part.row_end - part.row_begin, plan.seg_level[where]
    row_begin = plan.seg_row_begin[where].astype(np.int64) - part.row_begin
    num_rows = plan.seg_num_rows[where].astype(np.int64)
    kv_start, kv_len = plan.seg_kv_start[where].astype(np.int64), plan.seg_kv_len[where].astype(np.int64)
    is_narrow, is_short, is_wide = _classes(tiling, num_rows * config.group_size, kv_len)
    wide, short, narrow = (kind.nonzero()[0] for kind in (is_wide, is_short, is_narrow))
    per_tile, tile_lens = tiling.wide_rows // config.group_size, (tiling.short_tile_tokens, tiling.narrow_tile_tokens)
    tiles = -(-num_rows[wide] // per_tile)

    for may_cut in (True, False):
        chunk = kv_len[wide]
        if may_cut:
            chunk = _cut_wide(tiling, config, tiles, num_rows[wide], chunk)
        streams = [
            cut_stream(
                -(-kv_len[segs] // tile_tokens),
                num_rows[segs],
                [tiling.num_runs(number, config.num_kv_heads) for number in blocks],
                tile_tokens,
                tiling.min_run_tiles,
                may_cut,
            )
            for segs, tile_tokens, blocks in zip(
                (short, narrow), tile_lens, (tiling.short_blocks, tiling.narrow_blocks), strict=True
            )
        ]
        pieces = np.zeros(len(kv_len), np.int64)
        pieces[wide] = -(-kv_len[wide] // chunk)
        pieces[short], pieces[narrow] = streams[0].pieces, streams[1].pieces
        above, counts = pieces_above(level, row_begin, num_rows, pieces, rows)
        combined = np.where(counts == 1, -1, counts)
        number = (counts[row_begin] == 1).astype(np.int64)
        finishes = (above > 0) & (above <= tiling.max_finished) & (counts[row_begin] - above == 1)
        finishes &= is_narrow & (pieces == 1) & (num_rows == 1)
        several = is_narrow & (num_rows > 1)  # those of one row have nothing below
        if finishes.any() and several.any():
            finishes &= pieces_above(level, row_begin, num_rows, np.where(several, pieces, 0), rows)[0] == 0
        number[finishes] = above[finishes] + 1
        counts[row_begin[finishes]] -= 1
        combined[row_begin[finishes]] = -1
        num_partials = int(counts.sum())
        if num_partials <= most.num_partials:
            break

    together = tiling.wide_tiles
    if int(-(-tiles // together) @ pieces[wide]) * config.num_kv_heads * 2 <= tiling.num_sms:
        together = 1
    num_wide = int(-(-tiles // together) @ pieces[wide])
    num_double = int(tiles @ pieces[wide]) - num_wide
    short_used, narrow_used = [len(stream.run_item) if len(stream.order) else 0 for stream in streams]
    last_page = int(page_begin.max(initial=0))
    sizes = Sizes(num_wide, num_double, len(short), len(narrow), short_used, narrow_used, num_partials, rows, last_page)
    sizes.check(most)
    partial_indptr = indptr(counts)
    # All of a shared segment is before any new token; of an own one, the first row sees the least.
    seen = np.minimum(plan.row_pos[plan.seg_row_begin[where]] + 1 - kv_start, kv_len)
    table = np.empty((len(kv_len), FIELDS), np.int32)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = row_begin, num_rows, page_begin, kv_len
    table[:, 4], table[:, 5], table[:, 6], table[:, 7] = partial_indptr[row_begin], number, above, kv_start
    (short_items, short_runs), (narrow_items, narrow_runs) = [
        (items := stream_items(table[segs], stream), stream_runs(items, stream, tile_tokens))
        for segs, stream, tile_tokens in zip((short, narrow), streams, tile_lens, strict=True)
    ]
    lowered = Lowered(
        wide_items(table[wide], tiles, chunk, seen[wide], per_tile, together),
        num_double,
        short_items,
        short_runs,
        narrow_items,
        narrow_runs,
        partial_indptr.astype(np.int32),
        combined.astype(np.int32),
    )
    return lowered, sizes


def _cut_wide(
    tiling: Tiling, config: CascadeConfig, tiles: Int64Array, rows: Int64Array, kv_len: Int64Array
) -> Int64Array:
    """`cuts.cut_wide` for these tiles."""
    # A block that takes two tiles together takes as long for one, and no less if there are only such.
    at_once = 1 if tiling.wide_tiles > 1 and (tiles == 1).all() else tiling.wide_blocks
    slots = tiling.num_runs(at_once, config.num_kv_heads)
    return cut_wide(tiles, rows, kv_len, slots, at_once, tiling.min_cut, tiling.wide_tokens)


def _classes(
    tiling: Tiling, packed_rows: Int64Array, kv_len: Int64Array
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Narrow, short and wide segments; none of them has no KV."""
    has_kv = kv_len > 0
    is_narrow = has_kv & (packed_rows <= tiling.narrow_rows)
    others = has_kv & ~is_narrow
    is_short = others & (packed_rows <= tiling.short_rows) & (kv_len <= tiling.short_tokens)
    return is_narrow, is_short, others & ~is_short

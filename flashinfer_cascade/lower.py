"""What the segments executor launches for a plan: items by tile class, cuts of KV, runs of tiles, partial results.

Three classes by packed query rows (rows times query heads of a KV head): *wide* segments become blocks of a tile of
rows over a run of KV each, cut so that all SMs have work; *short* ones, of few rows and little KV, and *narrow* ones,
of the fewest rows, are streams: the tiles of KV of all of them in one line, cut into runs of equal length. Each cut is
a piece with a partial result of its own, in the row's range of partials; a row of one piece needs none.

Nothing here is part of a plan: the same plan may be lowered for another GPU, or for less room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr, ranges
from flashinfer_cascade.native import load_core
from flashinfer_cascade.native_lower import FIELDS, WINDOW, lower_natively, make_tiles
from flashinfer_cascade.plan import CascadePlan, PlanPart


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of the kernels, and what decides who gets which. Defaults are those of Triton's kernels.

    Attributes:
        num_sms: of the GPU.
        wide_rows: packed rows of a wide tile.
        wide_tokens: KV tokens of a wide tile; cuts are multiples of it.
        wide_blocks: wide blocks that one SM runs at once.
        min_cut: KV tokens below which a wide segment is not cut.
        short_rows: packed rows of a short tile; a segment of more is wide.
        short_tokens: KV tokens above which a segment of more than narrow_rows is wide.
        narrow_rows: packed rows of a narrow tile.
        short_tile_tokens, narrow_tile_tokens: KV tokens of a short and of a narrow tile.
        short_blocks, narrow_blocks: blocks of a stream that one SM runs at once, each number of them more than the one
            before it and used where that makes the longest run shorter by a tenth.
        min_run_tiles: tiles of a run at least, where KV is cut.
        max_finished: pieces above a narrow item of one row that it merges itself, rather than leave a piece to be
            merged; the kernels that wrote them must have run before.
        is_native: whether narrow items run on the CUDA kernel.
    """

    num_sms: int
    wide_rows: int = 64
    wide_tokens: int = 64
    wide_blocks: int = 2
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

    @classmethod
    def of(cls, config: CascadeConfig, num_sms: int, is_native: bool) -> Tiling:
        """The tiles for a configuration.

        Args:
            config: the attention.
            num_sms: of the GPU.
            is_native: whether the CUDA kernel for narrow items can be compiled. It takes KV of 16 bits.
        """
        wide_blocks = 2 if config.head_dim <= 128 else 1
        if not is_native or config.kv_dtype != config.dtype:
            return cls(num_sms, wide_blocks=wide_blocks)
        return cls(
            num_sms,
            wide_blocks=wide_blocks,
            narrow_rows=8 if config.group_size <= 8 else 16,
            narrow_tile_tokens=16,
            narrow_blocks=(8, 10),
            min_run_tiles=4,
            max_finished=2,
            is_native=True,
        )

    def num_runs(self, blocks_per_sm: int, num_kv_heads: int) -> int:
        """Runs of a stream over each KV head."""
        return max(self.num_sms * blocks_per_sm // num_kv_heads, 1)


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
        wide: [num_wide, FIELDS], the longest first.
        short: [num_short + WINDOW, FIELDS], in the order of the stream; ends with zeros.
        short_runs: [num_runs, FIELDS]: of the run's first item, what an item has to begin with; then its number, how
            many tiles the run has, and where in the item's KV it begins.
        narrow, narrow_runs: likewise.
        partial_indptr: [num_rows + 1].
        combined: [num_rows], pieces that are left to be merged; -1 if the row has its result by then.
    """

    wide: Int32Array
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
        max_partials: partial results that there is room for; KV is left uncut rather than exceed it. At least the
            part's (segment, row) pairs.
        native: use the native core where there is one.
    """
    config = plan.config
    where = slice(part.seg_begin, part.seg_end)
    if page_begin is None:
        page_begin = indptr(plan.seg_num_pages)[where]
    core = load_core() if native else None
    if core is not None:
        columns = [
            getattr(plan, name)[where] for name in ("seg_row_begin", "seg_num_rows", "seg_kv_start", "seg_kv_len")
        ]
        begins = np.ascontiguousarray(page_begin, np.int64)
        rows_of_part = part.row_begin, part.row_end
        tiles = make_tiles(config, tiling)
        return Lowered(*lower_natively(core, tiles, (*columns, plan.row_pos), begins, rows_of_part, max_partials))
    row_begin = plan.seg_row_begin[where].astype(np.int64) - part.row_begin
    num_rows = plan.seg_num_rows[where].astype(np.int64)
    kv_start, kv_len = plan.seg_kv_start[where].astype(np.int64), plan.seg_kv_len[where].astype(np.int64)
    rows = part.row_end - part.row_begin
    packed = num_rows * config.group_size
    has_kv = kv_len > 0
    is_narrow = packed <= tiling.narrow_rows
    is_short = ~is_narrow & (packed <= tiling.short_rows) & (kv_len <= tiling.short_tokens)
    wide = (has_kv & ~is_narrow & ~is_short).nonzero()[0]
    short = (has_kv & is_short).nonzero()[0]
    narrow = (has_kv & is_narrow).nonzero()[0]

    for may_cut in (True, False):
        chunk = _wide_chunks(config, tiling, num_rows[wide], kv_len[wide], may_cut)
        short_stream = _Stream(config, tiling, tiling.short_tile_tokens, tiling.short_blocks, kv_len[short], may_cut)
        narrow_stream = _Stream(
            config, tiling, tiling.narrow_tile_tokens, tiling.narrow_blocks, kv_len[narrow], may_cut
        )
        pieces = np.zeros(len(kv_len), np.int64)
        pieces[wide] = -(-kv_len[wide] // chunk)
        pieces[short], pieces[narrow] = short_stream.pieces, narrow_stream.pieces
        above, counts = _slots(plan.seg_level[where], row_begin, num_rows, pieces, rows)
        is_lone = counts[row_begin] == 1
        combined = np.where(counts == 1, -1, counts)
        finishes = np.zeros(len(kv_len), np.bool_)
        if tiling.max_finished:
            narrow_pieces = np.where(is_narrow, pieces, 0)
            narrow_above, _ = _slots(plan.seg_level[where], row_begin, num_rows, narrow_pieces, rows)
            last = counts[row_begin] - above == 1
            finishes = is_narrow & has_kv & last & (pieces == 1) & (num_rows == 1) & (narrow_above == 0)
            finishes &= (above > 0) & (above <= tiling.max_finished)
            counts[row_begin[finishes]] -= 1
            combined[row_begin[finishes]] = -1
        if max_partials is None or int(counts.sum()) <= max_partials:
            break

    partial_indptr = indptr(counts)
    # All of a shared segment is before any new token; of an own one, the first row sees the least.
    seen = np.minimum(plan.row_pos[plan.seg_row_begin[where]] + 1 - kv_start, kv_len)
    return Lowered(
        wide=_wide_items(
            config, tiling, wide, chunk, pieces, row_begin, num_rows, page_begin, kv_len, seen, above, kv_start, is_lone
        ),
        short=short_stream.items(
            short, row_begin, num_rows, page_begin, kv_len, above, kv_start, partial_indptr, finishes, is_lone
        ),
        short_runs=short_stream.runs,
        narrow=narrow_stream.items(
            narrow, row_begin, num_rows, page_begin, kv_len, above, kv_start, partial_indptr, finishes, is_lone
        ),
        narrow_runs=narrow_stream.runs,
        partial_indptr=partial_indptr.astype(np.int32),
        combined=combined.astype(np.int32),
    )


def _slots(
    level: Int32Array, row_begin: Int64Array, num_rows: Int64Array, pieces: Int64Array, rows: int
) -> tuple[Int64Array, Int64Array]:
    """Pieces above each segment, the same for all of its rows, and pieces of each row."""
    above = np.empty(len(pieces), np.int64)
    counts = np.zeros(rows, np.int64)
    bounds = np.searchsorted(level, np.arange(int(level[-1]) + 2)) if len(level) else np.zeros(1, np.int64)
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        begin = row_begin[low:high]
        above[low:high] = counts[begin]
        counts[ranges(begin, num_rows[low:high])] += pieces[low:high].repeat(num_rows[low:high])
    return above, counts


def _wide_chunks(
    config: CascadeConfig, tiling: Tiling, num_rows: Int64Array, kv_len: Int64Array, may_cut: bool
) -> Int64Array:
    """KV tokens of each piece of the wide segments."""
    if not may_cut or not len(kv_len):
        return np.maximum(kv_len, 1)
    tiles = -(-num_rows // _rows_per_tile(config, tiling))
    blocks = tiling.num_sms * tiling.wide_blocks
    wanted = max(tiling.min_cut, int(tiles @ kv_len) * config.num_kv_heads / blocks)
    cuts = np.maximum(np.rint(kv_len / wanted), 1).astype(np.int64)
    step = tiling.wide_tokens
    even = -(-kv_len // cuts)
    return -(-even // step) * step


def _rows_per_tile(config: CascadeConfig, tiling: Tiling) -> int:
    return tiling.wide_rows // config.group_size


def _wide_items(
    config: CascadeConfig,
    tiling: Tiling,
    segs: Int64Array,
    chunk: Int64Array,
    pieces: Int64Array,
    row_begin: Int64Array,
    num_rows: Int64Array,
    page_begin: NDArray[Any],
    kv_len: Int64Array,
    seen: Int64Array,
    above: Int64Array,
    kv_start: Int64Array,
    is_lone: NDArray[np.bool_],
) -> Int32Array:
    if not len(segs):
        return np.zeros((0, FIELDS), np.int32)
    per_tile = _rows_per_tile(config, tiling)
    tiles = -(-num_rows[segs] // per_tile)
    each = tiles * pieces[segs]
    of = np.arange(len(segs)).repeat(each)
    number = ranges(np.zeros(len(segs), np.int64), each)
    piece, tile = np.divmod(number, tiles[of])
    seg = segs[of]
    begin = piece * chunk[of]
    end = np.minimum(begin + chunk[of], kv_len[seg])
    items = np.empty((len(of), FIELDS), np.int64)
    items[:, 0] = row_begin[seg] + tile * per_tile
    items[:, 1] = np.minimum(num_rows[seg] - tile * per_tile, per_tile)
    items[:, 2] = page_begin[seg]
    items[:, 3], items[:, 4] = begin, end
    items[:, 5] = np.clip(seen[seg], begin, end)
    items[:, 6] = np.where(is_lone[seg], -1, above[seg] + piece)
    items[:, 7] = kv_start[seg]
    return items[np.argsort(begin - end, kind="stable")].astype(np.int32)


class _Stream:
    """The tiles of KV of some segments in one line, cut into runs.

    Attributes:
        pieces: int64[num_items], runs that each item is in.
        runs: as in `Lowered`.
    """

    def __init__(
        self,
        config: CascadeConfig,
        tiling: Tiling,
        tile_tokens: int,
        blocks: tuple[int, ...],
        kv_len: Int64Array,
        may_cut: bool,
    ) -> None:
        tiles = -(-kv_len // tile_tokens)
        num_items, num_tiles = len(tiles), int(tiles.sum())
        self.runs = np.zeros((tiling.num_runs(blocks[-1], config.num_kv_heads), FIELDS), np.int32)
        self._order = np.arange(num_items)
        self.pieces = np.ones(num_items, np.int64)
        self._first_run = np.zeros(num_items, np.int64)
        if not num_items:
            return
        num_runs = longest = 0
        for number in blocks:
            wanted = tiling.num_runs(number, config.num_kv_heads)
            deal = _deal(tiles, wanted)
            most = int(np.bincount(deal, tiles, wanted).max())
            # More blocks at once are slower each.
            if not num_runs or most * 10 <= longest * 9:
                whole, longest, num_runs = deal, most, wanted
        ideal = -(-num_tiles // num_runs)
        if not may_cut or longest <= max(ideal + 1, ideal * 5 // 4):
            self._order = np.argsort(whole, kind="stable")
            of_run = np.bincount(whole, minlength=len(self.runs))
            first = indptr(of_run)[:-1]
            self.runs[:, 3] = np.minimum(first, num_items)
            self.runs[:, 4] = np.bincount(whole, tiles, len(self.runs))
            self._first_run = whole
            return
        ends = tiles.cumsum()
        used = min(tiling.num_runs(blocks[0], config.num_kv_heads), -(-num_tiles // tiling.min_run_tiles))
        cuts = np.minimum(np.arange(len(self.runs) + 1), used) * num_tiles // used
        first = np.searchsorted(ends, cuts[:-1], side="right")
        first = np.minimum(first, num_items - 1)
        self.runs[:, 3] = first
        self.runs[:, 4] = cuts[1:] - cuts[:-1]
        self.runs[:, 5] = (cuts[:-1] - (ends[first] - tiles[first])) * tile_tokens
        begins = ends - tiles
        first_run = np.searchsorted(cuts[:used], begins, side="right") - 1
        last_run = np.searchsorted(cuts[: used + 1], ends, side="left") - 1
        self._first_run = first_run
        self.pieces = last_run - first_run + 1

    def items(
        self,
        segs: Int64Array,
        row_begin: Int64Array,
        num_rows: Int64Array,
        page_begin: NDArray[Any],
        kv_len: Int64Array,
        above: Int64Array,
        kv_start: Int64Array,
        partial_indptr: Int64Array,
        finishes: NDArray[np.bool_],
        is_lone: NDArray[np.bool_],
    ) -> Int32Array:
        """The items, as in `Lowered`."""
        segs = segs[self._order]
        items = np.zeros((len(segs) + WINDOW, FIELDS), np.int32)
        items[:-WINDOW, 0] = row_begin[segs]
        items[:-WINDOW, 1] = num_rows[segs]
        items[:-WINDOW, 2] = page_begin[segs]
        items[:-WINDOW, 3] = kv_len[segs]
        rows = row_begin[segs]
        items[:-WINDOW, 4] = partial_indptr[rows]
        items[:-WINDOW, 5] = np.where(finishes[segs], above[segs] + 1, is_lone[segs])
        items[:-WINDOW, 6] = above[segs] - self._first_run[self._order]
        items[:-WINDOW, 7] = kv_start[segs]
        self.runs[:, :3] = items[self.runs[:, 3], :3]
        return items


def _deal(tiles: Int64Array, num_runs: int) -> Int64Array:
    """The run of each item, were none cut: the longest first, to and fro over the runs."""
    rank = np.empty(len(tiles), np.int64)
    rank[np.argsort(-tiles, kind="stable")] = np.arange(len(tiles))
    turn, place = np.divmod(rank, num_runs)
    return np.where(turn % 2 == 0, place, num_runs - 1 - place)

"""Where the KV of segments is cut, so that the blocks of a kernel end at about the same time.

A *stream* is a line of tiles of KV, which is dealt out to a fixed number of runs. *Wide* segments become items, each a
tile of rows over one piece of KV, of which a fixed number run at once, the longest first.

Times are predicted in tokens: what a block takes for one of KV. All of it is in integers, with which the native core
comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashinfer_cascade.csr import Int64Array, indptr

ITEM_TOKENS, PIECE_TOKENS = 64, 8
"""Tokens in whose time a wide item begins and ends, and one piece of one row is merged.

Source: `DeviceProfile.segment_item_ns` and `segment_partial_ns` over `segment_token_ns`.
"""

SLACK = 5, 4
"""How much longer than the mean a run may be, as it goes faster once others have ended."""

LONE = 9, 16
"""Time of a wide item that has its SM to itself, against one that shares it."""

SHARES = (8, 9, 10, 12, 16)
"""Wide pieces to try: of so many eighths of what each block would have, were KV cut anywhere."""

LEVELS = 64
"""Lengths that are told apart among wide items."""


@dataclass(frozen=True, slots=True)
class Stream:
    """How a stream's tiles of KV are dealt out.

    Attributes:
        order: int64[num_items], items as they lie in the stream.
        first_run: int64[num_items], the run that each item begins in.
        pieces: int64[num_items], runs that each item is in.
        run_item: int64[num_runs], position in the stream of the first item of each run.
        run_tiles: int64[num_runs], its tiles; 0 where it idles.
        run_begin: int64[num_runs], the tile of its first item that it begins with.
    """

    order: Int64Array
    first_run: Int64Array
    pieces: Int64Array
    run_item: Int64Array
    run_tiles: Int64Array
    run_begin: Int64Array


def cut_stream(
    tiles: Int64Array, rows: Int64Array, num_runs: Sequence[int], tile_tokens: int, min_run_tiles: int, may_cut: bool
) -> Stream:
    """Deal out whole items, or cut the line into equal runs where that takes less time, merging included.

    Args:
        tiles: int64[num_items], tiles of KV of each item, at least 1.
        rows: int64[num_items], its rows.
        num_runs: runs that there may be, ascending; the last is how many `Stream` has. Whole items take more than the
            first where that makes the longest run shorter by a tenth.
        tile_tokens: KV tokens of a tile.
        min_run_tiles: cuts leave at most a run for each so many tiles.
        may_cut: whether items may be cut at all.
    """
    most_runs = num_runs[-1]
    if not len(tiles):
        nothing, idle = np.zeros(0, np.int64), np.zeros(most_runs, np.int64)
        return Stream(nothing, nothing, nothing, idle, idle, idle)
    total = int(tiles.sum())
    longest = 0
    for number in num_runs:
        dealt = _deal(tiles, number)
        most = int(np.bincount(dealt, tiles).max())
        if not longest or most * 10 <= longest * 9:  # more runs at once are slower each
            count, longest, run_of = number, most, dealt
    at_best = SLACK[0] * total
    if may_cut and SLACK[1] * longest * count > at_best:
        even = _cut_evenly(tiles, num_runs[0], most_runs, min_run_tiles)
        merging = SLACK[0] * PIECE_TOKENS * int(rows @ (even.pieces - 1))
        cut = max(at_best, SLACK[1] * int(even.run_tiles.max()) * num_runs[0]) * tile_tokens + merging
        if cut < max(at_best, SLACK[1] * longest * count) * tile_tokens:
            return even
    return Stream(
        order=np.argsort(run_of, kind="stable"),
        first_run=run_of,
        pieces=np.ones(len(tiles), np.int64),
        run_item=indptr(np.bincount(run_of, minlength=most_runs))[:-1],
        run_tiles=np.bincount(run_of, tiles, most_runs).astype(np.int64),
        run_begin=np.zeros(most_runs, np.int64),
    )


def _deal(tiles: Int64Array, num_runs: int) -> Int64Array:
    """The run of each item, were none cut: the longest first, to and fro over the runs."""
    turn, place = np.divmod(np.arange(len(tiles)), num_runs)
    run_of = np.empty(len(tiles), np.int64)
    run_of[np.argsort(-tiles, kind="stable")] = np.where(turn % 2 == 0, place, num_runs - 1 - place)
    return run_of


def _cut_evenly(tiles: Int64Array, most_used: int, num_runs: int, min_run_tiles: int) -> Stream:
    """Runs of equal length, whatever lies where."""
    ends = tiles.cumsum()
    begins = ends - tiles
    total = int(tiles.sum())
    used = min(most_used, -(-total // min_run_tiles))
    cuts = np.minimum(np.arange(num_runs + 1), used) * total // used
    first = np.minimum(np.searchsorted(ends, cuts[:-1], side="right"), len(tiles) - 1)
    first_run = np.searchsorted(cuts[:used], begins, side="right") - 1
    last_run = np.searchsorted(cuts[: used + 1], ends, side="left") - 1
    return Stream(
        order=np.arange(len(tiles)),
        first_run=first_run,
        pieces=last_run - first_run + 1,
        run_item=first,
        run_tiles=cuts[1:] - cuts[:-1],
        run_begin=cuts[:-1] - begins[first],
    )


def cut_wide(
    tiles: Int64Array,
    rows: Int64Array,
    kv_len: Int64Array,
    num_slots: int,
    blocks_per_sm: int,
    min_cut: int,
    step: int,
) -> Int64Array:
    """KV tokens of each piece of wide segments: the share of a slot, or more where that takes less time.

    Whatever the choice, cuts add at most `num_slots` items.

    Args:
        tiles: int64[num_segments], tiles of rows of each segment.
        rows: int64[num_segments], its rows.
        kv_len: int64[num_segments], its KV tokens, at least 1.
        num_slots: items that run at once.
        blocks_per_sm: how many of them on one SM.
        min_cut: KV tokens below which a segment is not cut.
        step: pieces are multiples of it.
    """
    if not len(kv_len):
        return kv_len
    total = int(tiles @ kv_len)
    best, least, before = kv_len, 0, 0
    for eighths in SHARES:
        share, over = total * eighths, 8 * num_slots
        if share < min_cut * over:
            share, over = min_cut, 1
        if share == before:
            break
        before = share
        cuts = np.maximum((2 * kv_len * over + share) // (2 * share), 1)
        even = -(-kv_len // cuts)
        chunk = -(-even // step) * step
        pieces = -(-kv_len // chunk)
        run_at_once = int(tiles @ pieces) <= num_slots
        if run_at_once and not least:
            return chunk
        time = _wide_time(tiles, rows, kv_len, chunk, pieces, num_slots, blocks_per_sm)
        if not least or time * 16 < least * 15:  # the prediction is no better than that
            best, least = chunk, time
        if run_at_once:
            break  # longer ones take longer
    return best


def _wide_time(
    tiles: Int64Array,
    rows: Int64Array,
    kv_len: Int64Array,
    chunk: Int64Array,
    pieces: Int64Array,
    num_slots: int,
    blocks_per_sm: int,
) -> int:
    """Predicted time, where each slot takes every `num_slots`-th item, and of merging; times slots and LONE."""
    lengths = np.concatenate((np.minimum(chunk, kv_len), kv_len - (pieces - 1) * chunk))
    longest = int(lengths.max())
    # Lengths are rounded up to one of LEVELS, so that they need not be sorted.
    level = LEVELS - 1 - (lengths * LEVELS - 1) // longest
    items = np.bincount(level, np.concatenate((tiles * (pieces - 1), tiles)), LEVELS).cumsum().astype(np.int64)
    waves = -(-int(items[-1]) // num_slots)
    levels = np.searchsorted(items, np.arange(waves) * num_slots, side="right")
    times = (LEVELS - levels) * longest // LEVELS + ITEM_TOKENS
    time = int(times.sum()) * LONE[1]
    if blocks_per_sm > 1 and (int(items[-1]) - (waves - 1) * num_slots) * blocks_per_sm <= num_slots:
        time -= int(times[-1]) * (LONE[1] - LONE[0])
    return time * num_slots + int(rows @ pieces) * PIECE_TOKENS * LONE[1]

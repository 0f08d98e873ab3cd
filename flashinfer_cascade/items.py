"""Tables of the segments' kernels, row by row: what `lower.Lowered` says of them, in numpy."""

from __future__ import annotations

import numpy as np

from flashinfer_cascade.csr import Int32Array, Int64Array, ranges
from flashinfer_cascade.cuts import Stream
from flashinfer_cascade.native_lower import FIELDS, WINDOW


def pieces_above(
    level: Int32Array, row_begin: Int64Array, num_rows: Int64Array, pieces: Int64Array, rows: int
) -> tuple[Int64Array, Int64Array]:
    """Pieces above each segment, the same for all of its rows, and pieces of each row."""
    above = np.empty(len(pieces), np.int64)
    counts = np.zeros(rows, np.int64)
    row_end = row_begin + num_rows
    bounds = np.searchsorted(level, np.arange(int(level[-1]) + 2)) if len(level) else np.zeros(1, np.int64)
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        begin, here = row_begin[low:high], pieces[low:high]
        above[low:high] = counts[begin]
        # Segments of a level follow each other, with gaps.
        steps = np.zeros(rows + 1, np.int64)
        steps[begin] = here
        steps[row_end[low:high]] -= here
        counts += steps[:-1].cumsum()
    return above, counts


def wide_items(
    table: Int32Array, tiles: Int64Array, chunk: Int64Array, seen: Int64Array, per_tile: int, together: int
) -> Int32Array:
    """Items of wide segments: piece by piece, tile by tile, the longest first; those of two tiles before the others.

    Args:
        table: int32[num_segments, FIELDS], of each segment what an item of a stream has, but for its slot: the pieces
            above.
        tiles: int64[num_segments], tiles of rows.
        chunk: int64[num_segments], tokens of a piece.
        seen: int64[num_segments], tokens that all rows see.
        per_tile: rows of a tile.
        together: tiles of an item, 1 or 2.
    """
    if not len(table):
        return np.zeros((0, FIELDS), np.int32)
    kv_len = table[:, 3]
    last = (kv_len - 1) // chunk  # piece
    # All but the last piece of a segment are equally long.
    per_item, blocks = per_tile * together, -(-tiles // together)
    groups = np.stack((np.minimum(chunk, kv_len), kv_len - last * chunk), axis=1).reshape(-1)
    counts = np.stack((blocks * last, blocks), axis=1).reshape(-1)
    order = np.argsort(-groups, kind="stable")
    group = order.repeat(counts[order])
    seg, is_last = np.divmod(group, 2)
    piece, tile = np.divmod(ranges(np.zeros(len(order), np.int64), counts[order]), blocks[seg])
    piece += is_last * last[seg]
    of = table[seg]
    begin = piece * chunk[seg]
    end = np.minimum(begin + chunk[seg], of[:, 3])
    items = np.empty((len(seg), FIELDS), np.int32)
    items[:, 0] = of[:, 0] + tile * per_item
    items[:, 1] = np.minimum(of[:, 1] - tile * per_item, per_item)
    items[:, 2] = of[:, 2]
    items[:, 3], items[:, 4] = begin, end
    items[:, 5] = np.clip(seen[seg], begin, end)
    items[:, 6] = np.where(of[:, 5] == 1, -1, of[:, 6] + piece)
    items[:, 7] = of[:, 7]
    is_single = items[:, 1] <= per_tile
    return items if together == 1 else np.concatenate((items[~is_single], items[is_single]))


def stream_items(table: Int32Array, stream: Stream) -> Int32Array:
    """Items in the order of the stream."""
    items = np.zeros((len(table) + WINDOW, FIELDS), np.int32)
    items[:-WINDOW] = table[stream.order]
    items[:-WINDOW, 6] -= stream.first_run[stream.order].astype(np.int32)
    return items


def stream_runs(items: Int32Array, stream: Stream, tile_tokens: int) -> Int32Array:
    """Records of a stream's runs."""
    runs = np.zeros((len(stream.run_item), FIELDS), np.int32)
    runs[:, :3] = items[stream.run_item, :3]
    runs[:, 3], runs[:, 4] = stream.run_item, stream.run_tiles
    runs[:, 5] = stream.run_begin * tile_tokens
    return runs

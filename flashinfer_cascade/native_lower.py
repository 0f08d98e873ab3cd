"""`lower.lower` by the native core: the same tables, some ten times faster."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array, Int64Array

FIELDS, WINDOW = 8, 32
"""Numbers of an item, and zeros behind a stream's items: see `lower`."""

MAX_BLOCKS = 4
_I64, _P = ctypes.c_int64, ctypes.c_void_p


class Tiles(ctypes.Structure):
    """`lower.Tiling` for C, and what of the configuration counts."""

    _fields_ = (
        *((name, _I64) for name in ("num_sms", "group_size", "num_kv_heads", "wide_rows", "wide_tokens")),
        *((name, _I64) for name in ("wide_blocks", "min_cut", "short_rows", "short_tokens", "narrow_rows")),
        *((name, _I64) for name in ("short_tile_tokens", "narrow_tile_tokens", "min_run_tiles", "max_finished")),
        *((name, _I64) for name in ("num_short_blocks", "num_narrow_blocks")),
        *((name, _I64 * MAX_BLOCKS) for name in ("short_blocks", "narrow_blocks")),
    )


class _Segments(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("row_begin", "num_rows", "kv_start", "kv_len", "row_pos", "page_begin")),
        *((name, _I64) for name in ("n", "row_0", "rows")),
    )


@functools.cache
def make_tiles(config: CascadeConfig, tiling: Any) -> Tiles:
    """Both in one block; kept, for it takes longer than lowering."""
    names = [field[0] for field in Tiles._fields_]
    values = {name: getattr(tiling, name) for name in names if hasattr(tiling, name)}
    values |= {"group_size": config.group_size, "num_kv_heads": config.num_kv_heads}
    for name in ("short_blocks", "narrow_blocks"):
        blocks = getattr(tiling, name)
        values |= {f"num_{name}": len(blocks), name: blocks}
    return Tiles(**values)


def lower_natively(
    core: ctypes.PyDLL,
    tiles: Tiles,
    columns: Sequence[Int32Array],
    page_begin: Int64Array,
    rows: tuple[int, int],
    max_partials: int | None,
) -> list[Int32Array]:
    """The arrays of `lower.Lowered`, in their order.

    Args:
        core: the native core.
        tiles: of the configuration and the tiling.
        columns: row_begin, num_rows, kv_start and kv_len of the part's segments, and row_pos of the plan; contiguous.
        page_begin: int64[num_segments], contiguous.
        rows: the part's first row, and the row behind its last.
        max_partials: as for `lower.lower`.
    """
    n, count = len(columns[0]), rows[1] - rows[0]
    addresses = [column.ctypes.data for column in columns]
    segments = _Segments(*addresses, page_begin.ctypes.data, n, rows[0], count)
    per_tile = tiles.wide_rows // tiles.group_size
    # No cut adds more items than there are blocks: each segment is cut into at most one more than its share of them.
    most_wide = tiles.num_sms * tiles.wide_blocks // tiles.num_kv_heads + 1
    most_wide += int(columns[1].sum(dtype=np.int64)) // per_tile + n
    runs = [
        max(tiles.num_sms * blocks[number - 1] // tiles.num_kv_heads, 1)
        for blocks, number in (
            (tiles.short_blocks, tiles.num_short_blocks),
            (tiles.narrow_blocks, tiles.num_narrow_blocks),
        )
    ]
    items = (n + WINDOW) * FIELDS
    sizes = most_wide * FIELDS, items, runs[0] * FIELDS, items, runs[1] * FIELDS, count + 1, count
    ends = [0, *accumulate(sizes)]
    out = np.empty(ends[-1], np.int32)
    used = (ctypes.c_int64 * 3)()
    places = [out.ctypes.data + 4 * end for end in ends[:-1]]
    most = -1 if max_partials is None else max_partials
    if core.fic_lower(ctypes.addressof(tiles), ctypes.addressof(segments), most, ctypes.addressof(used), *places):
        raise MemoryError
    arrays = [out[begin : begin + size] for begin, size in zip(ends, sizes, strict=False)]
    for number, length in (0, used[0]), (1, used[1] + WINDOW), (3, used[2] + WINDOW):
        arrays[number] = arrays[number][: length * FIELDS]
    return [array.reshape(-1, FIELDS) for array in arrays[:5]] + arrays[5:]

"""`lower.lower` by the native core, and the room that it writes to: the same tables, some ten times faster."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flashinfer_cascade.capacity import capacity_error
from flashinfer_cascade.config import MAX_INT32, CascadeConfig
from flashinfer_cascade.csr import Int32Array, Int64Array
from flashinfer_cascade.errors import CapacityError
from flashinfer_cascade.plan import CascadePlan, PlanPart

FIELDS, WINDOW = 8, 32
"""Numbers of an item, and items that a stream's kernel reads at once: as many zeros end its list."""

MAX_BLOCKS = 4
_I64, _P = ctypes.c_int64, ctypes.c_void_p


class Tiles(ctypes.Structure):
    """`lower.Tiling` for C, and what of the configuration counts."""

    _fields_ = (
        *((name, _I64) for name in ("num_sms", "group_size", "num_kv_heads", "wide_rows", "wide_tokens")),
        *((name, _I64) for name in ("wide_blocks", "wide_tiles", "min_cut", "short_rows", "short_tokens")),
        ("narrow_rows", _I64),
        *((name, _I64) for name in ("short_tile_tokens", "narrow_tile_tokens", "min_run_tiles", "max_finished")),
        *((name, _I64) for name in ("num_short_blocks", "num_narrow_blocks")),
        *((name, _I64 * MAX_BLOCKS) for name in ("short_blocks", "narrow_blocks")),
    )


class _Segments(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("row_begin", "num_rows", "kv_start", "kv_len", "row_pos", "page_begin")),
        *((name, _I64) for name in ("n", "row_0", "rows")),
    )


class Sizes(NamedTuple):
    """What a lowered part has.

    Attributes:
        num_wide, num_short, num_narrow: items.
        num_double: of the wide ones, those of two tiles.
        num_short_runs, num_narrow_runs: runs, none where there are no items.
        num_partials: partial results.
        num_rows: of the part.
        page_begin: the largest; an int32 in the tables.
    """

    num_wide: int
    num_double: int
    num_short: int
    num_narrow: int
    num_short_runs: int
    num_narrow_runs: int
    num_partials: int
    num_rows: int
    page_begin: int

    def check(self, most: Sizes) -> None:
        """Refuse what is larger than there is room for.

        Raises:
            CapacityError: something is.
        """
        pairs = zip(self._fields, zip(self, most, strict=True), strict=True)
        lacking = {name: pair for name, pair in pairs if pair[0] > pair[1]}
        if lacking:
            remedy = "Plan with the capacity that the room was made for, or reserve more"
            raise capacity_error("the lowered part", lacking, remedy)


UNLIMITED = Sizes(*[MAX_INT32] * len(Sizes._fields))


class _Room(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("wide", "short", "narrow", "short_runs", "narrow_runs")),
        *((name, _P) for name in ("partial_indptr", "combined")),
        *((name, _I64) for name in Sizes._fields),
    )


@dataclass(frozen=True, slots=True, eq=False)
class LoweredRoom:
    """Where parts are lowered to, one after the other: int32 arrays as in `lower.Lowered`, contiguous, and larger.

    Attributes:
        wide: [most items, FIELDS]; ends with zeros.
        short, narrow: [most items + WINDOW, FIELDS], or [0, FIELDS] for none; WINDOW zeros follow the part's items.
        short_runs, narrow_runs: [most runs, FIELDS]; ends with zeros.
        partial_indptr: [most rows + 1]; ends with its last number, again and again.
        combined: [most rows]; ends with zeros.
        num_partials: partial results that there is room for.
        most: what all of it takes.

    Raises:
        CapacityError: a list of items is shorter than its end, or `partial_indptr` is not one longer than `combined`.
    """

    wide: Int32Array
    short: Int32Array
    short_runs: Int32Array
    narrow: Int32Array
    narrow_runs: Int32Array
    partial_indptr: Int32Array
    combined: Int32Array
    num_partials: int
    most: Sizes = field(init=False, repr=False)
    _native: _Room = field(init=False, repr=False)

    def __post_init__(self) -> None:
        short, narrow, rows = len(self.short), len(self.narrow), len(self.combined)
        for name, length in ("short", short), ("narrow", narrow):
            if 0 < length < WINDOW:
                raise CapacityError(f"{name} has room for {length} items, but ends with {WINDOW} of zeros: add as many")
        if len(self.partial_indptr) != rows + 1:
            raise CapacityError(
                f"partial_indptr has {len(self.partial_indptr)} numbers for the {rows} rows of combined: give it "
                f"{rows + 1}"
            )
        most = Sizes(
            len(self.wide),
            len(self.wide),
            max(short - WINDOW, 0),
            max(narrow - WINDOW, 0),
            len(self.short_runs),
            len(self.narrow_runs),
            min(self.num_partials, MAX_INT32),
            rows,
            MAX_INT32,
        )
        tables = self.wide, self.short, self.narrow, self.short_runs, self.narrow_runs
        addresses = [table.ctypes.data if len(table) else None for table in tables]
        native = _Room(*addresses, self.partial_indptr.ctypes.data, self.combined.ctypes.data, *most)
        object.__setattr__(self, "most", most)
        object.__setattr__(self, "_native", native)

    @property
    def address(self) -> int:
        """Of what C reads."""
        return ctypes.addressof(self._native)


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


def allocate(tiles: Tiles, plan: CascadePlan, part: PlanPart, num_partials: int) -> LoweredRoom:
    """Room in which a part fits, but perhaps for its partial results."""
    n, rows = part.seg_end - part.seg_begin, part.row_end - part.row_begin
    slots, *runs = [
        max(tiles.num_sms * blocks // tiles.num_kv_heads, 1)
        for blocks in (
            tiles.wide_blocks,
            tiles.short_blocks[tiles.num_short_blocks - 1],
            tiles.narrow_blocks[tiles.num_narrow_blocks - 1],
        )
    ]
    per_tile = tiles.wide_rows // tiles.group_size
    row_tiles = n + int(np.add.reduce(plan.seg_num_rows[part.seg_begin : part.seg_end])) // per_tile
    wide = row_tiles + slots  # at most one more item for each of them: `cuts.cut_wide`
    short, short_runs = wide + n + WINDOW, wide + n + WINDOW + runs[0]
    narrow, narrow_runs = short_runs + n + WINDOW, short_runs + n + WINDOW + runs[1]
    tables, by_row = np.empty((narrow_runs, FIELDS), np.int32), np.empty(2 * rows + 1, np.int32)
    return LoweredRoom(
        tables[:wide],
        tables[wide:short],
        tables[short:short_runs],
        tables[short_runs:narrow],
        tables[narrow:],
        by_row[: rows + 1],
        by_row[rows + 1 :],
        num_partials,
    )


def lower_natively(
    core: ctypes.PyDLL, tiles: Tiles, plan: CascadePlan, part: PlanPart, page_begin: Int64Array, room: LoweredRoom
) -> Sizes:
    """Lower one part into a room.

    Args:
        core: the native core.
        tiles: of the configuration and the tiling.
        plan: what to run.
        part: which part of it.
        page_begin: int64[num_segments of the part], contiguous.
        room: where to; nothing is written if something does not fit.

    Raises:
        CapacityError: something does not fit.
    """
    columns = plan.seg_row_begin, plan.seg_num_rows, plan.seg_kv_start, plan.seg_kv_len
    at = part.seg_begin * columns[0].itemsize
    segments = _Segments(
        *[column.ctypes.data + at for column in columns],
        plan.row_pos.ctypes.data,
        page_begin.ctypes.data,
        len(page_begin),
        part.row_begin,
        part.row_end - part.row_begin,
    )
    sizes = (_I64 * len(Sizes._fields))()
    status = core.fic_lower(ctypes.addressof(tiles), ctypes.addressof(segments), room.address, sizes)
    if status < 0:
        raise MemoryError
    found = Sizes(*sizes)
    if status:
        found.check(room.most)
    return found

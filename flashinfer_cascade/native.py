"""The optional native core, core.c: planning's loops over requests and nodes. It computes what Python computes.

The wheel brings it where a C compiler was there to build it. Without it, plans are the same and take longer. Calls hold
the GIL: they are too short to be worth waiting for it again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from enum import IntEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.config import PlannerPolicy
from flashinfer_cascade.cost import (
    BLOCKS_PER_SM,
    DECODE_BLOCKS_PER_SM,
    DECODE_GROUP_SIZES,
    FA3_MIN_ROWS,
    LEVEL_WEIGHTS,
    MIN_SPLIT_TOKENS,
    TILES,
    Backend,
    CostModel,
)
from flashinfer_cascade.csr import Int32Array, Int64Array
from flashinfer_cascade.fold import Cut
from flashinfer_cascade.forest import PrefixForest
from flashinfer_cascade.segment_cost import BLOCKS_PER_SM as SEGMENT_BLOCKS_PER_SM
from flashinfer_cascade.segment_cost import MIN_TOKENS, NARROW_ROWS, SegmentCost

SOURCE, LIBRARY = (Path(__file__).with_name(name) for name in ("core.c", "_core.so"))
BACKENDS: tuple[Backend, ...] = ("fa2", "fa2_uncut", "fa3", "decode", "segments")
FLAT_BACKENDS = tuple((name,) for name in BACKENDS)
MAX_LEVELS, MAX_PARTS = 64, 2
HEAD = 5 + MAX_LEVELS
"""Numbers before the arrays in what `fic_rate` writes."""

_I64, _F64, _P = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Status(IntEnum):
    """What came of the search for a cascade."""

    FOUND = 0
    NOTHING_PAYS = 1
    TOO_DEEP = 2
    NO_MEMORY = 3
    NO_ROOM = 4
    DIFFERENT = 5
    UNRATED = 6


class Model(ctypes.Structure):
    """`CostModel` and `PlannerPolicy` for C."""

    _fields_ = (
        *((name, _F64) for name in ("hbm_us_per_token", "launch_us", "split_us", "split_row_ns", "merge_us")),
        *((name, _F64) for name in ("merge_row_ns", "row_heads", "decode_block_us", "decode_token_us")),
        *((name, _F64) for name in ("decode_launch_us", "decode_lone_block", "fa3_block_us", "fa3_token_us")),
        *((name, _F64) for name in ("decode_block_ps", "decode_token_ps")),
        *((name, _F64) for name in ("segment_partial_ps", "segment_launch_us")),
        *((name, _F64 * 2) for name in ("segment_item_ps", "segment_token_ps", "segment_lone_block")),
        *((name, _F64 * len(TILES)) for name in ("block_us", "token_us", "lone_block", "block_ps", "token_ps")),
        ("level_weights", _F64 * len(LEVEL_WEIGHTS)),
        ("tiles", _I64 * len(TILES)),
        ("tile_shift", _I64 * len(TILES)),
        *((name, _I64) for name in ("num_sms", "num_qo_heads", "num_kv_heads", "group_size", "small_head")),
        *((name, _I64) for name in ("page_size", "window_left", "blocks_per_sm", "min_split_tokens", "fa3_min_rows")),
        *((name, _I64) for name in ("decode_blocks_per_sm", "has_fa3", "has_decode", "decode_group", "fold")),
        *((name, _I64) for name in ("forced", "max_levels", "narrow_rows", "rows_per_tile")),
        *((name, _I64) for name in ("rates_levels", "rates_segments")),
        *((name, _I64 * 2) for name in ("segment_blocks_per_sm", "segment_min_tokens")),
    )


class Rated(NamedTuple):
    """Predicted times of flat and of the best cascade.

    Attributes:
        status: whether there is a cascade, and why not.
        tokens_left: that every request may grow by before a rounded length moves.
        flat_us, flat_backends: of flat attention.
        us, backends, cut: of the cascade, where there is one.
        merged: nodes that it had to give up to fit the limits.
        raw: int64, all of it as C wrote it; None when Python did it.
    """

    status: Status
    tokens_left: int
    flat_us: float
    flat_backends: tuple[Backend, ...]
    us: float = 0.0
    backends: tuple[Backend, ...] = ()
    cut: Cut | None = None
    merged: int = 0
    raw: Int64Array | None = None


@functools.cache
def load_core() -> ctypes.PyDLL | None:
    """The core, or None where it was not built, or from another source or for another machine."""
    try:
        core = ctypes.PyDLL(str(LIBRARY))
        core.fic_source.restype = ctypes.c_char_p
        if core.fic_source() != hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode():
            return None
    except (OSError, AttributeError):
        return None
    core.fic_rate.argtypes = (_P, _P, _I64, _I64, _P, _I64, _I64, _P)
    core.fic_columns.argtypes = (_P, _I64, _I64, _P, _I64, _P, *(_I64,) * 6, _P)
    core.fic_gather.argtypes = (_P, _P, _I64, _I64, _I64, _P, _P)
    core.fic_leave.argtypes = (_P, _I64)
    core.fic_share.argtypes = (_P, _P, _I64, _I64, _P, _I64)
    core.fic_forest.argtypes = (_P, _I64, _I64, _P)
    core.fic_steady.argtypes = (_P, _P, _P, _I64, _P, _I64, _I64, _P, _P, _I64, _P, _I64, _P, _P, _P)
    core.fic_steady.restype = _I64
    core.fic_lower.argtypes = (_P,) * 4
    core.fic_lower.restype = _I64
    core.fic_gather.restype = core.fic_leave.restype = None
    core.fic_rate.restype = core.fic_columns.restype = core.fic_share.restype = core.fic_forest.restype = _I64
    return core


class Rater:
    """Rates parts as `choose.Chooser` does in Python, apart from capacities and FlashInfer's own wrapper."""

    def __init__(
        self,
        core: ctypes.PyDLL,
        cost: CostModel,
        segments: SegmentCost,
        policy: PlannerPolicy,
        rates_levels: bool,
        rates_segments: bool,
    ) -> None:
        self._rate = core.fic_rate
        p, c = cost.profile, cost.config
        values: dict[str, Any] = {
            **{
                name: getattr(p, name) for name in ("launch_us", "split_us", "split_row_ns", "merge_us", "merge_row_ns")
            },
            **{name: getattr(p, name) for name in ("decode_launch_us", "decode_lone_block", "fa3_block_us", "num_sms")},
            **{name: getattr(p, name) for name in ("block_us", "lone_block")},
            **{name: getattr(c, name) for name in ("num_qo_heads", "num_kv_heads", "group_size", "page_size")},
            "window_left": c.window_left,
            **{name: getattr(cost, name) for name in ("hbm_us_per_token", "decode_block_us", "decode_token_us")},
            "row_heads": cost.row_heads_at_128,
            "decode_block_ps": round(cost.decode_block_us * 1e6),
            "decode_token_ps": round(cost.decode_token_us * 1e6),
            "token_us": cost.token_us,
            "block_ps": tuple(cost.block_ps),
            "token_ps": tuple(cost.token_ps),
            "fa3_token_us": cost.fa3_token_us,
            "level_weights": LEVEL_WEIGHTS,
            "tiles": TILES,
            "tile_shift": tuple(tile.bit_length() - 1 for tile in TILES),
            "small_head": c.head_dim < 256,
            "blocks_per_sm": BLOCKS_PER_SM,
            "min_split_tokens": MIN_SPLIT_TOKENS,
            "fa3_min_rows": FA3_MIN_ROWS,
            "decode_blocks_per_sm": DECODE_BLOCKS_PER_SM,
            "has_fa3": cost.has_fa3,
            "has_decode": cost.has_decode,
            "decode_group": c.group_size in DECODE_GROUP_SIZES,
            "fold": policy.fold,
            "forced": policy.executor != "auto",
            "max_levels": policy.max_levels,
            "segment_partial_ps": segments.partial_ps,
            "segment_launch_us": p.segment_launch_us,
            "segment_item_ps": tuple(segments.item_ps),
            "segment_token_ps": tuple(segments.token_ps),
            "segment_lone_block": p.segment_lone_block,
            "segment_blocks_per_sm": SEGMENT_BLOCKS_PER_SM,
            "segment_min_tokens": MIN_TOKENS,
            "narrow_rows": NARROW_ROWS,
            "rows_per_tile": segments.rows_per_tile,
            "rates_levels": rates_levels,
            "rates_segments": rates_segments,
        }
        assert values.keys() == {field[0] for field in Model._fields_}
        self._model = Model(**values)
        self.address = ctypes.addressof(self._model)

    def rate(self, batch: Batch, forest: PrefixForest, cascade: bool) -> Rated:
        """Rate flat attention, and the best cascade if one is wanted."""
        n, nodes = len(forest.order), forest.num_nodes
        out = np.empty(HEAD + 5 * n + 1 + 3 * nodes + -(-nodes // 8), np.int64)
        status = self._rate(
            self.address, forest.address, n, nodes, batch.address, len(batch.seq_lens), cascade, out.ctypes.data
        )
        flat_us, us = out[:2].view(np.float64).tolist()
        flat_backend, num_levels, tokens_left = out[2:5].tolist()
        flat_backends = FLAT_BACKENDS[flat_backend]
        if status != Status.FOUND:
            return Rated(Status(status), tokens_left, flat_us, flat_backends, raw=out)
        tail_start = HEAD + 3 * n + 1
        tail_above, start = tail_start + n, tail_start + 2 * n
        level, above, kept = start + nodes, start + 2 * nodes, start + 3 * nodes
        cut = Cut(
            out[kept:].view(np.bool_)[:nodes],
            out[start:level],
            out[level:above],
            out[above:kept],
            out[tail_start:tail_above],
            out[tail_above:start],
            num_levels,
        )
        backends = tuple([BACKENDS[number] for number in out[5 : 5 + num_levels].tolist()])
        return Rated(Status.FOUND, tokens_left, flat_us, flat_backends, us, backends, cut, 0, out)


def lay_out_columns(
    core: ctypes.PyDLL, batch: Batch, parts: list[tuple[PrefixForest, int, Int64Array | None]]
) -> tuple[Int32Array | None, list[Int32Array]]:
    """The arrays of `layout.Columns`, in their order: row_order, and the others.

    Args:
        core: the native core.
        batch: what is planned.
        parts: the forest of each part, how many nodes are kept, and what `Rated.raw` says of them.
    """
    n_all = batch.num_requests
    rows_all = batch.num_rows
    segs_all = n_all + sum(kept for _, kept, _ in parts)
    out = np.empty(2 * n_all + 1 + 2 * rows_all + 7 * segs_all, np.int32)
    address = out.ctypes.data
    n_at = rows_at = segs_at = 0
    for forest, kept, raw in parts:
        n = len(forest.order)
        rated = raw.ctypes.data if kept and raw is not None else None
        where = n_at, rows_at, segs_at, n_all, rows_all, segs_all
        rows_at = core.fic_columns(
            forest.address, n, forest.num_nodes, rated, batch.page_size, batch.address, *where, address
        )
        if rows_at < 0:
            raise MemoryError
        n_at, segs_at = n_at + n, segs_at + n + kept
    sizes = n_all, n_all + 1, rows_all, rows_all, *(segs_all,) * 7
    ends = accumulate(sizes)
    order, qo_indptr, row_order, *rest = [out[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    identity = bool((order[1:] > order[:-1]).all())
    return None if identity else row_order, [order, qo_indptr, *rest]

"""The optional native core, core.c: planning's loops over requests and nodes. It computes what Python computes.

The wheel brings it where a C compiler was there to build it. It is loaded with ctypes, which lets go of the GIL while
it runs. Without it, plans are the same and take longer.
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
    PartShape,
)
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr
from flashinfer_cascade.fold import Cut
from flashinfer_cascade.forest import PrefixForest
from flashinfer_cascade.pages import PagePool

SOURCE, LIBRARY = (Path(__file__).with_name(name) for name in ("core.c", "_core.so"))
BACKENDS: tuple[Backend, ...] = ("fa2", "fa2_uncut", "fa3", "decode")
MAX_LEVELS = 64

_I64, _F64, _P = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Status(IntEnum):
    """What came of the search for a cascade."""

    FOUND = 0
    NOTHING_PAYS = 1
    TOO_DEEP = 2
    NO_MEMORY = 3
    NO_ROOM = 4


class Model(ctypes.Structure):
    """`CostModel` and `PlannerPolicy` for C."""

    _fields_ = (
        *((name, _F64) for name in ("hbm_us_per_token", "launch_us", "split_us", "split_row_ns", "merge_us")),
        *((name, _F64) for name in ("merge_row_ns", "row_heads", "decode_block_us", "decode_token_us")),
        *((name, _F64) for name in ("decode_launch_us", "decode_lone_block", "fa3_block_us", "fa3_token_us")),
        *((name, _F64) for name in ("decode_block_ps", "decode_token_ps")),
        *((name, _F64 * len(TILES)) for name in ("block_us", "token_us", "lone_block", "block_ps", "token_ps")),
        ("level_weights", _F64 * len(LEVEL_WEIGHTS)),
        ("tiles", _I64 * len(TILES)),
        ("tile_shift", _I64 * len(TILES)),
        *((name, _I64) for name in ("num_sms", "num_qo_heads", "num_kv_heads", "group_size", "small_head")),
        *((name, _I64) for name in ("page_size", "window_left", "blocks_per_sm", "min_split_tokens", "fa3_min_rows")),
        *((name, _I64) for name in ("decode_blocks_per_sm", "has_fa3", "has_decode", "decode_group", "fold")),
        *((name, _I64) for name in ("forced", "max_levels")),
    )


class Found(ctypes.Structure):
    """What a search found."""

    _fields_ = (
        ("flat_us", _F64),
        ("us", _F64),
        ("flat_backend", _I64),
        ("num_levels", _I64),
        ("backends", _I64 * MAX_LEVELS),
    )


class Rated(NamedTuple):
    """Predicted times of flat and of the best cascade.

    Attributes:
        status: whether there is a cascade, and why not.
        shape: the part.
        flat_us, flat_backends: of flat attention.
        us, backends, cut: of the cascade, where there is one.
        merged: nodes that it had to give up to fit the limits.
    """

    status: Status
    shape: PartShape
    flat_us: float
    flat_backends: tuple[Backend, ...]
    us: float = 0.0
    backends: tuple[Backend, ...] = ()
    cut: Cut | None = None
    merged: int = 0


@functools.cache
def load_core() -> ctypes.CDLL | None:
    """The core, or None where it was not built, or from another source or for another machine."""
    try:
        core = ctypes.CDLL(str(LIBRARY))
        core.fic_source.restype = ctypes.c_char_p
        if core.fic_source() != hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode():
            return None
    except (OSError, AttributeError):
        return None
    core.fic_rate.argtypes = (_P, _P, _I64, _I64, _P, _P, _I64, _P, _P)
    core.fic_rate.restype = _I64
    core.fic_columns.argtypes = (_P, _I64, _I64, _P, _P, _P, _P, _I64, _I64, _P, _P, _P, _P, _P, *(_I64,) * 6, _P)
    core.fic_columns.restype = _I64
    core.fic_update.argtypes = (_P, _I64, _I64, _P, _P, _P, _P, _I64, _P, _I64)
    core.fic_update.restype = _I64
    core.fic_forest.argtypes = (_P, _I64, _I64, _P, _P, _P, _P, _I64, _P, _P)
    core.fic_forest.restype = _I64
    return core


class Rater:
    """Rates parts as `choose.Chooser` does in Python, apart from capacities and FlashInfer's own wrapper."""

    def __init__(self, core: ctypes.CDLL, cost: CostModel, policy: PlannerPolicy) -> None:
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
        }
        assert values.keys() == {field[0] for field in Model._fields_}
        self._model = Model(**values)
        self._address = ctypes.addressof(self._model)

    def rate(self, batch: Batch, forest: PrefixForest, cascade: bool) -> Rated:
        """Rate flat attention, and the best cascade if one is wanted."""
        n, nodes = len(forest.order), forest.num_nodes
        out = np.empty(5 * n + 1 + 3 * nodes + -(-nodes // 8), np.int64)
        found = Found()
        status = Status(
            self._rate(
                self._address,
                forest.block.ctypes.data,
                n,
                nodes,
                batch.seq_lens.ctypes.data,
                batch.qo_lens.ctypes.data,
                cascade,
                out.ctypes.data,
                ctypes.addressof(found),
            )
        )
        rows, context, row_indptr = out[:n], out[n : 2 * n], out[2 * n : 3 * n + 1]
        shape = PartShape(forest, batch.page_size, rows, row_indptr, context)
        flat_backends = (BACKENDS[found.flat_backend],)
        if status is not Status.FOUND:
            return Rated(status, shape, found.flat_us, flat_backends)
        at = 3 * n + 1
        tail_start, tail_above = out[at : at + n], out[at + n : at + 2 * n]
        at += 2 * n
        start, level, above = out[at : at + nodes], out[at + nodes : at + 2 * nodes], out[at + 2 * nodes :][:nodes]
        kept = out[at + 3 * nodes :].view(np.bool_)[:nodes]
        cut = Cut(kept, start, level, above, tail_start, tail_above, found.num_levels)
        backends = tuple(BACKENDS[number] for number in found.backends[: found.num_levels])
        return Rated(status, shape, found.flat_us, flat_backends, found.us, backends, cut)


def lay_out_columns(
    core: ctypes.CDLL, batch: Batch, parts: list[tuple[PrefixForest, Cut]]
) -> tuple[Int32Array | None, list[Int32Array]]:
    """The arrays of `layout.Columns`, in their order: row_order, and the others."""
    n_all = len(batch.seq_lens)
    q_begin = indptr(batch.qo_lens)
    rows_all = int(q_begin[-1])
    kept = [int(np.count_nonzero(cut.kept)) for _, cut in parts]
    segs_all = n_all + sum(kept)
    out = np.empty(2 * n_all + 1 + 2 * rows_all + 7 * segs_all, np.int32)
    of_batch = [a.ctypes.data for a in (batch.seq_lens, batch.qo_lens, batch.page_begin, batch.page_counts, q_begin)]
    address = out.ctypes.data
    n_at = rows_at = segs_at = 0
    for (forest, cut), num_kept in zip(parts, kept, strict=True):
        n = len(forest.order)
        of_cut: list[int | None] = [None] * 4
        if num_kept:
            of_cut = [a.ctypes.data for a in (cut.kept, cut.node_start, cut.node_level, cut.tail_start)]
        block, page_size = forest.block.ctypes.data, batch.page_size
        where = n_at, rows_at, segs_at, n_all, rows_all, segs_all
        rows_at = core.fic_columns(
            block, n, forest.num_nodes, *of_cut, cut.num_levels, page_size, *of_batch, *where, address
        )
        if rows_at < 0:
            raise MemoryError
        n_at, segs_at = n_at + n, segs_at + n + num_kept
    sizes = n_all, n_all + 1, rows_all, rows_all, *(segs_all,) * 7
    order, qo_indptr, row_order, *rest = (
        out[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
    identity = bool((order[1:] > order[:-1]).all())
    return None if identity else row_order, [order, qo_indptr, *rest]


class Trie:
    """The sharing among some requests, kept up to date request by request; by slot.

    Args:
        core: the native core.
        pool: the requests' tables.
    """

    def __init__(self, core: ctypes.CDLL, pool: PagePool) -> None:
        self._core, self._pool = core, pool
        self._state = np.empty((3, 0), np.int64)
        self._address = self._size = 0

    def update(self, limits: int, gone: Int64Array, come: Int64Array) -> None:
        """Take requests out, and others in.

        Args:
            limits: address of int64[num_slots], pages that each may share.
            gone: int64[n], slots; those that are not in are passed by.
            come: int64[n], slots; none may be in.
        """
        needed = self._size + len(come)
        if needed > self._state.shape[1]:
            state = np.empty((3, 2 * needed), np.int64)
            state[:, : self._size] = self._state[:, : self._size]
            self._state, self._address = state, state.ctypes.data
        self._size = self._core.fic_update(
            self._address,
            self._state.shape[1],
            self._size,
            self._pool.ids_address,
            self._pool.begin_address,
            limits,
            gone.ctypes.data,
            len(gone),
            come.ctypes.data,
            len(come),
        )

    def forest(self, limits: int, rank: int, num_ranks: int, tail_begin: int) -> PrefixForest:
        """The forest that `build_forest` finds.

        Args:
            limits: as for `update`.
            rank: address of int64[num_slots], number of each request in the batch.
            num_ranks: requests in the batch.
            tail_begin: address of int64[num_slots], written: pages that each request shares.
        """
        block = np.empty(10 * self._size, np.int64)
        nodes = self._core.fic_forest(
            self._address,
            self._state.shape[1],
            self._size,
            self._pool.ids_address,
            self._pool.begin_address,
            limits,
            rank,
            num_ranks,
            block.ctypes.data,
            tail_begin,
        )
        if nodes < 0:
            raise MemoryError
        return PrefixForest.of(block[: 3 * self._size + 7 * nodes], self._size)

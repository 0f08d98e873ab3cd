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
from numpy.typing import NDArray

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
from flashinfer_cascade.pages import PageView

SOURCE, LIBRARY = (Path(__file__).with_name(name) for name in ("core.c", "_core.so"))
BACKENDS: tuple[Backend, ...] = ("fa2", "fa2_uncut", "fa3", "decode")
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
        *((name, _F64 * len(TILES)) for name in ("block_us", "token_us", "lone_block", "block_ps", "token_ps")),
        ("level_weights", _F64 * len(LEVEL_WEIGHTS)),
        ("tiles", _I64 * len(TILES)),
        ("tile_shift", _I64 * len(TILES)),
        *((name, _I64) for name in ("num_sms", "num_qo_heads", "num_kv_heads", "group_size", "small_head")),
        *((name, _I64) for name in ("page_size", "window_left", "blocks_per_sm", "min_split_tokens", "fa3_min_rows")),
        *((name, _I64) for name in ("decode_blocks_per_sm", "has_fa3", "has_decode", "decode_group", "fold")),
        *((name, _I64) for name in ("forced", "max_levels")),
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
def load_core() -> ctypes.CDLL | None:
    """The core, or None where it was not built, or from another source or for another machine."""
    try:
        core = ctypes.CDLL(str(LIBRARY))
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
    core.fic_gather.restype = core.fic_leave.restype = None
    core.fic_rate.restype = core.fic_columns.restype = core.fic_share.restype = core.fic_forest.restype = _I64
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
    core: ctypes.CDLL, batch: Batch, parts: list[tuple[PrefixForest, int, Int64Array | None]]
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


class _Trie(ctypes.Structure):
    _fields_ = (("n", _I64), ("member", _P), ("lcp", _P), ("split", _P))


class _State(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("ids", "begin", "seq_lens", "computed_lens", "last_rows")),
        *((name, _P) for name in ("part", "limit", "tail_begin", "rank")),
        ("tries", _Trie * MAX_PARTS),
    )


class State:
    """What a session knows of its requests, by slot, for C; and the sharing among them, request by request."""

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        self._state = _State()
        self.address = ctypes.addressof(self._state)
        self._tries = np.empty((MAX_PARTS, 3, 0), np.int64)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._last_slots, self._slots_address = np.zeros(0, np.int64), 0

    def refer(self, num_slots: int, **arrays: NDArray[Any]) -> None:
        """Name the arrays anew; they were replaced by larger ones."""
        self._arrays |= arrays  # C reads them for as long as they are named
        for name, array in arrays.items():
            setattr(self._state, name, array.ctypes.data)
        old = self._tries
        if num_slots > old.shape[2]:
            self._tries = np.empty((MAX_PARTS, 3, num_slots), np.int64)
            self._tries[:, :, : old.shape[2]] = old
            for trie, rows in zip(self._state.tries, self._tries, strict=True):
                trie.member, trie.lcp, trie.split = (row.ctypes.data for row in rows)

    def gather(
        self, slots: Int64Array, page_size: int, pages: PageView, max_decode_rows: int, rows: Int64Array | None
    ) -> tuple[Batch, int, int, int]:
        """What `PlanSession._gather` returns."""
        n = len(slots)
        out = np.empty(4 * n + 3, np.int64)
        address = out.ctypes.data
        given = None if rows is None else rows.ctypes.data
        self._core.fic_gather(self.address, self._slots(slots), n, page_size, max_decode_rows, given, address)
        num_rows, num_pages, num_append = out[4 * n :].tolist()
        batch = Batch.of(page_size, pages, out[: 4 * n].reshape(4, n), address)
        return batch, num_rows, num_pages, num_append

    def _slots(self, slots: Int64Array) -> int:
        """Address of the slots, which are mostly those of the last call."""
        if slots is not self._last_slots:
            self._last_slots, self._slots_address = slots, slots.ctypes.data
        return self._slots_address

    def leave(self, slot: int) -> None:
        """A request is no longer part of what is shared."""
        self._core.fic_leave(self.address, slot)

    def share(self, slots: Int64Array, batch: Batch, max_decode_rows: int) -> bool:
        """Look at the requests whose sharing may have changed: whether there are any.

        Args:
            slots: int64[num_requests], slot of each request.
            batch: the requests.
            max_decode_rows: more rows make a request part 1; -1 when there is one part.
        """
        stale: int = self._core.fic_share(
            self.address, self._slots(slots), len(slots), batch.page_size, batch.address, max_decode_rows
        )
        return stale > 0

    def forest(self, part: int, num_requests: int) -> PrefixForest:
        """The forest that `build_forest` finds among a part of so many requests."""
        n = self._state.tries[part].n
        block = np.empty(10 * n, np.int64)
        nodes = self._core.fic_forest(self.address, part, num_requests, block.ctypes.data)
        if nodes < 0:
            raise MemoryError
        return PrefixForest.of(block[: 3 * n + 7 * nodes], n)


class Grower:
    """Plans steps in which lengths grow, as `Steady` does.

    Args:
        core: the native core.
        rater: of the planner.
        state: of the session.
        slots: int64[num_requests], slot of each request.
        forest: sharing among them.
        rated: what the plan was chosen by; `Rated.raw`.
        before: int32[num_requests + num_segments], row_pos and seg_kv_len of the plan.
        growth: int32[num_requests + num_segments], what each step adds to them.
        is_flat: whether the plan is flat.
        cascade: whether to look for a cascade when it is rated again.
    """

    def __init__(
        self,
        core: ctypes.CDLL,
        rater: Rater,
        state: State,
        slots: Int64Array,
        forest: PrefixForest,
        rated: Int64Array,
        before: Int32Array,
        growth: Int32Array,
        is_flat: bool,
        cascade: bool,
    ) -> None:
        self._step, self._num, self._cascade, self._is_flat = core.fic_steady, len(slots), cascade, is_flat
        self._before, self._rated, self._size = before, np.empty_like(rated), 2 * len(growth) - len(slots)
        scratch = np.empty(4 * len(slots) + 3, np.int64)
        self._head, self._times = self._rated[:5], self._rated[:2].view(np.float64)
        self._kept_alive = rater, state, slots, forest, rated, growth, scratch  # C is told where they lie
        self._address = before.ctypes.data
        self._first = rater.address, state.address, slots.ctypes.data, len(slots), forest.address, forest.num_nodes
        self._middle = growth.ctypes.data, len(growth) - len(slots), rated.ctypes.data, is_flat
        self._last = scratch.ctypes.data, self._rated.ctypes.data

    def step(self, rate: bool) -> tuple[Int32Array, Int32Array, Int32Array, Status]:
        """Grow by a step: row_pos, seg_kv_len, seg_num_pages, and what came of rating."""
        grown = np.empty(self._size, np.int32)
        address = grown.ctypes.data
        cascade = self._cascade if rate else -1
        status = self._step(*self._first, cascade, self._address, *self._middle, *self._last, address)
        self._before, self._address = grown, address
        num, end = self._num, len(grown) - self._middle[1]
        return grown[:num], grown[num:end], grown[end:], STATUSES[status]

    def predicted(self) -> tuple[float, float, int]:
        """Microseconds of flat attention and of the cascade, and tokens left, as rated last."""
        flat_us, us = self._times.tolist()
        return flat_us, us, int(self._head[4])


STATUSES = tuple(Status)

"""What a session asks of the native core: its batch, the sharing in it, and the next steady step."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.csr import Int32Array, Int64Array
from flashinfer_cascade.forest import PrefixForest
from flashinfer_cascade.native import BACKENDS, Rated, Rater, Status
from flashinfer_cascade.pages import PageView

MAX_PARTS = 2
STATUSES = tuple(Status)
_I64, _P = ctypes.c_int64, ctypes.c_void_p


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

    def __init__(self, core: ctypes.PyDLL) -> None:
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
        core: ctypes.PyDLL,
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
        self._head, self._times = self._rated[:6], self._rated[:2].view(np.float64)
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

    def predicted(self, status: Status) -> Rated:
        """What was rated last, without its cut."""
        flat_us, us = self._times.tolist()
        backends = (BACKENDS[int(self._head[5])],) if status == Status.FOUND else ()
        return Rated(status, int(self._head[4]), flat_us, (), us, backends)

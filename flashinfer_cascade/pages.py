"""Page ids that plans refer to: one array for all block tables, of which a device copy follows the changes."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.config import MAX_INT32
from flashinfer_cascade.csr import Int32Array, Int64Array, ranges

INDEX_SLACK = 1024
"""Entries behind the last page id of an array, so that fixed-size windows may be read past the end."""

MIN_CAPACITY = 4096
"""Entries of the smallest pool."""

SPARE = 4
"""A new array has room for this many times what it holds at first: what is left is used up before the next one."""

MIN_ROOM, ROOM_SHARE = 32, 8
"""A table gets room for so many more pages, and for an eighth of its own, before it has to move."""

STUCK = -1

LOG_LENGTH = 64
"""Versions back that a device copy may be and still follow."""

SLICE_COPY_PAGES = 24
"""Runs longer than this on average are copied one by one rather than gathered page by page."""

_pool_ids = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class PageView:
    """Page ids as one plan sees them. What it refers to never changes.

    A device copy remembers the `pool_id` and `version` of the view that it last followed, and asks the next view for
    `writes_since`.

    Attributes:
        ids: int32[>= size + INDEX_SLACK], CPU, read-only. A pool may go on to write entries that no plan refers to yet.
        size: entries in use; none behind them is referred to.
        pool_id: names the array within this process; 0 for page ids that belong to no pool, which every plan has
            its own of.
        version: of the pool, when the plan was made; grows with every plan before which page ids were written.
        writes: int64[2, num_ranges] for each of the last versions, begins and ends of what was written.
    """

    ids: Int32Array
    size: int
    pool_id: int = 0
    version: int = 0
    writes: tuple[Int64Array, ...] = ()

    def writes_since(self, pool_id: int, version: int) -> Int64Array | None:
        """Ranges to copy for a device copy that is at this version: int64[2, num_ranges], begins and ends.

        Returns:
            None when it must copy all of ``ids[:size]``: it holds another array, or is too many versions behind.
        """
        behind = self.version - version
        if pool_id != self.pool_id or not pool_id or not 0 <= behind <= len(self.writes):
            return None
        if behind == 0:
            return np.empty((2, 0), np.int64)
        return np.concatenate(self.writes[len(self.writes) - behind :], axis=1)


def gather_runs(ids: Int32Array, starts: Int32Array, counts: Int32Array) -> Int32Array:
    """Concatenate ``ids[start:start + count]`` over all pairs."""
    ends = starts + counts
    if not len(starts):
        return ids[:0]
    if (starts[1:] == ends[:-1]).all():
        return ids[starts[0] : ends[-1]]
    if counts.sum() > SLICE_COPY_PAGES * len(starts):
        return np.concatenate([ids[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
    return ids[ranges(starts, counts)]


class PagePool:
    """The block tables of a session's requests in one array.

    Every entry is written at most once, so that plans may refer to it for as long as they live: a table that would
    have to change what it has written moves to fresh entries, and when there are none left, all tables move to a new
    array. The array has at most `SPARE` times the entries that the tables and their room took when it was made; old
    ones live for as long as plans refer to them.

    Tables are known by small numbers, slots; a slot may be used again once it was dropped.

    Attributes:
        begin: int64[num_slots], where each table begins.
        count: int64[num_slots], pages of each table.
        moves: how many times a table was put somewhere.
    """

    def __init__(self) -> None:
        self.begin = np.zeros(0, np.int64)
        self.count = np.zeros(0, np.int64)
        # Pages that each table has room for; STUCK if what lies behind its pages is written already, 0 for no table.
        self._room = np.zeros(0, np.int64)
        self.moves = 0
        self._top = 0
        self._version = 0
        self._pending: list[Int64Array] = []  # what was written since the last view
        self._pending_runs: list[tuple[int, int]] = []
        self._log: deque[Int64Array] = deque(maxlen=LOG_LENGTH)
        self._new_array(MIN_CAPACITY)

    @property
    def ids(self) -> Int32Array:
        """The array: int32[capacity + INDEX_SLACK], read-only."""
        return self._view

    @property
    def capacity(self) -> int:
        """Entries of the array."""
        return len(self._ids) - INDEX_SLACK

    @property
    def pool_id(self) -> int:
        """Names the array; another one gets another number."""
        return self._pool_id

    def resize(self, num_slots: int) -> None:
        """Make room for more slots."""
        for name in ("begin", "count", "_room"):
            old = getattr(self, name)
            new = np.zeros(num_slots, np.int64)
            new[: len(old)] = old
            setattr(self, name, new)

    def table(self, slot: int) -> Int32Array:
        """The pages of one table: a view."""
        begin = int(self.begin[slot])
        return self._view[begin : begin + int(self.count[slot])]

    def put(self, slot: int, pages: NDArray[Any]) -> None:
        """Make a table of these pages."""
        self._place(slot, pages)

    def drop(self, slot: int) -> None:
        """Forget a table."""
        self.count[slot] = self._room[slot] = 0

    def extend(self, slot: int, pages: NDArray[Any]) -> None:
        """Add pages behind a table's last one."""
        count, more = int(self.count[slot]), len(pages)
        if not more:
            return
        if count + more > self._room[slot]:
            self._place(slot, np.concatenate((self.table(slot), pages)))
            return
        begin = int(self.begin[slot]) + count
        self._ids[begin : begin + more] = pages
        self.count[slot] = count + more
        self._pending_runs.append((begin, begin + more))

    def extend_each(self, slots: Int64Array, pages: NDArray[Any]) -> None:
        """Add one page behind the last one of each of these tables, all different."""
        count = self.count[slots]
        stuck = count >= self._room[slots]
        if stuck.any():
            for slot, page in zip(slots[stuck].tolist(), pages[stuck], strict=True):
                self.extend(slot, page[None])
            slots, pages, count = slots[~stuck], pages[~stuck], count[~stuck]
        at = self.begin[slots] + count
        self._ids[at] = pages
        count += 1
        self.count[slots] = count
        self._pending.append(np.array((at, at + 1)))

    def cut(self, slot: int, count: int) -> None:
        """Drop the pages of a table behind the first `count`."""
        if count < self.count[slot]:
            self.count[slot], self._room[slot] = count, STUCK

    def replace(self, slot: int, index: int, page: int) -> None:
        """Put another page into a table: it moves."""
        pages = self.table(slot).copy()
        pages[index] = page
        self._place(slot, pages)

    def view(self) -> PageView:
        """The array as it is now, for a plan."""
        if self._pending_runs:
            self._pending.append(np.array(self._pending_runs, np.int64).T)
            self._pending_runs.clear()
        if self._pending:
            self._log.append(self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending, axis=1))
            self._pending = []
            self._version += 1
        return PageView(self._view, self._top, self._pool_id, self._version, tuple(self._log))

    def _place(self, slot: int, pages: NDArray[Any]) -> None:
        """Write a table into fresh entries."""
        num = len(pages)
        room = num + num // ROOM_SHARE + MIN_ROOM
        if self._top + room > self.capacity:
            self.drop(slot)
            self._move_all(room)
        begin = self._top
        self._ids[begin : begin + num] = pages
        self._top += room
        self.moves += 1
        self.begin[slot], self.count[slot] = begin, num
        self._room[slot] = room
        if num:
            self._pending_runs.append((begin, begin + num))

    def _move_all(self, extra: int) -> None:
        """Copy all tables into a new array that has room for `extra` entries more."""
        old = self._ids
        slots = self._room.nonzero()[0].tolist()
        sizes = self.count + self.count // ROOM_SHARE + MIN_ROOM
        needed = int(sizes[slots].sum()) + extra
        self._new_array(min(max(SPARE * needed, MIN_CAPACITY), MAX_INT32 - INDEX_SLACK))
        for slot in slots:
            begin, num, room = int(self.begin[slot]), int(self.count[slot]), int(sizes[slot])
            self._ids[self._top : self._top + num] = old[begin : begin + num]
            self.begin[slot], self._room[slot] = self._top, room
            self._top += room

    def _new_array(self, capacity: int) -> None:
        self._ids = np.empty(capacity + INDEX_SLACK, np.int32)
        self._view = self._ids[:]
        self._view.flags.writeable = False
        self._top = 0
        self._pool_id = next(_pool_ids)
        self._pending.clear()
        self._pending_runs.clear()
        self._log.clear()

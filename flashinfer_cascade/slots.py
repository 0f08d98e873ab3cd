"""Where a session keeps what it knows of each request: vectors by slot, and the order of the batch."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from flashinfer_cascade.csr import Int64Array

ENDLESS = int(np.iinfo(np.int64).max)


class Slots:
    """The live requests. A slot is a small number that a request has until it leaves.

    Slots of no request, and in `grows` and `space` those of padding too, hold what makes steps pass them by.

    Args:
        page_size: tokens a page holds.
        most: slots at most.

    Attributes:
        by_id: slot of each request, in the order of the batch.
        seq_lens: int64[num_slots], KV tokens.
        grows: int64[num_slots], tokens that a step adds: 1, or 0.
        space: int64[num_slots], tokens that the pages hold.
        computed_lens: int64[num_slots], tokens that no row of the next plan is for.
        last_rows: int64[num_slots], rows in the last plan.
    """

    def __init__(self, page_size: int, most: int) -> None:
        self.by_id: dict[Hashable, int] = {}
        self.seq_lens = np.zeros(0, np.int64)
        self.grows = np.zeros(0, np.int64)
        self.space = np.zeros(0, np.int64)
        self.computed_lens = np.zeros(0, np.int64)
        self.last_rows = np.zeros(0, np.int64)
        self._page_size, self._most = page_size, most
        self._free: list[int] = []
        # The values of `by_id`, but for those that came and left since.
        self._order = np.zeros(0, np.int64)
        self._came: dict[int, None] = {}
        self._left: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether there must be more slots before another request can enter."""
        return not self._free

    def resize(self) -> int:
        """Make room for more slots: how many there are."""
        old = len(self.seq_lens)
        new = min(max(2 * old, 64), self._most)
        for name, fill in (("seq_lens", 0), ("grows", 0), ("space", ENDLESS), ("computed_lens", 0), ("last_rows", 1)):
            values = np.full(new, fill, np.int64)
            values[:old] = getattr(self, name)
            setattr(self, name, values)
        self._free = list(range(new - 1, old - 1, -1))
        return new

    def enter(self, id: Hashable, computed_len: int, last_rows: int) -> int:
        """Give a request a slot, behind the others."""
        slot = self._free.pop()
        self.by_id[id] = slot
        self.computed_lens[slot], self.last_rows[slot] = computed_len, last_rows
        self._came[slot] = None
        return slot

    def leave(self, id: Hashable) -> int:
        """Take a request's slot away: which it was."""
        slot = self.by_id.pop(id)
        self._free.append(slot)
        self.seq_lens[slot] = self.grows[slot] = 0
        self.space[slot] = ENDLESS
        if slot in self._came:
            del self._came[slot]
        else:
            self._left.append(slot)
        return slot

    def set_length(self, slot: int, length: int, num_pages: int) -> None:
        """A request has so many tokens and pages."""
        self.seq_lens[slot] = length
        self.grows[slot] = 1 if length else 0
        self.space[slot] = num_pages * self._page_size if length else ENDLESS

    def reorder(self, by_id: dict[Hashable, int]) -> None:
        """Set the order of the batch; all requests, each once."""
        self.by_id = by_id
        self._order = np.fromiter(by_id.values(), np.int64, len(by_id))
        self._came.clear()
        self._left.clear()

    def in_order(self) -> Int64Array:
        """Slots of the requests in the order of the batch: int64[num_requests]; never written to again."""
        if self._left:
            stays = np.ones(len(self.seq_lens), np.bool_)
            stays[self._left] = False
            self._order = self._order[stays[self._order]]
            self._left.clear()
        if self._came:
            self._order = np.concatenate((self._order, np.array(list(self._came), np.int64)))
            self._came.clear()
        return self._order

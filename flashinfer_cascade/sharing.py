"""What a session's requests share, found again only when it may have changed."""

from __future__ import annotations

from ctypes import CDLL

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.forest import PrefixForest, build_forest
from flashinfer_cascade.native import Trie
from flashinfer_cascade.pages import PagePool

NOWHERE = -1
MAX_PARTS = 2


class Sharing:
    """The forests of the parts of a session's batch, one after another.

    A request's leading pages decide where it hangs in a forest: those up to the first one that it shares with nobody.
    While that page stays what it is, growing changes nothing.
    """

    def __init__(self, core: CDLL | None, pool: PagePool) -> None:
        self._forests: list[PrefixForest] = []
        self._changed = True
        self._tries = None if core is None else [Trie(core, pool) for _ in range(MAX_PARTS)]
        self._gone: list[list[int]] = [[] for _ in range(MAX_PARTS)]  # slots that are still in a trie
        self._part = np.zeros(0, np.int64)  # forest that each slot's request is in
        self._limit = np.zeros(0, np.int64)  # pages that it could share then
        self._tail_begin = np.zeros(0, np.int64)  # pages that it did share
        self._rank = np.zeros(0, np.int64)  # its number in the batch
        self._addresses = (0, 0, 0)

    def resize(self, num_slots: int) -> None:
        """Make room for more slots."""
        for name, fill in (("_part", NOWHERE), ("_limit", 0), ("_tail_begin", 0), ("_rank", 0)):
            old = getattr(self, name)
            new = np.full(num_slots, fill, np.int64)
            new[: len(old)] = old
            setattr(self, name, new)
        self._addresses = (self._limit.ctypes.data, self._rank.ctypes.data, self._tail_begin.ctypes.data)

    def forget(self, slot: int) -> None:
        """The request in a slot left."""
        self._leave(slot)
        self._changed = True

    def cut(self, slot: int, count: int) -> None:
        """Pages behind the first `count` of a request are no longer what they were."""
        if count <= self._tail_begin[slot]:
            self._leave(slot)

    def reorder(self) -> None:
        """The order of requests changed."""
        self._changed = True

    def forests(self, batch: Batch, slots: Int64Array, part: Int64Array) -> list[PrefixForest]:
        """The forests of a batch's parts.

        Args:
            batch: the batch.
            slots: int64[num_requests], slot of each request.
            part: int64[num_requests], number of the forest that it belongs to.
        """
        limits = batch.shareable_pages()
        before, was_in = self._limit[slots], self._part[slots]
        # Up to the first page that it shares with nobody, or could not share: what lies behind does not matter.
        stale = np.minimum(limits, before) <= self._tail_begin[slots]
        stale &= limits != before
        stale |= was_in != part
        self._limit[slots] = limits
        if self._changed or stale.any():
            num_parts = int(part.max()) + 1
            if self._tries is None:
                self._build(batch, slots, part, num_parts)
            else:
                where = stale.nonzero()[0]
                self._update(self._tries, slots[where], was_in[where], part[where])
                self._rank[slots] = np.arange(len(slots))
                limit, rank, tail_begin = self._addresses
                self._forests = [trie.forest(limit, rank, len(slots), tail_begin) for trie in self._tries[:num_parts]]
            self._part[slots] = part
            self._changed = False
        return self._forests

    def tokens_until_change(self, batch: Batch, slots: Int64Array) -> Int64Array:
        """KV tokens up to which each request's growth, a token and a row a step, leaves the forests alone."""
        limits = self._limit[slots]
        until: Int64Array = np.where(
            limits > self._tail_begin[slots], np.iinfo(np.int64).max, (limits + 1) * batch.page_size
        )
        return until

    def _leave(self, slot: int) -> None:
        part = int(self._part[slot])
        if part != NOWHERE:
            self._gone[part].append(slot)
            self._part[slot] = NOWHERE

    def _update(self, tries: list[Trie], slots: Int64Array, was_in: Int64Array, part: Int64Array) -> None:
        """Hang stale requests up anew. All are taken out first: where one belongs is judged by those that are in."""
        for number, trie in enumerate(tries):
            left = self._gone[number]
            gone, come = slots[was_in == number], slots[part == number]
            if left or len(gone) or len(come):
                trie.update(self._addresses[0], np.concatenate((np.array(left, np.int64), gone)), come)
                left.clear()

    def _build(self, batch: Batch, slots: Int64Array, part: Int64Array, num_parts: int) -> None:
        self._forests = [
            build_forest(batch, None if num_parts == 1 else (part == number).nonzero()[0])
            for number in range(num_parts)
        ]
        for forest in self._forests:
            self._tail_begin[slots[forest.order]] = forest.tail_begin

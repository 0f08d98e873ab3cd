"""What a session's requests share, found again only when it may have changed."""

from __future__ import annotations

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.forest import PrefixForest, build_forest

NOWHERE = -1


class Sharing:
    """The forests of the parts of a session's batch, one after another.

    A request's leading pages decide where it hangs in a forest: those up to the first one that it shares with nobody.
    While that page stays what it is, growing changes nothing.
    """

    def __init__(self) -> None:
        self._forests: list[PrefixForest] = []
        self._changed = True
        self._part = np.zeros(0, np.int64)  # forest that each slot's request is in
        self._limit = np.zeros(0, np.int64)  # pages that it could share then
        self._tail_begin = np.zeros(0, np.int64)  # pages that it did share

    def resize(self, num_slots: int) -> None:
        """Make room for more slots."""
        for name, fill in (("_part", NOWHERE), ("_limit", 0), ("_tail_begin", 0)):
            old = getattr(self, name)
            new = np.full(num_slots, fill, np.int64)
            new[: len(old)] = old
            setattr(self, name, new)

    def forget(self, slot: int) -> None:
        """The request in a slot left."""
        self._part[slot] = NOWHERE
        self._changed = True

    def cut(self, slot: int, count: int) -> None:
        """Pages behind the first `count` of a request are no longer what they were."""
        if count <= self._tail_begin[slot]:
            self._part[slot] = NOWHERE

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
        before = self._limit[slots]
        # Up to the first page that it shares with nobody, or could not share: what lies behind does not matter.
        stale = (self._part[slots] != part) | (
            (limits != before) & (np.minimum(limits, before) <= self._tail_begin[slots])
        )
        if self._changed or stale.any():
            self._build(batch, slots, part)
            self._changed = False
        self._limit[slots] = limits
        return self._forests

    def tokens_until_change(self, batch: Batch, slots: Int64Array) -> Int64Array:
        """KV tokens up to which each request's growth, a token and a row a step, leaves the forests alone."""
        limits = self._limit[slots]
        until: Int64Array = np.where(
            limits > self._tail_begin[slots], np.iinfo(np.int64).max, (limits + 1) * batch.page_size
        )
        return until

    def _build(self, batch: Batch, slots: Int64Array, part: Int64Array) -> None:
        num_parts = int(part.max()) + 1
        self._forests = [
            build_forest(batch, None if num_parts == 1 else (part == number).nonzero()[0])
            for number in range(num_parts)
        ]
        for forest in self._forests:
            self._tail_begin[slots[forest.order]] = forest.tail_begin
        self._part[slots] = part

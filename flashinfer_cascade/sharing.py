"""What a session's requests share, found again only when it may have changed."""

from __future__ import annotations

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.forest import PrefixForest, build_forest
from flashinfer_cascade.native_session import State

NOWHERE = -1


class Sharing:
    """The forests of the parts of a session's batch, one after another.

    A request's leading pages decide where it hangs in a forest: those up to the first one that it shares with nobody.
    While that page stays what it is, growing changes nothing.
    """

    def __init__(self, state: State | None) -> None:
        self._state = state
        self._forests: list[PrefixForest] = []
        self._changed = True
        self._part = np.zeros(0, np.int64)  # forest that each slot's request is in
        self._limit = np.zeros(0, np.int64)  # pages that it could share then
        self._tail_begin = np.zeros(0, np.int64)  # pages that it did share
        self._rank = np.zeros(0, np.int64)  # its number in the batch

    def resize(self, num_slots: int) -> None:
        """Make room for more slots."""
        for name, fill in (("_part", NOWHERE), ("_limit", 0), ("_tail_begin", 0), ("_rank", 0)):
            old = getattr(self, name)
            new = np.full(num_slots, fill, np.int64)
            new[: len(old)] = old
            setattr(self, name, new)
        if self._state is not None:
            self._state.refer(
                num_slots, part=self._part, limit=self._limit, tail_begin=self._tail_begin, rank=self._rank
            )

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

    def forests(self, batch: Batch, slots: Int64Array, num_parts: int, max_decode_rows: int) -> list[PrefixForest]:
        """The forests of a batch's parts.

        Args:
            batch: the batch.
            slots: int64[num_requests], slot of each request.
            num_parts: one, or two.
            max_decode_rows: more rows make a request one of the second part.
        """
        most = max_decode_rows if num_parts > 1 else -1
        if self._state is None:
            self._look(batch, slots, most)
        elif self._state.share(slots, batch, most) or self._changed:
            self._forests = [self._state.forest(part, len(slots)) for part in range(num_parts)]
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
        if self._state is not None:
            self._state.leave(slot)
        self._part[slot] = NOWHERE

    def _look(self, batch: Batch, slots: Int64Array, max_decode_rows: int) -> None:
        """Find the forests again if they may have changed."""
        part = (batch.qo_lens > max_decode_rows).astype(np.int64) if max_decode_rows >= 0 else np.zeros_like(slots)
        limits, before = batch.shareable_pages(), self._limit[slots]
        # Up to the first page that it shares with nobody, or could not share: what lies behind does not matter.
        stale = np.minimum(limits, before) <= self._tail_begin[slots]
        stale &= limits != before
        stale |= self._part[slots] != part
        self._limit[slots], self._part[slots] = limits, part
        if not self._changed and not stale.any():
            return
        self._forests = [
            build_forest(batch, None if max_decode_rows < 0 else (part == number).nonzero()[0])
            for number in range(2 if max_decode_rows >= 0 else 1)
        ]
        for forest in self._forests:
            self._tail_begin[slots[forest.order]] = forest.tail_begin

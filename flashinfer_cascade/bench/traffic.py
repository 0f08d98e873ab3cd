"""Batches that change from step to step as an engine's do: requests join, leave, fork and grow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flashinfer_cascade.testing import RandomBatch


@dataclass(slots=True)
class _Request:
    pages: list[int]
    seq_len: int


@dataclass(slots=True)
class Traffic:
    """Random traffic over one KV cache of a bounded number of pages.

    Every step each request gets new tokens, and pages where it needs them. Before that some leave, some join (alone, or
    on the full pages of another), and some fork: the fork shares all full pages and has its own copy of the last.

    Attributes:
        rng: decides everything.
        page_size: tokens a page holds.
        num_pages: of the KV cache.
        max_requests: most requests at once.
        max_new: most new tokens of a request in a step; 1 is decode.
        max_len: most tokens that a request joins with, beyond what it shares.
    """

    rng: np.random.Generator
    page_size: int
    num_pages: int
    max_requests: int
    max_new: int = 1
    max_len: int = 100
    _requests: list[_Request] = field(default_factory=list)
    _users: dict[int, int] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = self.rng.permutation(self.num_pages).tolist()

    def step(self, num_requests: int | None = None) -> RandomBatch:
        """The next batch.

        Args:
            num_requests: have so many; None lets them come and go.
        """
        rng = self.rng
        wanted = int(rng.integers(1, self.max_requests + 1)) if num_requests is None else num_requests
        if rng.random() < 0.1:
            self._leave(len(self._requests))  # all change: sharing disappears
        while len(self._requests) > wanted:
            self._leave(1)
        while len(self._requests) < wanted:
            self._join()
        rng.shuffle(self._requests)
        qo_lens = []
        for request in self._requests:
            new = int(rng.integers(1, self.max_new + 1)) if rng.random() < 0.5 else 1
            self._grow(request, request.seq_len + new)
            qo_lens.append(new)
        return RandomBatch([list(r.pages) for r in self._requests], [r.seq_len for r in self._requests], qo_lens)

    def _leave(self, count: int) -> None:
        for _ in range(count):
            for page in self._requests.pop(int(self.rng.integers(len(self._requests)))).pages:
                self._users[page] -= 1
                if not self._users[page]:
                    self._free.append(page)

    def _join(self) -> None:
        request = _Request([], 0)
        if self._requests and self.rng.random() < 0.7:
            other = self._requests[int(self.rng.integers(len(self._requests)))]
            full = other.seq_len // self.page_size
            # A fork has all of them, a request with the same beginning some.
            shared = full if self.rng.random() < 0.5 else int(self.rng.integers(full + 1))
            request = _Request(other.pages[:shared], shared * self.page_size)
            for page in request.pages:
                self._users[page] += 1
        self._grow(request, request.seq_len + int(self.rng.integers(0, self.max_len + 1)))
        self._requests.append(request)

    def _grow(self, request: _Request, seq_len: int) -> None:
        request.seq_len = seq_len
        while len(request.pages) * self.page_size < seq_len:
            if not self._free:
                raise MemoryError(f"{self.num_pages} pages are too few for this traffic")
            page = self._free.pop()
            self._users[page] = 1
            request.pages.append(page)

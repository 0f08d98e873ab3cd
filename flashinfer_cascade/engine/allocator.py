"""Pages of the KV cache: who holds which, which are cached by their content, and which are given next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from flashinfer_cascade.errors import CapacityError

ROOT = 0
"""The chain in front of every first page."""


class _Key(NamedTuple):
    """What a cached page holds: its tokens, behind those of a chain. Compared in full, a hash never decides."""

    chain: int
    tokens: tuple[int, ...]


class _Cached(NamedTuple):
    page: int
    chain: int


class PageAllocator:
    """Gives pages, counts who holds them, and keeps full pages by content after the last one let go.

    A page is *held* (its count is above 0), *cached* (nobody holds it, its content may be found again) or *free*. Free
    pages are given first, then cached ones, the least recently used first. A full page's content is named by a
    *chain*: a number that stands for its tokens and all before them.

    Args:
        num_pages: pages 0 to num_pages - 1.
        page_size: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._by_key: dict[_Key, _Cached] = {}
        self._keys: dict[int, _Key] = {}
        self._num_chains = ROOT

    @property
    def num_available(self) -> int:
        """Pages that `take` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds but whose content may be found again."""
        return len(self._cached)

    def count(self, page: int) -> int:
        """How many hold a page."""
        return self._counts[page]

    def available_beside(self, pages: Sequence[int]) -> int:
        """What `num_available` will be once `pages` are held too."""
        return self.num_available - sum(page in self._cached for page in pages)

    def match(self, tokens: Sequence[int], max_pages: int) -> tuple[list[int], int]:
        """Find the longest cached prefix, in full pages.

        Args:
            tokens: what to find.
            max_pages: find no more than these.

        Returns:
            The pages, which are not held yet, and the chain of the last one.
        """
        pages: list[int] = []
        chain, size = ROOT, self.page_size
        for begin in range(0, max_pages * size, size):
            found = self._by_key.get(_Key(chain, tuple(tokens[begin : begin + size])))
            if found is None:
                break
            pages.append(found.page)
            chain = found.chain
        return pages, chain

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages that were matched, or that another holds."""
        for page in pages:
            if not self._counts[page]:
                del self._cached[page]
            self._counts[page] += 1

    def take(self, num_pages: int) -> list[int]:
        """Give pages, held once, whose content is whatever was there.

        Raises:
            CapacityError: fewer are available; none was given.
        """
        if num_pages > self.num_available:
            raise CapacityError(
                f"{num_pages} pages asked for, {self.num_available} of {self.num_pages} available: wait, or preempt a "
                "request"
            )
        return [self._take() for _ in range(num_pages)]

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._by_key[self._keys.pop(page)]
        self._counts[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Let go of a request's pages. The last are reused before those in front, without which none finds them."""
        for page in reversed(pages):
            self._counts[page] -= 1
            if not self._counts[page]:
                if page in self._keys:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def commit(self, page: int, tokens: Sequence[int], chain: int) -> int:
        """Make a held page's content known. It must not be written to again while others may find it.

        Args:
            page: full, once the steps that are scheduled have run.
            tokens: all that it holds.
            chain: that of the page before, `ROOT` for the first.

        Returns:
            The chain of this page. Where another page of the same content is known already, that one stays.
        """
        key = _Key(chain, tuple(tokens))
        if key not in self._by_key:
            self._num_chains += 1
            self._by_key[key] = _Cached(page, self._num_chains)
            self._keys[page] = key
        return self._by_key[key].chain

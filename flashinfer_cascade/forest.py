"""The prefix forest of a batch: which requests share which run of pages, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr, ranges, run_lengths, run_starts
from flashinfer_cascade.pages import INDEX_SLACK

FIRST_WINDOW = 32
"""Pages compared at once when a node's run is measured; grows fourfold up to INDEX_SLACK."""


@dataclass(frozen=True, slots=True)
class PrefixForest:
    """A trie over page ids: each node is a maximal run of pages shared by the same two or more requests.

    Nodes are numbered parents first, and siblings by their first request. Requests are ordered so that every
    node covers a contiguous run of them; with the sharing requests side by side in the batch already, that
    order is the batch's own.

    Attributes:
        order: int64[num_requests], request at each position.
        parent: int64[num_nodes], node above, -1 at a root.
        depth: int64[num_nodes], nodes above.
        begin: int64[num_nodes], first position covered.
        end: int64[num_nodes], behind the last position covered.
        page_begin: int64[num_nodes], pages above the node.
        num_pages: int64[num_nodes], pages of its run, at least 1.
        first_page: int64[num_nodes], id of its first page.
        tail_node: int64[num_requests], deepest node of the request at each position, -1 where it shares nothing.
        tail_begin: int64[num_requests], page at which the own KV of the request at each position begins.
        block: int64[3 * num_requests + 7 * num_nodes], of which all of these are parts: order, tail_node, tail_begin,
            and the others in the order of this list.
        address: where that lies, for C.
    """

    order: Int64Array
    parent: Int64Array
    depth: Int64Array
    begin: Int64Array
    end: Int64Array
    page_begin: Int64Array
    num_pages: Int64Array
    first_page: Int64Array
    tail_node: Int64Array
    tail_begin: Int64Array
    block: Int64Array
    address: int

    @classmethod
    def of(cls, block: Int64Array, num_requests: int) -> PrefixForest:
        """The forest in a block, which is never written to again."""
        block.setflags(write=False)
        n, nodes = num_requests, (len(block) - 3 * num_requests) // 7
        parent, depth, begin, end, page_begin, num_pages, first_page = block[3 * n :].reshape(7, nodes)
        tail_node, tail_begin = block[n : 2 * n], block[2 * n : 3 * n]
        by_node = parent, depth, begin, end, page_begin, num_pages, first_page
        return cls(block[:n], *by_node, tail_node, tail_begin, block, block.ctypes.data)

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefixForest.of, (self.block, len(self.order))

    @property
    def num_nodes(self) -> int:
        """Shared runs of pages."""
        return len(self.parent)


def build_forest(batch: Batch, requests: Int64Array | None = None) -> PrefixForest:
    """Find all sharing among a batch's requests, or among some of them.

    Sharing is judged by page ids at equal depth under one parent, and only over pages that were full before this
    step (`Batch.shareable_pages`). Work grows with the shared pages; of unshared ones it reads the first few.

    Args:
        batch: the validated batch.
        requests: int64[n], ascending: plan these alone; None is all.
    """
    order = np.arange(batch.num_requests) if requests is None else requests.copy()
    starts, limits = batch.page_begin, batch.shareable_pages()
    count = len(order)
    tail_node = np.full(count, -1, np.int64)
    tail_begin = np.zeros(count, np.int64)
    found: list[Int64Array] = []
    num_nodes = 0

    # Groups of two or more requests that agree on their first `depth` pages, each a run of positions. A round
    # splits all groups by their next page and measures how far each part agrees.
    begin, size = np.array([0]), np.array([count])
    depth, parent = np.zeros(1, np.int64), np.full(1, -1, np.int64)
    level = 0
    while len(begin) and count > 1:
        positions = ranges(begin, size)
        members = order[positions]
        group = np.arange(len(begin)).repeat(size)
        label = _label_by_next_page(batch, members, group, depth, limits)
        if (label[1:] < label[:-1]).any():
            members = members[label.argsort(kind="stable")]
            order[positions] = members
            label.sort()
        first = run_starts(label)
        part_size = run_lengths(first, len(label))
        shared = part_size > 1
        if not shared.any():
            break
        in_shared = shared.repeat(part_size)
        first, size = first[shared], part_size[shared]
        above = group[first]
        begin, parent, depth = positions[first], parent[above], depth[above]
        members = members[in_shared]
        run = _common_run(batch, starts[members], limits[members], depth, size)
        ids = np.arange(num_nodes, num_nodes + len(begin))
        first_page = batch.pages.ids[starts[order[begin]] + depth]
        found.append(np.stack((parent, np.full(len(begin), level), begin, begin + size, depth, run, first_page)))
        num_nodes += len(begin)
        depth, parent = depth + run, ids
        covered = positions[in_shared]
        tail_node[covered] = ids.repeat(size)
        tail_begin[covered] = depth.repeat(size)
        level += 1

    nodes = np.concatenate(found, axis=1).ravel() if found else np.empty(0, np.int64)
    return PrefixForest.of(np.concatenate((order, tail_node, tail_begin, nodes)), count)


def _label_by_next_page(
    batch: Batch, members: Int64Array, group: Int64Array, depth: Int64Array, limits: Int64Array
) -> Int64Array:
    """Label each member with the first one in its group that has the same next page: int64[len(members)].

    A request without a next shareable page stands alone.
    """
    at = depth[group]
    page = batch.pages.ids[batch.page_begin[members] + at].astype(np.int64)
    key = np.where(at >= limits[members], -1 - members, (group << 32) | page)
    by_key = key.argsort(kind="stable")
    key = key[by_key]
    first = run_starts(key)
    label = np.empty_like(key)
    label[by_key] = by_key[first].repeat(run_lengths(first, len(key)))
    return label


def _common_run(
    batch: Batch, starts: Int64Array, limits: Int64Array, depth: Int64Array, size: Int64Array
) -> Int64Array:
    """Pages on which all members of each group agree behind `depth`: int64[num_groups].

    Neighbours within a group are compared window by window; a group is done at its first mismatch or at its
    shortest member's limit.
    """
    first = indptr(size)[:-1]
    room = np.minimum.reduceat(limits, first) - depth
    run = np.zeros(len(size), np.int64)
    live = np.arange(len(size))
    at = starts + depth.repeat(size)
    window = FIRST_WINDOW
    while True:
        width = min(window, int((room - run)[live].max()))
        pages = _windows(batch.pages.ids, width)[at]
        # Pages on which each member agrees with the next one; the last of a group has no next one.
        differs = pages[1:] != pages[:-1]
        where = differs.argmax(axis=1)
        same = np.full(len(at), width)
        some = differs[np.arange(len(where)), where].nonzero()[0]
        same[some] = where[some]
        ends = indptr(size)
        same[ends[1:] - 1] = width
        agreed = np.minimum.reduceat(same, ends[:-1])
        run[live] = np.minimum(run[live] + agreed, room[live])
        more = (agreed == width) & (run[live] < room[live])
        if not more.any():
            break
        at = at[more.repeat(size)] + width
        live, size = live[more], size[more]
        window = min(4 * window, INDEX_SLACK)
    return run


def _windows(pages: Int32Array, width: int) -> Int32Array:
    """All runs of `width` entries, as rows of one view."""
    step = pages.strides[0]
    return np.ndarray((len(pages) - width + 1, width), pages.dtype, pages, strides=(step, step))

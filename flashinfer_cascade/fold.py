"""Which nodes of a prefix forest end a segment, and the segments that follow from that choice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.csr import Int64Array, run_starts
from flashinfer_cascade.forest import PrefixForest

BoolArray = NDArray[np.bool_]
Costs = NDArray[np.float64]
"""Times in picoseconds on one SM, whole numbers: their sums are exact, so that no choice hangs on the order of
additions, which differs between processors."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A choice of nodes and the segments it makes.

    Attributes:
        kept: bool[num_nodes], nodes that end a segment: their run and those of the unkept nodes right above.
        node_start: int64[num_nodes], page at which the segment that passes through each node begins.
        node_level: int64[num_nodes], kept nodes above.
        node_above: int64[num_nodes], nearest kept node above each node, -1 for none.
        tail_start: int64[num_requests], page at which the own segment of the request at each position begins.
        tail_above: int64[num_requests], kept node right above the own segment of the request at each position, or -1.
        num_levels: levels, the own segments' one included.
    """

    kept: BoolArray
    node_start: Int64Array
    node_level: Int64Array
    node_above: Int64Array
    tail_start: Int64Array
    tail_above: Int64Array
    num_levels: int


def cut_at(forest: PrefixForest, kept: BoolArray) -> Cut:
    """The segments that `kept` makes: one per kept node, and one per request for the rest."""
    page_end = forest.page_begin + forest.num_pages
    start = np.zeros(forest.num_nodes, np.int64)
    level = np.zeros(forest.num_nodes, np.int64)
    nearest = np.full(forest.num_nodes, -1)
    for low, high in _by_depth(forest)[1:]:
        above = forest.parent[low:high]
        start[low:high] = np.where(kept[above], page_end[above], start[above])
        level[low:high] = level[above] + kept[above]
        nearest[low:high] = np.where(kept[above], above, nearest[above])
    tail_start = np.zeros(len(forest.order), np.int64)
    tail_above = np.full(len(forest.order), -1)
    inside = (forest.tail_node >= 0).nonzero()[0]
    node = forest.tail_node[inside]
    tail_start[inside] = np.where(kept[node], page_end[node], start[node])
    tail_above[inside] = np.where(kept[node], node, nearest[node])
    num_levels = 1 + int(level[kept].max() + 1) if kept.any() else 1
    return Cut(kept, start, level, nearest, tail_start, tail_above, num_levels)


def no_cut(forest: PrefixForest) -> Cut:
    """Flat: every request's whole context is its own segment."""
    nodes, requests = forest.num_nodes, len(forest.order)
    zeros = np.zeros(max(nodes, requests), np.int64)
    none = zeros - 1
    kept = np.zeros(nodes, np.bool_)
    return Cut(kept, zeros[:nodes], zeros[:nodes], none[:nodes], zeros[:requests], none[:requests], 1)


def _by_depth(forest: PrefixForest) -> list[tuple[int, int]]:
    """Node ranges of equal depth, roots first."""
    if not forest.num_nodes:
        return [(0, 0)]
    bounds = np.searchsorted(forest.depth, np.arange(int(forest.depth[-1]) + 2)).tolist()
    return list(pairwise(bounds))


@dataclass(frozen=True, slots=True)
class FoldCosts:
    """What segments over the forest cost; linear in tokens.

    Attributes:
        node_fixed: picoseconds[num_nodes] of a segment over each node's rows, apart from its tokens.
        node_per_page: picoseconds[num_nodes] a page of it costs.
        tail_fixed: picoseconds[num_candidates, num_nodes], sum over the requests whose deepest node it is: their own
            KV.
        tail_per_page: picoseconds[num_candidates, num_nodes], likewise: a page more in each of these requests' own
            segments.
        partial: picoseconds[num_candidates, num_nodes] of one more partial result for each row.
    """

    node_fixed: Costs
    node_per_page: Costs
    tail_fixed: Costs
    tail_per_page: Costs
    partial: Costs


def best_cuts(forest: PrefixForest, costs: FoldCosts) -> BoolArray:
    """The cheapest choice of nodes for each candidate: bool[num_candidates, num_nodes].

    A node is either kept, so that its rows read its run, together with those of the unkept nodes right above,
    once; or its run passes into every segment below. Exact dynamic programming over (node, depth at which the
    segment through it begins), vectorised over the nodes of equal depth.
    """
    num_candidates = len(costs.partial)
    page_end = (forest.page_begin + forest.num_pages).astype(np.float64)
    ranges_by_depth = _by_depth(forest)

    # Each node's parent, counted from the first node of the parents' depth.
    above: list[Int64Array] = []
    # Pages from the beginning of each ancestor (by depth) to the end of the node, 0 for "behind the node".
    pages: list[NDArray[Any]] = []
    begins = np.empty((1, 0), np.float64)
    for depth, (low, high) in enumerate(ranges_by_depth):
        above.append(
            forest.parent[low:high] - ranges_by_depth[depth - 1][0] if depth else np.zeros(high - low, np.int64)
        )
        begins = np.column_stack((begins[above[depth]], forest.page_begin[low:high]))
        pages.append(np.column_stack((page_end[low:high, None] - begins, np.zeros(high - low))))

    # below[node, candidate, j]: cost of all beneath the node when the segment through it begins at depth j.
    keep: list[BoolArray] = []
    child_cost = np.empty((0, num_candidates, 0))
    for depth in range(len(ranges_by_depth) - 1, -1, -1):
        low, high = ranges_by_depth[depth]
        fixed, per_page = costs.tail_fixed[:, low:high].T, costs.tail_per_page[:, low:high].T
        below = fixed[:, :, None] + per_page[:, :, None] * pages[depth][:, None, :]
        if len(child_cost):
            parent = forest.parent[slice(*ranges_by_depth[depth + 1])] - low
            first = run_starts(parent)
            below[parent[first]] += np.add.reduceat(child_cost, first, axis=0)
        own = costs.node_fixed[low:high, None] + costs.node_per_page[low:high, None] * pages[depth][:, :-1]
        kept_cost = own[:, None, :] + (costs.partial[:, low:high].T[:, :, None] + below[:, :, -1:])
        keep.append(kept_cost < below[:, :, :-1])
        child_cost = np.minimum(kept_cost, below[:, :, :-1])
    keep.reverse()

    kept = np.zeros((num_candidates, forest.num_nodes), np.bool_)
    candidate = np.arange(num_candidates)
    begin_depth = np.zeros((1, num_candidates), np.int64)
    for depth, (low, high) in enumerate(ranges_by_depth):
        begin_depth = begin_depth[above[depth]]
        chosen = keep[depth][np.arange(high - low)[:, None], candidate, begin_depth]
        kept[:, low:high] = chosen.T
        begin_depth = np.where(chosen, depth + 1, begin_depth)
    return kept

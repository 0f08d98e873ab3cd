"""What a plan may use, and how a cut is made to fit that."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.config import MAX_INT32
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.errors import CapacityError, check_type
from flashinfer_cascade.fold import Cut, cut_at
from flashinfer_cascade.forest import PrefixForest


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """What a captured graph or a runtime reserved, or what a plan uses (`CascadePlan.usage`).

    Attributes:
        num_rows: query tokens.
        num_segments: segments over all parts.
        num_partials: (segment, row) pairs.
        num_page_indices: page ids over all segments.
        num_levels: levels of the whole-batch levels view.
        num_slots: groups of its largest level but the last, those without KV included; 0 when flat. The last level
            always has one group per request. Rows between segments are such groups, so this one depends on the order
            of requests.
    """

    num_rows: int = MAX_INT32
    num_segments: int = MAX_INT32
    num_partials: int = MAX_INT32
    num_page_indices: int = MAX_INT32
    num_levels: int = MAX_INT32
    num_slots: int = MAX_INT32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise CapacityError(f"{field.name}={value!r}: give a number of at least 0")

    def lacks(self, needed: PlanCapacity) -> dict[str, tuple[int, int]]:
        """Name -> (needed, reserved) of whatever does not fit; empty when all does."""
        pairs = {f.name: (getattr(needed, f.name), getattr(self, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] > pair[1]}


def check_capacity(capacity: object) -> None:
    """Refuse what is no capacity; None is none.

    Raises:
        InvalidBatchError: it is of another type.
    """
    if capacity is not None:
        check_type("capacity", capacity, PlanCapacity, "give the PlanCapacity of a graph, or one of your own")


def capacity_error(
    what: str, lacking: dict[str, tuple[int, int]], remedy: str, where: str = "the capacity"
) -> CapacityError:
    """One error for all that does not fit."""
    listed = ", ".join(f"{name} {needed} > {reserved}" for name, (needed, reserved) in lacking.items())
    return CapacityError(f"{what} does not fit {where}: {listed}. {remedy}", lacking)


def level_edges(begin: NDArray[Any], end: NDArray[Any], total: int) -> Int64Array:
    """Group borders of a level that covers [0, total): its sorted segments, and the gaps between them.

    Args:
        begin: int[num_segments], ascending.
        end: int[num_segments], at most the next begin.
        total: where the last group ends.
    """
    edges = np.empty(2 * len(begin) + 2, np.int64)
    edges[0], edges[-1] = 0, total
    edges[1:-1:2], edges[2:-1:2] = begin, end
    different = np.empty(len(edges), np.bool_)
    different[0] = True
    np.greater(edges[1:], edges[:-1], out=different[1:])
    borders: Int64Array = edges[different]
    return borders


def num_slots(forest: PrefixForest, cut: Cut) -> int:
    """Groups of the largest shared level; 0 when flat."""
    most = 0
    for level in range(cut.num_levels - 1):
        nodes = nodes_at(forest, cut, level)
        most = max(most, len(level_edges(forest.begin[nodes], forest.end[nodes], len(forest.order))) - 1)
    return most


def nodes_at(forest: PrefixForest, cut: Cut, level: int) -> Int64Array:
    """Kept nodes of a level, in the order of their rows."""
    nodes: Int64Array = (cut.kept & (cut.node_level == level)).nonzero()[0]
    return nodes[forest.begin[nodes].argsort()]


def fit_cut(forest: PrefixForest, rows: Int64Array, num_rows: int, cut: Cut, room: PlanCapacity) -> Cut:
    """Unkeep nodes, the least useful first, until the cut fits.

    Args:
        forest: what the cut is of.
        rows: int64[num_nodes], query rows that each node covers.
        num_rows: of all requests.
        cut: to begin with.
        room: num_segments, num_partials, num_levels and num_slots count; flat fits all of them.
    """
    # A node with more rows than there is room for would only drag smaller ones along.
    cut = cut_at(forest, cut.kept & (rows <= room.num_partials - num_rows))
    cut = _limit_levels(forest, cut, room.num_levels)
    while cut.kept.any():
        by_use = _least_useful_first(forest, cut, cut.kept.nonzero()[0])
        segments = len(forest.order) + len(by_use)
        freed = rows[by_use].cumsum()
        excess = num_rows + int(freed[-1]) - room.num_partials
        count = max(segments - room.num_segments, int(np.searchsorted(freed, excess)) + 1 if excess > 0 else 0)
        if count <= 0 and num_slots(forest, cut) > room.num_slots:
            count = 1
        if count <= 0:
            break
        # Unkeeping a node makes those below it more useful: look again halfway.
        kept = cut.kept.copy()
        kept[by_use[: (count + 1) // 2]] = False
        cut = cut_at(forest, kept)
    return cut


def _limit_levels(forest: PrefixForest, cut: Cut, num_levels: int) -> Cut:
    """Unkeep nodes on the paths that are too long, and only there."""
    while cut.num_levels > num_levels:
        deepest = (cut.kept & (cut.node_level == cut.num_levels - 2)).nonzero()[0]
        node = int(_least_useful_first(forest, cut, deepest)[0])
        path = [node]
        while (node := int(cut.node_above[node])) >= 0:
            path.append(node)
        by_use = _least_useful_first(forest, cut, np.array(path))
        kept = cut.kept.copy()
        kept[by_use[: len(path) - (num_levels - 1)]] = False
        cut = cut_at(forest, kept)
    return cut


def _least_useful_first(forest: PrefixForest, cut: Cut, nodes: Int64Array) -> Int64Array:
    """Order kept nodes by the page reads that each of them saves.

    Without a node, its segment's pages are read by each segment right below it. Ties go by where and what the run
    is, not by number: the order of requests must not matter.
    """
    readers = np.bincount(cut.tail_above[cut.tail_above >= 0], minlength=forest.num_nodes)
    above = cut.node_above[cut.kept]
    readers += np.bincount(above[above >= 0], minlength=forest.num_nodes)
    pages = forest.page_begin + forest.num_pages - cut.node_start
    saved = (pages * (readers - 1))[nodes]
    return nodes[np.lexsort((forest.first_page[nodes], forest.num_pages[nodes], forest.page_begin[nodes], saved))]

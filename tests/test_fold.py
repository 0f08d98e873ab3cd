"""The fold decision against exhaustive search."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.fold import FoldCosts, best_cuts, cut_at
from flashinfer_cascade.forest import build_forest

CONFIG = CascadeConfig(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=1, dtype="float16")


def forest_of(tables):
    return build_forest(make_batch(CONFIG, tables, [len(t) for t in tables]))


@st.composite
def forests(draw):
    tables = [
        [*draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)), 100 + r] for r in range(draw(st.integers(2, 8)))
    ]
    return forest_of(tables)


def total_cost(forest, costs, candidate, kept):
    """The definition: each segment's fixed cost, its pages, and a partial for its rows."""
    cut = cut_at(forest, kept)
    page_end = forest.page_begin + forest.num_pages
    total = 0.0
    for x in np.flatnonzero(kept):
        total += costs.node_fixed[x] + costs.node_per_page[x] * (page_end[x] - cut.node_start[x])
        total += costs.partial[candidate, x]
    for x in range(forest.num_nodes):
        from_page = page_end[x] if kept[x] else cut.node_start[x]
        total += costs.tail_fixed[candidate, x] + costs.tail_per_page[candidate, x] * (page_end[x] - from_page)
    return total


@given(forests(), st.integers(0, 2**32 - 1))
def test_the_choice_is_the_cheapest_of_all(forest, seed):
    n = forest.num_nodes
    rng = np.random.default_rng(seed)
    costs = FoldCosts(*(rng.integers(0, 40, size).astype(float) for size in (n, n, (3, n), (3, n), (3, n))))
    masks = [np.array(m, bool) for m in itertools.product([False, True], repeat=n)]
    for candidate, kept in enumerate(best_cuts(forest, costs)):
        best = min(total_cost(forest, costs, candidate, mask) for mask in masks)
        assert total_cost(forest, costs, candidate, kept) == best


def test_a_cut_passes_unkept_runs_down():
    forest = forest_of([[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 12], [1, 13], [14]])
    assert forest.num_pages.tolist() == [1, 1, 1]
    cut = cut_at(forest, np.array([False, True, False]))
    assert cut.node_start.tolist() == [0, 0, 2]
    assert cut.tail_start.tolist() == [2, 2, 2, 0, 0]
    assert (cut.num_levels, cut.node_level.tolist()) == (2, [0, 0, 1])
    everything = cut_at(forest, np.ones(3, bool))
    assert everything.tail_start.tolist() == [3, 3, 2, 1, 0]
    assert everything.num_levels == 4
    assert cut_at(forest, np.zeros(3, bool)).num_levels == 1


def test_a_forest_without_nodes():
    forest = forest_of([[1, 2], [3]])
    nothing = np.zeros(0)
    assert best_cuts(forest, FoldCosts(nothing, nothing, *[np.zeros((3, 0))] * 3)).shape == (3, 0)
    assert cut_at(forest, np.zeros(0, bool)).tail_start.tolist() == [0, 0]

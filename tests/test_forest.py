"""The forest against a naive trie, and the shapes that engines produce."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.forest import build_forest


def config(page_size=4, **changes):
    values = {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": page_size,
        "dtype": "bfloat16",
        "max_batch_size": 4096,
        "max_kv_pages": 2**24,
        "max_kv_indices": 2**26,
    }
    return CascadeConfig(**(values | changes))


def forest_of(tables, seq_lens, qo_lens=None, page_size=4):
    return build_forest(make_batch(config(page_size), tables, seq_lens, qo_lens))


def runs(forest, tables):
    """{(requests, first page, page ids)} of all nodes."""
    out = set()
    for node in range(forest.num_nodes):
        requests = frozenset(forest.order[forest.begin[node] : forest.end[node]].tolist())
        low = int(forest.page_begin[node])
        pages = tuple(tables[min(requests)][low : low + int(forest.num_pages[node])])
        out.add((requests, low, pages))
    return out


def naive_runs(tables, limits):
    """The same by walking a dictionary trie page by page."""
    out = set()
    groups = [(list(range(len(tables))), 0)]
    while groups:
        members, depth = groups.pop()
        low = depth
        parts = {}
        while True:
            parts = {}
            for r in members:
                key = tables[r][depth] if depth < limits[r] else ("end", r)
                parts.setdefault(key, []).append(r)
            if len(parts) != 1 or len(members) == 1:
                break
            depth += 1
        if depth > low and len(members) > 1:
            out.add((frozenset(members), low, tuple(tables[members[0]][low:depth])))
        # A fork: each part of two or more starts a run of its own here.
        groups += [(part, depth) for part in parts.values() if len(part) > 1 and len(parts) > 1]
    return out


@st.composite
def batches(draw):
    """Small page alphabets and copied prefixes, so that sharing, forks and repeated ids are common."""
    page_size = draw(st.sampled_from([1, 2, 16]))
    tables, seq_lens, qo_lens = [], [], []
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(tables)) if tables and draw(st.booleans()) else []
        table = base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 3), max_size=6))
        seq_len = draw(st.integers(0, len(table) * page_size))
        tables.append(table)
        seq_lens.append(seq_len)
        qo_lens.append(draw(st.integers(1, max(seq_len, 1))) if draw(st.booleans()) else 1)
    return page_size, tables, seq_lens, qo_lens


@given(batches())
def test_equals_a_naive_trie(batch):
    page_size, tables, seq_lens, qo_lens = batch
    forest = forest_of(tables, seq_lens, qo_lens, page_size)
    limits = [max(s - q, 0) // page_size for s, q in zip(seq_lens, qo_lens, strict=True)]
    assert runs(forest, tables) == naive_runs(tables, limits)


@given(batches())
def test_is_a_forest_over_a_contiguous_order(batch):
    page_size, tables, seq_lens, qo_lens = batch
    f = forest_of(tables, seq_lens, qo_lens, page_size)
    assert sorted(f.order) == list(range(len(tables)))
    for x in range(f.num_nodes):
        assert f.end[x] - f.begin[x] >= 2
        assert f.num_pages[x] >= 1
        p = f.parent[x]
        assert p < x
        if p < 0:
            assert f.page_begin[x] == 0
            assert f.depth[x] == 0
        else:
            assert f.page_begin[x] == f.page_begin[p] + f.num_pages[p]
            assert f.depth[x] == f.depth[p] + 1
            assert f.begin[p] <= f.begin[x] < f.end[x] <= f.end[p]
    for position, node in enumerate(f.tail_node):
        covering = [x for x in range(f.num_nodes) if f.begin[x] <= position < f.end[x]]
        assert node == (max(covering, key=lambda x: f.depth[x]) if covering else -1)
        assert f.tail_begin[position] == (f.page_begin[node] + f.num_pages[node] if covering else 0)


@given(batches(), st.randoms(use_true_random=False))
def test_permuting_requests_changes_names_alone(batch, rng):
    page_size, tables, seq_lens, qo_lens = batch
    old = list(range(len(tables)))
    rng.shuffle(old)
    shuffled = [tables[i] for i in old]
    f = forest_of(shuffled, [seq_lens[i] for i in old], [qo_lens[i] for i in old], page_size)
    renamed = {(frozenset(old[i] for i in requests), low, pages) for requests, low, pages in runs(f, shuffled)}
    assert renamed == runs(forest_of(tables, seq_lens, qo_lens, page_size), tables)


def test_siblings_stand_in_order_of_first_appearance():
    f = forest_of([[9, 1], [5, 1], [9, 2], [5, 2], [7, 1]], [8] * 5)
    assert f.order.tolist() == [0, 2, 1, 3, 4]


def test_grouped_batches_keep_their_order():
    f = forest_of([[1, 2, 9], [1, 2, 8], [1, 3, 7], [1, 3, 6], [4, 5, 6]], [12] * 5)
    assert f.order.tolist() == [0, 1, 2, 3, 4]
    assert f.num_nodes == 3


def test_one_outlier_does_not_end_sharing():
    shared = list(range(100, 356))
    tables = [[*shared, 1000 + r] for r in range(63)] + [list(range(2000, 2257))]
    f = forest_of(tables, [4096 + 16] * 64, page_size=16)
    assert (f.num_nodes, f.num_pages[0], f.begin[0], f.end[0]) == (1, 256, 0, 63)


def test_page_ids_need_no_order():
    shared = [90, 7, 55, 3, 2, 81]
    f = forest_of([[*shared, 5], [*shared, 1]], [27, 28])
    assert f.num_pages.tolist() == [6]


def test_a_partial_page_is_never_shared():
    f = forest_of([[4, 5, 6], [4, 5, 6]], [40, 40], page_size=16)
    assert f.num_pages.tolist() == [2]


def test_a_full_last_page_that_this_step_wrote_is_not_shared():
    f = forest_of([[4, 5, 6], [4, 5, 6]], [48, 48], page_size=16)
    assert f.num_pages.tolist() == [2]


def test_a_cold_prefill_shares_nothing_with_a_decode_over_its_pages():
    f = forest_of([[1, 2, 3], [1, 2, 3]], [12, 12], [12, 1])
    assert f.num_nodes == 0


def test_lengths_around_a_page():
    f = forest_of([[1], [1], [1], [1, 2]], [1, 15, 16, 17], page_size=16)
    assert f.num_nodes == 0
    f = forest_of([[1, 3], [1, 2]], [17, 17], page_size=16)
    assert f.num_pages.tolist() == [1]


def test_padding_requests_share_nothing():
    f = forest_of([[1, 2], [1, 2], [], []], [8, 8, 0, 0])
    assert f.end[0] - f.begin[0] == 2
    assert f.tail_node.tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize("page_size", [1, 4])
def test_chains_hundreds_of_levels_deep(page_size):
    depth = 700
    tables = [[*range(r + 1), 10_000 + r] for r in range(depth)]
    f = forest_of(tables, [(r + 2) * page_size for r in range(depth)], page_size=page_size)
    assert f.num_nodes == depth - 1
    assert f.depth[-1] == depth - 2


def test_long_contexts_at_page_size_one():
    base = np.arange(100_000)
    tables = np.stack([base, base, base])
    tables[1, 70_000:] += 200_000
    tables[2, 99_998:] += 400_000
    f = forest_of(tables, [100_000] * 3, page_size=1)
    assert f.num_pages.tolist() == [70_000, 29_998]
    assert f.order.tolist() == [0, 2, 1]


def test_windows_end_at_the_last_page_of_the_batch():
    # Windows that compare runs read past the tables' end; the slack there must never count as shared.
    f = forest_of([[1] * 40, [1] * 40], [160, 157])
    assert f.num_pages.tolist() == [39]

"""Synthetic workloads: their sizes, their sharing at any page size, and that they are the same every time."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CascadePlanner, InvalidBatchError, PlannerPolicy
from flashinfer_cascade.bench.workloads import (
    DATA,
    IRREGULAR,
    TREES,
    append,
    grid,
    irregular,
    read_grid,
    tree,
    workload,
)

FORCED = PlannerPolicy(executor="levels", fold=False, max_levels=64)
SPECS = st.integers(1, 4).flatmap(
    lambda levels: st.tuples(
        st.lists(st.integers(1, 6), min_size=levels, max_size=levels).map(sorted),
        st.lists(st.integers(1, 40), min_size=levels, max_size=levels),
    )
)


def spelled(counts, lengths):
    return f"{','.join(map(str, counts))}_{','.join(map(str, lengths))}"


def test_grid_has_the_trees_with_their_batch_sizes():
    listed = read_grid()["trees"]
    assert set(TREES) == set(listed)
    for batch in grid():
        counts, lengths = ([int(n) for n in half.split(",")] for half in listed[batch.name].split("_"))
        assert batch.num_requests == batch.num_rows == counts[-1]
        assert set(batch.seq_lens) == {sum(lengths)}
        # All of the grid is whole pages, so every page is one node's.
        assert batch.num_pages == sum(n * length // 16 for n, length in zip(counts, lengths, strict=True))


@given(SPECS, st.sampled_from([1, 3, 16, 64]))
def test_a_tree_shares_exactly_the_full_pages_of_common_tokens(spec, page_size):
    counts, lengths = spec
    batch = tree(spelled(counts, lengths), page_size)
    paths = []
    for leaf in range(counts[-1]):
        node, path = leaf, [leaf]
        for level in range(len(counts) - 1, 0, -1):
            node = node * counts[level - 1] // counts[level]
            path.append(node)
        paths.append(path[::-1])
    for a, path_a in enumerate(paths):
        for b, path_b in enumerate(paths[:a]):
            common = 0
            for node_a, node_b, length in zip(path_a, path_b, lengths, strict=True):
                if node_a != node_b:
                    break
                common += length
            same = batch.block_tables[a] == batch.block_tables[b]
            full = common // page_size
            assert same[:full].all()
            assert not same[full : -(-sum(lengths) // page_size)].any()


@given(SPECS, st.sampled_from([1, 3, 16, 64]))
def test_pages_are_numbered_densely_and_belong_to_one_position(spec, page_size):
    batch = tree(spelled(*spec), page_size)
    position_of = {}
    for row, seq_len in zip(batch.block_tables, batch.seq_lens, strict=True):
        used = -(-int(seq_len) // page_size)
        assert (row[:used] >= 0).all()
        assert (row[used:] == -1).all()
        assert len(set(row[:used].tolist())) == used
        for position, page in enumerate(row[:used].tolist()):
            assert position_of.setdefault(page, position) == position
    assert sorted(position_of) == list(range(batch.num_pages))


def test_the_planner_finds_the_tree():
    batch = tree("1,4,16,64_1024,256,128,32")
    (part,) = CascadePlanner(batch.config(), FORCED).plan(batch.block_tables, batch.seq_lens).parts
    assert part.forest.num_nodes == 1 + 4 + 16
    assert sorted(set(part.forest.num_pages.tolist())) == [8, 16, 64]


def test_a_prefix_that_ends_inside_a_page_is_shared_up_to_it():
    batch = tree("1,3_100,10", page_size=64)
    assert batch.block_tables.shape == (3, 2)
    assert len(set(batch.block_tables[:, 0])) == 1
    assert len(set(batch.block_tables[:, 1])) == 3


def test_seeds_shuffle_page_ids_alone():
    one, same, other = tree("1,4_64,16"), tree("1,4_64,16"), tree("1,4_64,16", seed=1)
    assert (one.block_tables == same.block_tables).all()
    assert (one.block_tables != other.block_tables).any()
    assert one.num_pages == other.num_pages
    assert (one.seq_lens == other.seq_lens).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "nodes per level"),
        ("1,2", "nodes per level"),
        ("1,x_3,4", "nodes per level"),
        ("1,2_3_4", "nodes per level"),
        ("1,2_3", "as many lengths as levels"),
        ("4,2_3,4", "fewer nodes than the one above"),
        ("1,2_3,0", "at least 1"),
    ],
)
def test_a_wrong_tree_is_refused(spec, message):
    with pytest.raises(InvalidBatchError, match=message):
        tree(spec)


def test_wrong_names_and_sizes_are_refused():
    with pytest.raises(InvalidBatchError, match="no workload 'P21': choose from P1, P2"):
        grid(["P1", "P21"])
    with pytest.raises(InvalidBatchError, match="page_size=0"):
        tree("1,2_3,4", page_size=0)
    with pytest.raises(InvalidBatchError, match="nothing has no requests"):
        workload("nothing", [], 16, description="")


def test_irregular_workloads_are_as_the_grid_describes_them():
    assert set(IRREGULAR) == set(read_grid()["irregular"])
    half, tool, sample8, beam, chat = grid(IRREGULAR)
    assert sorted(half.seq_lens) == [2048] * 32 + [4352] * 32
    assert (tool.seq_lens[:42] >= 6444).all()
    assert (tool.seq_lens[42:] <= 2560 + 1200).all()
    assert len(np.unique(tool.block_tables[:, 0])) == 2
    assert sample8.num_requests == 64
    assert len(np.unique(sample8.block_tables[:, 0])) == 8
    assert set(beam.seq_lens) == {2051}
    assert beam.num_pages == 128 + 128
    assert chat.seq_lens.min() >= 512 + 2048
    assert chat.seq_lens.max() <= 512 + 20480


@pytest.mark.parametrize("name", IRREGULAR)
def test_irregular_workloads_plan_at_every_page_size(name):
    for page_size in (1, 16, 64):
        batch = irregular(name, page_size)
        plan = CascadePlanner(batch.config()).plan(batch.block_tables, batch.seq_lens)
        assert plan.parts[0].forest.num_nodes > 0


def test_append_has_shared_own_and_new_tokens():
    batch = append(requests=4, shared=100, own=20, new=30, page_size=16)
    assert (batch.seq_lens == 150).all()
    assert (batch.qo_lens == 30).all()
    assert batch.num_rows == 120
    (part,) = CascadePlanner(batch.config(), FORCED).plan(batch.block_tables, batch.seq_lens, batch.qo_lens).parts
    assert part.name == "append"
    assert part.forest.num_pages.tolist() == [6]


def test_append_without_context_of_its_own_shares_no_new_token():
    batch = append(requests=2, shared=64, own=0, new=16, page_size=16)
    (part,) = CascadePlanner(batch.config(), FORCED).plan(batch.block_tables, batch.seq_lens, batch.qo_lens).parts
    assert part.forest.num_pages.tolist() == [4]


def test_shuffled_permutes_requests_and_nothing_else():
    batch = append(requests=8, shared=32, own=8, new=4)
    shuffled = batch.shuffled(seed=3)
    assert (shuffled.block_tables != batch.block_tables).any()
    assert sorted(map(tuple, shuffled.block_tables)) == sorted(map(tuple, batch.block_tables))
    assert shuffled.num_rows == batch.num_rows


def test_config_fits_the_batch_and_takes_more():
    batch = tree("1,4_64,16")
    config = batch.config(num_qo_heads=8, num_kv_heads=2, head_dim=64, dtype="float16", window_left=32)
    assert (config.max_batch_size, config.max_kv_pages, config.max_kv_indices) == (4, 8, 20)
    assert config.window_left == 32


def test_shipped_grid_is_json_without_surprises():
    listed = json.loads((DATA / "grid.json").read_text())
    assert {"trees", "heads", "head_dim", "dtype", "page_size", "irregular"} < set(listed)


def test_workloads_need_no_torch():
    code = (
        "import sys; import flashinfer_cascade.bench.workloads, flashinfer_cascade.bench.traces; "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"

"""Batches of traces: sharing as the traces state it, and files that are wrong."""

import json

import numpy as np
import pytest

from flashinfer_cascade import CascadePlanner, InvalidBatchError
from flashinfer_cascade.bench.traces import (
    BLOCK_TOKENS,
    CONVERSATION,
    MAX_GENERATED,
    SYNTHETIC,
    TREE_OF_THOUGHT,
    mooncake_batches,
    read_mooncake,
    read_thoughts,
    tot_batches,
)


def trace(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt(length, *ids):
    return {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": list(ids)}


def common_pages(batch, a, b):
    """Leading pages that two requests have in common."""
    same = (batch.block_tables[a] == batch.block_tables[b]) & (batch.block_tables[a] >= 0)
    return int(np.argmin(np.append(same, False)))


@pytest.mark.parametrize("path", [CONVERSATION, SYNTHETIC])
@pytest.mark.parametrize("page_size", [1, 16, 48, 1024])
def test_shipped_traces_share_as_their_ids_say(path, page_size):
    prompts = list(read_mooncake(path))[:64]
    batch = next(mooncake_batches(path, 64, page_size))
    assert batch.seq_lens.tolist() == [p.input_length for p in prompts]
    pages = set()
    for a, p in enumerate(prompts):
        pages.update(batch.block_tables[a].tolist())
        for b, q in enumerate(prompts[:a]):
            blocks = 0
            for x, y in zip(p.hash_ids, q.hash_ids, strict=False):
                if x != y:
                    break
                blocks += 1
            tokens = min(blocks * BLOCK_TOKENS, p.input_length, q.input_length)
            assert common_pages(batch, a, b) == tokens // page_size
    assert pages - {-1} == set(range(batch.num_pages))


def test_a_trace_is_cut_into_consecutive_batches():
    batches = list(mooncake_batches(CONVERSATION, 128))
    assert [batch.num_requests for batch in batches] == [128, 128, 44]
    assert len({batch.name for batch in batches}) == 3
    lengths = [p.input_length for p in read_mooncake(CONVERSATION)]
    assert np.concatenate([batch.seq_lens for batch in batches]).tolist() == lengths


def test_short_last_blocks_are_shared_only_when_equally_long(tmp_path):
    path = trace(tmp_path / "t.jsonl", prompt(512 + 100, 0, 1), prompt(512 + 100, 0, 1), prompt(512 + 90, 0, 1))
    (batch,) = mooncake_batches(path, 3, page_size=16)
    # 100 tokens are 6 full pages and a private one.
    assert common_pages(batch, 0, 1) == 32 + 6
    assert batch.block_tables[0, 38] != batch.block_tables[1, 38]
    assert common_pages(batch, 0, 2) == 32


def test_samples_share_the_prompt_s_full_pages_and_own_the_rest(tmp_path):
    path = trace(tmp_path / "t.jsonl", prompt(600, 0, 1), prompt(520, 0, 2))
    (batch,) = mooncake_batches(path, 2, page_size=16, samples=4)
    assert batch.num_requests == 8
    for first, length in ((0, 600), (4, 520)):
        generated = batch.seq_lens[first : first + 4] - length
        assert generated.min() >= 1
        assert generated.max() <= MAX_GENERATED
        for r in range(first + 1, first + 4):
            assert common_pages(batch, first, r) == length // 16
    assert common_pages(batch, 0, 4) == 512 // 16
    (again,) = mooncake_batches(path, 2, page_size=16, samples=4)
    assert (again.block_tables == batch.block_tables).all()


def test_max_context_keeps_the_beginning(tmp_path):
    path = trace(tmp_path / "t.jsonl", prompt(1500, 0, 1, 2), prompt(1500, 0, 1, 3), prompt(300, 4))
    (batch,) = mooncake_batches(path, 3, page_size=16, max_context=1000)
    assert batch.seq_lens.tolist() == [1000, 1000, 300]
    assert common_pages(batch, 0, 1) == 1000 // 16


def test_parallel_samples_of_real_prompts_plan_as_a_cascade():
    batch = next(mooncake_batches(CONVERSATION, 8, samples=8))
    plan = CascadePlanner(batch.config()).plan(batch.block_tables, batch.seq_lens)
    assert plan.parts[0].executor == "segments"
    assert plan.num_levels > 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"t\.jsonl:2: not JSON"),
        ("[" * 100_000, r"t\.jsonl:2: not JSON"),
        ("[1]", r"t\.jsonl:2: no input_length"),
        ('{"input_length": 5}', r"t\.jsonl:2: no hash_ids"),
        ('{"input_length": "5", "hash_ids": [9]}', r"t\.jsonl:2: .* must be integers"),
        ('{"input_length": 5, "hash_ids": 9}', r"t\.jsonl:2: .* must be integers"),
        ('{"input_length": 5, "hash_ids": [true]}', r"t\.jsonl:2: .* must be integers"),
        ('{"input_length": 5, "hash_ids": [-9]}', r"t\.jsonl:2: .* at least 0"),
        ('{"input_length": 513, "hash_ids": [9]}', r"t\.jsonl:2: input_length 513 is 2 blocks .* has 1 ids"),
        ('{"input_length": 0, "hash_ids": []}', r"t\.jsonl:2: input_length 0 is 0 blocks"),
        ('{"input_length": 600, "hash_ids": [5, 1]}', r"t\.jsonl:2: block 1 follows 5 here and 0 before"),
        ('{"input_length": 600, "hash_ids": [7, 7]}', r"t\.jsonl:2: block 7 follows 7 here and -1 before"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(prompt(600, 0, 1)) + "\n" + line + "\n")
    with pytest.raises(InvalidBatchError, match=message):
        list(mooncake_batches(path, 1))


def test_blank_lines_are_skipped_and_numbers_checked(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps(prompt(5, 0)) + "\n\n")
    assert [batch.num_requests for batch in mooncake_batches(path, 4)] == [1]
    for name in ("batch", "samples", "max_context"):
        with pytest.raises(InvalidBatchError, match=f"{name}=0 must be at least 1"):
            next(mooncake_batches(path, **({"batch": 1} | {name: 0})))


TASKS = ("sorting128ToT", "docmergeToT", "set128ToT", "keywordToT")


@pytest.mark.parametrize("task", TASKS)
def test_shipped_trees_are_consistent(task):
    trees = read_thoughts(TREE_OF_THOUGHT, task)
    assert len(trees) == 12
    for thoughts in trees:
        for thought in thoughts.values():
            if thought.parent >= 0:
                assert thought.start == thoughts[thought.parent].end + 1


def test_branches_share_their_ancestors_alone():
    # Tree 1: node 2 (711 tokens) ended at iteration 711; its children began at 712; others are still alive.
    (batch,) = tot_batches(TREE_OF_THOUGHT, "sorting128ToT", [720], trees=[1])
    thoughts = read_thoughts(TREE_OF_THOUGHT, "sorting128ToT")[1]
    alive = [t for t in thoughts.values() if t.start <= 720 <= t.end]
    expected = [1104 + (711 + 9 if t.parent == 2 else 720) for t in alive]
    assert batch.seq_lens.tolist() == expected
    children = [r for r, t in enumerate(alive) if t.parent == 2]
    others = [r for r, t in enumerate(alive) if t.parent == 0]
    assert len(children) > 2
    assert common_pages(batch, children[0], children[1]) == (1104 + 711) // 16
    assert common_pages(batch, children[0], others[0]) == 1104 // 16


def test_trees_run_side_by_side_and_end():
    batches = list(tot_batches(TREE_OF_THOUGHT, "keywordToT", range(1, 5000, 100)))
    assert 1 < len(batches) < 50
    # The third search never began.
    assert len(np.unique(batches[0].block_tables[:, 0])) == 11
    assert list(tot_batches(TREE_OF_THOUGHT, "keywordToT", [1, 2], trees=[2])) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not lists of tree-of-thought trees"),
        ("[" * 100_000, "not lists of tree-of-thought trees"),
        ('{"other": []}', "no task 'a', only other"),
        ('{"a": [{}]}', "not lists of tree-of-thought trees"),
        ('{"a": [{"nodes": [[0, -1]]}]}', "not lists of tree-of-thought trees"),
        ('{"a": [{"nodes": [[0, -1, 4, 1, 9]]}]}', "tree 0: node 0 generates 4 tokens in iterations 1 to 9"),
        ('{"a": [{"nodes": [[0, 7, 4, 1, 4]]}]}', "tree 0: node 0 has a parent 7"),
        ('{"a": [{"nodes": [[0, -1, 4, 1, 4], [1, 0, 1, 4, 4]]}]}', "tree 0: node 1 has a parent 0"),
    ],
)
def test_wrong_trees_are_refused(tmp_path, text, message):
    path = tmp_path / "trees.json"
    path.write_text(text)
    with pytest.raises(InvalidBatchError, match=message):
        list(tot_batches(path, "a", [1]))

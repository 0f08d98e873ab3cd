"""The report: numbers that add up, and text that stays short on any forest."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy
from flashinfer_cascade.report import explain, format_bytes, part_facts, render, summary

FORCED = PlannerPolicy(executor="levels", fold=False)
FLAT = PlannerPolicy(executor="flat")
TOKEN_BYTES = 2 * 8 * 128 * 2


def config(**changes):
    values = {
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 16,
        "dtype": "bfloat16",
        "max_batch_size": 1024,
        "max_kv_pages": 2**20,
    }
    return CascadeConfig(**(values | changes))


def tree(counts, pages, own_tokens):
    """Block tables and lengths: `counts[i]` nodes of `pages[i]` at depth i, `counts[-1]` requests."""
    fresh = iter(range(2**20))
    runs = [[[next(fresh) for _ in range(n)] for _ in range(count)] for count, n in zip(counts, pages, strict=False)]
    tables, seq_lens = [], []
    for r in range(counts[-1]):
        shared = [page for level in runs for page in level[r * len(level) // counts[-1]]]
        tables.append(shared + [next(fresh) for _ in range(-(-own_tokens // 16))])
        seq_lens.append(16 * len(shared) + own_tokens)
    return tables, seq_lens


def plan_tree(counts, pages, own_tokens=20, policy=None):
    return CascadePlanner(config(), policy).plan(*tree(counts, pages, own_tokens))


def plan_chain(length=500, policy=None):
    """Request r shares the first r + 1 pages of one long run."""
    tables = [[*range(r + 1), 100_000 + r] for r in range(length)]
    return CascadePlanner(config(), policy).plan(tables, [16 * (r + 1) + 5 for r in range(length)])


def plan_mixed(policy=FORCED):
    """Two decode and two append requests under one prefix of two pages."""
    tables = [[1, 2, 10], [1, 2, 11], [1, 2, 12, 13, 14], [1, 2, 15, 16, 17]]
    return CascadePlanner(config(), policy).plan(tables, [33, 33, 80, 80], [1, 1, 40, 40])


def test_summary_counts_every_byte():
    plan = plan_tree((1, 4, 64), (64, 8), 20, FORCED)
    numbers = summary(plan)
    assert (numbers["num_requests"], numbers["num_rows"], numbers["page_size"]) == (64, 64, 16)
    assert (numbers["nodes_found"], numbers["nodes_kept"], numbers["num_segments"]) == (5, 5, 69)
    assert numbers["kv_flat_bytes"] == 64 * (1024 + 128 + 20) * TOKEN_BYTES
    assert numbers["kv_read_bytes"] == (1024 + 4 * 128 + 64 * 20) * TOKEN_BYTES
    assert numbers["kv_unique_bytes"] == numbers["kv_read_bytes"]
    assert (numbers["pages_flat"], numbers["pages_read"]) == (64 * 74, 64 + 4 * 8 + 64 * 2)
    (part,) = numbers["parts"]
    assert (part["name"], part["executor"], part["reason"]) == ("decode", "levels", plan.parts[0].reason)
    assert part["predicted_us"] == plan.parts[0].predicted_us
    assert json.loads(json.dumps(numbers)) == numbers


def test_summary_of_two_parts_adds_up():
    numbers = summary(plan_mixed())
    decode, append = numbers["parts"]
    assert (decode["name"], decode["num_rows"], append["name"], append["num_rows"]) == ("decode", 2, "append", 80)
    for name in ("nodes_found", "nodes_kept", "kv_flat_bytes", "kv_read_bytes", "kv_unique_bytes", "num_segments"):
        assert numbers[name] == decode[name] + append[name]


@given(
    tables=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12),
    policy=st.sampled_from(
        [FORCED, FLAT, PlannerPolicy(executor="levels"), PlannerPolicy(executor="levels", fold=False, max_levels=2)]
    ),
)
def test_reads_of_nodes_and_own_kv_add_up_to_what_segments_read(tables, policy):
    plan = CascadePlanner(config(page_size=1), policy).plan(tables, [len(table) for table in tables])
    (part,) = plan.parts
    facts = part_facts(plan, part)
    reads = np.where(part.kept, 1, facts.readers.sum(axis=1))
    assert (reads * facts.node_tokens).sum() + facts.own_tokens.sum() == plan.seg_kv_len.sum()
    assert facts.seq_lens.tolist() == [len(tables[r]) for r in part.forest.order]
    assert explain(plan)


def test_explain_names_what_was_kept():
    text = explain(plan_tree((1, 4, 64), (64, 8), 20, FORCED))
    assert text.splitlines()[0] == "decode: levels, 3 levels, 64 requests, 64 rows"
    assert "why        the policy asks for levels" in text
    assert "KV read    307 MB flat -> 11.5 MB (3.8%), 11.5 MB with every page once" in text
    assert "64 requests share 1024 tokens (64 pages)   kept: level 0" in text
    assert "16 requests share 128 tokens (8 pages)  kept: level 1" in text
    assert "… and 3 more like it: 16 requests share 128 tokens (8 pages)" in text
    assert "own KV of 16 requests, 20 tokens" in text


def test_explain_lists_levels_with_what_flat_would_read():
    level_0, level_1, own = explain(plan_tree((1, 4, 64), (64, 8), 20, FORCED)).splitlines()[-3:]
    assert level_0.split()[:8] == ["0", "1", "64", "1024", "4.19", "MB", "268", "MB"]
    assert level_1.split()[:8] == ["1", "4", "64", "128", "2.10", "MB", "33.6", "MB"]
    assert own.split()[:10] == ["2,", "own", "KV", "64", "64", "20", "5.24", "MB", "5.24", "MB"]


def test_explain_weighs_what_was_merged():
    plan = plan_tree((1, 4, 64), (64, 8), 20, FLAT)
    text = explain(plan)
    assert "read by each of 64 requests: +264 MB read" in text
    assert "read by each of 16 requests: +7.86 MB read" in text
    assert "kept: level" not in text


def test_explain_says_which_segments_read_a_merged_node():
    # A chain of three nodes of which only two levels, so one node, may remain.
    tables = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 2, 3, 12], [1, 13]]
    policy = PlannerPolicy(executor="levels", fold=False, max_levels=2)
    text = explain(CascadePlanner(config(page_size=1), policy).plan(tables, [5, 5, 4, 2]))
    assert "merged into 1 node and 1 request below: +4.10 kB read, -4 row merges" in text
    assert "3 requests share 2 tokens (2 pages)   kept: level 0" in text
    assert "merged into 2 requests below" in text


def test_explain_summarises_own_kv_padding_and_loners():
    tables = [[1, 2, 10], [1, 2, 11, 12], [1, 2, 13, 14, 15], [20], [], []]
    text = explain(CascadePlanner(config(), FORCED).plan(tables, [33, 60, 70, 9, 0, 0]))
    assert "own KV of 3 requests, 1 to 38 tokens, median 28" in text
    assert "no sharing: 1 request, 9 tokens" in text
    assert "2 padding requests" in text


def test_explain_of_two_parts():
    text = explain(plan_mixed())
    total, decode, append = text.split("\n\n")
    assert total.startswith("plan, 2 levels, 4 requests, 82 rows, KV read ")
    assert decode.startswith("decode: levels, 2 levels, 2 requests, 2 rows")
    assert append.startswith("append: levels, 2 levels, 2 requests, 80 rows")


def test_one_request():
    text = explain(CascadePlanner(config()).plan([[1, 2, 3]], [40]))
    assert "flat, 1 level, 1 request, 1 row" in text
    assert "0 shared nodes, 0 kept" in text
    assert "no sharing: 1 request, 40 tokens" in text


def test_nothing_but_padding():
    plan = CascadePlanner(config()).plan([[], []], [0, 0])
    assert summary(plan)["kv_read_bytes"] == 0
    assert "2 padding requests" in explain(plan)


@pytest.mark.parametrize("policy", [None, FORCED, FLAT])
@pytest.mark.parametrize(
    "make",
    [
        lambda policy: plan_tree((1, 8, 16, 32, 64, 128, 1024), (16, 8, 4, 2, 2, 2), 32, policy),
        lambda policy: plan_tree(tuple(2**i for i in range(11)), (1,) * 10, 32, policy),
        lambda policy: plan_tree((512, 1024), (4,), 32, policy),
        lambda policy: plan_irregular(1024, policy),
        lambda policy: plan_chain(500, policy),
    ],
    ids=["six levels", "binary", "pairs", "irregular", "chain"],
)
def test_explain_stays_short_on_large_forests(make, policy):
    lines = explain(make(policy)).splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 160


def plan_irregular(count, policy=None):
    """Each request follows an earlier one for a while; three in ten begin anew."""
    rng = np.random.default_rng(1)
    fresh = iter(range(2**20))
    tables = []
    for _ in range(count):
        base = tables[rng.integers(len(tables))] if tables and rng.random() < 0.7 else []
        base = base[: rng.integers(len(base) + 1)] if len(base) < 60 else base[:40]
        tables.append(base + [next(fresh) for _ in range(rng.integers(1, 30))])
    return CascadePlanner(config(), policy).plan(tables, [16 * len(table) - 3 for table in tables])


def test_what_does_not_fit_is_counted():
    # Roots of all sizes: each kind but the heaviest few goes into one line.
    tables = [[*range(100 * n, 100 * n + n), 10_000 + 2 * n + i] for n in range(1, 90) for i in (0, 1)]
    plan = CascadePlanner(config(page_size=1), FORCED).plan(tables, [len(table) for table in tables])
    assert summary(plan)["nodes_kept"] == 89
    lines = [line for line in explain(plan).splitlines() if "more" in line]
    numbers = [int(re.search(r"and (\d+) more", line)[1]) for line in lines]
    shown = sum("kept: level 0" in line for line in explain(plan).splitlines())
    assert sum(numbers) + shown == 89


def test_a_run_of_merged_nodes_is_one_line():
    text = explain(plan_chain(500, FLAT))
    assert "500 requests share 7984 tokens (499 pages)  read by each of 500 requests: +" in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize("make", [plan_mixed, lambda: plan_tree((1, 4, 64), (64, 8)), plan_chain])
def test_render_says_what_explain_says(make):
    console = Console(width=200, file=io.StringIO())
    plan = make()
    console.print(render(plan))
    console.print(plan)
    drawn = console.file.getvalue()
    for line in explain(plan).splitlines():
        assert drawn.count(line.strip()) >= 2


def test_render_shows_brackets_in_a_reason_as_they_are():
    console = Console(width=120, file=io.StringIO())
    plan = plan_tree((1, 4), (4,))
    part = dataclasses.replace(plan.parts[0], reason="[bold]because[/bold]")
    console.print(render(dataclasses.replace(plan, parts=(part,))))
    assert "[bold]because[/bold]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (999_499, "999 kB"),
        (999_501, "1.00 MB"),
        (123e9, "123 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text

"""Which rows each suite has, and what is refused by name."""

import pytest

from flashinfer_cascade import InvalidBatchError
from flashinfer_cascade.bench.cases import COUNTED, QUICK, SUITES, Case, select, suites
from flashinfer_cascade.bench.workloads import APPENDS, IRREGULAR, TREES, read_grid

EVERYTHING = [known for names in SUITES.values() for known in names]


def test_suites_hold_the_whole_grid():
    counts = {suite: len(select([suite])) for suite in SUITES}
    assert counts == {"decode": 26, "heads": 3 * 26, "append": 9, "fp8": 26, "irregular": 2 * 5}
    every = select(suites(["all"]))
    assert len(every) == len({case[1:] for case in every}) == sum(counts.values())
    listed = {(heads["num_qo_heads"], heads["num_kv_heads"]) for heads in read_grid()["heads"]}
    trees = [case for case in every if case.workload in TREES and case.kv_dtype == "bfloat16"]
    assert {(case.num_qo_heads, case.num_kv_heads) for case in trees} == listed
    assert {case.page_size for case in every} == {1, 16}
    assert {case.workload for case in every} == {*TREES, *APPENDS, *IRREGULAR}


def test_means_are_over_the_sixteen_published_trees():
    assert len(COUNTED) == 16
    assert set(TREES[:20]) - set(COUNTED) == {"P13", "P15", "P19", "P20"}


def test_options_replace_what_a_suite_has():
    chosen = select(["decode"], ["P10", "P1"], [(64, 8), (16, 1)], [1], ["float8_e5m2"])
    assert [(c.workload, c.num_qo_heads, c.page_size, c.kv_dtype) for c in chosen] == [
        ("P1", 64, 1, "float8_e5m2"),
        ("P10", 64, 1, "float8_e5m2"),
        ("P1", 16, 1, "float8_e5m2"),
        ("P10", 16, 1, "float8_e5m2"),
    ]
    beams = [case for case in select(["irregular"]) if case.workload == "beam"]
    assert {(case.num_qo_heads, case.num_kv_heads) for case in beams} == {(16, 8)}
    assert select(["irregular"], ["beam"], [(32, 8)])[0].num_qo_heads == 32


def test_a_case_that_two_suites_have_is_measured_once():
    cases = select(["decode", "heads"], ["P1"], [(32, 8)])
    assert cases == [Case("decode", "P1", 32, 8, 16, "bfloat16")]


def test_quick_is_a_few_of_each_unless_some_are_named():
    assert set(QUICK) <= set(EVERYTHING)
    for suite, names in SUITES.items():
        chosen = {case.workload for case in select([suite], quick=True)}
        assert chosen == set(QUICK) & set(names)
        assert 0 < len(chosen) < len(names)
    assert [case.workload for case in select(["decode"], ["P2"], quick=True)] == ["P2"]


def test_a_case_builds_its_batch_and_configuration():
    work, config = Case("fp8", "P4", 64, 8, 16, "float8_e4m3fn").build()
    assert (work.name, work.num_requests) == ("P4", 64)
    assert (config.num_qo_heads, config.num_kv_heads, config.kv_dtype) == (64, 8, "float8_e4m3fn")
    work, _ = Case("append", "A2", 32, 8, 16, "bfloat16").build()
    assert (work.num_requests, work.num_rows, set(work.seq_lens)) == (64, 256, {8192 + 256 + 4})


def test_unknown_names_are_refused():
    with pytest.raises(
        InvalidBatchError, match="no suite 'fast': choose from decode, heads, append, fp8, irregular or all"
    ):
        suites(["decode", "fast"])
    with pytest.raises(InvalidBatchError, match="no suite ''"):
        suites([])
    with pytest.raises(InvalidBatchError, match="no workload 'A1' in decode: choose from P1, P2"):
        select(["decode"], ["P1", "A1"])
    with pytest.raises(InvalidBatchError, match="kv_dtype 'int8': choose from float16, bfloat16"):
        select(["decode"], kv_dtypes=["int8"])

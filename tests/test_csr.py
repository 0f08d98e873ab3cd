"""Offsets, runs and ranges."""

import numpy as np

from flashinfer_cascade.csr import indptr, ranges, run_lengths, run_starts


def test_indptr():
    assert indptr(np.array([2, 0, 3], np.int32)).tolist() == [0, 2, 2, 5]
    assert indptr(np.array([], int)).tolist() == [0]


def test_ranges():
    assert ranges(np.array([3, 10, 5]), np.array([2, 0, 3])).tolist() == [3, 4, 5, 6, 7]
    assert ranges(np.array([7]), np.array([2])).tolist() == [7, 8]
    assert ranges(np.array([], int), np.array([], int)).tolist() == []
    # Offsets over all counts may outgrow the counts' own type.
    assert ranges(np.zeros(3, np.int8), np.full(3, 100, np.int8))[-1] == 99


def test_runs():
    starts = run_starts(np.array([5, 5, 7, 5, 5, 5]))
    assert starts.tolist() == [0, 2, 3]
    assert run_lengths(starts, 6).tolist() == [2, 1, 3]
    assert run_lengths(run_starts(np.array([1])), 1).tolist() == [1]

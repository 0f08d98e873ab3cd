"""Offsets, runs and ranges: the few vectorised idioms that every planning step is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


def indptr(counts: NDArray[Any]) -> Int64Array:
    """Offsets of consecutive runs of these lengths: int64[len(counts) + 1], starts at 0."""
    out = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=out[1:])
    return out


def ranges(starts: NDArray[Any], counts: NDArray[Any]) -> Int64Array:
    """Concatenate ``arange(start, start + count)`` over all pairs."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + counts[0])
    ends = counts.cumsum(dtype=np.int64)
    out = np.arange(ends[-1] if len(ends) else 0)
    out += (starts - ends + counts).repeat(counts)
    return out


def run_starts(values: NDArray[Any]) -> Int64Array:
    """Where each run of equal neighbours begins; `values` is not empty."""
    change = np.empty(len(values), np.bool_)
    change[0] = True
    np.not_equal(values[1:], values[:-1], out=change[1:])
    return change.nonzero()[0]


def run_lengths(starts: Int64Array, total: int) -> Int64Array:
    """Lengths of the runs that begin at `starts` and fill `total` entries."""
    out = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=out[:-1])
    out[-1] = total - starts[-1]
    return out

"""Lowering by the native core gives what Python defines, array by array."""

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy
from flashinfer_cascade.lower import Tiling, lower
from flashinfer_cascade.native import load_core
from flashinfer_cascade.testing import random_batch

HEADS = [(32, 8), (4, 4), (10, 2), (16, 1), (64, 8), (6, 2), (128, 64)]


def tilings(config):
    small = Tiling(4, min_cut=64, short_tokens=64)
    return [small, Tiling.of(config, 132, True), Tiling.of(config, 132, False), Tiling.of(config, 8, True)]


def assert_equal(plan, part, tiling, max_partials=None, page_begin=None):
    native = lower(plan, part, tiling, page_begin, max_partials)
    python = lower(plan, part, tiling, page_begin, max_partials, native=False)
    for field in fields(native):
        mine, theirs = getattr(native, field.name), getattr(python, field.name)
        assert mine.dtype == theirs.dtype == np.int32
        assert np.array_equal(mine, theirs), (field.name, tiling, max_partials)
    return python


@pytest.mark.skipif(load_core() is None, reason="the native core was not built")
@pytest.mark.parametrize("seed", range(70))
def test_native_equals_python(seed):
    rng = np.random.default_rng(seed)
    heads = HEADS[seed % len(HEADS)]
    config = CascadeConfig(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        page_size=[1, 16, 64][seed % 3],
        dtype="bfloat16",
        max_kv_pages=10**6,
    )
    count, longest = int(rng.integers(1, 60)), int(rng.choice([30, 300, 3000]))
    batch = random_batch(
        rng, page_size=config.page_size, num_requests=count, max_new=[1, 1, 4, 40][seed % 4], max_len=longest
    )
    plan = CascadePlanner(config, PlannerPolicy(executor="segments", fold=bool(seed % 2), max_levels=64)).plan(*batch)
    for tiling in tilings(config):
        for part in plan.parts:
            segs = slice(part.seg_begin, part.seg_end)
            pairs = int(plan.seg_num_rows[segs].sum())
            for most in (None, pairs, pairs + 20):
                assert_equal(plan, part, tiling, most)
            assert_equal(plan, part, tiling, None, plan.seg_page_begin[segs])


@pytest.mark.skipif(load_core() is None, reason="the native core was not built")
@pytest.mark.parametrize(
    "lengths",
    [[1], [2**20], [1] * 1024, [65536] + [100] * 255, [0, 0, 0], [0, 5, 0], [100] * 140, [512, 512, 30] * 50],
    ids=lambda lengths: f"{len(lengths)} up to {max(lengths)}",
)
def test_lengths_that_are_hard_to_deal(lengths):
    config = CascadeConfig(
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        dtype="bfloat16",
        max_batch_size=1024,
        max_kv_pages=2**18,
    )
    pages = np.cumsum([0, *(-(-length // 16) for length in lengths)])
    tables = [np.arange(low, high) for low, high in pairwise(pages)]
    plan = CascadePlanner(config, PlannerPolicy(executor="segments")).plan(tables, lengths)
    for tiling in tilings(config):
        lowered = assert_equal(plan, plan.parts[0], tiling)
        tiles = -(-np.array(lengths) // tiling.narrow_tile_tokens)
        assert lowered.narrow_runs[:, 4].sum() == tiles.sum()
        ideal = -(-int(tiles.sum()) // tiling.num_runs(tiling.narrow_blocks[-1], 8))
        whole = -(-len(lengths) // len(lowered.narrow_runs)) * int(tiles.max())  # were no item cut
        longest = int(lowered.narrow_runs[:, 4].max())
        assert longest <= max(whole, ideal + 1, ideal * 5 // 4, tiling.min_run_tiles)

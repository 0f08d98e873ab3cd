"""Cuts of KV: everything is dealt out once, and no block is left with much more than the others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade.cuts import cut_stream, cut_wide

RUNS = [132, 165]
"""Of a narrow stream over 8 KV heads on 132 SMs."""


def dealt(lengths, runs=RUNS, may_cut=True, min_run_tiles=4):
    lengths = np.array(lengths)
    return cut_stream(lengths, np.ones(len(lengths), np.int64), runs, 16, min_run_tiles, may_cut)


def assert_complete(stream, lengths, num_runs):
    """A walk over the runs takes every tile of every item once, in as many pieces as it says."""
    pieces = {}
    for run in range(num_runs):
        at, token, left = (int(of[run]) for of in (stream.run_item, stream.run_begin, stream.run_tiles))
        while left:
            item = int(stream.order[at])
            took = min(left, lengths[item] - token)
            assert took > 0
            pieces.setdefault(item, []).append((run, token, took))
            at, token, left = at + 1, 0, left - took
    for item, length in enumerate(lengths):
        runs, begins, taken = zip(*pieces[item], strict=True)
        assert sum(taken) == length
        assert begins == (0, *np.cumsum(taken)[:-1])
        assert runs == tuple(range(stream.first_run[item], stream.first_run[item] + stream.pieces[item]))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    longest=st.sampled_from([1, 500]),
    runs=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(sorted),
    min_run_tiles=st.integers(1, 4),
    may_cut=st.booleans(),
)
def test_every_tile_is_dealt_out_once(lengths, longest, runs, min_run_tiles, may_cut):
    lengths = [longest, *lengths]
    stream = dealt(lengths, runs, may_cut, min_run_tiles)
    assert len(stream.run_tiles) == runs[-1]
    assert may_cut or (stream.pieces == 1).all()
    assert_complete(stream, lengths, runs[-1])


@pytest.mark.parametrize(
    "lengths",
    [
        [4096] + [7] * 255,  # one of 64k tokens among 255 of 100
        [40] * 100 + [1] * 156,  # two classes
        [500, 300],  # very few
        [20] + [2] * 500,
        [64] * 133,  # one more than there are runs
        [1000] * 166,
    ],
    ids=lambda lengths: f"{len(lengths)} up to {max(lengths)}",
)
def test_no_run_is_much_longer_than_the_mean(lengths):
    stream = dealt(lengths)
    used = int((stream.run_tiles > 0).sum())
    ideal = -(-sum(lengths) // RUNS[0])
    assert stream.run_tiles.max() <= (ideal * 5 // 4 if used <= RUNS[0] else -(-sum(lengths) // RUNS[1]) * 5 // 4)


@pytest.mark.parametrize(
    "lengths", [[63] * 132, [7] * 140, [1] * 1024, [8] * 30 + [7] * 102, [3] * 264], ids=lambda x: f"{len(x)} of {x[0]}"
)
def test_what_can_be_dealt_whole_is_not_cut(lengths):
    assert (dealt(lengths).pieces == 1).all()


@pytest.mark.parametrize(("tiles", "rows", "cuts"), [(2, 1, False), (200, 1, True), (200, 100, False)])
def test_cuts_must_pay_for_merging(tiles, rows, cuts):
    """Three equal items, two runs: one run is a third longer than the mean, or an item's rows are merged."""
    stream = cut_stream(np.full(3, tiles), np.full(3, rows), [2], 16, 1, True)
    assert stream.pieces.tolist() == ([1, 2, 1] if cuts else [1, 1, 1])


def makespan(tiles, kv_len, chunk, slots):
    """Tokens of the slot with the most, each taking every so many of the items, the longest first."""
    pieces = -(-kv_len // chunk)
    full, rest = np.minimum(chunk, kv_len), kv_len - (pieces - 1) * chunk
    items = np.sort(np.concatenate((full.repeat(tiles * (pieces - 1)), rest.repeat(tiles))))[::-1]
    return int(items[::slots].sum()), len(items)


@given(
    tiles=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    seed=st.integers(0, 2**32 - 1),
    longest=st.sampled_from([100, 3000, 50_000]),
    slots=st.sampled_from([1, 8, 33, 264]),
    blocks=st.sampled_from([1, 2]),
)
def test_wide_pieces(tiles, seed, longest, slots, blocks):
    kv_len = np.random.default_rng(seed).integers(1, longest + 1, len(tiles))
    tiles = np.array(tiles)
    chunk = cut_wide(tiles, tiles * 16, kv_len, slots, blocks, 384, 64)
    assert (chunk % 64 == 0).all()
    extra = tiles @ (-(-kv_len // chunk) - 1)
    assert 0 <= extra <= slots
    assert (chunk[kv_len > 384] >= 256).all()
    assert (chunk >= np.minimum(kv_len, 256)).all()


@pytest.mark.parametrize(
    ("tiles", "kv_len"),
    [([7], [5700]), ([5, 1, 1], [5200, 4600, 5100]), ([8, 3, 6], [1300, 2200, 5800]), ([5], [4900])],
    ids=str,
)
def test_a_few_items_too_many_are_not_left_for_another_wave(tiles, kv_len):
    """The nearest cuts to a slot's share come to 34 or 35 items for 33 slots."""
    tiles, kv_len, slots = np.array(tiles), np.array(kv_len), 33
    share = tiles @ kv_len / slots
    nearest = np.rint(kv_len / share).astype(np.int64)
    chunk = cut_wide(tiles, tiles * 16, kv_len, slots, 2, 384, 64)
    before, after = (makespan(tiles, kv_len, of, slots) for of in (-(-kv_len // nearest), chunk))
    assert before[1] > slots >= after[1]
    assert after[0] < 0.75 * before[0]
    assert after[0] < 1.5 * share

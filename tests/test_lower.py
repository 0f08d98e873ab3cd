"""What the segments' kernels are given: a walk over it as theirs covers all KV once and writes every piece once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy
from flashinfer_cascade.lower import WINDOW, Tiling, lower, wide_shared_bytes
from flashinfer_cascade.native import load_core
from flashinfer_cascade.testing import RandomBatch, random_batch

BUILT = pytest.mark.skipif(load_core() is None, reason="the native core was not built")
HEADS = [(32, 8), (4, 4), (10, 2), (16, 1)]


def tilings(config):
    return [
        Tiling(num_sms=4, min_cut=64, short_tokens=64),
        Tiling(num_sms=4, min_cut=64, short_tokens=64, wide_tokens=32),
        Tiling.of(config, 132, is_native=True),
        Tiling.of(config, 132, is_native=False),
        Tiling.of(config, 16, is_native=True, has_native_wide=True),
    ]


def config_of(heads, page_size):
    return CascadeConfig(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        page_size=page_size,
        dtype="bfloat16",
        max_kv_pages=10**6,
    )


# What a block may have on H200, A100, L40S, RTX 5090, B200.
SHARED_BYTES = {(9, 0): 232448, (8, 0): 166912, (8, 9): 101376, (12, 0): 101376, (10, 0): 232448}


def wide(capability, **changes):
    cfg = CascadeConfig(num_qo_heads=32, num_kv_heads=8, page_size=16, dtype="bfloat16", **changes)
    tiling = Tiling.of(cfg, 132, is_native=True, capability=capability, shared_bytes=SHARED_BYTES[capability])
    needed = wide_shared_bytes(cfg, capability, tiling.wide_tokens, tiling.wide_stages)
    assert tiling.wide_blocks * needed <= SHARED_BYTES[capability]
    return tiling.wide_tokens, tiling.wide_stages, tiling.wide_blocks


def test_wide_tiles_fit_the_shared_memory():
    for capability in SHARED_BYTES:
        assert wide(capability, head_dim=64) == (64, 3, 2)
        assert wide(capability, head_dim=128, kv_dtype="float8_e5m2")[:2] == (64, 3)
    for capability in (9, 0), (10, 0):
        assert wide(capability, head_dim=128) == (64, 3, 2)
        assert wide(capability, head_dim=256) == (64, 3, 1)
    for capability in (8, 0), (8, 9), (12, 0):
        assert wide(capability, head_dim=128) == (64, 3, 1)
    assert wide((8, 0), head_dim=256) == (64, 2, 1)
    assert wide((8, 9), head_dim=256) == (32, 2, 1)
    assert wide((8, 9), head_dim=256, kv_dtype="float8_e5m2") == (64, 2, 1)


class Walk:
    """Does what the kernels do with a lowered part, but for the arithmetic.

    Attributes:
        covered: of each row, how often each of its visible tokens was attended.
        partials: how often each partial result was written, by the kernel that did.
        outputs: how often each row was written to the output, by pieces.
    """

    def __init__(self, plan, part, tiling, lowered):
        self.plan, self.tiling, self.lowered = plan, tiling, lowered
        self.pages, self.page_size = plan.seg_pages, plan.config.page_size
        self.row_pos = plan.row_pos[part.row_begin : part.row_end]
        request = np.repeat(np.arange(plan.num_requests), np.diff(plan.qo_indptr))[part.row_begin : part.row_end]
        self.request = plan.request_order[request]
        self.covered = [np.zeros(pos + 1, np.int64) for pos in self.row_pos]
        self.read = [np.full(pos // self.page_size + 1, -1) for pos in self.row_pos]
        self.partials, self.outputs, self.above = Counter(), Counter(), {}
        self.wide()
        self.stream("short", lowered.short, lowered.short_runs, tiling.short_tile_tokens)
        self.stream("narrow", lowered.narrow, lowered.narrow_runs, tiling.narrow_tile_tokens)

    def attend(self, item, begin, end):
        """Rows of an item over some of its segment's tokens."""
        first_row, num_rows, page_begin, kv_start = (int(item[i]) for i in (0, 1, 2, 7))
        for row in range(first_row, first_row + num_rows):
            seen = min(end, int(self.row_pos[row]) + 1 - kv_start)
            if seen > begin:
                self.covered[row][kv_start + begin : kv_start + seen] += 1
                tokens = np.arange(begin, seen)
                self.read[row][(kv_start + tokens) // self.page_size] = self.pages[
                    page_begin + tokens // self.page_size
                ]

    def write(self, kernel, row, slot):
        self.partials[kernel, row, int(self.lowered.partial_indptr[row]) + slot] += 1

    def wide(self):
        tokens, most_rows = self.tiling.wide_tokens, self.tiling.wide_rows * self.tiling.wide_tiles
        sizes = self.lowered.wide[:, 1] * self.plan.config.group_size
        num_double = self.lowered.num_double
        assert (sizes[:num_double] > self.tiling.wide_rows).all()
        assert (sizes[num_double:] <= self.tiling.wide_rows).all()
        for part in self.lowered.wide[:num_double], self.lowered.wide[num_double:]:
            assert (np.diff(part[:, 4] - part[:, 3]) <= 0).all(), "the longest first"
        for first_row, num_rows, page_begin, begin, end, limit, slot, kv_start in self.lowered.wide.tolist():
            assert 0 < num_rows * self.plan.config.group_size <= most_rows
            assert begin < end
            assert begin % tokens == 0
            # Up to here nothing is masked, of any row.
            full_end = begin + (limit - begin) // tokens * tokens
            rows = range(first_row, first_row + num_rows)
            assert begin <= full_end <= end
            assert full_end == begin or full_end <= min(self.row_pos[row] for row in rows) + 1 - kv_start
            self.attend((first_row, num_rows, page_begin, 0, 0, 0, 0, kv_start), begin, end)
            for row in rows:
                if slot < 0:
                    self.outputs[row] += 1
                else:
                    self.write("wide", row, slot)

    def stream(self, kernel, items, runs, tile):
        most_rows = {"short": self.tiling.short_rows, "narrow": self.tiling.narrow_rows}[kernel]
        assert not items[-WINDOW:].any()
        for number, run in enumerate(runs):
            at, num_tiles, token = (int(run[i]) for i in (3, 4, 5))
            if num_tiles:
                assert (run[:3] == items[at, :3]).all()
                assert token % tile == 0
            for index in range(num_tiles):
                first_row, num_rows, _, num_tokens, first_partial, lone, slot, _ = items[at].tolist()
                assert 0 < num_rows * self.plan.config.group_size <= most_rows
                assert first_partial == self.lowered.partial_indptr[first_row]
                assert token < num_tokens
                self.attend(items[at], token, min(token + tile, num_tokens))
                ends = token + tile >= num_tokens
                if ends or index == num_tiles - 1:
                    for row in range(first_row, first_row + num_rows):
                        if lone:
                            self.outputs[row] += 1
                            self.above[kernel, row] = lone - 1
                        else:
                            self.write(kernel, row, slot + number)
                at, token = (at + 1, 0) if ends else (at, token + tile)

    def check(self, batch):
        indptr, combined = self.lowered.partial_indptr, self.lowered.combined
        for row, (covered, read) in enumerate(zip(self.covered, self.read, strict=True)):
            assert (covered == 1).all()
            assert read.tolist() == batch.block_tables[self.request[row]][: len(read)]
        assert set(self.partials.values()) <= {1}
        assert set(self.outputs.values()) <= {1}
        places = sorted(place for _, _, place in self.partials)
        assert len(set(places)) == len(places)
        for row in range(len(self.row_pos)):
            kernels = [kernel for kernel, of, _ in self.partials if of == row]
            places = sorted(place for _, of, place in self.partials if of == row)
            assert places == [*range(indptr[row], indptr[row] + len(places))]
            if row not in self.outputs:
                assert combined[row] == len(places) == indptr[row + 1] - indptr[row]
                continue
            assert combined[row] == -1
            assert len(places) <= indptr[row + 1] - indptr[row]
            merged = self.above.get(("narrow", row), 0)
            assert self.above.get(("short", row), 0) == 0
            assert merged == len(places) <= self.tiling.max_finished
            assert "narrow" not in kernels  # what it merges was written before


def arrays_of(lowered):
    return [getattr(lowered, name) for name in lowered.__dataclass_fields__]


@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.sampled_from(HEADS),
    page_size=st.sampled_from([1, 16, 64]),
    max_new=st.sampled_from([1, 4]),
    num_requests=st.integers(1, 24),
    max_len=st.sampled_from([20, 400]),
    fold=st.booleans(),
    spare=st.sampled_from([None, 0, 7]),
)
def test_the_kernels_walk(seed, heads, page_size, max_new, num_requests, max_len, fold, spare):
    config = config_of(heads, page_size)
    batch = random_batch(
        np.random.default_rng(seed), page_size=page_size, num_requests=num_requests, max_new=max_new, max_len=max_len
    )
    policy = PlannerPolicy(executor="segments", fold=fold, max_levels=64, max_decode_rows=2)
    plan = CascadePlanner(config, policy).plan(*batch)
    for tiling in tilings(config):
        for part in plan.parts:
            pairs = int(plan.seg_num_rows[part.seg_begin : part.seg_end].sum())
            most = None if spare is None else pairs + spare
            lowered = lower(plan, part, tiling, max_partials=most, native=False)
            Walk(plan, part, tiling, lowered).check(batch)
            assert most is None or lowered.num_partials <= most
            for blocks, runs in (tiling.short_blocks, lowered.short_runs), (tiling.narrow_blocks, lowered.narrow_runs):
                assert len(runs) == tiling.num_runs(blocks[-1], config.num_kv_heads)
            again = lower(plan, part, tiling, max_partials=most, native=False)
            for one, other in zip(arrays_of(lowered), arrays_of(again), strict=True):
                assert np.array_equal(one, other)


@pytest.mark.parametrize("native", [pytest.param(True, marks=BUILT), False], ids=["native", "python"])
@pytest.mark.parametrize("heads", HEADS)
def test_new_tokens_behind_the_first_full_tile(heads, native):
    """Own KV of several wide tiles, of which the first rows see but a part."""
    config = config_of(heads, 16)
    tables = [[*range(5), *range(100 * request, 100 * request + 20)] for request in range(1, 4)]
    seq_lens, qo_lens = [80 + 200, 80 + 300, 80 + 64], [150, 70, 64]
    policy = PlannerPolicy(executor="segments", fold=False, max_decode_rows=2)
    plan = CascadePlanner(config, policy).plan(tables, seq_lens, qo_lens)
    for tiling in tilings(config):
        (part,) = plan.parts
        lowered = lower(plan, part, tiling, native=native)
        Walk(plan, part, tiling, lowered).check(RandomBatch(tables, seq_lens, qo_lens))
        full, seen = ((lowered.wide[:, field] - lowered.wide[:, 3]) // tiling.wide_tokens for field in (4, 5))
        assert (seen < full).any()
        assert (seen > 0).any()


def lowered_decode(lens, tiling, heads=(32, 8)):
    config = config_of(heads, 16)
    ends = np.cumsum([-(-seq_len // 16) for seq_len in lens])
    tables = [list(range(end - -(-seq_len // 16), end)) for end, seq_len in zip(ends, lens, strict=True)]
    plan = CascadePlanner(config, PlannerPolicy(executor="segments")).plan(tables, lens)
    return lower(plan, plan.parts[0], tiling, native=False)


@pytest.mark.parametrize("lens", [[100_000], [50_000, 3, 40_000], [9000] * 3 + [17] * 20], ids=str)
def test_long_requests_are_spread_evenly(lens):
    tiling = Tiling.of(config_of((32, 8), 16), 132, is_native=True)
    runs = lowered_decode(lens, tiling).narrow_runs[:, 4]
    used = runs[runs > 0]
    assert used.sum() == sum(-(-seq_len // 16) for seq_len in lens)
    assert len(used) == tiling.num_runs(tiling.narrow_blocks[0], 8)
    assert used.max() - used.min() <= 1


def test_equal_requests_are_not_cut():
    tiling = Tiling.of(config_of((32, 8), 16), 132, is_native=True)
    lowered = lowered_decode([1000] * 132, tiling)
    assert (lowered.combined == -1).all()
    assert (lowered.narrow_runs[lowered.narrow_runs[:, 4] > 0, 4] == 63).all()


def test_a_short_context_is_cut_into_runs_of_some_length_at_least():
    tiling = Tiling.of(config_of((32, 8), 16), 132, is_native=True)
    runs = lowered_decode([640], tiling).narrow_runs[:, 4]
    assert runs[runs > 0].tolist() == [tiling.min_run_tiles] * (40 // tiling.min_run_tiles)


def test_wide_segments_are_cut_until_all_sms_have_work():
    config = config_of((32, 8), 16)
    tiling = Tiling.of(config, 132, is_native=True)
    tables = [[*range(1024), 2000 + request] for request in range(16)]
    plan = CascadePlanner(config, PlannerPolicy(executor="segments")).plan(tables, [1024 * 16 + 5] * 16)
    lowered = lower(plan, plan.parts[0], tiling, native=False)
    lengths = lowered.wide[:, 4] - lowered.wide[:, 3]
    assert 0.8 <= len(lowered.wide) * 8 / (tiling.num_sms * tiling.wide_blocks) <= 1.2
    assert (np.diff(lengths) <= 0).all()
    assert lengths.sum() == 1024 * 16


def test_little_wide_work_leaves_room_for_narrow_items():
    config = config_of((32, 8), 16)
    tiling = Tiling.of(config, 132, is_native=True, has_native_wide=True)

    def tiles_of(shared, own, requests):
        tables, fresh = [], 10_000
        for _ in range(requests):
            tables.append([*range(shared // 16), *range(fresh, fresh + own // 16)])
            fresh += own // 16
        plan = CascadePlanner(config, PlannerPolicy(executor="segments")).plan(tables, [shared + own] * requests)
        return tiling.for_part(plan, plan.parts[0])

    light = tiles_of(256, 32, 256)
    assert (light.has_native_wide, light.wide_tiles, light.is_native) == (False, 1, True)
    assert tiles_of(1024, 32, 256) == tiling
    assert tiles_of(1024, 64, 8) == tiling, "less than wide work, so nothing to leave room for"
    assert tiles_of(0, 512, 16) == tiling, "nothing wide"
    plain = Tiling.of(config, 132, is_native=True)
    plan = CascadePlanner(config).plan([[1, 2], [1, 3]], [32, 32])
    assert plain.for_part(plan, plan.parts[0]) == plain

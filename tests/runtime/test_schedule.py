"""The schedule of uncut launches: every query tile once, idle blocks marked, nothing left of the plan before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CascadeConfig
from flashinfer_cascade.runtime import schedule
from flashinfer_cascade.runtime.schedule import UncutSchedule, is_planned_alike, tiles_of
from flashinfer_cascade.runtime.shapes import GraphShape, launch_specs, make_bucket

CFG = CascadeConfig(num_qo_heads=12, num_kv_heads=2, head_dim=128, page_size=16, dtype="bfloat16")
SPEC = launch_specs(CFG, make_bucket(CFG, 60), GraphShape(("fa2_uncut",), ("fa2",)), 132)[0]
PLANNED = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]


def read(made, memory):
    """What a kernel would see: (group, tile) of each working block, by FlashInfer's fields."""
    info = made.plan_info(PLANNED)
    as_bytes = memory.view(np.uint8)

    def array(field, count, dtype=np.int32):
        return as_bytes[info[field] :][: count * np.dtype(dtype).itemsize].view(dtype)

    blocks = info[schedule.PADDED_BLOCKS]
    assert blocks == SPEC.num_blocks
    assert info[schedule.TILE] == SPEC.tile == 64
    valid = array(schedule.VALID_AT, blocks, np.uint8)
    assert set(valid.tolist()) <= {0, 1}
    assert not array(schedule.KV_TILE_AT, blocks).any()
    working = valid.nonzero()[0]
    pairs = zip(array(schedule.REQUEST_AT, blocks)[working], array(schedule.QO_TILE_AT, blocks)[working], strict=True)
    return (
        [(int(group), int(tile)) for group, tile in pairs],
        array(schedule.O_INDPTR_AT, SPEC.num_slots + 1),
        int(array(schedule.NUM_ROWS_AT, 1)[0]),
        int(array(schedule.KV_CHUNK_AT, 1)[0]),
    )


@given(st.lists(st.integers(0, 15), min_size=0, max_size=SPEC.num_slots), st.integers(0, 2**32 - 1))
def test_every_tile_once(rows, seed):
    rows = np.array([*rows, *[0] * (SPEC.num_slots - len(rows))])
    rows[rows.cumsum() > 60] = 0
    qo_indptr = np.append(0, rows.cumsum()).astype(np.int32)
    made = UncutSchedule(CFG, SPEC)
    memory = np.random.default_rng(seed).integers(-(2**31), 2**31, made.num_entries).astype(np.int32)
    made.write(memory, qo_indptr)
    pairs, o_indptr, num_rows, chunk = read(made, memory)
    expected = [(g, t) for g, count in enumerate(rows) for t in range(-(-int(count) * CFG.group_size // 64))]
    assert pairs == expected
    assert o_indptr.tolist() == qo_indptr.tolist()
    assert num_rows == qo_indptr[-1]
    assert chunk > 10**9


def flashinfer_s(qo_indptr, tile, blocks):
    """A workspace as FlashInfer writes it, and its plan."""
    request, qo_tile = tiles_of(qo_indptr, CFG.group_size, tile)
    pad = [0] * (blocks - len(request))
    arrays = [
        np.array([*request, *pad], np.int32),
        np.array([*qo_tile, *pad], np.int32),
        np.zeros(blocks, np.int32),
        qo_indptr.astype(np.int32),
        np.array([qo_indptr[-1], 0, 0, 0], np.int32),
        np.array([*[1] * len(request), *[0] * (blocks - len(request))], np.uint8),
    ]
    begins = np.cumsum([0, *(array.nbytes for array in arrays)]).tolist()
    info = list(PLANNED)
    fields = (schedule.REQUEST_AT, schedule.QO_TILE_AT, schedule.KV_TILE_AT, schedule.O_INDPTR_AT)
    for field, begin in zip((*fields, schedule.NUM_ROWS_AT, schedule.VALID_AT), begins, strict=False):
        info[field] = begin
    info[schedule.TILE], info[schedule.PADDED_BLOCKS] = tile, blocks
    return info, np.concatenate([array.view(np.uint8) for array in arrays])


def test_flashinfer_s_own_schedule_is_recognised():
    qo_indptr = np.array([0, 30, 30, 41], np.int32)
    info, workspace = flashinfer_s(qo_indptr, 64, 9)
    assert is_planned_alike(info, workspace, qo_indptr, CFG.group_size)


@pytest.mark.parametrize(
    ("field", "value"), [(schedule.IS_GRAPH, 0), (schedule.IS_CUT, 1), (schedule.TILE, 16), (schedule.REQUEST_AT, 36)]
)
def test_another_schedule_is_refused(field, value):
    qo_indptr = np.array([0, 30, 30, 41], np.int32)
    info, workspace = flashinfer_s(qo_indptr, 64, 9)
    info[field] = value
    assert not is_planned_alike(info, workspace, qo_indptr, CFG.group_size)
    assert not is_planned_alike(info[:-1], workspace, qo_indptr, CFG.group_size)

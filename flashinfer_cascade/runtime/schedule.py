"""The schedule of an uncut fa2 launch in a captured graph: which block works on which query tile of which group.

FlashInfer's own plan fixes a captured launch's grid and tile by the rows and groups that it may ever get. Here both are
free, so that a graph can be captured for few blocks; and the schedule is part of the arrays that are staged anyway,
which spares a call of ``plan`` and a copy.

Source: flashinfer/attention/scheduler.cuh, PrefillPlanImpl and PrefillPlanInfo, of FlashInfer 0.7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array, Int64Array, ranges
from flashinfer_cascade.runtime.shapes import LaunchSpec

NUM_FIELDS = 15
PADDED_BLOCKS, NUM_ROWS, NUM_ROWS_AT, TILE = 0, 1, 2, 3
REQUEST_AT, QO_TILE_AT, KV_TILE_AT, O_INDPTR_AT, KV_CHUNK_AT, VALID_AT = 4, 5, 6, 8, 9, 12
IS_GRAPH, IS_CUT = 13, 14
"""Fields of PrefillPlanInfo; those that end in AT are bytes into the int workspace."""


class UncutSchedule:
    """Writes the schedule of one launch.

    Args:
        config: the attention.
        spec: the launch.

    Attributes:
        num_entries: int32 entries that it takes.
    """

    def __init__(self, config: CascadeConfig, spec: LaunchSpec) -> None:
        self._spec, self._group = spec, config.group_size
        blocks = spec.num_blocks
        sizes = (blocks, blocks, blocks, spec.num_slots + 1, 4, 4, -(-blocks // 4))
        begins = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
        self.num_entries = begins.pop()
        self._request, self._qo_tile, self._kv_tile, self._o_indptr, self._chunk, self._rows, self._valid = begins

    def plan_info(self, planned: list[int]) -> list[int]:
        """FlashInfer's plan of the launch, with this grid and these places in the int workspace."""
        info = list(planned)
        spec = self._spec
        info[PADDED_BLOCKS], info[TILE], info[NUM_ROWS] = spec.num_blocks, spec.tile, spec.num_rows
        info[REQUEST_AT], info[QO_TILE_AT], info[KV_TILE_AT] = 4 * self._request, 4 * self._qo_tile, 4 * self._kv_tile
        info[O_INDPTR_AT], info[KV_CHUNK_AT] = 4 * self._o_indptr, 4 * self._chunk
        info[NUM_ROWS_AT], info[VALID_AT] = 4 * self._rows, 4 * self._valid
        return info

    def write(self, memory: Int32Array, qo_indptr: Int32Array) -> None:
        """Schedule one batch.

        Args:
            memory: int32[num_entries], on the host.
            qo_indptr: int32[num_slots + 1], in rows.
        """
        blocks = self._spec.num_blocks
        request, qo_tile = tiles_of(qo_indptr, self._group, self._spec.tile)
        count = len(request)
        memory[self._request : self._request + count] = request
        memory[self._qo_tile : self._qo_tile + count] = qo_tile
        memory[self._kv_tile : self._kv_tile + blocks] = 0
        memory[self._o_indptr : self._o_indptr + len(qo_indptr)] = qo_indptr
        memory[self._chunk] = np.iinfo(np.int32).max
        memory[self._rows] = qo_indptr[-1]
        valid = memory[self._valid :].view(np.uint8)
        valid[:count] = 1
        valid[count:blocks] = 0


def tiles_of(qo_indptr: NDArray[Any], group_size: int, tile: int) -> tuple[Int64Array, Int64Array]:
    """Group, and number within it, of every query tile."""
    counts = -(-(qo_indptr[1:] - qo_indptr[:-1]) * group_size // tile)
    groups = counts.nonzero()[0]
    counts = counts[groups]
    return groups.repeat(counts), ranges(np.zeros(len(counts), np.int64), counts)


def is_planned_alike(planned: list[int], int_workspace: NDArray[np.uint8], qo_indptr: Int32Array, group: int) -> bool:
    """Whether FlashInfer's own schedule of a batch is what this module takes it for.

    Args:
        planned: its plan of an uncut fa2 launch for CUDA graphs.
        int_workspace: uint8, pinned: where it wrote the schedule.
        qo_indptr: the batch's groups.
        group: query heads of one KV head.
    """
    if len(planned) != NUM_FIELDS or planned[IS_GRAPH] != 1 or planned[IS_CUT] != 0:
        return False
    request, qo_tile = tiles_of(qo_indptr, group, planned[TILE])
    count, blocks = len(request), planned[PADDED_BLOCKS]

    def read(field: int, size: int) -> Int32Array:
        return int_workspace[planned[field] : planned[field] + 4 * size].view(np.int32)

    valid = int_workspace[planned[VALID_AT] : planned[VALID_AT] + blocks]
    return bool(
        np.array_equal(read(REQUEST_AT, count), request)
        and np.array_equal(read(QO_TILE_AT, count), qo_tile)
        and not read(KV_TILE_AT, count).any()
        and np.array_equal(read(O_INDPTR_AT, len(qo_indptr)), qo_indptr)
        and read(NUM_ROWS_AT, 1)[0] == qo_indptr[-1]
        and valid[:count].all()
        and not valid[count:].any()
    )

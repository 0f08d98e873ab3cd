"""Segments inside a captured CUDA graph: fixed grids over tables that are filled anew for every plan."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from flashinfer_cascade.capacity import PlanCapacity, capacity_error
from flashinfer_cascade.config import MAX_INT32, CascadeConfig
from flashinfer_cascade.csr import Int32Array, indptr
from flashinfer_cascade.errors import CapacityError
from flashinfer_cascade.lower import Tiling, lower_into
from flashinfer_cascade.native_lower import FIELDS, WINDOW, LoweredRoom
from flashinfer_cascade.plan import CascadePlan, Level
from flashinfer_cascade.runtime.buffers import ALIGNMENT
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.fit import IDLE, OTHER_KERNEL, Laid, Needs
from flashinfer_cascade.runtime.graph_levels import GraphBuffers, StagedPages
from flashinfer_cascade.runtime.segment_kernels import Partials, SegmentArrays, SegmentKernels
from flashinfer_cascade.runtime.shapes import Bucket, SegmentRoom, SegmentShape

_BY_SEGMENT = [field.name for field in fields(CascadePlan) if field.name.startswith("seg_")]
"""Names of a plan's arrays with an entry for each segment."""


class SegmentLayout(NamedTuple):
    """Where a segment graph's arrays lie in `GraphBuffers`: entries from, to; `end` of all of them."""

    row_map: slice
    row_pos: slice
    partial_indptr: slice
    combined: slice
    num_wide: slice
    wide: slice
    short: slice
    short_runs: slice
    narrow: slice
    narrow_runs: slice
    end: int

    @classmethod
    def of(cls, config: CascadeConfig, bucket: Bucket, shape: SegmentShape, tiling: Tiling, at: int) -> SegmentLayout:
        """One array behind the other from `at` on, each aligned."""
        room = SegmentRoom.of(config, bucket, tiling, shape.shares)
        rows, items = bucket.num_rows, (room.num_segments + WINDOW) * FIELDS
        runs = [
            tiling.num_runs(blocks[-1], config.num_kv_heads) * FIELDS
            for blocks in (tiling.short_blocks, tiling.narrow_blocks)
        ]
        shared = int(shape.shares)
        sizes = (
            rows,
            rows,
            rows + 1,
            rows,
            2,
            shared * room.num_wide * FIELDS,
            shared * items,
            shared * runs[0],
            items,
            runs[1],
        )
        begins = [at, *(at + end for end in accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))]
        places = (slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False))
        return cls(*places, end=begins[-1])  # type: ignore[arg-type,misc]  # mypy does not count places


def as_one_part(plan: CascadePlan) -> CascadePlan:
    """The same segments in a single part, for kernels that run all of a batch at once.

    They are sorted by level, then part and row. Only what `lower` reads is right of the part.
    """
    if len(plan.parts) == 1:
        return plan
    order = np.argsort(plan.seg_level, kind="stable")
    last = plan.parts[-1]
    part = replace(plan.parts[0], request_end=last.request_end, row_end=last.row_end, seg_end=last.seg_end)
    return replace(plan, parts=(part,), **{name: getattr(plan, name)[order] for name in _BY_SEGMENT})


class CapturedSegments:
    """The segments' kernels over fixed buffers.

    Args:
        config: the attention.
        bucket: rows and requests.
        shape: which plans it takes.
        tiling: the kernels'.
        kernels: their launches.
        buffers: shared by graphs that are never replayed side by side.
        partials: likewise.
    """

    def __init__(
        self,
        config: CascadeConfig,
        bucket: Bucket,
        shape: SegmentShape,
        tiling: Tiling,
        kernels: SegmentKernels,
        buffers: GraphBuffers,
        partials: Partials,
    ) -> None:
        self._config, self._tiling, self._kernels, self._buffers = config, tiling, kernels, buffers
        self.bucket, self.shape = bucket, shape
        self._room = room = SegmentRoom.of(config, bucket, tiling, shape.shares)
        self._partials = partials
        self.capacity = PlanCapacity(
            num_rows=bucket.num_rows,
            num_segments=room.num_segments,
            num_partials=room.num_partials if shape.shares else bucket.num_rows,
            num_page_indices=config.max_kv_indices,
            num_levels=MAX_INT32 if shape.shares else 1,
            num_slots=MAX_INT32 if shape.shares else 0,
        )
        self._layout = layout = SegmentLayout.of(config, bucket, shape, tiling, buffers.num_pages)
        self._host = [pinned.numpy() for pinned in buffers.pinned]
        self._rooms = [self._room_in(memory) for memory in self._host]
        memory = buffers.on_device

        def table(where: slice) -> torch.Tensor:
            return memory[where].view(-1, FIELDS)

        self._arrays = SegmentArrays(
            wide=table(layout.wide) if shape.shares else None,
            num_wide=memory[layout.num_wide],
            num_double=0,
            short=table(layout.short) if shape.shares and tiling.short_rows > tiling.narrow_rows else None,
            short_runs=table(layout.short_runs),
            narrow=table(layout.narrow),
            narrow_runs=table(layout.narrow_runs),
            partial_indptr=memory[layout.partial_indptr],
            combined=memory[layout.combined],
            pages=memory,
            row_map=memory[layout.row_map],
            row_pos=memory[layout.row_pos] if bucket.kind == "append" else None,
        )

    def _room_in(self, memory: Int32Array) -> LoweredRoom:
        layout = self._layout

        def table(where: slice) -> Int32Array:
            return memory[where].reshape(-1, FIELDS)

        return LoweredRoom(
            table(layout.wide),
            table(layout.short),
            table(layout.short_runs),
            table(layout.narrow),
            table(layout.narrow_runs),
            memory[layout.partial_indptr],
            memory[layout.combined],
            self._room.num_partials,
        )

    def lay(self, plan: CascadePlan, levels: list[Level], needs: Needs) -> Laid | None:
        """See `graph_state.GraphExecutor.lay`."""
        capacity = self.capacity
        if (
            (needs.groups and not self.shape.shares)
            or needs.num_segments > capacity.num_segments
            or needs.num_partials > capacity.num_partials
        ):
            return None
        idle = self.shape.shares and not needs.groups
        other = needs.backends[-1] != "segments"
        return Laid(IDLE * idle + (OTHER_KERNEL + IDLE) * other, levels, ())

    def misfit(self, plan: CascadePlan) -> CapacityError:
        """See `graph_state.GraphExecutor.misfit`."""
        where = f"a graph for {self.bucket} ({self.shape})"
        remedy = "Plan with the capacity of this graph, or run it eagerly"
        return capacity_error("the plan", self.capacity.lacks(plan.usage()), remedy, where)

    def load(self, plan: CascadePlan, laid: Laid) -> None:
        """See `graph_state.GraphExecutor.load`."""
        self._fill(plan)

    def load_nothing(self) -> None:
        """See `graph_state.GraphExecutor.load_nothing`."""
        self._fill(None)

    def _fill(self, plan: CascadePlan | None) -> None:
        buffers, layout = self._buffers, self._layout
        with torch.cuda.device(buffers.device):
            turn = buffers.begin()
            try:
                memory = self._host[turn]
                staged = StagedPages([0], buffers.num_pages, layout.end, None)
                if plan is None:
                    self._write_nothing(memory)
                else:
                    plan = as_one_part(plan)
                    runs = [(plan.seg_page_begin, plan.seg_num_pages)]
                    staged = buffers.stage_pages(memory, buffers.num_pages, layout.end, plan.pages, runs)
                    self._write(turn, plan, staged.offsets[0])
                buffers.copy_staged(turn, staged, layout.end)
            finally:
                buffers.end(turn)

    def _write_nothing(self, memory: Int32Array) -> None:
        """No row sees anything."""
        layout, rows = self._layout, self.bucket.num_rows
        memory[layout.row_map] = np.arange(rows)
        memory[layout.row_pos] = -1
        for where in (layout.partial_indptr, layout.combined, layout.num_wide, layout.short_runs, layout.narrow_runs):
            memory[where] = 0

    def _write(self, turn: int, plan: CascadePlan, offset: int) -> None:
        layout, rows, memory = self._layout, plan.num_rows, self._host[turn]
        page_begin = indptr(plan.seg_num_pages)[:-1] + offset
        sizes = lower_into(plan, plan.parts[0], self._tiling, page_begin, self._rooms[turn])
        memory[layout.num_wide] = sizes.num_wide, sizes.num_double
        row_map = memory[layout.row_map]
        row_map[:] = np.arange(self.bucket.num_rows)
        if plan.row_order is not None:
            row_map[:rows] = plan.row_order
        memory[layout.row_pos][:rows] = plan.row_pos

    def run(self, call: LayerCall) -> None:
        """See `graph_state.GraphExecutor.run`."""
        with torch.cuda.device(self._buffers.device):  # kernels go to the current one
            self._kernels.run(call, self._arrays, self._partials, num_rows=self.bucket.num_rows, combines=True)

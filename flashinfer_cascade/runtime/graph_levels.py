"""Levels inside a captured CUDA graph: fixed launches over buffers that never move, filled anew for every plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from flashinfer_cascade.capacity import capacity_error
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array
from flashinfer_cascade.errors import CapacityError
from flashinfer_cascade.plan import CascadePlan, Level
from flashinfer_cascade.runtime.buffers import ALIGNMENT
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.captured import (
    CapturedLaunch,
    GroupArrays,
    LaunchMemory,
    float_workspace_bytes,
    int_workspace_bytes,
)
from flashinfer_cascade.runtime.kernels.merge import merge
from flashinfer_cascade.runtime.schedule import UncutSchedule
from flashinfer_cascade.runtime.shapes import (
    Bucket,
    GraphShape,
    Laid,
    LaunchSpec,
    bucket_capacity,
    fit,
    launch_specs,
)


class GraphBuffers:
    """Memory that graphs of several buckets and shapes read in turn: a load fills it, the replay behind it reads it.

    Args:
        config: the attention.
        device: a CUDA device.
        graphs: bucket and launches of every graph.
    """

    def __init__(
        self, config: CascadeConfig, device: torch.device, graphs: Sequence[tuple[Bucket, Sequence[LaunchSpec]]]
    ) -> None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.device = device
        self.num_sms = num_sms
        num_launches = max(len(specs) for _, specs in graphs)
        num_rows = max(bucket.num_rows for bucket, _ in graphs)
        all_specs = [spec for _, specs in graphs for spec in specs]
        header = max(Layout.of(config, bucket, specs).num_entries for bucket, specs in graphs)
        num_entries = header + config.max_kv_indices
        int_bytes = max(int_workspace_bytes(config, spec, num_sms) for spec in all_specs)
        float_bytes = max(float_workspace_bytes(config, spec, num_sms) for spec in all_specs)
        with torch.cuda.device(device):
            self.workspace = torch.empty(max(float_bytes, 2**12), dtype=torch.uint8, device=device)
            self.on_device = torch.zeros(num_entries, dtype=torch.int32, device=device)
            self._pinned = [torch.zeros(num_entries, dtype=torch.int32, pin_memory=True) for _ in range(2)]
            self.int_workspaces = [
                (
                    torch.zeros(int_bytes, dtype=torch.uint8, device=device),
                    [torch.zeros(int_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)],
                )
                for _ in range(num_launches)
            ]
            shape = (config.num_qo_heads, config.head_dim)
            self.gathered = torch.empty(num_rows, *shape, dtype=getattr(torch, config.dtype), device=device)
            self.partials = torch.empty(num_launches * num_rows, *shape, dtype=self.gathered.dtype, device=device)
            self.partial_lse = torch.empty(num_launches * num_rows, shape[0], device=device)
            self._copied = [torch.cuda.Event() for _ in range(2)]
            self._stream = torch.cuda.current_stream(device)
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Of all buffers on the device."""
        tensors = (self.workspace, self.on_device, self.gathered, self.partials, self.partial_lse)
        return sum(t.numel() * t.itemsize for t in (*tensors, *(device for device, _ in self.int_workspaces)))

    def begin(self) -> tuple[int, torch.Tensor]:
        """The turn, and its pinned area, once the copies out of it are done."""
        turn = self._turn = 1 - self._turn
        self._copied[turn].synchronize()
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            # What was queued for the graph before, on another stream, may still read these buffers.
            stream.wait_stream(self._stream)
            self._stream = stream
        return turn, self._pinned[turn]

    def copy(self, turn: int, num_entries: int) -> None:
        """Copy the head of a turn's pinned area."""
        self.on_device[:num_entries].copy_(self._pinned[turn][:num_entries], non_blocking=True)

    def end(self, turn: int) -> None:
        """All copies out of a turn's areas are queued."""
        self._copied[turn].record(self._stream)


class Layout(NamedTuple):
    """Where a graph's arrays lie in `GraphBuffers`: entries from, to.

    Attributes:
        row_map: row of q at each plan row.
        active: whether each launch has a level.
        groups: of each launch: qo_indptr, kv_indptr, kv_last_page_len, kv_len.
        schedules: of each launch; empty but for uncut fa2.
        num_entries: behind the last; the page ids follow.
    """

    row_map: slice
    active: slice
    groups: tuple[tuple[slice, slice, slice, slice], ...]
    schedules: tuple[slice, ...]
    num_entries: int

    @classmethod
    def of(cls, config: CascadeConfig, bucket: Bucket, specs: Sequence[LaunchSpec]) -> Layout:
        """One array behind the other, each aligned."""
        at = 0

        def take(count: int) -> slice:
            nonlocal at
            begin, at = at, at + -(-count // ALIGNMENT) * ALIGNMENT
            return slice(begin, begin + count)

        row_map, active = take(bucket.num_rows), take(len(specs))
        groups = tuple(
            (take(s.num_slots + 1), take(s.num_slots + 1), take(s.num_slots), take(s.num_slots)) for s in specs
        )
        schedules = tuple(
            take(UncutSchedule(config, s).num_entries if s.backend == "fa2_uncut" and not s.is_by_row else 0)
            for s in specs
        )
        return cls(row_map, active, groups, schedules, at)

    def tensors(self, memory: torch.Tensor) -> list[GroupArrays]:
        """Each launch's groups as views."""
        return [GroupArrays(*(memory[where] for where in places)) for places in self.groups]


class CapturedLevels:
    """A shape's launches, and one merge of them, over fixed buffers.

    Args:
        config: the attention.
        bucket: rows and requests.
        shape: kernels.
        buffers: shared by graphs that are never replayed side by side.
    """

    def __init__(self, config: CascadeConfig, bucket: Bucket, shape: GraphShape, buffers: GraphBuffers) -> None:
        self._config, self._buffers = config, buffers
        self.bucket, self.shape = bucket, shape
        self._specs = launch_specs(config, bucket, shape, buffers.num_sms)
        self.capacity = bucket_capacity(config, bucket, self._specs)
        self._layout = layout = Layout.of(config, bucket, self._specs)
        self._row_map = buffers.on_device[layout.row_map]
        self._active = buffers.on_device[layout.active]
        # A flat plan of one part keeps the order of the batch.
        self._may_permute = bool(shape.shared) or bucket.kind == "append"
        turn, pinned = buffers.begin()
        with torch.cuda.device(buffers.device):
            pages = buffers.on_device[layout.num_entries :]
            host, on_device = layout.tensors(pinned), layout.tensors(buffers.on_device)
            self._launches = []
            for number, spec in enumerate(self._specs):
                # FlashInfer's own first plan wants all rows in some group.
                _write_nothing(host[number], bucket, spec, covers_rows=True)
                schedule = buffers.on_device[layout.schedules[number]].view(torch.uint8)
                memory = LaunchMemory(
                    buffers.workspace, buffers.int_workspaces[number], on_device[number], schedule, pages
                )
                self._launches.append(CapturedLaunch(config, spec, memory, host[number], buffers.num_sms))
        buffers.end(turn)

    def lay(self, plan: CascadePlan, levels: list[Level]) -> Laid:
        """See `graph_state.GraphExecutor.lay`."""
        found = fit(self._config, self.bucket, self.shape, self._specs, plan, levels, self._buffers.num_sms)
        if found is None:
            lacking = self.capacity.lacks(plan.usage())
            if not lacking:
                raise CapacityError(
                    f"the plan's own KV is longer than the graph's kernels ({self.shape}) take uncut: add fa2 to the "
                    "shape's own kernels, or run it eagerly"
                )
            raise capacity_error(
                f"the plan for a graph of {self.bucket} ({self.shape})",
                lacking,
                "Plan with the capacity of this graph, or run it eagerly",
            )
        return Laid(found.distance, levels, found.level_of)

    def load(self, plan: CascadePlan, laid: Laid) -> None:
        """See `graph_state.GraphExecutor.load`."""
        self._fill(plan, laid.level_of, laid.levels)

    def load_nothing(self) -> None:
        """See `graph_state.GraphExecutor.load_nothing`."""
        rows = self.bucket.num_rows
        one = np.array([0, rows], np.int32)
        every = np.arange(rows + 1, dtype=np.int32) if self.bucket.kind == "decode" else one
        level = Level(every, np.zeros_like(every), np.empty(0, np.int32), np.zeros(len(every) - 1, np.int32))
        self._fill(None, (*[None] * (len(self._specs) - 1), 0), [level])

    def _fill(self, plan: CascadePlan | None, level_of: Sequence[int | None], levels: list[Level]) -> None:
        layout, buffers, bucket = self._layout, self._buffers, self.bucket
        with torch.cuda.device(buffers.device):
            turn, pinned = buffers.begin()
            try:
                memory = pinned.numpy()
                host = layout.tensors(pinned)
                end = layout.num_entries
                offsets = []
                for level in levels:
                    offsets.append(end - layout.num_entries)
                    memory[end : end + len(level.kv_indices)] = level.kv_indices
                    end += len(level.kv_indices)
                rows = memory[layout.row_map]
                rows[:] = np.arange(bucket.num_rows)
                if plan is not None and plan.row_order is not None:
                    rows[: plan.num_rows] = plan.row_order
                memory[layout.active] = [number is not None for number in level_of]
                for spec, groups, number in zip(self._specs, host, level_of, strict=True):
                    if number is None:
                        _write_nothing(groups, bucket, spec, covers_rows=spec.backend == "decode")
                    else:
                        _write(groups, bucket, spec, levels[number], offsets[number], self._config.page_size)
                for launch, groups, where in zip(self._launches, host, layout.schedules, strict=True):
                    launch.plan(groups, pinned[where], turn)
                buffers.copy(turn, end)
            finally:
                buffers.end(turn)

    def run(self, call: LayerCall) -> None:
        """See `graph_state.GraphExecutor.run`."""
        q, buffers = call.q, self._buffers
        if len(self._launches) == 1 and not self._may_permute and call.sinks is None and call.out.is_contiguous():
            self._launches[0].run(q, call.kv_cache, call.out, call.lse, call.k_scale, call.v_scale)
            return
        row_map = self._row_map if self._may_permute else None
        num_rows, num_launches = self.bucket.num_rows, len(self._launches)
        if row_map is not None:
            q = torch.index_select(q, 0, row_map, out=buffers.gathered[:num_rows])
        partials = buffers.partials[: num_launches * num_rows].view(num_launches, num_rows, *q.shape[1:])
        partial_lse = buffers.partial_lse[: num_launches * num_rows].view(num_launches, num_rows, q.shape[1])
        for number, launch in enumerate(self._launches):
            launch.run(q, call.kv_cache, partials[number], partial_lse[number], call.k_scale)
        merge(
            partials,
            partial_lse,
            call.out,
            row_map=row_map,
            active=self._active,
            sinks=call.sinks,
            v_scale=call.v_scale,
            lse=call.lse,
        )


def _write_nothing(groups: GroupArrays, bucket: Bucket, spec: LaunchSpec, *, covers_rows: bool) -> None:
    """No KV in any group; all rows in some group, or in none."""
    qo_indptr, kv_indptr, last_page_len, kv_len = (tensor.numpy() for tensor in groups)
    if not covers_rows:
        qo_indptr[:] = 0
    elif spec.is_shared or bucket.kind == "append":
        qo_indptr[0], qo_indptr[1:] = 0, bucket.num_rows
    else:
        qo_indptr[:] = np.arange(len(qo_indptr))
    kv_indptr[:] = 0
    last_page_len[:] = 0
    kv_len[:] = 0


def _write(groups: GroupArrays, bucket: Bucket, spec: LaunchSpec, level: Level, offset: int, page_size: int) -> None:
    """A level's groups, then the rows of padding without KV."""
    qo_indptr, kv_indptr, last_page_len, kv_len = (tensor.numpy() for tensor in groups)
    count, num_rows = len(level.kv_last_page_len), int(level.qo_indptr[-1])
    qo_indptr[: count + 1] = level.qo_indptr
    np.add(level.kv_indptr, offset, out=kv_indptr[: count + 1])
    kv_indptr[count + 1 :] = kv_indptr[count]
    last_page_len[:count] = level.kv_last_page_len
    last_page_len[count:] = 0
    pages: Int32Array = kv_indptr[1:] - kv_indptr[:-1]
    kv_len[:] = pages * page_size - (page_size - last_page_len) * (pages > 0)
    if bucket.kind == "decode" and not spec.is_shared:
        qo_indptr[count + 1 :] = np.arange(count + 1, len(qo_indptr))
    else:
        qo_indptr[count + 1 :] = bucket.num_rows
        if spec.is_shared and num_rows < bucket.num_rows and not level.kv_last_page_len[-1]:
            qo_indptr[count] = bucket.num_rows

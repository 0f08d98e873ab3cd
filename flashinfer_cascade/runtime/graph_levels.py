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
from flashinfer_cascade.pages import PageView, gather_runs
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
from flashinfer_cascade.runtime.fit import Laid, Needs, fit
from flashinfer_cascade.runtime.kernels.merge import merge
from flashinfer_cascade.runtime.mirror import MAX_WRITES, MIN_MIRRORED_PAGES, PageMirror, Update
from flashinfer_cascade.runtime.schedule import UncutSchedule
from flashinfer_cascade.runtime.shapes import Bucket, GraphShape, LaunchSpec, bucket_capacity, launch_specs


class StagedPages(NamedTuple):
    """Page ids that were staged.

    Attributes:
        offsets: where each list of runs will begin on the device.
        begin, end: entries to copy.
        update: what was staged for the mirror; None when the page ids themselves were.
    """

    offsets: list[int]
    begin: int
    end: int
    update: Update | None


class GraphBuffers:
    """Memory that graphs of several buckets and shapes read in turn: a load fills it, the replay behind it reads it.

    Args:
        config: the attention.
        device: a CUDA device.
        graphs: bucket and launches of every graph of levels.
        segments: entries of every segment graph behind the page ids, and runs of page ids that its plans have at most.
    """

    def __init__(
        self,
        config: CascadeConfig,
        device: torch.device,
        graphs: Sequence[tuple[Bucket, Sequence[LaunchSpec]]],
        segments: Sequence[tuple[int, int]] = (),
    ) -> None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.device = device
        self.num_sms = num_sms
        num_launches = max((len(specs) for _, specs in graphs), default=0)
        num_rows = max((bucket.num_rows for bucket, _ in graphs), default=0)
        all_specs = [spec for _, specs in graphs for spec in specs]
        # Page ids end where the header begins, an update of the mirror begins where it ends: one copy takes both.
        self.num_pages = -(-config.max_kv_indices // ALIGNMENT) * ALIGNMENT
        ends = [Layout.of(config, bucket, specs, self.num_pages).end for bucket, specs in graphs]
        ends += [self.num_pages + entries for entries, _ in segments]
        most_runs = max([sum(spec.num_slots for spec in specs) for _, specs in graphs] + [runs for _, runs in segments])
        self.most_update_entries = 2 * (MAX_WRITES + most_runs + 1)
        num_entries = max(ends) + self.most_update_entries
        int_bytes = max((int_workspace_bytes(config, spec, num_sms) for spec in all_specs), default=0)
        float_bytes = max((float_workspace_bytes(config, spec, num_sms) for spec in all_specs), default=0)
        with torch.cuda.device(device):
            self.workspace = torch.empty(max(float_bytes, 2**12), dtype=torch.uint8, device=device)
            self.on_device = torch.zeros(num_entries, dtype=torch.int32, device=device)
            self.pinned = [torch.zeros(num_entries, dtype=torch.int32, pin_memory=True) for _ in range(2)]
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
            self.mirror = PageMirror(device)
            self._copied = [torch.cuda.Event() for _ in range(2)]
            self._stream = torch.cuda.current_stream(device)
        self._turn = 0

    def begin(self) -> int:
        """The turn: which of `pinned` to fill, now that the copies out of it are done."""
        turn = self._turn = 1 - self._turn
        self._copied[turn].synchronize()
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            # What was queued for the graph before, on another stream, may still read these buffers.
            stream.wait_stream(self._stream)
            self._stream = stream
        return turn

    def stage_pages(
        self, memory: Int32Array, begin: int, end: int, view: PageView, runs: Sequence[tuple[Int32Array, Int32Array]]
    ) -> StagedPages:
        """Stage the page ids of a plan, or what brings the mirror to them.

        Args:
            memory: a turn's pinned area.
            begin: of what is copied beside them.
            end: likewise.
            view: the page ids of the plan.
            runs: lists of runs, as begins and lengths, laid one behind the other.
        """
        sizes = [int(counts.sum()) for _, counts in runs]
        offsets = np.cumsum([0, *sizes]).tolist()
        total = offsets.pop()
        if view.pool_id and total >= MIN_MIRRORED_PAGES:
            update = self.mirror.follow(view, [run[0] for run in runs], [run[1] for run in runs])
            update_end = end + sum(map(len, update.arrays))
            np.concatenate(update.arrays, out=memory[end:update_end])
            return StagedPages(offsets, begin, update_end, update)
        first = begin - total
        for offset, size, run in zip(offsets, sizes, runs, strict=True):
            memory[first + offset : first + offset + size] = gather_runs(view.ids, *run)
        return StagedPages([first + offset for offset in offsets], first, end, None)

    def copy_staged(self, turn: int, staged: StagedPages, end: int) -> None:
        """Copy what was staged in a turn's area, behind whose `end` an update of the mirror begins."""
        self.copy(turn, staged.begin, staged.end)
        if staged.update is not None:
            self.mirror.apply(staged.update, self.on_device[end : staged.end], self.on_device)

    def copy(self, turn: int, begin: int, end: int) -> None:
        """Copy some entries of a turn's pinned area."""
        self.on_device[begin:end].copy_(self.pinned[turn][begin:end], non_blocking=True)

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
        begin, end: of all of them; the page ids lie before.
    """

    row_map: slice
    active: slice
    groups: tuple[tuple[slice, slice, slice, slice], ...]
    schedules: tuple[slice, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, config: CascadeConfig, bucket: Bucket, specs: Sequence[LaunchSpec], at: int) -> Layout:
        """One array behind the other from `at` on, each aligned."""
        first = at

        def take(count: int) -> slice:
            nonlocal at
            begin, at = at, at + -(-count // ALIGNMENT) * ALIGNMENT
            return slice(begin, begin + count)

        row_map, active = take(bucket.num_rows), take(len(specs))
        groups = tuple(
            (take(s.num_slots + 1), take(s.num_slots + 1), take(s.num_slots), take(s.num_slots)) for s in specs
        )
        schedules = tuple(
            take(UncutSchedule(config, s).num_entries if s.backend == "fa2_uncut" and not s.is_fixed else 0)
            for s in specs
        )
        return cls(row_map, active, groups, schedules, first, at)

    def views(self, memory: torch.Tensor) -> list[GroupArrays]:
        """Each launch's groups."""
        return [GroupArrays(*(memory[where] for where in places)) for places in self.groups]


class _HostLaunch(NamedTuple):
    """A launch's part of a pinned area: as FlashInfer's module takes it, and to be written to."""

    groups: GroupArrays
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_last_page_len: Int32Array
    kv_len: Int32Array
    schedule: Int32Array

    @classmethod
    def of(cls, groups: GroupArrays, schedule: torch.Tensor) -> _HostLaunch:
        qo_indptr, kv_indptr, last_page_len, kv_len = (tensor.numpy() for tensor in groups)
        return cls(groups, qo_indptr, kv_indptr, last_page_len, kv_len, schedule.numpy())


class _HostArea(NamedTuple):
    """One of the pinned areas, as a graph lays it out."""

    memory: Int32Array
    row_map: Int32Array
    active: Int32Array
    launches: list[_HostLaunch]

    @classmethod
    def of(cls, layout: Layout, pinned: torch.Tensor) -> _HostArea:
        memory = pinned.numpy()
        schedules = (pinned[where] for where in layout.schedules)
        launches = [_HostLaunch.of(*pair) for pair in zip(layout.views(pinned), schedules, strict=True)]
        return cls(memory, memory[layout.row_map], memory[layout.active], launches)


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
        self._layout = layout = Layout.of(config, bucket, self._specs, buffers.num_pages)
        self._row_map = buffers.on_device[layout.row_map]
        self._active = buffers.on_device[layout.active]
        # A flat plan of one part keeps the order of the batch.
        self._may_permute = bool(shape.shared) or bucket.kind == "append"
        self._rows = np.arange(bucket.num_rows + 1, dtype=np.int32)
        self._host = [_HostArea.of(layout, pinned) for pinned in buffers.pinned]
        turn = buffers.begin()
        with torch.cuda.device(buffers.device):
            pages = buffers.on_device[: config.max_kv_indices]
            host, on_device = self._host[turn].launches, layout.views(buffers.on_device)
            self._launches = []
            for number, spec in enumerate(self._specs):
                # FlashInfer's own first plan wants all rows in some group.
                self._write_nothing(host[number], spec, covers_rows=True)
                schedule = buffers.on_device[layout.schedules[number]].view(torch.uint8)
                memory = LaunchMemory(
                    buffers.workspace, buffers.int_workspaces[number], on_device[number], schedule, pages
                )
                self._launches.append(CapturedLaunch(config, spec, memory, host[number].groups, buffers.num_sms))
        buffers.end(turn)

    def lay(self, plan: CascadePlan, levels: list[Level], needs: Needs) -> Laid | None:
        """See `graph_state.GraphExecutor.lay`."""
        found = fit(self._config, self.bucket, self.shape, self._specs, needs, self._buffers.num_sms)
        return None if found is None else Laid(found.distance, levels, found.level_of)

    def misfit(self, plan: CascadePlan) -> CapacityError:
        """See `graph_state.GraphExecutor.misfit`."""
        lacking = self.capacity.lacks(plan.usage())
        if not lacking:
            return CapacityError(
                f"the plan's own KV is longer than the graph's kernels ({self.shape}) take uncut: add fa2 to the "
                "shape's own kernels, or run it eagerly"
            )
        where = f"a graph for {self.bucket} ({self.shape})"
        return capacity_error("the plan", lacking, "Plan with the capacity of this graph, or run it eagerly", where)

    def load(self, plan: CascadePlan, laid: Laid) -> None:
        """See `graph_state.GraphExecutor.load`."""
        self._fill(plan, laid.level_of, laid.levels)

    def load_nothing(self) -> None:
        """See `graph_state.GraphExecutor.load_nothing`."""
        every = self._rows if self.bucket.kind == "decode" else np.array([0, self.bucket.num_rows], np.int32)
        level = Level(every, np.zeros_like(every), np.empty(0, np.int32), np.zeros(len(every) - 1, np.int32))
        self._fill(None, (*[None] * (len(self._specs) - 1), 0), [level])

    def _fill(self, plan: CascadePlan | None, level_of: Sequence[int | None], levels: list[Level]) -> None:
        buffers, layout = self._buffers, self._layout
        with torch.cuda.device(buffers.device):
            turn = buffers.begin()
            try:
                host = self._host[turn]
                staged = StagedPages([0], layout.begin, layout.end, None)
                if plan is not None:
                    runs = [plan.level_runs(number) for number in range(len(levels))]
                    staged = buffers.stage_pages(host.memory, layout.begin, layout.end, plan.pages, runs)
                host.row_map[:] = self._rows[:-1]
                if plan is not None and plan.row_order is not None:
                    host.row_map[: plan.num_rows] = plan.row_order
                host.active[:] = [number is not None for number in level_of]
                for spec, launch, into, number in zip(
                    self._specs, self._launches, host.launches, level_of, strict=True
                ):
                    if number is None:
                        self._write_nothing(into, spec, covers_rows=spec.backend == "decode")
                    else:
                        self._write(into, spec, levels[number], staged.offsets[number])
                    launch.plan(into.groups, into.qo_indptr, into.schedule, turn)
                buffers.copy_staged(turn, staged, layout.end)
            finally:
                buffers.end(turn)

    def _write_nothing(self, into: _HostLaunch, spec: LaunchSpec, *, covers_rows: bool) -> None:
        """No KV in any group; all rows in some group, or in none."""
        if not covers_rows:
            into.qo_indptr[:] = 0
        elif spec.is_by_row:
            into.qo_indptr[:] = self._rows
        else:
            into.qo_indptr[0], into.qo_indptr[1:] = 0, self.bucket.num_rows
        into.kv_indptr[:] = 0
        into.kv_last_page_len[:] = 0
        into.kv_len[:] = 0

    def _write(self, into: _HostLaunch, spec: LaunchSpec, level: Level, offset: int) -> None:
        """A level's groups, then the rows of padding without KV."""
        qo_indptr, kv_indptr, last_page_len = into.qo_indptr, into.kv_indptr, into.kv_last_page_len
        count = len(level.kv_last_page_len)
        if spec.is_by_row:
            qo_indptr[:] = self._rows
        else:
            qo_indptr[: count + 1] = level.qo_indptr
            qo_indptr[count + 1 :] = self.bucket.num_rows
            if spec.is_shared and not level.kv_last_page_len[-1]:
                qo_indptr[count] = self.bucket.num_rows
        np.add(level.kv_indptr, offset, out=kv_indptr[: count + 1])
        kv_indptr[count + 1 :] = kv_indptr[count]
        last_page_len[:count] = level.kv_last_page_len
        last_page_len[count:] = 0
        if spec.backend == "fa3":  # no other reads it
            page_size = self._config.page_size
            pages = kv_indptr[1:] - kv_indptr[:-1]
            into.kv_len[:] = pages * page_size - (page_size - last_page_len) * (pages > 0)

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

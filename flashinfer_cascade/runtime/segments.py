"""The segments executor: one part of a plan on this library's own kernels."""

from __future__ import annotations

import numpy as np
import torch
import triton

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.lower import Tiling, lower
from flashinfer_cascade.native_lower import WINDOW
from flashinfer_cascade.plan import CascadePlan, PlanPart
from flashinfer_cascade.runtime.buffers import ALIGNMENT, StagingBuffer
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.cuda import has_stream, has_wide
from flashinfer_cascade.runtime.kernels.segments import HAS_DEPENDENT_LAUNCHES
from flashinfer_cascade.runtime.levels import rows_of
from flashinfer_cascade.runtime.segment_kernels import Partials, SegmentArrays, SegmentKernels
from flashinfer_cascade.segment_cost import why_no_segments


def tiling_of(config: CascadeConfig, device: torch.device) -> Tiling:
    """The tiles that a GPU's kernels take."""
    index = torch.device(device).index or 0
    return Tiling.of(
        config,
        torch.cuda.get_device_properties(device).multi_processor_count,
        has_stream(index),
        has_wide(index),
        capability=torch.cuda.get_device_capability(device),
        shared_bytes=triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"],
    )


def check_gpu(config: CascadeConfig, device: torch.device) -> None:
    """Refuse segments where their kernels do not run.

    Raises:
        UnsupportedError: the GPU does not take the configuration.
    """
    why_not = why_no_segments(config, torch.cuda.get_device_capability(device))
    if why_not is not None:
        raise UnsupportedError(
            f"the plan asks for segments with {why_not}; plan with the profile of this GPU, "
            f"{torch.cuda.get_device_name(device)}"
        )


def reserve_partials(config: CascadeConfig, count: int, device: torch.device) -> Partials:
    """Room for so many pieces."""
    shape = (count, config.num_qo_heads)
    values = torch.empty(*shape, config.head_dim, dtype=getattr(torch, config.dtype), device=device)
    return Partials(values, torch.empty(shape, dtype=torch.float32, device=device))


def segment_kernels(config: CascadeConfig, tiling: Tiling, device: torch.device) -> SegmentKernels:
    """The launches on a GPU."""
    dependent = HAS_DEPENDENT_LAUNCHES and torch.cuda.get_device_capability(device)[0] >= 9
    return SegmentKernels(config, tiling, dependent=dependent)


class SegmentsExecutor:
    """Runs one part of a plan on the segments' kernels.

    Loading grows the buffers where a batch needs more than any before it; running allocates nothing.

    Args:
        config: the attention.
        device: a CUDA device.

    Raises:
        UnsupportedError: its kernels do not run on this GPU.
    """

    def __init__(self, config: CascadeConfig, device: torch.device) -> None:
        check_gpu(config, device)
        self._config, self._device = config, device
        self._tiling = tiling_of(config, device)
        self._staging = StagingBuffer(0, device)
        self._partials = reserve_partials(config, 0, device)
        self._arrays: SegmentArrays | None = None
        self._kernels: SegmentKernels | None = None
        self._rows = slice(0)
        self._num_rows = 0
        self._combines = False

    def load(self, plan: CascadePlan, part: PlanPart, pages: torch.Tensor, row_order: torch.Tensor | None) -> None:
        """Lower the part and copy its tables.

        Args:
            plan: what to run.
            part: which part of it.
            pages: int32[len(plan.seg_pages)], on the device, with `buffers.PAGE_SLACK` more numbers behind it.
            row_order: int32[plan.num_rows], on the device, or None.
        """
        tiling = self._tiling.for_part(plan, part)
        self._kernels = segment_kernels(self._config, tiling, self._device)
        lowered = lower(plan, part, tiling)
        causal = part.row_end - part.row_begin > part.num_requests
        tables: list[Int32Array] = [
            lowered.wide.reshape(-1),
            lowered.short.reshape(-1),
            lowered.short_runs.reshape(-1),
            lowered.narrow.reshape(-1),
            lowered.narrow_runs.reshape(-1),
            lowered.partial_indptr,
            lowered.combined,
            plan.row_pos[part.row_begin : part.row_end] if causal else np.empty(0, np.int32),
        ]
        entries = sum(len(table) + ALIGNMENT for table in tables)
        # This stream waits for all runs before: what they read may be used again behind it, and no sooner.
        stream = torch.cuda.current_stream(self._device)
        for old in (self._staging.on_device, self._partials.values, self._partials.lse):
            old.record_stream(stream)
        if entries > self._staging.num_entries:
            self._staging = StagingBuffer(2 * entries, self._device)
        if lowered.num_partials > len(self._partials.values):
            self._partials = reserve_partials(self._config, lowered.num_partials, self._device)
        wide, short, short_runs, narrow, narrow_runs, partial_indptr, combined, row_pos = self._staging.copy(tables)
        self._rows, row_map = rows_of(plan, part, row_order)
        self._arrays = SegmentArrays(
            wide.view(lowered.wide.shape) if len(lowered.wide) else None,
            None,
            lowered.num_double,
            short.view(lowered.short.shape) if len(lowered.short) > WINDOW else None,
            short_runs.view(lowered.short_runs.shape),
            narrow.view(lowered.narrow.shape) if len(lowered.narrow) > WINDOW else None,
            narrow_runs.view(lowered.narrow_runs.shape),
            partial_indptr,
            combined,
            pages,
            row_map,
            row_pos if causal else None,
        )
        self._num_rows = part.row_end - part.row_begin
        self._combines = bool((lowered.combined >= 0).any())

    def run(self, call: LayerCall) -> None:
        """Attend for the part's rows of q; writes exactly these rows of ``out`` and ``lse``."""
        arrays = self._arrays
        assert arrays is not None
        assert self._kernels is not None
        if arrays.row_map is None:
            lse = None if call.lse is None else call.lse[self._rows]
            call = call._replace(q=call.q[self._rows], out=call.out[self._rows], lse=lse)
        self._kernels.run(call, arrays, self._partials, num_rows=self._num_rows, combines=self._combines)

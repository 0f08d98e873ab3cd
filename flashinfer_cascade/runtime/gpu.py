"""All parts of a plan on one GPU: buffers, streams, and an executor for each part. Flat runs as a single level."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import BackendUnavailableError
from flashinfer_cascade.plan import CascadePlan, Executor
from flashinfer_cascade.runtime.buffers import StagingBuffer
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.graph_levels import CapturedLevels, GraphBuffers
from flashinfer_cascade.runtime.graph_segments import CapturedSegments, SegmentLayout
from flashinfer_cascade.runtime.launch import float_workspace_bytes, import_flashinfer
from flashinfer_cascade.runtime.levels import LevelsExecutor
from flashinfer_cascade.runtime.segments import SegmentsExecutor, reserve_partials, segment_kernels, tiling_of
from flashinfer_cascade.runtime.shapes import (
    AnyShape,
    Bucket,
    GraphShape,
    SegmentRoom,
    SegmentShape,
    StockShape,
    check_segments,
    default_shapes,
    launch_specs,
    one_for_all,
)
from flashinfer_cascade.runtime.stock import CapturedStock, StockExecutor

AnyExecutor = LevelsExecutor | SegmentsExecutor | StockExecutor
AnyCaptured = CapturedLevels | CapturedSegments | CapturedStock


class GpuExecutors:
    """Loads plans onto a GPU and runs their parts.

    Loading and running may happen on different streams: a run waits for the load before it, and a load for the runs
    before it.

    Args:
        config: the attention, and what to reserve.
        device: a CUDA device.

    Raises:
        BackendUnavailableError: FlashInfer, or the device, is missing.
    """

    def __init__(self, config: CascadeConfig, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailableError(
                f"device={str(device)!r}, but torch {torch.__version__} sees no CUDA device: use device='cpu', which "
                "runs the reference executor"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise BackendUnavailableError(
                f"device={str(device)!r}, but torch sees {torch.cuda.device_count()} CUDA devices: count from cuda:0, "
                "and look at CUDA_VISIBLE_DEVICES"
            )
        import_flashinfer()
        self._config = config
        self.device = device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", say
        with torch.cuda.device(device):
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            self._capability = torch.cuda.get_device_capability(device)
            workspace_bytes = float_workspace_bytes(config, self._num_sms)
            # The launches of all parts run one after the other, so one workspace serves them.
            self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
            self._staging = StagingBuffer.for_config(config, device)
            self._loaded = torch.cuda.Event()
        self._levels: list[LevelsExecutor] = []
        self._stock: list[StockExecutor] = []
        self._segments: list[SegmentsExecutor] = []
        self._active: list[AnyExecutor] = []
        self._stream: torch.cuda.Stream | None = None
        self._elsewhere: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def load(self, plan: CascadePlan) -> list[str]:
        """Copy the plan's arrays and let FlashInfer plan its launches, on the current stream."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            before = stream if self._stream is None else self._stream
            stream.wait_stream(before)
            for event in self._elsewhere.values():
                stream.wait_event(event)
                # What FlashInfer allocated there for the last plan is freed by this one.
                before.wait_event(event)
            self._elsewhere.clear()
            # FlashInfer plans in pinned memory of its own: what the last load wrote there must have been copied.
            self._loaded.synchronize()
            try:
                arrays = [plan.seg_pages] if plan.row_order is None else [plan.seg_pages, plan.row_order]
                pages, *rows = self._staging.copy(arrays)
                self._active = [self._executor(number, part.executor) for number, part in enumerate(plan.parts)]
                for executor, part in zip(self._active, plan.parts, strict=True):
                    executor.load(plan, part, pages, rows[0] if rows else None)
            finally:
                # A load that fails halfway has queued copies too.
                self._loaded.record(stream)
                self._stream = stream
        return [part.executor for part in plan.parts]

    def _executor(self, number: int, name: Executor) -> AnyExecutor:
        """Executors are kept from plan to plan, one of each kind for every part that a plan may have."""
        if name == "segments":
            while len(self._segments) <= number:
                self._segments.append(SegmentsExecutor(self._config, self.device))
            return self._segments[number]
        if name == "stock":
            while len(self._stock) <= number:
                self._stock.append(StockExecutor(self._config, self._workspace))
            return self._stock[number]
        while len(self._levels) <= number:
            self._levels.append(LevelsExecutor(self._config, self._workspace))
        return self._levels[number]

    def default_graph_shapes(self, bucket: Bucket) -> list[AnyShape | None]:
        """See `runtime.Executors`."""
        return [*default_shapes(self._config, bucket, self._num_sms, self._capability)]

    def graphs(self, graphs: Sequence[tuple[Bucket, AnyShape | None]]) -> list[AnyCaptured]:
        """See `runtime.Executors`."""
        config, num_sms, device, capability = self._config, self._num_sms, self.device, self._capability
        meant = [
            (bucket, one_for_all(config, bucket, num_sms, capability) if shape is None else shape)
            for bucket, shape in graphs
        ]
        specs = [
            (bucket, launch_specs(config, bucket, shape, num_sms))
            for bucket, shape in meant
            if isinstance(shape, GraphShape)
        ]
        segments = [
            (bucket, check_segments(config, bucket, shape, capability))
            for bucket, shape in meant
            if isinstance(shape, SegmentShape)
        ]
        tiling = tiling_of(config, device)
        rooms = [SegmentRoom.of(config, bucket, tiling, shape.shares) for bucket, shape in segments]
        sizes = [
            (SegmentLayout.of(config, bucket, shape, tiling, 0).end, room.num_segments)
            for (bucket, shape), room in zip(segments, rooms, strict=True)
        ]
        buffers = GraphBuffers(config, device, specs, sizes) if specs or sizes else None
        partials = reserve_partials(config, max((room.num_partials for room in rooms), default=0), device)
        kernels = segment_kernels(config, tiling, device)
        executors: list[AnyCaptured] = []
        for bucket, shape in meant:
            if isinstance(shape, StockShape):
                executors.append(CapturedStock(config, bucket, shape, device, num_sms))
            elif isinstance(shape, SegmentShape) and buffers is not None:
                executors.append(CapturedSegments(config, bucket, shape, tiling, kernels, buffers, partials))
            elif isinstance(shape, GraphShape) and buffers is not None:
                executors.append(CapturedLevels(config, bucket, shape, buffers))
        return executors

    def run(self, number: int, call: LayerCall) -> None:
        """Run one part on the current stream."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            foreign = stream != self._stream and not torch.cuda.is_current_stream_capturing()
            if foreign:
                stream.wait_event(self._loaded)
            self._active[number].run(call)
            if foreign:
                self._elsewhere.setdefault(stream, torch.cuda.Event()).record(stream)

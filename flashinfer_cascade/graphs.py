"""CUDA graphs captured once and replayed for any plan: buckets of rows, a few shapes each."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from flashinfer_cascade.capacity import PlanCapacity, capacity_error
from flashinfer_cascade.errors import (
    CapacityError,
    InvalidBatchError,
    UnsupportedError,
    check_count,
    check_type,
    listed,
    told,
)
from flashinfer_cascade.plan import CascadePlan, Level
from flashinfer_cascade.runtime.call import check_plan
from flashinfer_cascade.runtime.fit import Laid, Needs, level_backends
from flashinfer_cascade.runtime.graph_state import GraphState
from flashinfer_cascade.runtime.runtime import CascadeRuntime
from flashinfer_cascade.runtime.shapes import AnyShape, Bucket, GraphShape, SegmentShape, make_bucket

StepFn = Callable[[dict[str, torch.Tensor]], Any]
"""An engine's own step: from named inputs, one row a query token, to a tensor, or a tuple, list or dict of tensors,
with as many rows."""


MAX_CHOSEN = 4096
"""Choices of a graph that a pool remembers."""


@dataclass(slots=True)
class PoolStats:
    """What a pool did so far.

    Attributes:
        replays: by bucket and shape, as text.
        inexact: replays on other kernels than the plan asked for.
        eager: steps that `GraphPool.run` ran without a graph, by what did not fit: rows or requests of the largest
            graphs, fields of `PlanCapacity`, or "kernels".
        captures: graphs captured, the lazy ones included.
    """

    replays: Counter[tuple[str, str]] = field(default_factory=Counter)
    inexact: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    captures: int = 0


class _Captured(NamedTuple):
    """A graph, the state that it reads and what it writes."""

    state: GraphState
    replay: Callable[[], Any]


class GraphPool:
    """Graphs of one step function, for several buckets and shapes. Made by `capture_cuda_graphs`.

    One pool serves one thread and one stream at a time: replays on another stream than the last wait for it. Several
    pools do not disturb each other.

    Attributes:
        stats: what ran, and why.
        memory_bytes: device memory that it took at the start, inputs and buffers included; 0 on the CPU.
    """

    def __init__(self, runtime: CascadeRuntime, step_fn: StepFn, inputs: Mapping[str, torch.Tensor], lazy: int) -> None:
        self._runtime, self._step_fn, self._lazy = runtime, step_fn, lazy
        self._padding = {name: value.clone() for name, value in inputs.items()}
        self._static = {name: value.clone() for name, value in inputs.items()}
        self._sources = dict.fromkeys((runtime.device, torch.device("cpu")))  # where inputs may lie
        self._written = 0  # rows of the static inputs that may hold other values than those of padding
        self._captured: dict[Bucket, list[_Captured]] = {}
        self._stream: torch.cuda.Stream | None = None
        # One stream for all captures: memory that one graph leaves is another's on the same stream only.
        self._side = torch.cuda.Stream(runtime.device) if runtime.device.type == "cuda" else None
        self._memory_pool = torch.cuda.graph_pool_handle() if runtime.device.type == "cuda" else None
        self._chosen: dict[tuple[Bucket, Needs], tuple[_Captured, int, tuple[int | None, ...]]] = {}
        self._refused: set[tuple[Bucket, AnyShape]] = set()
        self._ahead: tuple[CascadePlan, _Captured, Laid] | None = None
        self.stats = PoolStats()
        self.memory_bytes = 0

    @property
    def buckets(self) -> list[Bucket]:
        """Those captured, smallest first."""
        return sorted(self._captured, key=lambda bucket: (bucket.kind, bucket.num_rows))

    def shapes(self, bucket: Bucket) -> list[AnyShape | None]:
        """Those captured for a bucket; None on the CPU."""
        return [captured.state.shape for captured in self._captured[bucket]]

    def capacity(self, num_rows: int, num_requests: int | None = None) -> PlanCapacity:
        """What a plan of so many rows may use to be sure to replay, for `CascadePlanner.plan`.

        Args:
            num_rows: of the batch.
            num_requests: of the batch; None is a decode batch, one row each.

        Raises:
            InvalidBatchError: there are no such batches.
            CapacityError: no bucket is so large.
        """
        requests = num_rows if num_requests is None else num_requests
        for name, value in (("num_rows", num_rows), ("num_requests", requests)):
            check_count(name, value, 1)
        if requests > num_rows:
            raise InvalidBatchError(
                f"num_requests={requests} exceeds num_rows={num_rows}: give the rows of all requests, 1 each at least"
            )
        bucket = self._bucket(num_rows, requests)
        return self._roomiest(bucket).state.capacity

    def load(self, plan: CascadePlan) -> None:
        """Load the next replay's plan ahead, where its inputs are not known yet, and the host has nothing else to do.

        Call it once the replay before has been launched: its copies wait on the stream for that. `replay` and `run` of
        the same plan then do the rest; anything else that is loaded or replayed before takes its place.

        Raises:
            CapacityError: no captured graph takes the plan; nothing was touched.
            InvalidBatchError: the plan reads pages that the captured KV caches do not hold; nothing was touched.
        """
        check_plan(self._runtime.config, plan)
        self._order()
        captured, laid = self._select(plan)
        self._ahead = None  # should it fail
        captured.state.load(plan, laid)
        self._ahead = plan, captured, laid

    def replay(self, plan: CascadePlan, **inputs: torch.Tensor) -> Any:
        """Run the step for one batch through a graph.

        The inputs are copied to the graph's own, the plan is loaded and the graph launched, all on the current stream;
        the host waits for none of it.

        Args:
            plan: of the batch.
            **inputs: all of the step's, by name, with the batch's rows: on the device, or in pinned memory.

        Returns:
            Views of what the step returned, cut to the batch's rows; valid until the pool's next replay.

        Raises:
            CapacityError: no captured graph takes the plan; nothing was touched. `run` would run it eagerly.
            InvalidBatchError: an input is missing, of another shape or dtype or elsewhere, or the plan reads pages that
                the captured KV caches do not hold; nothing was touched.
        """
        check_plan(self._runtime.config, plan)
        self._check(plan, inputs)
        if self._ahead is None or self._ahead[0] is not plan:
            self.load(plan)
        assert self._ahead is not None
        _, captured, laid = self._ahead
        self._ahead = None
        self._order()
        num_rows = plan.num_rows
        bucket_rows = captured.state.bucket.num_rows
        stale = slice(num_rows, min(self._written, bucket_rows))
        self._written = max(self._written, num_rows)  # should a copy fail
        for name, value in inputs.items():
            self._static[name][:num_rows].copy_(value, non_blocking=True)
            if stale.start < stale.stop:
                self._static[name][stale].copy_(self._padding[name][stale])
        if self._written <= bucket_rows:  # rows behind the bucket stay as they are until a larger one comes
            self._written = num_rows
        outputs = captured.replay()
        self.stats.replays[str(captured.state.bucket), str(captured.state.shape)] += 1
        self.stats.inexact += laid.distance > 0
        return _map(outputs, lambda tensor: tensor[:num_rows])

    def run(self, plan: CascadePlan, **inputs: torch.Tensor) -> Any:
        """`replay`, or the step without a graph where no graph takes the plan; `stats.eager` counts why.

        Raises:
            InvalidBatchError: as for `replay`.
        """
        try:
            return self.replay(plan, **inputs)
        except CapacityError as error:
            self.stats.eager[", ".join(error.lacking) or "kernels"] += 1
        self._order()
        self._runtime.load(plan)
        device = self._runtime.device
        return self._step_fn({name: value.to(device, non_blocking=True) for name, value in inputs.items()})

    def _order(self) -> None:
        """What this pool queued before, on another stream, comes first."""
        if self._runtime.device.type == "cuda":
            stream = torch.cuda.current_stream(self._runtime.device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def _bucket(self, num_rows: int, num_requests: int) -> Bucket:
        """The smallest that holds a batch: of decode buckets, then of the others."""
        for kind in ("decode", "append"):
            if kind == "decode" and num_rows != num_requests:
                continue
            for bucket in self.buckets:
                if bucket.kind == kind and num_rows <= bucket.num_rows and num_requests <= bucket.num_requests:
                    return bucket
        kinds = [bucket for bucket in self._captured if bucket.kind == "append"] or [*self._captured]
        if num_rows > num_requests:
            kinds = [bucket for bucket in kinds if bucket.kind == "append"]
        rows = max((bucket.num_rows for bucket in kinds), default=0)
        requests = max((bucket.num_requests for bucket in kinds), default=0)
        kind = "decode" if kinds and kinds[0].kind == "decode" else "append"
        sizes = {f"rows in {kind} graphs": (num_rows, rows)}
        if kind == "append":
            sizes[f"requests in {kind} graphs"] = num_requests, requests
        over = {name: pair for name, pair in sizes.items() if pair[0] > pair[1]}
        what, remedy = f"a batch of {num_requests} requests", "Capture a larger bucket, or run it eagerly"
        raise capacity_error(what, over, remedy, "the pool")

    def _roomiest(self, bucket: Bucket) -> _Captured:
        """The graph of a bucket that takes the deepest cascades."""

        def room(captured: _Captured) -> tuple[int, int]:
            return captured.state.capacity.num_slots, captured.state.capacity.num_levels

        return max(self._captured[bucket], key=room)

    def _select(self, plan: CascadePlan) -> tuple[_Captured, Laid]:
        bucket = self._bucket(plan.num_rows, plan.num_requests)
        levels = plan.levels(with_pages=False)
        # Steps that differ in lengths alone need the same.
        key = bucket, Needs.of(bucket, plan, levels)
        if key in self._chosen:
            captured, distance, level_of = self._chosen[key]
            return captured, Laid(distance, levels, level_of)
        best: tuple[_Captured, Laid] | None = None
        for captured in self._captured[bucket]:
            laid = captured.state.lay(plan, levels)
            if laid is not None and (best is None or laid.distance < best[1].distance):
                best = captured, laid
        if self._lazy and (best is None or best[1].distance):
            *shared, own = level_backends(plan)
            wanted: tuple[Bucket, AnyShape]
            if own == "segments":
                wanted = bucket, SegmentShape(shares=bool(shared) or bucket.kind == "append")
            else:
                wanted = bucket, GraphShape(tuple(shared), (own,))
            if wanted not in self._refused:
                laid = self._capture_late(wanted[0], wanted[1], plan, levels)
                if laid is not None:
                    return self._captured[bucket][-1], laid
        if best is None:
            raise self._roomiest(bucket).state.misfit(plan)
        if len(self._chosen) >= MAX_CHOSEN:
            self._chosen.clear()
        self._chosen[key] = best[0], best[1].distance, best[1].level_of
        return best

    def _capture_late(self, bucket: Bucket, shape: AnyShape, plan: CascadePlan, levels: list[Level]) -> Laid | None:
        """Capture one more shape while serving; None when it cannot be, or the plan does not fit it either."""
        self._refused.add((bucket, shape))  # never tried twice
        self._chosen.clear()
        with contextlib.suppress(UnsupportedError):
            self._capture([(bucket, shape)])
            self._lazy -= 1
            return self._captured[bucket][-1].state.lay(plan, levels)
        return None

    def _check(self, plan: CascadePlan, inputs: Mapping[str, torch.Tensor]) -> None:
        if inputs.keys() != self._static.keys():
            raise InvalidBatchError(
                f"inputs {sorted(inputs)} given, but the graphs were captured with {sorted(self._static)}: give all of "
                "these, and only these"
            )
        for name, value in inputs.items():
            shape, dtype = (plan.num_rows, *self._static[name].shape[1:]), self._static[name].dtype
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.shape == shape and value.dtype == dtype and value.device in self._sources:
                continue
            what = f"input {name} is {value.dtype} {list(value.shape)} on {value.device}" if is_tensor else None
            raise InvalidBatchError(
                f"{what or told(f'input {name}', value)}; expected a tensor, {dtype} {list(shape)} on "
                f"{' or '.join(map(str, self._sources))}: one row for each row of the plan"
            )

    def _capture(self, graphs: Sequence[tuple[Bucket, AnyShape | None]], progress: Progress | None = None) -> None:
        """Capture graphs that share buffers and memory, in this order.

        The step runs once to warm up: its inputs must be those of padding, lest it writes for the last batch again.
        """
        for name, value in self._static.items():
            value[: self._written].copy_(self._padding[name][: self._written])
        self._written = 0
        states = self._runtime.graph_states(graphs)
        task = progress.add_task("Capturing CUDA graphs", total=len(states)) if progress is not None else None
        for state in states:
            if progress is not None and task is not None:
                progress.update(task, description=f"Capturing {state.bucket}, {state.shape}")
            state.load_nothing()
            inputs = {name: value[: state.bucket.num_rows] for name, value in self._static.items()}

            def step(state: GraphState = state, inputs: dict[str, torch.Tensor] = inputs) -> Any:
                with self._runtime.using(state):
                    outputs = self._step_fn(inputs)
                _map(outputs, functools.partial(_check_rows, state.bucket))
                return outputs

            if self._memory_pool is None:
                step()  # so that a step that cannot run says so here, as it does where it is captured
                replay: Callable[[], Any] = step
            else:
                replay = self._capture_one(step)
            self._captured.setdefault(state.bucket, []).append(_Captured(state, replay))
            self.stats.captures += 1
            if progress is not None and task is not None:
                progress.advance(task)

    def _capture_one(self, step: Callable[[], Any]) -> Callable[[], Any]:
        device, side = self._runtime.device, self._side
        assert side is not None
        side.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(side):
            step()  # compiles, and initialises what may not be initialised during capture
            side.synchronize()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._memory_pool, stream=side, capture_error_mode="thread_local"):
                outputs = step()
        torch.cuda.current_stream(device).wait_stream(side)

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay


def capture_cuda_graphs(
    runtime: CascadeRuntime,
    step_fn: StepFn,
    *,
    inputs: Mapping[str, torch.Tensor],
    batch_sizes: Sequence[int] = (),
    token_sizes: Sequence[int] = (),
    max_requests: int | None = None,
    shapes: Sequence[AnyShape] | Callable[[Bucket], Sequence[AnyShape]] | None = None,
    lazy: int = 0,
    progress: bool = True,
) -> GraphPool:
    """Capture a step for all batch sizes, to be replayed for any plan.

    `step_fn` is called with static inputs of a bucket's rows, once to warm up and once to be captured, for each shape
    of each bucket, the largest first. Within it, `CascadeRuntime.run` goes to the graph's buffers; no row sees any KV
    then. On the CPU nothing is captured: `step_fn` is called once for each bucket, with the same inputs, and again by
    each replay, for development and tests.

    Args:
        runtime: whose `run` the step calls, once a layer.
        step_fn: the engine's own function.
        inputs: by name, tensors on the runtime's device whose first dimension is that of the largest bucket. Their
            rows are what padding rows will hold: give a slot mapping that writes nowhere, say. They are copied.
        batch_sizes: buckets for decode, in rows, one row a request.
        token_sizes: buckets for appends, prefill and mixed batches, in rows.
        max_requests: most requests of the latter; None is config.max_batch_size.
        shapes: kernels to capture in each bucket, or a function of the bucket; None is what
            `runtime.default_graph_shapes` says.
        lazy: how many more graphs may be captured while serving, for plans that ask for other kernels. Each such step
            takes as long as a capture.
        progress: show it on stderr.

    Raises:
        InvalidBatchError: an argument is of a wrong type, no bucket is given, one exceeds the configuration or has no
            shapes, an input has too few rows, or the step returns a tensor without a row for each of the inputs'.
        UnsupportedError: a shape that the device or the configuration does not allow.
    """
    check_type("runtime", runtime, CascadeRuntime, "give the CascadeRuntime whose run the step calls")
    if not callable(step_fn):
        raise InvalidBatchError(f"{told('step_fn', step_fn)}: give a function of a dict of tensors")
    check_type("inputs", inputs, Mapping, "give tensors by name, as a mapping")
    check_count("lazy", lazy, 0)
    config, device = runtime.config, runtime.device
    buckets = [make_bucket(config, size) for size in listed("batch_sizes", batch_sizes, "give a list")]
    buckets += [
        make_bucket(config, None, size, max_requests) for size in listed("token_sizes", token_sizes, "give a list")
    ]
    if not buckets:
        raise InvalidBatchError("no bucket: give batch_sizes for decode, token_sizes for appends, or both")
    largest = max(bucket.num_rows for bucket in buckets)
    if not inputs:
        raise InvalidBatchError("inputs is empty: a step reads at least one tensor with a row for each query token")
    for name, value in inputs.items():
        check_type(f"input {name}", value, torch.Tensor, f"give a tensor of at least {largest} rows on {device}")
        if value.ndim < 1 or len(value) < largest or value.device != device:
            raise InvalidBatchError(
                f"input {name} is {list(value.shape)} on {value.device}: give a tensor of at least {largest} rows on "
                f"{device}"
            )
    graphs: list[tuple[Bucket, AnyShape | None]] = []
    for bucket in sorted(set(buckets), key=lambda bucket: -bucket.num_rows):
        chosen = runtime.default_graph_shapes(bucket) if shapes is None else shapes
        chosen = chosen(bucket) if callable(chosen) else chosen
        if isinstance(chosen, AnyShape):  # some are tuples
            raise InvalidBatchError(f"{told('shapes', chosen)}: give a list of shapes")
        of_bucket = listed("shapes", chosen, "give a list of shapes")
        if not of_bucket:
            raise InvalidBatchError(f"no shapes for the bucket of {bucket}: name one at least, or leave the bucket out")
        graphs += [(bucket, shape) for shape in of_bucket]
    before = _free_bytes(device)
    pool = GraphPool(runtime, step_fn, {name: value[:largest] for name, value in inputs.items()}, lazy)
    with _shown(progress) as shown:
        pool._capture(graphs, shown)
    pool.memory_bytes = before - _free_bytes(device)
    logging.getLogger("flashinfer_cascade").info(
        "captured %d graphs for %d buckets: %.0f MB", pool.stats.captures, len(pool.buckets), pool.memory_bytes / 1e6
    )
    return pool


@contextlib.contextmanager
def _shown(progress: bool) -> Iterator[Progress | None]:
    if not progress:
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as shown:
        yield shown


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _check_rows(bucket: Bucket, output: torch.Tensor) -> torch.Tensor:
    if output.ndim < 1 or len(output) != bucket.num_rows:
        raise InvalidBatchError(
            f"the step returned a tensor of {list(output.shape)} for inputs of {bucket.num_rows} rows: return tensors "
            "with as many rows"
        )
    return output


def _map(outputs: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of tuples, lists and dicts, its tensors cut."""
    if isinstance(outputs, torch.Tensor):
        return cut(outputs)
    if isinstance(outputs, dict):
        return {name: _map(value, cut) for name, value in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(_map(value, cut) for value in outputs))
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(_map(value, cut) for value in outputs)
    return outputs

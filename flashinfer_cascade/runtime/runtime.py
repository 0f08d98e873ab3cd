"""The runtime: takes plans and tensors from the caller, checks them once, and hands them to executors."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, overload

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import CascadeError, InvalidBatchError, UnsupportedError, check_type
from flashinfer_cascade.plan import CascadePlan, PartName, PlanPart
from flashinfer_cascade.runtime import ops
from flashinfer_cascade.runtime.call import (
    KVCache,
    LayerCall,
    check_pages,
    check_plan,
    check_scale,
    check_tensors,
    num_cache_pages,
)
from flashinfer_cascade.runtime.graph_state import GraphExecutor, GraphState
from flashinfer_cascade.runtime.reference import ReferenceExecutors
from flashinfer_cascade.runtime.shapes import AnyShape, Bucket, check_shape, make_bucket

DEVICES = "use 'cuda' or 'cuda:0', say, or 'cpu' for the reference executor"
"""What to do about a device that none of this runs on."""


@dataclass(slots=True)
class RuntimeStats:
    """What a runtime did so far.

    Attributes:
        loads: plans loaded.
        runs: calls of `CascadeRuntime.run`.
        parts_run: times that each (part, executor) ran. On a GPU that is the executor which the plan names, on the
            CPU "reference".
    """

    loads: int = 0
    runs: int = 0
    parts_run: Counter[tuple[PartName, str]] = field(default_factory=Counter)


class Executors(Protocol):
    """What a device needs to run plans: `reference.ReferenceExecutors` or `gpu.GpuExecutors`."""

    def load(self, plan: CascadePlan) -> Sequence[str]:
        """Prepare all parts of a plan; returns the name of the executor that each will run on."""

    def run(self, number: int, call: LayerCall) -> None:
        """Run one part by its position in `CascadePlan.parts`; writes exactly its rows of ``out`` and ``lse``."""

    def default_graph_shapes(self, bucket: Bucket) -> list[AnyShape | None]:
        """See `CascadeRuntime.default_graph_shapes`."""

    def graphs(self, graphs: Sequence[tuple[Bucket, AnyShape | None]]) -> Sequence[GraphExecutor]:
        """What captured graphs of these buckets and shapes run on."""


class CascadeRuntime:
    """Runs plans of one configuration on one device: `load` once a step, then `run` once a layer.

    Args:
        config: what every plan must be made for.
        device: a CUDA device, where FlashInfer runs the plan; or "cpu", which runs the reference executor.

    Attributes:
        stats: what ran, and how often.
        number: names the runtime within this process, for `ops.attention`.

    Raises:
        InvalidBatchError: `config` is none.
        UnsupportedError: no executor runs on `device`.
        BackendUnavailableError: the device, or FlashInfer, is missing.
    """

    def __init__(self, config: CascadeConfig, device: str | torch.device = "cuda") -> None:
        check_type("config", config, CascadeConfig, "give a CascadeConfig")
        self.config = config
        self.device = _device(device)
        self.stats = RuntimeStats()
        self.number = ops.register(self)
        self._plan: CascadePlan | None = None
        self._state: GraphState | None = None
        self._num_pages = 0  # of the smallest cache that the plan was held against
        self._executor_names: Sequence[str] = ()
        self._executors: Executors
        if self.device.type == "cpu":
            self._executors = ReferenceExecutors(config)
        elif self.device.type == "cuda":
            from flashinfer_cascade.runtime.gpu import GpuExecutors

            self._executors = GpuExecutors(config, self.device)
            self.device = self._executors.device
        else:
            raise UnsupportedError(f"device={str(device)!r}: {DEVICES}")

    def load(self, plan: CascadePlan) -> None:
        """Make `plan` the one that `run` executes.

        On a GPU its arrays are copied on the current stream. The host waits only for the copies of the load before, so
        it may run ahead of the GPU by one step. Buffers that a larger batch than any before needs are allocated here,
        so that `run`, given `out`, allocates nothing (FlashInfer's own wrapper does). After an error no plan is loaded.

        A load is ordered behind all runs before it, on whatever stream. Runs of one runtime share its buffers: keep
        them on one stream, or order them. A CUDA graph captured from `run` is valid until the next load.

        Raises:
            InvalidBatchError: it is no plan, or one for another configuration.
            CapacityError: it does not fit what was reserved.
            UnsupportedError: it names a kernel that this GPU does not have.
        """
        self._plan = None  # should loading fail, at whatever point
        check_plan(self.config, plan)
        self._executor_names = self._executors.load(plan)
        self._plan = plan
        self._num_pages = 0
        self.stats.loads += 1

    def graph_state(
        self,
        batch_size: int | None = None,
        *,
        num_tokens: int | None = None,
        max_requests: int | None = None,
        shape: AnyShape | None = None,
    ) -> GraphState:
        """Buffers for a CUDA graph that you capture yourself: one that replays any plan which fits.

        Call `GraphState.run` in the captured function, or `run` inside ``with runtime.using(state)``; before each
        replay, load a plan that was made with ``capacity=state.capacity``.

        Args:
            batch_size: rows of a graph for decode, one row a request.
            num_tokens: instead: rows of a graph for appends, prefill and mixed batches.
            max_requests: most requests of a graph for appends; None is config.max_batch_size.
            shape: its kernels; None takes `shapes.one_for_all`.

        Raises:
            InvalidBatchError: the sizes exceed the configuration's.
            UnsupportedError: the shape names a kernel that the device, the configuration or the bucket does not allow.
        """
        bucket = make_bucket(self.config, batch_size, num_tokens, max_requests)
        return self.graph_states([(bucket, shape)])[0]

    def graph_states(self, graphs: Sequence[tuple[Bucket, AnyShape | None]]) -> list[GraphState]:
        """States of graphs that are never replayed side by side: they share their buffers.

        A load into any of them replaces what was loaded into the others.

        Raises:
            InvalidBatchError: a shape is none.
            UnsupportedError: as for `graph_state`.
        """
        for _, shape in graphs:
            check_shape(shape)
        executors = self._executors.graphs(graphs)
        return [GraphState(self.config, self.device, executor) for executor in executors]

    def default_graph_shapes(self, bucket: Bucket) -> list[AnyShape | None]:
        """The shapes that `capture_cuda_graphs` captures for a bucket; on the CPU one, without kernels."""
        return self._executors.default_graph_shapes(bucket)

    @contextlib.contextmanager
    def using(self, state: GraphState) -> Iterator[None]:
        """Within it, `run` goes to a graph's state rather than to the loaded plan.

        Raises:
            InvalidBatchError: `state` is none.
        """
        check_type("state", state, GraphState, "give a state that graph_state made")
        before, self._state = self._state, state
        try:
            yield
        finally:
            self._state = before

    @overload
    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        *,
        part: PartName | PlanPart | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        *,
        part: PartName | PlanPart | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        *,
        part: PartName | PlanPart | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer, rows in the caller's order.

        Args:
            q: ``[num_rows, num_qo_heads, head_dim]``, config.dtype: the requests' rows in the order of the batch.
            kv_cache: config.kv_dtype, any strides of whole 16 bytes (as those of q and out) but the last, which is 1:
                ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD),
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or K and V, of equal strides, as a pair of
                these without their second dimension. Holds this step's new tokens already.
            part: run this part alone, by name or from `CascadePlan.parts`, and write only its rows; None is all.
            k_scale: what the cache's keys are multiplied by.
            v_scale: what its values are multiplied by.
            sinks: float32[num_qo_heads], natural-log logits that join each row's denominator.
            out: shape and dtype of q, written in place. None allocates it; rows of other parts are then 0.
            return_lse: also return the log-sum-exp.

        Returns:
            out: shape and dtype of q.
            lse: float32[num_rows, num_qo_heads], base 2, sinks included; -inf for rows that see nothing, and for
                rows of other parts.

        Raises:
            CascadeError: no plan is loaded.
            InvalidBatchError: a tensor contradicts the plan or the configuration, a scale is not finite, or the plan
                has no such part.
        """
        if self._state is not None:
            if part is not None:
                raise UnsupportedError("part: a captured graph runs all parts of a plan at once, leave it out")
            state = self._state
            if return_lse:
                return state.run(q, kv_cache, k_scale=k_scale, v_scale=v_scale, sinks=sinks, out=out, return_lse=True)
            return state.run(q, kv_cache, k_scale=k_scale, v_scale=v_scale, sinks=sinks, out=out)
        if self._plan is None:
            raise CascadeError("no plan is loaded: call load(plan) before run")
        plan = self._plan
        selected = _select(plan, part)
        k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
        check_tensors(self.config, self.device, plan.num_rows, q, kv_cache, sinks, out)
        # Layers have caches of one size: it is held against the plan once.
        num_pages = num_cache_pages(kv_cache)
        if num_pages < self._num_pages or not self._num_pages:
            check_pages(plan, num_pages)
            self._num_pages = num_pages
        is_whole = len(selected) == len(plan.parts)
        if out is None:
            out = (torch.empty_like if is_whole else torch.zeros_like)(q, memory_format=torch.contiguous_format)
        lse = None
        if return_lse:
            lse = torch.empty(q.shape[:2], device=self.device)
            if not is_whole:
                lse.fill_(float("-inf"))
        call = LayerCall(q, kv_cache, out, lse, k_scale, v_scale, sinks)
        for number in selected:
            self._executors.run(number, call)
            self.stats.parts_run[plan.parts[number].name, self._executor_names[number]] += 1
        self.stats.runs += 1
        return out if lse is None else (out, lse)


def _select(plan: CascadePlan, part: PartName | PlanPart | None) -> list[int]:
    """Positions in `CascadePlan.parts`."""
    if part is None:
        return list(range(len(plan.parts)))
    check_type("part", part, str | PlanPart, "give the name of one of the plan's parts, or one of plan.parts")
    for number, candidate in enumerate(plan.parts):
        if candidate is part or candidate.name == part:
            return [number]
    names = " and ".join(repr(candidate.name) for candidate in plan.parts)
    asked = part if isinstance(part, str) else f"{part.name} of another plan"
    raise InvalidBatchError(f"the loaded plan has no part {asked!r}, only {names}: load its plan, or skip the call")


def _device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(f"device={given!r}: {DEVICES}") from error
    return torch.device("cpu") if device.type == "cpu" else device  # torch counts no CPUs

"""The state that a captured CUDA graph reads, for graphs captured by anyone."""

from __future__ import annotations

from typing import Literal, Protocol, overload

import torch

from flashinfer_cascade.capacity import PlanCapacity, capacity_error
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import CapacityError, CascadeError
from flashinfer_cascade.plan import CascadePlan, Level
from flashinfer_cascade.runtime.call import (
    KVCache,
    LayerCall,
    check_pages,
    check_plan,
    check_scale,
    check_tensors,
    num_cache_pages,
)
from flashinfer_cascade.runtime.fit import Laid, Needs
from flashinfer_cascade.runtime.shapes import AnyShape, Bucket


class GraphExecutor(Protocol):
    """A plan's attention over fixed buffers: `CapturedLevels`, `CapturedStock` or, on the CPU, `ReferenceRows`."""

    bucket: Bucket
    capacity: PlanCapacity

    @property
    def shape(self) -> AnyShape | None:
        """Kernels of its launches; None on the CPU."""

    def lay(self, plan: CascadePlan, levels: list[Level], needs: Needs) -> Laid | None:
        """How the plan, of so many rows and requests at most, fits; None when it does not. Nothing is written."""

    def misfit(self, plan: CascadePlan) -> CapacityError:
        """Why a plan that `lay` refused does not fit."""

    def load(self, plan: CascadePlan, laid: Laid) -> None:
        """Fill the buffers with a plan that `lay` accepted."""

    def load_nothing(self) -> None:
        """Fill the buffers so that no row sees anything."""

    def run(self, call: LayerCall) -> None:
        """Launch what is captured; writes all rows of the bucket."""


class GraphState:
    """Buffers that a captured CUDA graph reads: `load` fills them before each replay, `run` is what is captured.

    Made by `CascadeRuntime.graph_state`. A fresh state is loaded with nothing: every row sees no KV, so that a graph
    can be warmed up and captured at once.

    Load on the stream that replays, or order the two: a load overwrites what the replay before it reads.

    Attributes:
        bucket: rows and requests that it holds.
        shape: kernels of its launches; None on the CPU.
        capacity: what a plan may use; `CascadePlanner.plan` makes plans to fit. Flat always fits.
    """

    def __init__(self, config: CascadeConfig, device: torch.device, executor: GraphExecutor) -> None:
        self._config, self._device, self._executor = config, device, executor
        self.bucket, self.shape, self.capacity = executor.bucket, executor.shape, executor.capacity
        self._num_pages: int | None = None
        self._is_ready = False
        self.load_nothing()

    def lay(self, plan: CascadePlan, levels: list[Level]) -> Laid | None:
        """How a plan fits, for `load`; None when it has too many levels or groups. Nothing is written.

        Args:
            plan: what to lay.
            levels: its `CascadePlan.levels`; their page ids are not read.

        Raises:
            InvalidBatchError: it is no plan, or one for another configuration.
            CapacityError: it has too many rows or requests.
        """
        check_plan(self._config, plan)
        bucket = self.bucket
        sizes = {"num_rows": (plan.num_rows, bucket.num_rows), "num_requests": (plan.num_requests, bucket.num_requests)}
        over = {name: pair for name, pair in sizes.items() if pair[0] > pair[1]}
        if over:
            raise capacity_error("the plan", over, "Take a larger graph, or run it eagerly", f"a graph for {bucket}")
        if bucket.kind == "decode" and plan.num_rows > plan.num_requests:
            raise capacity_error(
                "the plan",
                {"rows a request": (int((plan.qo_indptr[1:] - plan.qo_indptr[:-1]).max()), 1)},
                "Take a graph for appends, or run it eagerly",
                f"a graph for {bucket}",
            )
        return self._executor.lay(plan, levels, Needs.of(bucket, plan, levels))

    def misfit(self, plan: CascadePlan) -> CapacityError:
        """Why a plan that `lay` refused does not fit."""
        return self._executor.misfit(plan)

    def load(self, plan: CascadePlan, laid: Laid | None = None) -> None:
        """Fill the buffers for the next replay, with copies on the current stream; the host waits for none of them.

        Two pinned areas take turns: a load waits only for the copies of the load before the last (with a `StockShape`,
        for those of the last, since FlashInfer has one area).

        Args:
            plan: at most as many rows and requests as the bucket holds; rows behind its own see nothing.
            laid: what `lay` said of it; None asks.

        Raises:
            InvalidBatchError: as for `lay`, or it reads pages that the captured KV caches do not hold.
            CapacityError: it does not fit; nothing was written.
        """
        if laid is None:
            check_plan(self._config, plan)
            laid = self.lay(plan, plan.levels(with_pages=False))
            if laid is None:
                raise self.misfit(plan)
        if self._num_pages is not None:
            check_pages(plan, self._num_pages)
        self._is_ready = False  # should it fail halfway
        self._executor.load(plan, laid)
        self._is_ready = True

    def load_nothing(self) -> None:
        """Fill the buffers so that no row sees anything: results are 0."""
        self._is_ready = False
        self._executor.load_nothing()
        self._is_ready = True

    @overload
    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        *,
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
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`CascadeRuntime.run` for all rows of the bucket; may be captured, and reads what was loaded at each replay.

        Args:
            q: ``[bucket.num_rows, num_qo_heads, head_dim]``; rows behind those of the loaded plan may hold anything.
            kv_cache: as for `CascadeRuntime.run`.
            k_scale: likewise; captured as a constant, as is v_scale.
            v_scale: likewise.
            sinks: likewise.
            out: likewise.
            return_lse: likewise.

        Raises:
            CascadeError: the last load failed.
            InvalidBatchError: a tensor contradicts the bucket or the configuration, or a scale is not finite.
        """
        if not self._is_ready:
            raise CascadeError("the last load into this graph state failed: load a plan that fits before run")
        k_scale, v_scale = check_scale("k_scale", k_scale), check_scale("v_scale", v_scale)
        check_tensors(self._config, self._device, self.bucket.num_rows, q, kv_cache, sinks, out)
        # Every replay reads this cache: later plans are held against the smallest one.
        num_pages = num_cache_pages(kv_cache)
        self._num_pages = num_pages if self._num_pages is None else min(num_pages, self._num_pages)
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        lse = torch.empty(q.shape[:2], device=self._device) if return_lse else None
        self._executor.run(LayerCall(q, kv_cache, out, lse, k_scale, v_scale, sinks))
        return out if lse is None else (out, lse)

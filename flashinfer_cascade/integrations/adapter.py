"""What an engine keeps for each model and calls each step, whatever its own backend interface looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.errors import CascadeError, check_count, listed
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.planner import CascadePlanner
from flashinfer_cascade.profile import DeviceProfile
from flashinfer_cascade.runtime import CascadeRuntime, GraphState
from flashinfer_cascade.runtime.shapes import make_bucket


class EngineAdapter:
    """Planner, runtime and graph buffers of one model: of one group of layers that share their attention.

    For engines that capture one decode graph a batch size by themselves. Build it once the KV cache has its size; call
    `reserve` before capturing; each step `plan` and `load`; in each layer what `attention` returned, after the step's
    K and V are in the cache.

    Args:
        config: the attention of this tensor-parallel rank, and the limits of the engine's scheduler.
        device: where the model runs; "cpu" runs the reference executor, for an engine's own tests.
        policy: how to choose; None is `PlannerPolicy()`.
        profile: the GPU, as for `CascadePlanner`.

    Attributes:
        config: the attention.
        planner: makes the plans; a scheduler process may have one of its own, made with the same arguments.
        runtime: runs those that no graph does.
    """

    def __init__(
        self,
        config: CascadeConfig,
        device: str | torch.device = "cuda",
        *,
        policy: PlannerPolicy | None = None,
        profile: str | DeviceProfile = "h200",
    ) -> None:
        self.config = config
        self.planner = CascadePlanner(config, policy, profile)
        self.runtime = CascadeRuntime(config, device)
        self._states: dict[int, GraphState] = {}

    @property
    def graph_sizes(self) -> list[int]:
        """Batch sizes that buffers are reserved for, smallest first."""
        return sorted(self._states)

    def reserve(self, batch_sizes: Iterable[int]) -> None:
        """Make the buffers of decode graphs, one row a request; sizes that have them already are left alone.

        The graphs of one call share their memory: they are never replayed side by side.

        Raises:
            InvalidBatchError: a size exceeds the configuration's, or is none.
        """
        sizes = listed("batch_sizes", batch_sizes, "give a list")
        for size in sizes:
            check_count("a batch size", size, 1)
        missing = sorted({*sizes} - self._states.keys(), reverse=True)
        if missing:
            states = self.runtime.graph_states([(make_bucket(self.config, size), None) for size in missing])
            self._states |= zip(missing, states, strict=True)

    def graph_size(self, num_requests: int) -> int | None:
        """The smallest reserved batch size that holds a decode batch; None when it must run without a graph.

        Raises:
            InvalidBatchError: `num_requests` is no number.
        """
        check_count("num_requests", num_requests, 0)
        return min((size for size in self._states if size >= num_requests), default=None)

    def plan(self, block_tables: Any, seq_lens: Any, qo_lens: Any = None, *, graph: int | None = None) -> CascadePlan:
        """Plan a step, on the CPU alone: the same on every rank.

        Args:
            block_tables: as for `CascadePlanner.plan`, and so are the next two. Rows that pad a graph's batch are
                best left out.
            seq_lens: likewise.
            qo_lens: likewise.
            graph: batch size of the graph that will be replayed; None is none.

        Raises:
            CascadeError: nothing is reserved for such a graph.
        """
        capacity = None if graph is None else self.graph_state(graph).capacity
        return self.planner.plan(block_tables, seq_lens, qo_lens, capacity=capacity)

    def load(self, plan: CascadePlan, *, graph: int | None = None) -> None:
        """Make a plan the one that layers run, on the current stream: before the forward pass, or before the replay.

        Raises:
            CascadeError: nothing is reserved for such a graph.
        """
        if graph is None:
            self.runtime.load(plan)
        else:
            self.graph_state(graph).load(plan)

    def attention(self, *, graph: int | None = None) -> Callable[..., Any]:
        """What a layer calls: `CascadeRuntime.run`, or the `GraphState.run` to capture for a batch size.

        Raises:
            CascadeError: nothing is reserved for such a graph.
        """
        return self.runtime.run if graph is None else self.graph_state(graph).run

    def graph_state(self, batch_size: int) -> GraphState:
        """What a graph reads; its `capacity` is for plans made elsewhere, by a session or in a scheduler process.

        Raises:
            CascadeError: nothing is reserved for such a graph.
        """
        try:
            state = self._states.get(batch_size)
        except TypeError:  # no number
            state = None
        if state is None:
            raise CascadeError(
                f"no graph of batch size {batch_size!r} is reserved, only {self.graph_sizes}: call reserve with it, "
                "then capture"
            )
        return state

"""FlashInfer's own multi-level wrapper, for those who hold one already and for comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashinfer_cascade.capacity import PlanCapacity, capacity_error
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.errors import CapacityError, UnsupportedError
from flashinfer_cascade.plan import CascadePlan, Level, PlanPart
from flashinfer_cascade.planner import CascadePlanner
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.captured import float_workspace_bytes as graph_workspace_bytes
from flashinfer_cascade.runtime.fit import Laid, Needs
from flashinfer_cascade.runtime.launch import import_flashinfer, plan_on_fa2
from flashinfer_cascade.runtime.levels import rows_of
from flashinfer_cascade.runtime.shapes import Bucket, LaunchSpec, StockShape, fa2_tile

MAX_MERGED_HEADS = {64: 128, 128: 64, 256: 32}
"""Query heads above which the wrapper's merge kernel fails to launch and leaves the CUDA context broken, by head_dim.

Source: flashinfer/attention/cascade.cuh, MergeStateInPlace: one thread per vector of each head.
"""


class StockExecutor:
    """Runs one part on ``flashinfer.MultiLevelCascadeAttentionWrapper``, every level on fa2.

    Args:
        config: the attention.
        workspace: FlashInfer's float workspace, on the device.
    """

    def __init__(self, config: CascadeConfig, workspace: torch.Tensor) -> None:
        self._config = config
        self._workspace = workspace
        self._wrappers: dict[int, Any] = {}
        self._planned: Any = None
        self._rows = slice(0)
        self._row_map: torch.Tensor | None = None

    def load(self, plan: CascadePlan, part: PlanPart, pages: torch.Tensor, row_order: torch.Tensor | None) -> None:
        """Plan the wrapper; arguments as in `LevelsExecutor.load`.

        Raises:
            UnsupportedError: more query heads than its merge kernel can take.
        """
        config = self._config
        check_heads(config, part.num_levels)
        if part.num_levels not in self._wrappers:
            self._wrappers[part.num_levels] = import_flashinfer().MultiLevelCascadeAttentionWrapper(
                part.num_levels, self._workspace, config.kv_layout
            )
        self._planned = self._wrappers[part.num_levels]
        plan_on_fa2(self._planned, config, plan.to_flashinfer(part=part))
        self._rows, self._row_map = rows_of(plan, part, row_order)

    def run(self, call: LayerCall) -> None:
        """Attend for the part's rows of q; writes exactly these rows of ``out``.

        Raises:
            UnsupportedError: what the wrapper does not pass on: sinks, scales, the log-sum-exp.
        """
        refuse_what_stock_lacks(call)
        q, out = call.q, call.out
        if self._row_map is None:
            out[self._rows].copy_(self._planned.run(q[self._rows], call.kv_cache))
        else:
            row_map = self._row_map.long()
            out.index_copy_(0, row_map, self._planned.run(q[row_map], call.kv_cache))


def refuse_what_stock_lacks(call: LayerCall) -> None:
    """FlashInfer's multi-level wrapper does not pass on sinks, scales and the log-sum-exp.

    Raises:
        UnsupportedError: the call asks for one of them.
    """
    for name, asked in (
        ("sinks", call.sinks is not None),
        ("k_scale", call.k_scale != 1.0),
        ("v_scale", call.v_scale != 1.0),
        ("return_lse", call.lse is not None),
    ):
        if asked:
            raise UnsupportedError(f"{name}: FlashInfer's multi-level wrapper does not take it. Use executor='levels'")


class CapturedStock:
    """The wrapper inside a captured CUDA graph: for comparison, and for those who capture theirs.

    Args:
        config: the attention.
        bucket: rows and requests.
        shape: levels and groups.
        device: a CUDA device.
        num_sms: of it.

    Raises:
        UnsupportedError: more query heads than its merge kernel can take.
    """

    def __init__(
        self, config: CascadeConfig, bucket: Bucket, shape: StockShape, device: torch.device, num_sms: int
    ) -> None:
        check_heads(config, shape.num_levels)
        self._config, self._device = config, device
        self.bucket, self.shape = bucket, shape
        shared = bucket.num_groups if shape.num_slots is None else min(shape.num_slots, bucket.num_groups)
        self._slots = [shared] * (shape.num_levels - 1) + [bucket.num_groups]
        self.capacity = PlanCapacity(
            num_rows=bucket.num_rows,
            num_page_indices=config.max_kv_indices,
            num_levels=shape.num_levels,
            num_slots=max(shared - 1, 0),  # rows of padding may need one
        )
        specs = [
            LaunchSpec.of(config, "fa2", bucket, slots, fa2_tile(config, bucket.num_rows - slots + 1), is_shared=False)
            for slots in self._slots
        ]
        workspace_bytes = max(graph_workspace_bytes(config, spec, num_sms) for spec in specs)

        def buffers(more: int) -> list[torch.Tensor]:
            return [torch.zeros(slots + more, dtype=torch.int32, device=device) for slots in self._slots]

        self._wrapper = import_flashinfer().MultiLevelCascadeAttentionWrapper(
            shape.num_levels,
            torch.empty(workspace_bytes, dtype=torch.uint8, device=device),
            config.kv_layout,
            use_cuda_graph=True,
            qo_indptr_buf_arr=buffers(1),
            paged_kv_indptr_buf_arr=buffers(1),
            paged_kv_indices_buf_arr=[
                torch.zeros(config.max_kv_indices, dtype=torch.int32, device=device) for _ in self._slots
            ],
            paged_kv_last_page_len_buf_arr=buffers(0),
        )
        self._row_map = torch.arange(bucket.num_rows, device=device)
        self._copied = torch.cuda.Event()

    def lay(self, plan: CascadePlan, levels: list[Level], needs: Needs) -> Laid | None:
        """See `graph_state.GraphExecutor.lay`."""
        return None if self.capacity.lacks(plan.usage()) else Laid(0, levels, ())

    def misfit(self, plan: CascadePlan) -> CapacityError:
        """See `graph_state.GraphExecutor.misfit`."""
        where = f"a graph for {self.bucket} ({self.shape})"
        lacking = self.capacity.lacks(plan.usage())
        return capacity_error("the plan", lacking, "Plan with the capacity of this graph, or run it eagerly", where)

    def load(self, plan: CascadePlan, laid: Laid) -> None:
        """See `graph_state.GraphExecutor.load`."""
        arguments = plan.to_flashinfer(num_levels=len(self._slots), slots=self._slots)
        # FlashInfer takes no fewer rows than captured: those of padding lie in groups without KV.
        for level, qo_indptr in zip(plan.levels(num_levels=len(self._slots)), arguments["qo_indptr_arr"], strict=True):
            qo_indptr[len(level.qo_indptr) :] = self.bucket.num_rows
        arguments["causal"] = self.bucket.kind == "append"  # fixed at capture
        if self.bucket.kind == "decode":
            arguments["qo_indptr_arr"][-1] = torch.arange(self.bucket.num_rows + 1, dtype=torch.int32)
        rows = torch.arange(self.bucket.num_rows, dtype=torch.int64)
        if plan.row_order is not None:
            rows[: plan.num_rows] = torch.from_numpy(plan.row_order.astype(np.int64))
        with torch.cuda.device(self._device):
            self._copied.synchronize()  # FlashInfer plans in pinned memory of its own
            try:
                self._row_map.copy_(rows, non_blocking=True)
                plan_on_fa2(self._wrapper, self._config, arguments)
            finally:
                self._copied.record()

    def load_nothing(self) -> None:
        """See `graph_state.GraphExecutor.load_nothing`."""
        empty = CascadePlanner(self._config, PlannerPolicy(executor="flat")).plan([[]], [0])
        self.load(empty, Laid(0, [], ()))

    def run(self, call: LayerCall) -> None:
        """See `graph_state.GraphExecutor.run`."""
        refuse_what_stock_lacks(call)
        call.out.index_copy_(0, self._row_map, self._wrapper.run(call.q[self._row_map], call.kv_cache))


def check_heads(config: CascadeConfig, num_levels: int) -> None:
    """Refuse what FlashInfer's merge kernel cannot take.

    Raises:
        UnsupportedError: more query heads than it has threads for.
    """
    limit = MAX_MERGED_HEADS[config.head_dim]
    if num_levels > 1 and config.num_qo_heads > limit:
        raise UnsupportedError(
            f"num_qo_heads={config.num_qo_heads}: FlashInfer's multi-level wrapper merges at most {limit} at "
            f"head_dim={config.head_dim}. Use executor='levels', which takes any number"
        )

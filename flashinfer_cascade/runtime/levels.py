"""The levels executor: one FlashInfer launch per level, then one merge of them all. Flat is a single level."""

from __future__ import annotations

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.plan import CascadePlan, PlanPart
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.kernels.merge import merge
from flashinfer_cascade.runtime.launch import PagedLaunch


def rows_of(plan: CascadePlan, part: PlanPart, row_order: torch.Tensor | None) -> tuple[slice, torch.Tensor | None]:
    """Where a part's plan rows lie in q: a slice when they are consecutive there, else a map on the device."""
    rows = slice(part.row_begin, part.row_end)
    if row_order is None or plan.row_order is None:
        return rows, None
    order = plan.row_order[rows]
    first = int(order[0])
    if int(order[-1]) - first == len(order) - 1 and (order[1:] > order[:-1]).all():
        return slice(first, first + len(order)), None
    return rows, row_order[rows]


class LevelsExecutor:
    """Runs one part of a plan on FlashInfer.

    Loading grows the partial results' buffers where a batch needs more than any before it; running allocates
    nothing.

    Args:
        config: the attention.
        workspace: FlashInfer's float workspace, on the device.
    """

    def __init__(self, config: CascadeConfig, workspace: torch.Tensor) -> None:
        self._config = config
        self._workspace = workspace
        self._launches: list[PagedLaunch] = []
        self._active: list[PagedLaunch] = []
        self._partials = torch.empty(0)
        self._partial_lse = torch.empty(0)
        self._gathered = torch.empty(0)
        self._rows = slice(0)
        self._row_map: torch.Tensor | None = None

    def load(self, plan: CascadePlan, part: PlanPart, pages: torch.Tensor, row_order: torch.Tensor | None) -> None:
        """Plan the part's launches.

        Args:
            plan: what to run.
            part: which part of it.
            pages: int32[len(plan.seg_pages)], on the device.
            row_order: int32[plan.num_rows], on the device, or None.
        """
        levels = plan.levels(part)
        while len(self._launches) < len(levels):
            self._launches.append(PagedLaunch(self._config, self._workspace))
        for number, (level, launch) in enumerate(zip(levels, self._launches, strict=False)):
            begin, end = plan.level_pages(part, number)
            is_last = number == len(levels) - 1
            launch.plan(level, pages[begin:end], causal=part.causal and is_last, backend=part.backends[number])
        self._active = self._launches[: len(levels)]
        self._rows, self._row_map = rows_of(plan, part, row_order)
        self._reserve(len(levels), part.row_end - part.row_begin)

    def run(self, call: LayerCall) -> None:
        """Attend for the part's rows of q; writes exactly these rows of ``out`` and ``lse``."""
        row_map, q, out, lse = self._row_map, call.q, call.out, call.lse
        if row_map is None:
            q, out = q[self._rows], out[self._rows]
            lse = None if lse is None else lse[self._rows]
            if len(self._active) == 1 and call.sinks is None and out.is_contiguous():
                self._active[0].run(q, call.kv_cache, out, lse, call.k_scale, call.v_scale)
                return
        else:
            q = torch.index_select(q, 0, row_map, out=self._gathered[: len(row_map)])
        num_levels, num_rows = len(self._active), len(q)
        partials = self._partials[: num_levels * num_rows].view(num_levels, num_rows, *q.shape[1:])
        partial_lse = self._partial_lse[: num_levels * num_rows].view(num_levels, num_rows, q.shape[1])
        for number, launch in enumerate(self._active):
            launch.run(q, call.kv_cache, partials[number], partial_lse[number], call.k_scale)
        merge(partials, partial_lse, out, row_map=row_map, sinks=call.sinks, v_scale=call.v_scale, lse=lse)

    def _reserve(self, num_levels: int, num_rows: int) -> None:
        config, device = self._config, self._workspace.device
        dtype = getattr(torch, config.dtype)
        shape = (config.num_qo_heads, config.head_dim)
        if len(self._partials) < num_levels * num_rows:
            self._partials = torch.empty(num_levels * num_rows, *shape, dtype=dtype, device=device)
            self._partial_lse = torch.empty(num_levels * num_rows, shape[0], dtype=torch.float32, device=device)
        if self._row_map is not None and len(self._gathered) < num_rows:
            self._gathered = torch.empty(num_rows, *shape, dtype=dtype, device=device)

"""FlashInfer's own multi-level wrapper, for those who hold one already and for comparison."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.plan import CascadePlan, PlanPart
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.launch import import_flashinfer, plan_stock
from flashinfer_cascade.runtime.levels import rows_of

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
        limit = MAX_MERGED_HEADS[config.head_dim]
        if part.num_levels > 1 and config.num_qo_heads > limit:
            raise UnsupportedError(
                f"num_qo_heads={config.num_qo_heads}: FlashInfer's multi-level wrapper merges at most {limit} at "
                f"head_dim={config.head_dim}. Use executor='levels', which takes any number"
            )
        if part.num_levels not in self._wrappers:
            self._wrappers[part.num_levels] = import_flashinfer().MultiLevelCascadeAttentionWrapper(
                part.num_levels, self._workspace, config.kv_layout
            )
        self._planned = self._wrappers[part.num_levels]
        plan_stock(self._planned, plan, part)
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

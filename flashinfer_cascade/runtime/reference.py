"""The reference executor: a plan's segments in plain torch, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flashinfer_cascade.capacity import PlanCapacity
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import CapacityError
from flashinfer_cascade.plan import CascadePlan, Level, PlanPart
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.fit import Laid, Needs
from flashinfer_cascade.runtime.shapes import AnyShape, Bucket

LOG2E = math.log2(math.e)

MAX_LOGITS = 2**25
"""Logits held at once; a segment with more is computed some rows at a time."""


class _Segment(NamedTuple):
    """A segment with KV; rows are counted from the part's first, pages are a slice of `CascadePlan.seg_pages`."""

    level: int
    row_begin: int
    row_end: int
    page_begin: int
    page_end: int
    kv_start: int
    kv_len: int


class ReferenceExecutor:
    """Computes one part of a plan as the plan defines it, whichever executor the plan names.

    Every segment's keys and values are gathered once for all its rows, then each row's partial results are merged.

    Args:
        config: the attention.
        device: any that torch computes on.
        accumulate: of all arithmetic but the inputs' and the result's own rounding: torch.float32 or torch.float64.
    """

    def __init__(
        self, config: CascadeConfig, device: str | torch.device = "cpu", accumulate: torch.dtype = torch.float32
    ) -> None:
        self._config = config
        self._device = torch.device(device)
        self._accumulate = accumulate
        self._num_levels = 0
        self._segments: list[_Segment] = []
        self._rows = self._row_pos = self._pages = torch.empty(0, dtype=torch.int64, device=self._device)

    def load(self, plan: CascadePlan, part: PlanPart) -> None:
        """Take over one part of a plan, in place of the part before."""
        rows = np.arange(plan.num_rows) if plan.row_order is None else plan.row_order
        self._rows = self._copy(rows[part.row_begin : part.row_end])
        self._row_pos = self._copy(plan.row_pos[part.row_begin : part.row_end])
        self._pages = self._copy(plan.seg_pages)
        self._num_levels = part.num_levels
        of_part = slice(part.seg_begin, part.seg_end)
        row_begin = plan.seg_row_begin[of_part] - part.row_begin
        columns = (
            plan.seg_level[of_part],
            row_begin,
            row_begin + plan.seg_num_rows[of_part],
            plan.seg_page_indptr[:-1][of_part],
            plan.seg_page_indptr[1:][of_part],
            plan.seg_kv_start[of_part],
            plan.seg_kv_len[of_part],
        )
        segments = (_Segment(*values) for values in zip(*(column.tolist() for column in columns), strict=True))
        self._segments = [segment for segment in segments if segment.kv_len]

    def _copy(self, array: NDArray[np.integer[Any]]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend for the part's rows of q; writes exactly these rows of `out`, and of `lse` when given.

        Args are those of `CascadeRuntime.run`, with any floating dtype for q, out and lse.
        """
        k_cache, v_cache = kv_cache.unbind(1) if isinstance(kv_cache, torch.Tensor) else kv_cache
        queries = q[self._rows].to(self._accumulate)
        # A row has at most one segment a level. Where it has none, an lse of -inf says that it saw nothing.
        partials = queries.new_zeros(self._num_levels, *queries.shape)
        partial_lse = queries.new_full(partials.shape[:-1], -math.inf)
        scale = self._config.softmax_scale * k_scale
        for segment in self._segments:
            k, v = self._gather(k_cache, segment), self._gather(v_cache, segment)
            step = max(1, MAX_LOGITS // (self._config.num_qo_heads * segment.kv_len))
            for begin in range(segment.row_begin, segment.row_end, step):
                rows = slice(begin, min(begin + step, segment.row_end))
                result = self._attend(queries[rows], k, v, self._row_pos[rows], segment.kv_start, scale)
                partials[segment.level, rows], partial_lse[segment.level, rows] = result
        merged, merged_lse = merge_partials(partials, partial_lse)
        if sinks is not None:
            merged, merged_lse = apply_sinks(merged, merged_lse, sinks.to(merged_lse))
        out[self._rows] = (merged * v_scale).to(out.dtype)
        if lse is not None:
            lse[self._rows] = merged_lse.to(lse.dtype)

    def _gather(self, cache: torch.Tensor, segment: _Segment) -> torch.Tensor:
        """Keys or values of a segment: [num_kv_heads, kv_len, head_dim]."""
        pages = cache[self._pages[segment.page_begin : segment.page_end]]
        if self._config.kv_layout == "HND":
            pages = pages.transpose(1, 2)
        tokens = pages.flatten(0, 1)[: segment.kv_len]
        return tokens.to(self._accumulate).transpose(0, 1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row_pos: torch.Tensor, kv_start: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial attention of rows at `row_pos` over KV whose first token stands at `kv_start`.

        Returns:
            out: shape of q; 0 where a row sees nothing.
            lse: [rows, num_qo_heads], base 2; -inf where a row sees nothing.
        """
        (num_rows, num_heads, _), (num_kv_heads, num_tokens, _) = q.shape, k.shape
        group, cap, window = num_heads // num_kv_heads, self._config.logits_soft_cap, self._config.window_left
        # One product per KV head, of all rows and query heads that read it.
        q = q.view(num_rows, num_kv_heads, group, -1).transpose(0, 1).flatten(1, 2)
        logits = (q @ k.transpose(1, 2)).mul_(scale)
        if cap > 0:
            logits = logits.div_(cap).tanh_().mul_(cap)
        positions = kv_start + torch.arange(num_tokens, device=q.device)
        hidden = positions > row_pos[:, None]
        if window >= 0:
            hidden |= positions < row_pos[:, None] - window
        logits.view(num_kv_heads, num_rows, group, num_tokens).masked_fill_(hidden[:, None], -math.inf)
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top.where(top > -math.inf, 0)).exp_()
        total = weights.sum(-1, keepdim=True)
        out = (weights @ v) / total.where(total > 0, 1)
        lse = (top + total.log()) * LOG2E

        def by_row(x: torch.Tensor) -> torch.Tensor:
            return x.view(num_kv_heads, num_rows, group, -1).transpose(0, 1).flatten(1, 2)

        return by_row(out), by_row(lse)[..., 0]


class ReferenceExecutors:
    """Reference executors for all parts of a plan, on the CPU."""

    def __init__(self, config: CascadeConfig) -> None:
        self._config = config
        self._executors: list[ReferenceExecutor] = []

    def load(self, plan: CascadePlan) -> list[str]:
        """See `runtime.Executors`."""
        executors = [ReferenceExecutor(self._config) for _ in plan.parts]
        for executor, part in zip(executors, plan.parts, strict=True):
            executor.load(plan, part)
        self._executors = executors
        return ["reference"] * len(executors)

    def run(self, number: int, call: LayerCall) -> None:
        """See `runtime.Executors`."""
        self._executors[number].run(*call)

    def default_graph_shapes(self, bucket: Bucket) -> list[AnyShape | None]:
        """See `runtime.Executors`."""
        return [None]

    def graphs(self, graphs: Sequence[tuple[Bucket, AnyShape | None]]) -> list[ReferenceRows]:
        """See `runtime.Executors`; shapes are a GPU's matter."""
        return [ReferenceRows(self._config, bucket) for bucket, _ in graphs]


class ReferenceRows:
    """What a graph does, on the CPU: a plan of at most so many rows, the others seeing nothing.

    Args:
        config: the attention.
        bucket: rows and requests.
    """

    def __init__(self, config: CascadeConfig, bucket: Bucket) -> None:
        self._executors = ReferenceExecutors(config)
        self._plan: CascadePlan | None = None
        self.bucket = bucket
        self.shape: AnyShape | None = None
        self.capacity = PlanCapacity(num_rows=bucket.num_rows, num_page_indices=config.max_kv_indices)

    def lay(self, plan: CascadePlan, levels: list[Level], needs: Needs) -> Laid:
        """See `graph_state.GraphExecutor.lay`; every plan of the bucket fits."""
        return Laid(0, levels, ())

    def misfit(self, plan: CascadePlan) -> CapacityError:
        """See `graph_state.GraphExecutor.misfit`."""
        return CapacityError("every plan fits on the CPU")

    def load(self, plan: CascadePlan, laid: Laid) -> None:
        """See `graph_state.GraphExecutor.load`."""
        self._executors.load(plan)
        self._plan = plan

    def load_nothing(self) -> None:
        """See `graph_state.GraphExecutor.load_nothing`."""
        self._plan = None

    def run(self, call: LayerCall) -> None:
        """See `graph_state.GraphExecutor.run`."""
        num_rows = 0 if self._plan is None else self._plan.num_rows
        call.out[num_rows:] = 0
        if call.lse is not None:
            empty = -math.inf if call.sinks is None else call.sinks * LOG2E
            call.lse[num_rows:] = empty
        if self._plan is not None:
            live = call._replace(
                q=call.q[:num_rows], out=call.out[:num_rows], lse=None if call.lse is None else call.lse[:num_rows]
            )
            for number in range(len(self._plan.parts)):
                self._executors.run(number, live)


def merge_partials(partials: torch.Tensor, partial_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint KV, all parts of a row at once.

    Args:
        partials: [num_partials, rows, heads, head_dim]; 0 where the lse is -inf.
        partial_lse: [num_partials, rows, heads], base 2; -inf where a row saw nothing.

    Returns:
        out: [rows, heads, head_dim]; 0 where a row saw nothing in any.
        lse: [rows, heads], base 2; -inf there.

    Source: "FlashInfer" (arXiv:2501.01005), section 2.2, "Attention Composition".
    """
    top = partial_lse.amax(0)
    weights = torch.exp2(partial_lse - top.where(top > -math.inf, 0))
    total = weights.sum(0)
    out = torch.einsum("prh,prhd->rhd", weights, partials) / total.where(total > 0, 1)[..., None]
    return out, top + total.log2()


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let one logit a head join the denominator, without a value: ``out / (1 + 2 ** (sink - lse))``.

    Args:
        out: [rows, heads, head_dim].
        lse: [rows, heads], base 2.
        sinks: [heads], natural-log units; -inf is none.
    """
    with_sink = torch.logaddexp2(lse, sinks * LOG2E)
    share = torch.exp2(lse - with_sink).where(lse > -math.inf, 0)
    return out * share[..., None], with_sink

"""Steps in which only lengths grow: the structure of the plan before is used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.capacity import PlanCapacity
from flashinfer_cascade.choose import Chooser, Groups
from flashinfer_cascade.config import MAX_INT32
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.layout import Choice
from flashinfer_cascade.pages import PagePool
from flashinfer_cascade.plan import CascadePlan


class Steady:
    """What a plan's next steps need, as long as each adds one token and one row to every request but padding.

    Args:
        chooser: decides.
        batch: that the plan is of; one row a request.
        groups: its parts.
        choices: what was decided on them.
        plan: the plan.
        slots: int64[num_requests], slot of each request.
        until: int64[num_requests], KV tokens up to which the forests stay as they are.
        capacity: that the plan was made to fit.
    """

    def __init__(
        self,
        chooser: Chooser,
        batch: Batch,
        groups: Groups,
        choices: list[Choice],
        plan: CascadePlan,
        slots: Int64Array,
        until: Int64Array,
        capacity: PlanCapacity | None,
    ) -> None:
        self._chooser, self._groups, self._choices, self._plan = chooser, groups, choices, plan
        self._slots, self._capacity, self._moves = slots, capacity, -1
        grows = batch.seq_lens > 0
        in_plan = grows[plan.request_order]
        self._row_growth = in_plan.astype(np.int32)
        growth = np.zeros(plan.num_segments, np.int32)
        for part in plan.parts:
            growth[part.seg_end - part.num_requests : part.seg_end] = in_plan[part.request_begin : part.request_end]
        self._seg_growth = growth
        self._more_indices = chooser.config.max_kv_indices - batch.num_pages
        self._steps_left = int((np.minimum(until, MAX_INT32) - batch.seq_lens)[grows].min(initial=MAX_INT32))
        self._set_choice_left()

    def _set_choice_left(self) -> None:
        """Steps in which no rounded length moves; none where windows are compared with exact lengths."""
        windowed = self._chooser.config.window_left >= 0
        self._choice_left = 0 if windowed else min(choice.tokens_left for choice in self._choices)

    def step(self, gather: Callable[[Int64Array], Batch], pool: PagePool) -> CascadePlan | None:
        """Plan one step; None when it must be planned anew, and `Steady` with it.

        Args:
            gather: gives the batch in some slots, the step's token included.
            pool: the block tables, with the step's pages.
        """
        config, plan = self._chooser.config, self._plan
        self._steps_left -= 1
        self._choice_left -= 1
        self._more_indices -= len(self._slots)
        if self._steps_left < 0 or self._more_indices < 0:
            return None
        seg_kv_len = plan.seg_kv_len + self._seg_growth
        seg_num_pages = (seg_kv_len + (config.page_size - 1)) // config.page_size
        if self._capacity is not None and int(seg_num_pages.sum()) > self._capacity.num_page_indices:
            return None
        parts = plan.parts
        if self._choice_left < 0:
            batch = gather(self._slots)
            view = batch.pages
            choices = [self._chooser.choose(name, batch, forest) for name, forest in self._groups]
            if not all(a.same_as(b) for a, b in zip(choices, self._choices, strict=True)):
                return None
            self._choices = choices
            self._set_choice_left()
            parts = tuple(
                replace(part, reason=choice.reason, predicted_us=choice.predicted_us)
                for part, choice in zip(parts, choices, strict=True)
            )
        else:
            view = pool.view()
        begin = plan.seg_page_begin
        if pool.moves != self._moves:
            if self._moves < 0:
                first = np.searchsorted(plan.qo_indptr, plan.seg_row_begin)
                self._seg_slot = self._slots[plan.request_order[first]]
                self._seg_offset = plan.seg_kv_start // config.page_size
            begin = (pool.begin[self._seg_slot] + self._seg_offset).astype(np.int32)
            self._moves = pool.moves
        self._plan = CascadePlan(
            config,
            parts,
            plan.row_order,
            plan.row_pos + self._row_growth,
            plan.request_order,
            plan.qo_indptr,
            plan.seg_row_begin,
            plan.seg_num_rows,
            view,
            begin,
            seg_num_pages,
            plan.seg_kv_start,
            seg_kv_len,
            plan.seg_level,
            plan.structure_id,
            plan.generation + 1,
        )
        return self._plan

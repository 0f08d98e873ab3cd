"""Steps in which only lengths grow: the structure of the plan before is used again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.capacity import PlanCapacity
from flashinfer_cascade.choose import Chooser
from flashinfer_cascade.config import MAX_INT32
from flashinfer_cascade.csr import Int32Array, Int64Array
from flashinfer_cascade.layout import Choice
from flashinfer_cascade.native import Status
from flashinfer_cascade.native_session import Grower, State
from flashinfer_cascade.pages import PagePool
from flashinfer_cascade.plan import CascadePlan, PlanPart

Grown = tuple[Int32Array, Int32Array, Int32Array, tuple[PlanPart, ...]]
"""row_pos, seg_kv_len, seg_num_pages and parts of a plan."""


class Steady:
    """What a plan's next steps need, as long as each adds one token and one row to every request but padding.

    With a row a request there is but one part.

    Args:
        chooser: decides.
        state: of the session, with the native core.
        batch: that the plan is of.
        choice: what was decided on it.
        plan: the plan.
        slots: int64[num_requests], slot of each request.
        until: int64[num_requests], KV tokens up to which the forest stays as it is.
        capacity: that the plan was made to fit.
    """

    def __init__(
        self,
        chooser: Chooser,
        state: State | None,
        batch: Batch,
        choice: Choice,
        plan: CascadePlan,
        slots: Int64Array,
        until: Int64Array,
        capacity: PlanCapacity | None,
    ) -> None:
        self._chooser, self._choice, self._plan = chooser, choice, plan
        self._slots, self._capacity, self._moves = slots, capacity, -1
        num, config = len(slots), chooser.config
        grows = batch.seq_lens > 0
        # What a step adds to row_pos and to seg_kv_len, where each request's own segment comes last.
        self._growth = np.zeros(num + plan.num_segments, np.int32)
        self._growth[:num] = self._growth[-num:] = grows[plan.request_order]
        self._more_indices = config.max_kv_indices - batch.num_pages
        self._steps_left = int((np.minimum(until, MAX_INT32) - batch.seq_lens)[grows].min(initial=MAX_INT32))
        self._why_flat = chooser.why_flat(batch, choice.forest)
        self._windowed = config.window_left >= 0  # windows are compared with exact lengths
        self._choice_left = 0 if self._windowed else choice.tokens_left
        self._grower = None
        if state is not None and chooser.core is not None and chooser.rater is not None and choice.raw is not None:
            before = np.concatenate((plan.row_pos, plan.seg_kv_len))
            how = choice.executor == "flat", self._why_flat is None
            where = chooser.core, chooser.rater, state, slots, choice.forest, choice.raw
            self._grower = None if self._windowed else Grower(*where, before, self._growth, *how)

    def step(self, gather: Callable[[Int64Array], Batch], pool: PagePool) -> CascadePlan | None:
        """Plan one step; None when it must be planned anew, and `Steady` with it.

        Args:
            gather: gives the batch in some slots, the step's token included.
            pool: the block tables, with the step's pages.
        """
        plan = self._plan
        self._steps_left -= 1
        self._choice_left -= 1
        self._more_indices -= len(self._slots)
        if self._steps_left < 0 or self._more_indices < 0:
            return None
        grown = self._grow(gather) if self._grower is None else self._grow_native(self._grower)
        if grown is None:
            return None
        row_pos, seg_kv_len, seg_num_pages, parts = grown
        if self._capacity is not None and int(seg_num_pages.sum()) > self._capacity.num_page_indices:
            return None
        begin = plan.seg_page_begin
        if pool.moves != self._moves:
            if self._moves < 0:
                first = np.searchsorted(plan.qo_indptr, plan.seg_row_begin)
                self._seg_slot = self._slots[plan.request_order[first]]
                self._seg_offset = plan.seg_kv_start // plan.config.page_size
            begin = (pool.begin[self._seg_slot] + self._seg_offset).astype(np.int32)
            self._moves = pool.moves
        self._plan = CascadePlan(
            plan.config,
            parts,
            plan.row_order,
            row_pos,
            plan.request_order,
            plan.qo_indptr,
            plan.seg_row_begin,
            plan.seg_num_rows,
            pool.view(),
            begin,
            seg_num_pages,
            plan.seg_kv_start,
            seg_kv_len,
            plan.seg_level,
            plan.structure_id,
            plan.generation + 1,
        )
        return self._plan

    def _grow(self, gather: Callable[[Int64Array], Batch]) -> Grown | None:
        """The arrays that change and the parts, in numpy; None when another choice is due."""
        plan, page_size = self._plan, self._plan.config.page_size
        parts = plan.parts
        if self._choice_left < 0:
            choice = self._chooser.choose(parts[0].name, gather(self._slots), self._choice.forest)
            if not choice.same_as(self._choice):
                return None
            self._choice = choice
            self._choice_left = 0 if self._windowed else choice.tokens_left
            parts = (parts[0].told_again(choice.reason, choice.predicted_us),)
        row_pos = plan.row_pos + self._growth[: plan.num_rows]
        seg_kv_len = plan.seg_kv_len + self._growth[plan.num_rows :]
        return row_pos, seg_kv_len, -(-seg_kv_len // page_size), parts

    def _grow_native(self, grower: Grower) -> Grown | None:
        """The same by the native core."""
        parts = self._plan.parts
        row_pos, seg_kv_len, seg_num_pages, status = grower.step(self._choice_left < 0)
        if self._choice_left < 0:
            if status not in (Status.FOUND, Status.NOTHING_PAYS):
                return None
            rated = grower.predicted(status)
            self._choice_left = rated.tokens_left
            executor, reason, predicted = self._chooser.conclude(
                self._why_flat, rated, self._choice.forest.num_nodes > 0
            )
            if executor != parts[0].executor:
                return None
            parts = (parts[0].told_again(reason, predicted),)
        return row_pos, seg_kv_len, seg_num_pages, parts

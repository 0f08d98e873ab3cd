"""Planning in a decode loop: a session is told what changes, and a plan costs what changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.batch import Batch, check_num_indices, check_num_rows, id_vector, query_lens
from flashinfer_cascade.capacity import PlanCapacity, check_capacity
from flashinfer_cascade.choose import Chooser
from flashinfer_cascade.config import MAX_INT32
from flashinfer_cascade.csr import Int32Array, Int64Array
from flashinfer_cascade.errors import CapacityError, InvalidBatchError, UnsupportedError, listed, told
from flashinfer_cascade.native_session import State
from flashinfer_cascade.pages import PagePool
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.sharing import Sharing
from flashinfer_cascade.slots import Slots
from flashinfer_cascade.steady import Steady

IDS = "give the ids of requests, as a list"
"""What to do about what is not that."""


class PlanSession:
    """The live requests of one engine, planned step by step; made by `CascadePlanner.session`.

    A plan of a session equals the one-shot plan of the same tables, lengths and order of requests. The order is that in
    which requests were added; `remove` keeps it for the others, and `reorder` sets it. Ids are anything hashable.

    A call that raises leaves the session as it was. A session is for one thread at a time, apart from what `plan_async`
    says. It is not copied or pickled: its plans are, and planners.

    Attributes:
        config: that of the planner.
    """

    def __init__(self, chooser: Chooser) -> None:
        self.config, self._chooser = chooser.config, chooser
        self._slots = Slots(self.config.page_size, self.config.max_batch_size)
        self._pool = PagePool()
        self._state = None if chooser.core is None else State(chooser.core)
        self._sharing = Sharing(self._state)
        self._ids: Int32Array | None = None  # that the native core knows of
        self._num_steps = 0  # whole-batch steps since the last plan
        self._changed = True  # anything else since then
        self._steady: Steady | None = None
        self._start_steady: Callable[[], Steady] | None = None
        self._plan: CascadePlan | None = None
        self._capacity: PlanCapacity | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[CascadePlan] | None = None

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a session cannot be copied or pickled, it belongs to one decode loop: give the other process a planner, "
            "and add the requests to a session of that one"
        )

    def __len__(self) -> int:
        return len(self._slots.by_id)

    def __contains__(self, id: Hashable) -> bool:
        return id in self._slots.by_id

    @property
    def ids(self) -> list[Hashable]:
        """The live requests, in the order of the batch."""
        return list(self._slots.by_id)

    @property
    def pool_entries(self) -> int:
        """Page ids that the session has memory for, 4 bytes each."""
        return self._pool.capacity

    def seq_len(self, id: Hashable) -> int:
        """KV tokens of a request."""
        self._settle()
        return int(self._slots.seq_lens[self._slot(id)])

    def block_table(self, id: Hashable) -> Int32Array:
        """The pages of a request: int32[num_pages], CPU, read-only."""
        self._settle()
        return self._pool.table(self._slot(id))

    def add(self, id: Hashable, pages: Any, seq_len: int, *, computed_len: int = 0) -> None:
        """Take in a request, behind the others.

        Args:
            id: its name.
            pages: int[>= ceil(seq_len / page_size)], its block table without padding; arrays are taken much faster
                than lists. Pages that `seq_len` does not need yet are for later tokens.
            seq_len: KV tokens, with those whose rows are in the next plan; 0 is a padding request, which `step`
                passes by.
            computed_len: leading tokens whose KV is in the cache already; the others are rows of the next plan.

        Raises:
            InvalidBatchError: the id is taken, or a value is wrong.
            CapacityError: there are max_batch_size requests already.
        """
        self._settle()
        self._check_new(id)
        length = _integer("seq_len", seq_len, 0, MAX_INT32)
        computed = _integer("computed_len", computed_len, 0, max(length - 1, 0))
        table = self._pages("pages", pages)
        self._check_enough(id, length, len(table))
        self._enter(id, table, length, computed, 1)

    def fork(self, id: Hashable, new_id: Hashable) -> None:
        """Take in a copy of a request, behind the others: one more sample or beam.

        Both then hold the same pages. Unless the last one is full, give one of them a page of its own there
        (`replace_page`) before their next tokens are written.

        Raises:
            InvalidBatchError: `id` is not in the session, or `new_id` is.
            CapacityError: there are max_batch_size requests already.
        """
        self._settle()
        slot = self._slot(id)
        self._check_new(new_id)
        lens = int(self._slots.seq_lens[slot]), int(self._slots.computed_lens[slot]), int(self._slots.last_rows[slot])
        self._enter(new_id, self._pool.table(slot), *lens)

    def remove(self, id: Hashable) -> None:
        """Let a request go; its id may be used again.

        Raises:
            InvalidBatchError: it is not in the session.
        """
        self._settle()
        self._slot(id)
        slot = self._slots.leave(id)
        self._pool.drop(slot)
        self._sharing.forget(slot)
        self._changed = True

    def append(self, id: Hashable, num_tokens: int, new_pages: Any = ()) -> None:
        """Add tokens to one request, as rows of the next plan: a chunk of a prompt, draft tokens.

        Args:
            id: the request.
            num_tokens: how many; 0 adds pages alone.
            new_pages: pages behind its last one, as many as the tokens need, or more.

        Raises:
            InvalidBatchError: the request is unknown, a value is wrong, or pages are missing.
        """
        self._settle()
        slot = self._slot(id)
        table = self._pages("new_pages", new_pages)
        length = int(self._slots.seq_lens[slot])
        length += _integer("num_tokens", num_tokens, 0, MAX_INT32 - length)
        self._check_enough(id, length, int(self._pool.count[slot]) + len(table))
        self._pool.extend(slot, table)
        self._set_length(slot, length)

    def step(self, new_pages: Mapping[Hashable, int] | None = None, *, ids: Iterable[Hashable] | None = None) -> None:
        """Add a token to every request, or to some: a decode step.

        Args:
            new_pages: a page behind the last one, for each request whose token needs one; others may get theirs early.
            ids: the requests; None is all but padding.

        Raises:
            InvalidBatchError: a request is unknown or named twice, a page is out of range or missing.
        """
        self._settle()
        lens, space, grows = self._slots.seq_lens, self._slots.space, self._slots.grows
        page_size = self.config.page_size
        given, pages = ([], []) if new_pages is None else self._given(new_pages)
        if ids is None:
            full = (lens >= space).nonzero()[0].tolist()
        else:
            some = np.array([self._slot(id) for id in listed("ids", ids, IDS)], np.int64)
            if len(np.unique(some)) != len(some):
                raise InvalidBatchError("ids names a request twice: a step adds one token to each")
            full = some[lens[some] >= self._pool.count[some] * page_size].tolist()
        if full:
            self._check_given(full, given)
        if given:
            slots = np.array(given)
            self._pool.extend_each(slots, np.array(pages))
            space[slots] += grows[slots] * page_size
        if ids is None:
            lens += grows
            self._num_steps += 1
        elif len(some):
            lens[some] += 1
            grows[some] = 1
            space[some] = self._pool.count[some] * page_size
            self._changed = True

    def truncate(self, id: Hashable, seq_len: int) -> None:
        """Drop a request's last tokens (rejected drafts, preemption), and the pages that no token is left in.

        Pages that the engine keeps for the request nevertheless are given again, with `append` or `step`.

        Raises:
            InvalidBatchError: the request is unknown, or shorter than `seq_len`.
        """
        self._settle()
        slot = self._slot(id)
        length = _integer("seq_len", seq_len, 0, int(self._slots.seq_lens[slot]))
        count = -(-length // self.config.page_size)
        self._pool.cut(slot, count)
        self._sharing.cut(slot, count)
        self._slots.computed_lens[slot] = min(int(self._slots.computed_lens[slot]), length)
        self._set_length(slot, length)

    def replace_page(self, id: Hashable, index: int, page: int) -> None:
        """Exchange one page of a request's table (copy-on-write), as the engine has copied its content.

        Args:
            id: the request.
            index: which page of its table.
            page: what is there from now on.

        Raises:
            InvalidBatchError: the request is unknown, or a value is out of range.
        """
        self._settle()
        slot = self._slot(id)
        index = _integer("index", index, 0, int(self._pool.count[slot]) - 1)
        page = _integer("page", page, 0, self.config.max_kv_pages - 1)
        if int(self._pool.table(slot)[index]) != page:
            self._pool.replace(slot, index, page)
            self._sharing.cut(slot, index)
            self._changed = True

    def reorder(self, ids: Iterable[Hashable]) -> None:
        """Set the order of the batch.

        Args:
            ids: all live requests, each once.

        Raises:
            InvalidBatchError: these are not the live requests.
        """
        self._settle()
        order = listed("ids", ids, IDS)
        slots = {id: self._slot(id) for id in order}
        if len(slots) != len(order) or len(slots) != len(self):
            raise InvalidBatchError(f"{len(order)} ids for {len(self)} live requests: name each request once")
        if order != self.ids:
            self._slots.reorder(slots)
            self._sharing.reorder()
            self._changed = True

    def plan(self, qo_lens: Any = None, *, capacity: PlanCapacity | None = None) -> CascadePlan:
        """Plan the batch as it is.

        Args:
            qo_lens: int[num_requests], query rows of each request, in the order of the batch; None takes the tokens
                that it got since the last plan. One that got none keeps the rows that it had there (one if it was in
                none), so that a batch may be planned again after requests left.
            capacity: what the plan must fit into, as in `CascadePlanner.plan`.

        Raises:
            InvalidBatchError: there is no request, or `qo_lens` contradicts their lengths.
            UnsupportedError: the policy forces a cascade that a sliding window makes wrong.
            CapacityError: more rows or page ids than the configuration reserves, or not even the flat plan fits.
        """
        check_capacity(capacity)
        self._settle()
        return self._make_plan(qo_lens, capacity)

    def plan_async(self, qo_lens: Any = None, *, capacity: PlanCapacity | None = None) -> Future[CascadePlan]:
        """Plan in a worker thread, while this one does something else: launches the step before, say.

        The session belongs to the worker until the plan is there; any other call waits for that. A plan is never
        written to again, so earlier ones may be read all the while.

        Returns:
            A future: its ``result()`` is what `plan` returns, or raises.

        Raises:
            InvalidBatchError: `capacity` is none.
        """
        check_capacity(capacity)
        self._settle()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="flashinfer-cascade-plan")
        self._pending = self._worker.submit(self._make_plan, qo_lens, capacity)
        return self._pending

    def _settle(self) -> None:
        """Wait until the session is ours."""
        if self._pending is not None:
            wait([self._pending])  # whoever holds the future sees an exception
            self._pending = None

    def _make_plan(self, qo_lens: Any, capacity: PlanCapacity | None) -> CascadePlan:
        last = self._plan
        if qo_lens is None and last is not None and not self._changed and capacity == self._capacity:
            if self._num_steps == 0:
                return last
            if self._num_steps == 1 and self._steady is None and self._start_steady is not None:
                self._steady = self._start_steady()
            if self._num_steps == 1 and self._steady is not None:
                plan = self._steady.step(lambda slots: self._gather(slots, None)[0], self._pool)
                if plan is not None:
                    return self._publish(plan)
        return self._plan_anew(qo_lens, capacity)

    def _publish(self, plan: CascadePlan) -> CascadePlan:
        self._slots.computed_lens[:] = self._slots.seq_lens
        self._num_steps = 0
        self._changed = False
        self._plan = plan
        return plan

    def _plan_anew(self, qo_lens: Any, capacity: PlanCapacity | None) -> CascadePlan:
        config = self.config
        if not self._slots.by_id:
            raise InvalidBatchError("the batch is empty: skip the step when no request is live")
        slots = self._slots.in_order()
        given = None if qo_lens is None else query_lens(config, self._slots.seq_lens[slots], qo_lens)
        batch, num_rows, num_pages, num_append = self._gather(slots, given)
        check_num_rows(config, num_rows)
        check_num_indices(config, num_pages)
        if num_pages * config.page_size > MAX_INT32 and int(batch.seq_lens.max()) > MAX_INT32:
            raise InvalidBatchError(f"a request has {batch.seq_lens.max()} tokens, above {MAX_INT32}: end it before")
        names = self._chooser.part_names(num_append, len(slots))
        forests = self._sharing.forests(batch, slots, len(names), self._chooser.policy.max_decode_rows)
        groups = list(zip(names, forests, strict=True))
        self._steady = self._start_steady = None
        plan, choices = self._chooser.plan(batch, groups, capacity, self._plan)
        if choices is not None and num_rows == len(slots):

            def start() -> Steady:
                until = self._sharing.tokens_until_change(batch, slots)
                return Steady(self._chooser, self._state, batch, choices[0], plan, slots, until, capacity)

            self._start_steady = start  # once the next plan is known to be such a step
        self._slots.last_rows[slots] = batch.qo_lens
        self._capacity = capacity
        return self._publish(plan)

    def _gather(self, slots: Int64Array, rows: Int64Array | None) -> tuple[Batch, int, int, int]:
        """The batch in some slots.

        Args:
            slots: int64[num_requests], slot of each request.
            rows: int64[num_requests], query rows of each; None for the tokens since the last plan.

        Returns:
            The batch, and how many rows, pages, and requests with more than max_decode_rows rows it has.
        """
        page_size, most, view = self.config.page_size, self._chooser.policy.max_decode_rows, self._pool.view()
        if self._state is not None:
            if self._pool.ids is not self._ids:
                self._ids = self._pool.ids
                self._state.refer(len(self._pool.begin), ids=self._ids)
            return self._state.gather(slots, page_size, view, most, rows)
        lens = self._slots.seq_lens[slots]
        if rows is None:
            rows = lens - self._slots.computed_lens[slots]
            rows = np.where(rows == 0, np.minimum(self._slots.last_rows[slots], np.maximum(lens, 1)), rows)
        counts = -(-lens // page_size)
        block = np.array((self._pool.begin[slots], counts, lens, rows))
        batch = Batch.of(page_size, view, block)
        return batch, int(rows.sum()), int(counts.sum()), int(np.count_nonzero(rows > most))

    def _enter(self, id: Hashable, table: NDArray[Any], length: int, computed: int, last_rows: int) -> None:
        """Give a request a slot."""
        if self._slots.is_full:
            self._more_slots()
        slot = self._slots.enter(id, computed, last_rows)
        self._pool.put(slot, table)
        self._set_length(slot, length)

    def _set_length(self, slot: int, length: int) -> None:
        self._slots.set_length(slot, length, int(self._pool.count[slot]))
        self._changed = True

    def _more_slots(self) -> None:
        slots, num_slots = self._slots, self._slots.resize()
        self._pool.resize(num_slots)
        self._sharing.resize(num_slots)
        if self._state is not None:
            arrays = {name: getattr(slots, name) for name in ("seq_lens", "computed_lens", "last_rows")}
            self._state.refer(num_slots, begin=self._pool.begin, **arrays)

    def _slot(self, id: Hashable) -> int:
        try:
            return self._slots.by_id[id]
        except (KeyError, TypeError):
            raise InvalidBatchError(f"request {id!r} is not in the session: add it first") from None

    def _check_new(self, id: Hashable) -> None:
        try:
            is_known = id in self._slots.by_id
        except TypeError:
            what = told("the request's id", id)
            raise InvalidBatchError(f"{what}, which has no hash: give a string, a number or a tuple of these") from None
        if is_known:
            raise InvalidBatchError(f"request {id!r} is in the session already: remove it first, or use another id")
        if len(self) >= self.config.max_batch_size:
            raise CapacityError(
                f"{len(self) + 1} requests exceed max_batch_size={self.config.max_batch_size}: "
                "raise it in CascadeConfig or remove one first"
            )

    def _check_enough(self, id: Hashable, length: int, num_pages: int) -> None:
        needed = -(-length // self.config.page_size)
        if num_pages < needed:
            raise InvalidBatchError(
                f"request {id!r}: its table has {num_pages} pages, but {length} tokens need {needed} at "
                f"page_size={self.config.page_size}: give the new pages too"
            )

    def _check_given(self, full: list[int], given: list[int]) -> None:
        missing = set(full).difference(given)
        if missing:
            id = next(id for id, slot in self._slots.by_id.items() if slot in missing)
            who = f"request {id!r} needs" if len(missing) == 1 else f"{len(missing)} requests, {id!r} the first, need"
            raise InvalidBatchError(
                f"{who} a page for this step that new_pages does not give, at {self.seq_len(id)} tokens: allocate the "
                "step's pages first"
            )

    def _given(self, new_pages: Mapping[Hashable, int]) -> tuple[list[int], list[int]]:
        """Slots and pages of a step."""
        if not isinstance(new_pages, Mapping):
            raise InvalidBatchError(f"{told('new_pages', new_pages)}: give a page by request, as a mapping")
        try:
            slots = [self._slots.by_id[id] for id in new_pages]
        except KeyError:
            slots = [self._slot(id) for id in new_pages]  # says which
        pages = list(new_pages.values())
        if not pages:
            return [], []
        if {int}.issuperset(map(type, pages)) and min(pages) >= 0 and max(pages) < self.config.max_kv_pages:
            return slots, pages
        return slots, self._pages("new_pages", pages).tolist()

    def _pages(self, name: str, pages: Any) -> NDArray[Any]:
        return id_vector(name, pages, self.config.max_kv_pages)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        out = operator.index(value)
    except TypeError:
        raise InvalidBatchError(f"{name} is {value!r}: give an integer") from None
    if not low <= out <= high:
        raise InvalidBatchError(f"{name}={out} is outside [{low}, {high}]")
    return out

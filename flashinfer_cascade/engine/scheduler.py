"""What runs in each step: admission, chunks of prompts, forks, copy-on-write and preemption."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashinfer_cascade.engine.allocator import PageAllocator
from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.requests import Batch, Request, Rows, Sequence, SequenceId
from flashinfer_cascade.errors import CapacityError, InvalidBatchError
from flashinfer_cascade.session import PlanSession


@dataclass(slots=True)
class SchedulerStats:
    """What a scheduler did so far.

    Attributes:
        prompt_tokens: computed, those computed again after a preemption included.
        cached_tokens: of admitted sequences, found in the cache.
        preemptions: sequences that had to give up their pages.
        copied_pages: copies on write.
        max_held_pages: most pages held at once.
        tell_us: host time of telling the planner's session, in all.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    copied_pages: int = 0
    max_held_pages: int = 0
    tell_us: float = 0.0


@dataclass(slots=True)
class Scheduler:
    """Decides each step by lengths alone, so that it can do so while the step before still runs.

    - *Order.* First come, first served: a request that does not fit yet keeps those behind it waiting.
    - *Admission.* There must be pages for all of its known tokens and, beside these, one for each running sequence
      and each of its samples; a seat for each of its samples; and room in the step. It takes these pages at once.
    - *Steps.* Every running sequence has at least one row in each: all decodes, then chunks of the one prompt that is
      incomplete, then new ones.
    - *Preemption.* When a decode finds no page, the sequence that joined the batch last gives up its pages, until there
      is one. It waits in front of all others and is computed again, from what the cache still holds. A sequence
      that could not run alone is refused when it is submitted, so the first one always gets on.
    - *Copy-on-write.* A sequence about to write into a page that others hold gets a copy.

    Attributes:
        config: sizes.
        session: is told everything that changes; its requests are the running sequences.
        forced: tokens for each sequence to go on with, whatever was sampled; None takes what was.
        allocator: of the pages.
        outputs: generated tokens of each finished sequence.
        stats: what happened.
    """

    config: EngineConfig
    session: PlanSession
    forced: Mapping[SequenceId, list[int]] | None = None
    allocator: PageAllocator = field(init=False)
    outputs: dict[SequenceId, list[int]] = field(default_factory=dict)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    _waiting: deque[Sequence] = field(default_factory=deque)
    _running: list[Sequence] = field(default_factory=list)
    _forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.config.num_pages, self.config.page_size)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to get in, or back in."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidBatchError: an empty prompt, or nothing to generate.
            CapacityError: it could never run.
        """
        if not request.prompt or request.max_new_tokens < 1 or request.num_samples < 1:
            raise InvalidBatchError(
                f"request {request.id}: {len(request.prompt)} prompt tokens, {request.max_new_tokens} to generate, "
                f"{request.num_samples} samples: give at least one of each"
            )
        sequence, config = Sequence.of(request), self.config
        limits = {
            "max_seq_len": (sequence.max_len, config.max_seq_len),
            "num_pages": (self._pages_for(sequence.max_len), config.num_pages),
            "max_batch_size": (request.num_samples, config.max_batch_size),
        }
        over = {name: pair for name, pair in limits.items() if pair[0] > pair[1]}
        if over:
            listed = ", ".join(f"{name} {needed} > {limit}" for name, (needed, limit) in over.items())
            raise CapacityError(
                f"request {request.id} can never run: {listed}. Shorten it, or raise these in EngineConfig", over
            )
        self._waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """The next step; None once all is done. Tokens of the step before may still be unknown, of those before not."""
        self._fork()
        self._retire()
        copies: list[tuple[int, int]] = []
        # A sequence preempted here cannot come back in this step: it needs more pages than it gave up.
        self._admit(self.config.max_num_tokens - self._continue(copies))
        if not self._running:
            return None
        held = self.config.num_pages - self.allocator.num_available
        self.stats.max_held_pages = max(self.stats.max_held_pages, held)
        self.stats.copied_pages += len(copies)
        rows = [self._rows(sequence) for sequence in self._running]
        return Batch(rows, copies, sum(r.end - r.begin for r in rows), sum(r.end for r in rows))

    def complete(self, batch: Batch, tokens: Iterable[Iterable[int]]) -> None:
        """Take over what a step sampled.

        Args:
            batch: the step.
            tokens: for each of its rows with receivers, in their order: the most likely tokens, one for each receiver.
        """
        sampled = (rows for rows in batch.rows if rows.receivers)
        for rows, likely in zip(sampled, tokens, strict=True):
            for sequence, token in zip(rows.receivers, likely, strict=False):
                if self.forced is not None:
                    token = self.forced[sequence.id][len(sequence.tokens) - sequence.prompt_len]  # noqa: PLW2901
                sequence.tokens.append(token)
                sequence.num_pending -= 1
                if len(sequence.tokens) == sequence.max_len:
                    self.outputs[sequence.id] = sequence.tokens[sequence.prompt_len :]

    def _fork(self) -> None:
        """Sequences whose prompt the last step completed become as many as there are samples."""
        for parent, child in self._forks:
            child.pages = list(parent.pages)
            self.allocator.hold(child.pages)
            child.scheduled_len, child.num_committed, child.chain = (
                parent.scheduled_len,
                parent.num_committed,
                parent.chain,
            )
            self._tell(self.session.fork, parent.id, child.id)
            self._running.append(child)
        self._forks.clear()

    def _retire(self) -> None:
        """Sequences that need no further step leave."""
        for sequence in [s for s in self._running if s.length == s.max_len]:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._tell(self.session.remove, sequence.id)
        self._commit(sequence)
        self.allocator.release(sequence.forget_pages())

    def _continue(self, copies: list[tuple[int, int]]) -> int:
        """Schedule the running sequences; returns how many tokens that makes."""
        decodes: list[Sequence] = []
        partial: Sequence | None = None
        new_pages: dict[SequenceId, int] = {}
        number = 0
        while number < len(self._running):  # which preemption shortens
            sequence = self._running[number]
            number += 1
            if sequence.length - sequence.scheduled_len > 1:
                partial = sequence
            elif self._make_writable(sequence, new_pages, copies):
                decodes.append(sequence)
        if decodes:
            are_all = len(decodes) == len(self._running)
            self._tell(self.session.step, new_pages, ids=None if are_all else [sequence.id for sequence in decodes])
            for sequence in decodes:
                self._advance(sequence, 1)
        num_tokens = len(decodes)
        if partial is not None and partial.pages:
            chunk = min(partial.length - partial.scheduled_len, self.config.max_num_tokens - num_tokens)
            self._tell(self.session.append, partial.id, chunk)
            self._advance(partial, chunk)
            self.stats.prompt_tokens += chunk
            num_tokens += chunk
        return num_tokens

    def _make_writable(
        self, sequence: Sequence, new_pages: dict[SequenceId, int], copies: list[tuple[int, int]]
    ) -> bool:
        """Give a sequence a page of its own for its next token; False when it was itself preempted for want of one."""
        index = sequence.scheduled_len // self.config.page_size
        is_new = index == len(sequence.pages)
        if not is_new and self.allocator.count(sequence.pages[index]) == 1:
            return True
        while not self.allocator.num_available:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        (page,) = self.allocator.take(1)
        if is_new:
            sequence.pages.append(page)
            new_pages[sequence.id] = page
        else:
            shared, sequence.pages[index] = sequence.pages[index], page
            copies.append((shared, page))
            self.allocator.release([shared])
            self._tell(self.session.replace_page, sequence.id, index, page)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _admit(self, room: int) -> None:
        """Let waiting sequences in while they fit and there is room for their tokens."""
        size = self.config.page_size
        seats = self.config.max_batch_size - sum(sequence.num_samples for sequence in self._running)
        while self._waiting and room > 0:
            sequence = self._waiting[0]
            # The last token is computed in any case: something must be sampled from.
            pages, chain = self.allocator.match(sequence.tokens, (sequence.length - 1) // size)
            missing = self._pages_for(sequence.length) - len(pages)
            beside = len(self._running) + sequence.num_samples if self._running else 0
            if sequence.num_samples > seats or missing + beside > self.allocator.available_beside(pages):
                break
            self._waiting.popleft()
            self._running.append(sequence)
            self.allocator.hold(pages)
            sequence.pages = pages + self.allocator.take(missing)
            sequence.scheduled_len, sequence.num_committed, sequence.chain = len(pages) * size, len(pages), chain
            chunk = min(sequence.length - sequence.scheduled_len, room)
            self._tell(
                self.session.add,
                sequence.id,
                np.array(sequence.pages),
                sequence.scheduled_len + chunk,
                computed_len=sequence.scheduled_len,
            )
            self.stats.cached_tokens += sequence.scheduled_len
            self.stats.prompt_tokens += chunk
            self._advance(sequence, chunk)
            room -= chunk
            seats -= sequence.num_samples

    def _advance(self, sequence: Sequence, num_rows: int) -> None:
        """Schedule tokens.

        Requests admitted in this very step may find the pages that these fill: a layer writes all KV before it reads.
        """
        sequence.advance(num_rows)
        self._commit(sequence)

    def _commit(self, sequence: Sequence) -> None:
        """Make known the pages that scheduled tokens fill, as far as these are known themselves."""
        size = self.config.page_size
        for number in range(sequence.num_committed, min(sequence.scheduled_len, len(sequence.tokens)) // size):
            tokens = sequence.tokens[number * size : (number + 1) * size]
            sequence.chain = self.allocator.commit(sequence.pages[number], tokens, sequence.chain)
            sequence.num_committed = number + 1

    def _rows(self, sequence: Sequence) -> Rows:
        """What a scheduled sequence does in the step; whoever gets a token from it has one pending from now on."""
        receivers: tuple[Sequence, ...] = ()
        if sequence.scheduled_len == sequence.length:
            children = [sequence.fork(sample) for sample in range(1, sequence.num_samples)]
            sequence.num_samples = 1
            sequence.num_pending += 1
            self._forks += [(sequence, child) for child in children]
            receivers = (sequence, *children)
        return Rows(sequence, sequence.scheduled_len - sequence.num_rows, sequence.scheduled_len, receivers)

    def _tell(self, call: Callable[..., None], *values: Any, **named: Any) -> None:
        begin = time.perf_counter_ns()
        call(*values, **named)
        self.stats.tell_us += (time.perf_counter_ns() - begin) / 1e3

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

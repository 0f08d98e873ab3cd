"""The serving loop: schedule, plan, run, sample; the host prepares a step while the GPU runs the one before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from flashinfer_cascade.config import PlannerPolicy
from flashinfer_cascade.engine.account import RunStats
from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.model import Llama
from flashinfer_cascade.engine.requests import Batch, Request, SequenceId
from flashinfer_cascade.engine.scheduler import Scheduler, SchedulerStats
from flashinfer_cascade.errors import CapacityError
from flashinfer_cascade.graphs import capture_cuda_graphs
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.planner import CascadePlanner
from flashinfer_cascade.runtime import CascadeRuntime

INPUTS = ("token", "position", "slot")
STAGED = (*INPUTS, "last", "copy_from", "copy_to")
"""What a step copies to the device: its inputs; rows that a token is sampled from; pages to copy."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run made.

    Attributes:
        outputs: generated tokens of each sequence.
        stats: of the engine.
        scheduling: of the scheduler.
    """

    outputs: dict[SequenceId, list[int]]
    stats: RunStats
    scheduling: SchedulerStats

    def record(self) -> dict[str, Any]:
        """Its numbers, ready for JSON."""
        return self.stats.record() | asdict(self.scheduling)


class Sampled(NamedTuple):
    """Logits of a step, as `Engine.run` shows them.

    Attributes:
        batch: the step; its rows with receivers have a row of logits each, in this order.
        logits: ``[rows, vocab_size]``, on the device; yours to keep.
    """

    batch: Batch
    logits: torch.Tensor


OnLogits = Callable[[Sampled], None]
OnStep = Callable[[RunStats, Scheduler], None]


class _Step(NamedTuple):
    """A step that is ready but for the tokens that the one before samples."""

    batch: Batch
    plan: CascadePlan
    positions: list[int]
    slots: list[int]


class _Flight(NamedTuple):
    """A step that was launched."""

    batch: Batch
    likely: torch.Tensor  # int64[rows, most receivers], in memory of the host, there once the device is done


class Engine:
    """Serves requests with one model, in steps that mix decodes and chunks of prompts.

    Decode steps replay captured graphs; steps with chunks of prompts run eagerly. On the CPU there are no graphs, and
    the same calls run the step function.

    Args:
        model: with its weights; decides the device.
        config: sizes.

    Attributes:
        runtime: of the attention.
        pool: the captured graphs.
        cache: see `Llama.make_cache`.
    """

    def __init__(self, model: Llama, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self.cascade_config = model.shape.cascade_config(config)
        self.runtime = CascadeRuntime(self.cascade_config, model.device)
        self.cache = model.make_cache(self.cascade_config)
        sizes = [2**power for power in range(config.max_batch_size.bit_length()) if 2**power < config.max_batch_size]
        # Rows of padding write into the page behind those of requests.
        nowhere = config.num_pages * config.page_size
        padding = {"token": 0, "position": 0, "slot": nowhere}
        self.pool = capture_cuda_graphs(
            self.runtime,
            self._step,
            batch_sizes=[*sizes, config.max_batch_size],
            inputs={
                name: torch.full((config.max_batch_size,), value, device=self.runtime.device)
                for name, value in padding.items()
            },
            progress=False,
        )
        is_gpu = self.runtime.device.type == "cuda"
        self._staging = torch.empty(len(STAGED), config.max_num_tokens, dtype=torch.int64, pin_memory=is_gpu)
        self._likely = torch.empty(config.max_batch_size**2, dtype=torch.int64, pin_memory=is_gpu)
        self._done = torch.cuda.Event() if is_gpu else None

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.hidden(inputs["token"], inputs["position"], inputs["slot"], self.cache, self.runtime.run)

    def run(
        self,
        requests: Iterable[Request],
        policy: PlannerPolicy | None = None,
        *,
        forced: Mapping[SequenceId, list[int]] | None = None,
        on_logits: OnLogits | None = None,
        on_step: OnStep | None = None,
    ) -> RunResult:
        """Serve some requests, from an empty cache to the last token.

        Args:
            requests: all there at once; first come, first served.
            policy: of the planner: `PlannerPolicy(executor="flat")` never cascades.
            forced: outputs of another run to go on with, so that logits of the two can be compared.
            on_logits: is shown every step's logits.
            on_step: is called after each step.

        Raises:
            InvalidBatchError: a request has an empty prompt, or nothing to generate.
            CapacityError: a request could never run.
        """
        scheduler = Scheduler(self.config, CascadePlanner(self.cascade_config, policy).session(), forced)
        for request in requests:
            scheduler.submit(request)
        shape = self.model.shape
        stats = RunStats(self.cascade_config.kv_token_bytes * shape.num_layers)
        before = self.pool.stats.inexact, self.pool.stats.eager.copy(), self.pool.stats.replays.total()
        flight: _Flight | None = None
        arrived = time.perf_counter()
        while True:
            # The step before runs meanwhile: scheduling goes by lengths, its tokens are not needed.
            step = self._prepare(scheduler, stats)
            if flight is not None:
                scheduler.complete(flight.batch, self._wait(flight))
                now = time.perf_counter()
                num_tokens = sum(len(rows.receivers) for rows in flight.batch.rows)
                stats.completed(num_tokens, flight.batch.num_rows == len(flight.batch.rows), now - arrived)
                arrived = now
                if on_step is not None:
                    on_step(stats, scheduler)
            if step is None:
                break
            flight = self._launch(step, on_logits)
        inexact, eager, replays = before
        stats.graph_inexact = self.pool.stats.inexact - inexact
        stats.graph_replays = self.pool.stats.replays.total() - replays
        stats.eager = self.pool.stats.eager - eager
        return RunResult(scheduler.outputs, stats, scheduler.stats)

    def _prepare(self, scheduler: Scheduler, stats: RunStats) -> _Step | None:
        told_us = scheduler.stats.tell_us
        batch = scheduler.schedule()
        if batch is None:
            return None
        begin = time.perf_counter_ns()
        is_decode = batch.num_rows == len(batch.rows)
        plan = scheduler.session.plan(capacity=self.pool.capacity(batch.num_rows) if is_decode else None)
        plan_us = (time.perf_counter_ns() - begin) / 1e3 + scheduler.stats.tell_us - told_us
        stats.planned(plan, batch.num_flat_tokens, plan_us)
        if is_decode:
            with contextlib.suppress(CapacityError):  # `run` will say so again
                self.pool.load(plan)
        size = self.config.page_size
        positions: list[int] = []
        slots: list[int] = []
        for sequence, first, end, _ in batch.rows:
            positions += range(first, end)
            slots += [sequence.pages[at // size] * size + at % size for at in range(first, end)]
        return _Step(batch, plan, positions, slots)

    def _launch(self, step: _Step, on_logits: OnLogits | None) -> _Flight:
        """Queue a step; the host waits for nothing but the step before, whose staging area it reuses."""
        batch, plan, positions, slots = step
        if self._done is not None:
            self._done.synchronize()
        if batch.copies:
            sources, targets = zip(*batch.copies, strict=True)
            to = self._stage("copy_to", targets).to(self.runtime.device, non_blocking=True)
            self.cache[:, to] = self.cache[:, self._stage("copy_from", sources).to(to.device, non_blocking=True)]
        tokens = [token for rows in batch.rows for token in rows.sequence.tokens[rows.begin : rows.end]]
        inputs = zip(INPUTS, (tokens, positions, slots), strict=True)
        hidden = self.pool.run(plan, **{name: self._stage(name, values) for name, values in inputs})
        last = [end - 1 for end, rows in zip(_ends(batch), batch.rows, strict=True) if rows.receivers]
        if len(last) < batch.num_rows:
            hidden = hidden[self._stage("last", last).to(hidden.device, non_blocking=True)]
        logits = self.model.logits(hidden)
        if on_logits is not None:
            on_logits(Sampled(batch, logits))
        most = max((len(rows.receivers) for rows in batch.rows), default=0)
        top = logits.topk(most, -1).indices if most > 1 else logits.argmax(-1, keepdim=True)
        likely = self._likely[: top.numel()].view(top.shape)
        likely.copy_(top, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return _Flight(batch, likely)

    def _wait(self, flight: _Flight) -> list[list[int]]:
        if self._done is not None:
            self._done.synchronize()
        likely: list[list[int]] = flight.likely.tolist()
        return likely

    def _stage(self, name: str, values: Sequence[int]) -> torch.Tensor:
        """Put integers into their part of the staging area."""
        staged = self._staging[STAGED.index(name), : len(values)]
        staged.numpy()[:] = values
        return staged


def _ends(batch: Batch) -> Iterable[int]:
    """Behind the last row of each sequence."""
    return accumulate(rows.end - rows.begin for rows in batch.rows)

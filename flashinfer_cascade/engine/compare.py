"""Flat against cascade on the same requests: do they compute the same, and how fast is each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_cascade.config import PlannerPolicy
from flashinfer_cascade.engine.engine import Engine, OnStep, RunResult, Sampled
from flashinfer_cascade.engine.model import dense_logits
from flashinfer_cascade.engine.requests import Request, SequenceId
from flashinfer_cascade.errors import CascadeError

FLAT = PlannerPolicy(executor="flat")

NUM_DENSE = 4
"""Sequences that are computed densely too."""

DENSE_FACTOR = 2.0
"""How many times further than flat logits those of a cascade may be from dense ones, as in `testing.error_budget`."""

Key = tuple[SequenceId, int]
"""A sequence and the position that its logits are for."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the logits of two runs on the same tokens are apart. Errors are relative L2 errors of a row of logits.

    Attributes:
        num_rows: rows of logits compared.
        max_error: largest error of a cascade's rows against flat ones.
        bound: what that may be: if flat rows are e from the truth and cascaded ones 2 e, they are at most 3 e apart.
        flat_error: e, the largest error of flat rows against the dense model in float32, on a few sequences.
        cascade_error: that of cascaded rows on the same sequences.
        same_tokens: fraction of rows in which both find the same token most likely.
    """

    num_rows: int
    max_error: float
    bound: float
    flat_error: float
    cascade_error: float
    same_tokens: float

    @property
    def ok(self) -> bool:
        """Whether both errors are within bounds; NaN is not."""
        return self.max_error <= self.bound and self.cascade_error <= DENSE_FACTOR * self.flat_error


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of both policies, turn and turn about.

    Attributes:
        agreement: of their logits; runs of their own, before those that are timed.
        flat, cascade: each repeat.
    """

    agreement: Agreement
    flat: list[RunResult]
    cascade: list[RunResult]

    def gain(self, rate: str) -> float:
        """Median over the repeats of a rate with a cascade over that without, `RunStats.tokens_per_s`, say."""
        pairs = zip(self.flat, self.cascade, strict=True)
        gains = [getattr(cascade.stats, rate) / max(getattr(flat.stats, rate), 1e-9) for flat, cascade in pairs]
        return float(statistics.median(gains))

    def record(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        agreement = {name: getattr(self.agreement, name) for name in Agreement.__slots__}
        return {
            "agreement": agreement | {"ok": self.agreement.ok},
            "gain": {
                "tokens_per_s": round(self.gain("tokens_per_s"), 3),
                "decode_tokens_per_s": round(self.gain("decode_tokens_per_s"), 3),
            },
            **{name: [result.record() for result in getattr(self, name)] for name in ("flat", "cascade")},
        }


class _Rows:
    """Keeps the logits of a run by step, and where each row lies."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []
        self.where: dict[Key, tuple[int, int]] = {}

    def __call__(self, sampled: Sampled) -> None:
        for row, key in enumerate(_keys(sampled)):
            self.where[key] = len(self.steps), row
        self.steps.append(sampled.logits)

    def of(self, keys: Sequence[Key]) -> torch.Tensor:
        """``[len(keys), vocab_size]``."""
        return torch.stack([self.steps[step][row] for step, row in map(self.where.__getitem__, keys)])


def _keys(sampled: Sampled) -> list[Key]:
    return [(rows.sequence.id, rows.end) for rows in sampled.batch.rows if rows.receivers]


def row_errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of each row: float32[rows]; the rows of both are ``[rows, vocab_size]``."""
    expected = expected.float()
    errors: torch.Tensor = (logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors


def check_logits(
    engine: Engine, requests: Sequence[Request], policy: PlannerPolicy | None = None, *, on_step: OnStep | None = None
) -> Agreement:
    """Run requests flat, then as a policy plans them, on the tokens of the flat run; compare all logits.

    Some sequences are held against the dense model too, which knows no pages and no batches. Their error, measured
    rather than guessed, is what the bound on all others is made of. The logits of a whole run are kept.

    Args:
        engine: that runs them.
        requests: what to serve.
        policy: of the second run; None is the planner's own choice.
        on_step: is called after each step.
    """
    flat, cascade = _Rows(), _Rows()
    result = engine.run(requests, FLAT, on_logits=flat, on_step=on_step)
    engine.run(requests, policy, forced=result.outputs, on_logits=cascade, on_step=on_step)
    if [*flat.where] != [*cascade.where]:
        raise CascadeError("the two runs were scheduled differently: lengths alone should decide, report it")
    apart, same = [], []
    for theirs, ours in zip(flat.steps, cascade.steps, strict=True):
        if len(ours):
            apart.append(row_errors(ours, theirs).amax())
            same.append((ours.argmax(-1) == theirs.argmax(-1)).sum())
    errors: list[torch.Tensor] = []
    for request, id in _some(requests):
        tokens, first = request.prompt + result.outputs[id], len(request.prompt)
        # The first token of all samples comes from the logits of the first one.
        keys: list[Key] = [(id if at > first else SequenceId(id.request, 0), at) for at in range(first, len(tokens))]
        dense = dense_logits(engine.model, tokens[:-1], first - 1)
        errors.append(torch.stack([row_errors(rows.of(keys), dense).amax() for rows in (flat, cascade)]))
    flat_error, cascade_error = torch.stack(errors).amax(0).tolist()
    return Agreement(
        num_rows=len(flat.where),
        max_error=float(torch.stack(apart).amax()),
        bound=(1 + DENSE_FACTOR) * flat_error,
        flat_error=flat_error,
        cascade_error=cascade_error,
        same_tokens=int(torch.stack(same).sum()) / len(flat.where),
    )


def _some(requests: Sequence[Request]) -> list[tuple[Request, SequenceId]]:
    """The last sample of a few requests, spread over all of them."""
    count = min(NUM_DENSE, len(requests))
    chosen = [requests[number * (len(requests) - 1) // max(count - 1, 1)] for number in range(count)]
    return [(request, SequenceId(request.id, request.num_samples - 1)) for request in chosen]


def compare(
    engine: Engine,
    requests: Sequence[Request],
    policy: PlannerPolicy | None = None,
    *,
    repeats: int = 3,
    on_step: OnStep | None = None,
) -> Comparison:
    """Check the logits, then time flat, cascade, flat, cascade and so on, so that both meet the same clocks.

    Args:
        engine: that runs them.
        requests: what to serve, each time from an empty cache.
        policy: of the cascade; None is the planner's own choice.
        repeats: of each.
        on_step: is called after each step.
    """
    agreement = check_logits(engine, requests, policy, on_step=on_step)
    comparison = Comparison(agreement, [], [])
    for _ in range(repeats):
        comparison.flat.append(engine.run(requests, FLAT, on_step=on_step))
        comparison.cascade.append(engine.run(requests, policy, on_step=on_step))
    return comparison

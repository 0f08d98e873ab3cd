"""What a run did and what it cost, counted as it goes."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashinfer_cascade.plan import CascadePlan


@dataclass(slots=True)
class RunStats:
    """One run of an engine.

    Attributes:
        token_bytes: KV of one token in all layers.
        seconds: from the first step to the last token.
        decode_seconds: of steps in which every sequence had one row.
        decode_tokens: sampled in these.
        num_steps: steps.
        num_decode_steps: of these, those of `decode_seconds`.
        new_tokens: sampled.
        rows: query tokens, those of prompts included.
        read_tokens: KV tokens that the plans' segments hold: what attention reads, once a layer.
        flat_tokens: KV tokens that it would read without a cascade: every sequence's whole context.
        plan_us: host time of each step's planning: telling the session what changed, and its plan.
        executors: steps that a part of the plan named an executor in, by part and executor.
        graph_replays: steps that ran in a captured graph (on the CPU: through the pool).
        graph_inexact: of these, those on other kernels than planned.
        eager: steps without a graph, by what did not fit one.
    """

    token_bytes: int
    seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    num_steps: int = 0
    num_decode_steps: int = 0
    new_tokens: int = 0
    rows: int = 0
    read_tokens: int = 0
    flat_tokens: int = 0
    plan_us: list[float] = field(default_factory=list)
    executors: Counter[tuple[str, str]] = field(default_factory=Counter)
    graph_replays: int = 0
    graph_inexact: int = 0
    eager: Counter[str] = field(default_factory=Counter)

    def planned(self, plan: CascadePlan, num_flat_tokens: int, plan_us: float) -> None:
        """Count a step as it is planned."""
        self.num_steps += 1
        self.rows += plan.num_rows
        self.read_tokens += int(plan.seg_kv_len.sum(dtype=np.int64))
        self.flat_tokens += num_flat_tokens
        self.plan_us.append(plan_us)
        for part in plan.parts:
            self.executors[part.name, part.executor] += 1

    def completed(self, num_tokens: int, is_decode: bool, seconds: float) -> None:
        """Count a step as its tokens arrive, `seconds` after those of the step before."""
        self.new_tokens += num_tokens
        self.seconds += seconds
        if is_decode:
            self.num_decode_steps += 1
            self.decode_tokens += num_tokens
            self.decode_seconds += seconds

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prompts' steps included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Generated tokens a second of steps that only decode; 0 where there were none."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def record(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 1),
            "seconds": round(self.seconds, 4),
            "decode_seconds": round(self.decode_seconds, 4),
            "steps": self.num_steps,
            "decode_steps": self.num_decode_steps,
            "new_tokens": self.new_tokens,
            "rows": self.rows,
            "kv_read_bytes": self.read_tokens * self.token_bytes,
            "kv_flat_bytes": self.flat_tokens * self.token_bytes,
            "plan_us": {
                "median": round(statistics.median(self.plan_us), 1) if self.plan_us else 0.0,
                "p99": round(float(np.quantile(self.plan_us, 0.99)), 1) if self.plan_us else 0.0,
            },
            "executors": {f"{part}: {executor}": steps for (part, executor), steps in sorted(self.executors.items())},
            "graph_replays": self.graph_replays,
            "graph_inexact": self.graph_inexact,
            "eager_steps": dict(self.eager),
        }

"""Plans and executes batches of the shipped traces on the CPU, each checked against the fp64 oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_cascade.bench import traces
from flashinfer_cascade.bench.workloads import Workload, grid
from flashinfer_cascade.config import PlannerPolicy
from flashinfer_cascade.errors import InvalidBatchError
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.planner import CascadePlanner
from flashinfer_cascade.report import summary
from flashinfer_cascade.runtime import CascadeRuntime
from flashinfer_cascade.testing import (
    dense_attention,
    error_budget,
    make_kv_cache,
    make_q,
    plain_attention,
    relative_errors,
)

MAX_CONTEXT = 4096
POLICIES = {
    "auto": PlannerPolicy(),
    "forced": PlannerPolicy(executor="levels", fold=False),
}
"""The planner's own choice, and a cascade over every shared node whether that pays or not."""

PLAN_REPEATS = 5


def _mooncake(path: Any, batch: int, samples: int = 1) -> Workload:
    return next(traces.mooncake_batches(path, batch, samples=samples, max_context=MAX_CONTEXT))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "conversation": lambda: _mooncake(traces.CONVERSATION, 48),
    "sampling": lambda: _mooncake(traces.CONVERSATION, 8, samples=16),
    "synthetic": lambda: _mooncake(traces.SYNTHETIC, 64),
    "tree-search": lambda: next(traces.tot_batches(traces.TREE_OF_THOUGHT, "sorting128ToT", [1800])),
    "P4": lambda: grid(["P4"])[0],
    "P10": lambda: grid(["P10"])[0],
}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """One executed plan.

    Attributes:
        workload: its name.
        policy: "auto" or "forced", see POLICIES.
        num_requests: requests.
        num_rows: query tokens.
        num_nodes: shared runs of pages that were found.
        executor: what the plan names; several parts are joined by "+".
        num_levels: levels of the plan.
        kv_saving: KV bytes that flat attention reads, over those of the plan.
        predicted_speedup: predicted time of flat attention, over that of the plan.
        plan_us: median time of planning.
        max_error: largest relative L2 error over rows and heads, against the fp64 oracle.
        budget: what that may be at most.
    """

    workload: str
    policy: str
    num_requests: int
    num_rows: int
    num_nodes: int
    executor: str
    num_levels: int
    kv_saving: float
    predicted_speedup: float
    plan_us: float
    max_error: float
    budget: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the budget."""
        return self.max_error <= self.budget


def select(names: list[str] | None) -> list[str]:
    """Names of the demo's workloads, all when None.

    Raises:
        InvalidBatchError: an unknown name.
    """
    for name in names or ():
        if name not in WORKLOADS:
            raise InvalidBatchError(f"the demo has no workload {name!r}: choose from {', '.join(WORKLOADS)}")
    return names or list(WORKLOADS)


def execute(name: str) -> Iterator[tuple[DemoResult, CascadePlan]]:
    """Plan a workload under every policy, execute each plan, and compare with the oracle."""
    # Thousands of small products: on a machine with other work, threads would mostly wait for each other.
    torch.set_num_threads(1)
    batch = WORKLOADS[name]()
    config = batch.config(num_qo_heads=8, num_kv_heads=2, head_dim=128)  # one of 4 ranks of 32/8 heads
    q = make_q(config, batch.num_rows)
    kv_cache = make_kv_cache(config, batch.num_pages)
    qo_lens = [1] * batch.num_requests if batch.qo_lens is None else batch.qo_lens.tolist()
    step = (batch.block_tables.tolist(), batch.seq_lens.tolist(), qo_lens)
    oracle, _ = dense_attention(config, q, kv_cache, *step)
    plain = plain_attention(config, q, kv_cache, *step)
    budget = error_budget(oracle, plain)
    runtime = CascadeRuntime(config, device="cpu")
    for policy_name, policy in POLICIES.items():
        planner = CascadePlanner(config, policy)
        plan, plan_us = _timed(lambda: planner.plan(batch.block_tables, batch.seq_lens, batch.qo_lens))  # noqa: B023
        runtime.load(plan)
        out = runtime.run(q, kv_cache)
        numbers = summary(plan)
        predicted = [(part.predicted_us["flat"], part.predicted_us[part.executor]) for part in plan.parts]
        yield (
            DemoResult(
                workload=name,
                policy=policy_name,
                num_requests=plan.num_requests,
                num_rows=plan.num_rows,
                num_nodes=numbers["nodes_found"],
                executor="+".join(part.executor for part in plan.parts),
                num_levels=plan.num_levels,
                kv_saving=numbers["kv_flat_bytes"] / numbers["kv_read_bytes"],
                predicted_speedup=sum(flat for flat, _ in predicted) / sum(chosen for _, chosen in predicted),
                plan_us=plan_us,
                max_error=float(relative_errors(out, oracle).amax()),
                budget=budget,
            ),
            plan,
        )


def _timed(call: Callable[[], CascadePlan]) -> tuple[CascadePlan, float]:
    call()  # the first one pays for caches
    taken = []
    for _ in range(PLAN_REPEATS):
        start = time.perf_counter_ns()
        plan = call()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    return plan, statistics.median(taken)

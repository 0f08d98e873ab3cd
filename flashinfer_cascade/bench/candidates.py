"""The ways to run a workload that a benchmark compares: this package's executors, and FlashInfer by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from flashinfer_cascade.bench.results import OURS, Choice
from flashinfer_cascade.bench.timing import Call
from flashinfer_cascade.bench.workloads import Workload
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.planner import CascadePlanner
from flashinfer_cascade.runtime import CascadeRuntime
from flashinfer_cascade.runtime.stock import check_heads

HOST_REPEATS = 5
WORKSPACE_BYTES = 2**29
"""FlashInfer's float workspace, for each of its wrappers."""

POLICIES: dict[str, dict[str, Any]] = {name: {"executor": name} for name in OURS}
"""`PlannerPolicy` of each candidate of ours."""


MULTI_LEVEL: dict[str, str | None] = {"stock_default": None, "stock_fa2": "fa2"}
"""Its multi-level wrapper, every shared node a group: on the backend that it chooses itself, and on fa2."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is timed.

    Attributes:
        call: given a KV cache, returns attention's output.
        row_rank: int64[num_rows], row of that output for each row of q; None when the identity.
        choice: what the plan is, for ours.
    """

    call: Call
    row_rank: torch.Tensor | None = None
    choice: Choice | None = None


def candidates(config: CascadeConfig, work: Workload, q: torch.Tensor) -> dict[str, Callable[[], Candidate]]:
    """What builds each candidate by name; building raises `UnsupportedError`, and FlashInfer whatever it likes."""
    plain = ["decode"] if work.num_rows == work.num_requests else []
    plain += [] if work.qo_lens is None else ["prefill_fa2", "prefill_fa3"]
    build = {**dict.fromkeys(OURS, ours), **dict.fromkeys(plain, one_launch), **dict.fromkeys(MULTI_LEVEL, multi_level)}
    return {name: partial(make, name, config, work, q) for name, make in build.items()}


def ours(name: str, config: CascadeConfig, work: Workload, q: torch.Tensor) -> Candidate:
    """One of `POLICIES`, planned and loaded.

    Raises:
        UnsupportedError: the executor does not take the configuration, or this device does not have it.
    """
    planner = CascadePlanner(config, PlannerPolicy.model_validate(POLICIES[name]))
    plan = planner.plan(work.block_tables, work.seq_lens, work.qo_lens)
    runtime = CascadeRuntime(config, q.device)
    runtime.load(plan)
    out = torch.empty_like(q)
    return Candidate(
        lambda cache: runtime.run(q, cache, out=out),
        choice=describe(
            plan,
            _median_us(lambda: planner.plan(work.block_tables, work.seq_lens, work.qo_lens)),
            _median_us(lambda: runtime.load(plan)),
        ),
    )


def describe(plan: CascadePlan, plan_us: float, load_us: float) -> Choice:
    """A plan in a record."""
    predicted = [part.predicted_us for part in plan.parts]
    everywhere = [name for name in predicted[0] if all(name in one for one in predicted)]
    return Choice(
        executor="+".join(part.executor for part in plan.parts),
        reason="; ".join(part.reason for part in plan.parts),
        num_levels=plan.num_levels,
        backends=tuple(str(backend) for part in plan.parts for backend in part.backends),
        predicted_us={name: round(sum(one[name] for one in predicted), 2) for name in everywhere},
        plan_us=round(plan_us, 1),
        load_us=round(load_us, 1),
    )


def one_launch(name: str, config: CascadeConfig, work: Workload, q: torch.Tensor) -> Candidate:
    """Every request's whole context, on one of FlashInfer's plain wrappers, planned for this very batch.

    "decode" is the decode wrapper on tensor cores, which is fa2; the others are the prefill wrapper.

    Raises:
        UnsupportedError: `q` is on no GPU.
    """
    flashinfer = _flashinfer(q)
    flat = CascadePlanner(config, PlannerPolicy(executor="flat")).plan(work.block_tables, work.seq_lens, work.qo_lens)
    (level,) = flat.levels()
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    common: dict[str, Any] = {
        "num_qo_heads": config.num_qo_heads,
        "num_kv_heads": config.num_kv_heads,
        "page_size": config.page_size,
        "q_data_type": q.dtype,
        "kv_data_type": getattr(torch, config.kv_dtype),
    }
    kv_indptr, kv_indices, last_page_len = map(torch.tensor, level[1:])
    kv_indices = kv_indices.to(q.device)
    out = torch.empty_like(q)
    if name == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, config.kv_layout, use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(
            indptr=kv_indptr, indices=kv_indices, last_page_len=last_page_len, head_dim=config.head_dim, **common
        )
    else:
        backend = name.removeprefix("prefill_")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, config.kv_layout, backend=backend)
        wrapper.plan(
            qo_indptr=torch.tensor(level.qo_indptr),
            paged_kv_indptr=kv_indptr,
            paged_kv_indices=kv_indices,
            paged_kv_last_page_len=last_page_len,
            head_dim_qk=config.head_dim,
            causal=True,
            **common,
        )
    row_rank, rows = _in_plan_order(flat, q)
    return Candidate(lambda cache: wrapper.run(rows, cache, out=out), row_rank)


def multi_level(name: str, config: CascadeConfig, work: Workload, q: torch.Tensor) -> Candidate:
    """FlashInfer's multi-level wrapper, q in the order that it asks for.

    Raises:
        UnsupportedError: `q` is on no GPU, or has more heads than the wrapper merges.
    """
    flashinfer = _flashinfer(q)
    every_node = CascadePlanner(config, PlannerPolicy(executor="stock", fold=False, max_levels=64)).plan(
        work.block_tables, work.seq_lens, work.qo_lens
    )
    check_heads(config, every_node.num_levels)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(every_node.num_levels, workspace, config.kv_layout)
    backend = MULTI_LEVEL[name]
    for level in wrapper._batch_prefill_wrappers if backend else ():
        level._backend = backend  # the wrapper has no argument for it
    wrapper.plan(**every_node.to_flashinfer())
    row_rank, rows = _in_plan_order(every_node, q)
    return Candidate(lambda cache: wrapper.run(rows, cache), row_rank)


def _flashinfer(q: torch.Tensor) -> Any:
    if q.device.type != "cuda":
        raise UnsupportedError(f"FlashInfer's kernels run on CUDA GPUs, not on {q.device.type}: run this on one")
    from flashinfer_cascade.runtime.launch import import_flashinfer

    return import_flashinfer()


def _in_plan_order(plan: CascadePlan, q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Where each row of q went, and its rows as the plan has them: an engine would keep them so."""
    if plan.row_order is None or plan.row_rank is None:
        return None, q
    order, rank = (torch.from_numpy(rows.astype(np.int64)).to(q.device) for rows in (plan.row_order, plan.row_rank))
    return rank, q[order]


def _median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(HOST_REPEATS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)

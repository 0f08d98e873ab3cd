"""The runtime: takes plans and tensors from the caller, checks them once, and hands them to executors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, overload

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import CascadeError, InvalidBatchError, UnsupportedError
from flashinfer_cascade.plan import CascadePlan, PartName, PlanPart
from flashinfer_cascade.runtime.reference import ReferenceExecutor

KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class RuntimeStats:
    """What a runtime did so far.

    Attributes:
        loads: plans loaded.
        runs: calls of `CascadeRuntime.run`.
        parts_run: times that each (part, executor) ran. The executor is the one that ran, which on the CPU is
            "reference" whatever the plan names.
    """

    loads: int = 0
    runs: int = 0
    parts_run: Counter[tuple[PartName, str]] = field(default_factory=Counter)


class CascadeRuntime:
    """Runs plans of one configuration on one device: `load` once a step, then `run` once a layer.

    Args:
        config: what every plan must be made for.
        device: "cpu", which runs the reference executor.

    Attributes:
        stats: what ran, and how often.

    Raises:
        UnsupportedError: no executor runs on `device`.
    """

    def __init__(self, config: CascadeConfig, device: str | torch.device = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise UnsupportedError(
                f"device={str(device)!r}: this version has no executor for it. device='cpu' runs the reference executor"
            )
        self.stats = RuntimeStats()
        self._plan: CascadePlan | None = None
        self._num_pages = 0
        self._executors: list[ReferenceExecutor] = []

    def load(self, plan: CascadePlan) -> None:
        """Make `plan` the one that `run` executes. All or nothing: after an error the plan before is still loaded.

        Raises:
            InvalidBatchError: the plan was made for another configuration.
        """
        if plan.config != self.config:
            theirs, ours = plan.config.model_dump(), self.config.model_dump()
            differing = ", ".join(f"{name}={theirs[name]!r}" for name in ours if theirs[name] != ours[name])
            raise InvalidBatchError(
                f"the plan was made with {differing}, unlike this runtime's configuration: "
                "build planner and runtime from one CascadeConfig"
            )
        executors = [ReferenceExecutor(self.config, self.device) for _ in plan.parts]
        for executor, part in zip(executors, plan.parts, strict=True):
            executor.load(plan, part)
        self._plan, self._executors = plan, executors
        self._num_pages = int(plan.seg_pages.max(initial=-1)) + 1
        self.stats.loads += 1

    @overload
    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        *,
        part: PartName | PlanPart | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        *,
        part: PartName | PlanPart | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        *,
        part: PartName | PlanPart | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer, rows in the caller's order.

        Args:
            q: ``[num_rows, num_qo_heads, head_dim]``, config.dtype: the requests' rows in the order of the batch.
            kv_cache: config.kv_dtype, any strides; ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD),
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or K and V as a pair of these without
                their second dimension. Holds this step's new tokens already.
            part: run this part alone, by name or from `CascadePlan.parts`, and write only its rows; None is all.
            k_scale: what the cache's keys are multiplied by.
            v_scale: what its values are multiplied by.
            sinks: float32[num_qo_heads], natural-log logits that join each row's denominator.
            out: shape and dtype of q, written in place. None allocates it; rows of other parts are then 0.
            return_lse: also return the log-sum-exp.

        Returns:
            out: shape and dtype of q.
            lse: float32[num_rows, num_qo_heads], base 2, sinks included; -inf for rows that see nothing, and for
                rows of other parts.

        Raises:
            CascadeError: no plan is loaded.
            InvalidBatchError: a tensor contradicts the plan or the configuration, or the plan has no such part.
        """
        if self._plan is None:
            raise CascadeError("no plan is loaded: call load(plan) before run")
        plan, config = self._plan, self.config
        selected = _select(plan, part)
        shape, dtype = (plan.num_rows, config.num_qo_heads, config.head_dim), getattr(torch, config.dtype)
        self._check("q", q, shape, dtype, "pass the rows of the batch that the loaded plan was made for")
        self._check_cache(kv_cache)
        if sinks is not None:
            self._check("sinks", sinks, shape[1:2], torch.float32, "give one natural-log logit per query head")
        if out is None:
            out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        else:
            self._check("out", out, shape, dtype, "it receives the rows of q")
        lse = torch.full(shape[:2], float("-inf"), device=self.device) if return_lse else None
        for number in selected:
            self._executors[number].run(q, kv_cache, out, lse, k_scale, v_scale, sinks)
            self.stats.parts_run[plan.parts[number].name, "reference"] += 1
        self.stats.runs += 1
        return out if lse is None else (out, lse)

    def _check(self, name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, remedy: str) -> None:
        if x.shape != shape or x.dtype != dtype or x.device != self.device:
            raise InvalidBatchError(
                f"{name} is {_describe(x)}; expected {dtype} {list(shape)} on {self.device}: {remedy}"
            )

    def _check_cache(self, kv_cache: KVCache) -> None:
        config = self.config
        page = (config.page_size, config.num_kv_heads, config.head_dim)
        if config.kv_layout == "HND":
            page = (config.num_kv_heads, config.page_size, config.head_dim)
        remedy = f"the layout is {config.kv_layout}; view a cache stored as bytes in its own dtype"
        if isinstance(kv_cache, torch.Tensor):
            caches, num_pages = {"kv_cache": kv_cache}, len(kv_cache)
            shape: tuple[int, ...] = (num_pages, 2, *page)
        else:
            if len(kv_cache) != 2:
                raise InvalidBatchError(f"kv_cache holds {len(kv_cache)} tensors: pass one 5-D tensor, or (k, v)")
            caches, num_pages = {"kv_cache[0]": kv_cache[0], "kv_cache[1]": kv_cache[1]}, len(kv_cache[0])
            shape = (num_pages, *page)
        for name, cache in caches.items():
            self._check(name, cache, shape, getattr(torch, config.kv_dtype), remedy)
        if num_pages < self._num_pages:
            raise InvalidBatchError(
                f"the plan reads page {self._num_pages - 1}, but kv_cache holds {num_pages} pages: "
                "pass the cache that the block tables index"
            )


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}"


def _select(plan: CascadePlan, part: PartName | PlanPart | None) -> list[int]:
    """Positions in `CascadePlan.parts`."""
    if part is None:
        return list(range(len(plan.parts)))
    for number, candidate in enumerate(plan.parts):
        if candidate is part or candidate.name == part:
            return [number]
    names = " and ".join(repr(candidate.name) for candidate in plan.parts)
    asked = part if isinstance(part, str) else f"{part.name} of another plan"
    raise InvalidBatchError(f"the loaded plan has no part {asked!r}, only {names}: load its plan, or skip the call")

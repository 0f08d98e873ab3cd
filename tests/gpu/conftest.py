"""What the GPU tests share: problems with their answers, plans forced onto kernels, tree-shaped batches, a delay.

They are fixtures, for the test modules cannot import from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig, CascadePlan
from flashinfer_cascade.bench.workloads import tree
from flashinfer_cascade.cost import DECODE_GROUP_SIZES
from flashinfer_cascade.testing import (
    KVCache,
    RandomBatch,
    assert_close,
    assert_lse_close,
    dense_attention,
    make_kv_cache,
    make_q,
    plain_attention,
)

TANH_ERROR = 2.0**-11
"""Largest relative error of tanh.approx.f32, with which FlashInfer caps logits. Source: PTX ISA, "tanh"."""


@dataclass(frozen=True)
class Problem:
    """A batch, its tensors, and what attention over some or all of its requests comes to.

    Attributes:
        rows: of q, in the order of the answers.
        oracle, oracle_lse, plain: answers for these rows, see `testing.assert_close`.
        options: of `CascadeRuntime.run`: scales and sinks.
    """

    config: CascadeConfig
    batch: RandomBatch
    q: torch.Tensor
    kv_cache: KVCache
    options: dict[str, Any]
    rows: list[int]
    oracle: torch.Tensor
    oracle_lse: torch.Tensor
    plain: torch.Tensor

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Hold a result for all rows of q against the oracle."""
        assert out.shape == self.q.shape
        assert_close(out[self.rows], self.oracle, self.plain)
        if lse is not None:
            assert lse.dtype == torch.float32
            capped = TANH_ERROR * self.config.logits_soft_cap * math.log2(math.e)
            assert_lse_close(lse[self.rows], self.oracle_lse, out.dtype, atol=1e-3 + capped)


def make_problem(
    config: CascadeConfig,
    batch: RandomBatch,
    *,
    device: torch.device,
    form: str = "tensor",
    seed: int = 0,
    judged: list[int] | None = None,
    **options: Any,
) -> Problem:
    """Random tensors for a batch, and the answers for the requests `judged`; None is all of them.

    With form="fast" the cache is made on the device: for the large ones.
    """
    q = make_q(config, batch.num_rows, seed=seed, device=device)
    scales = {name: value for name, value in options.items() if name != "sinks"}
    if form == "fast":
        page = (config.page_size, config.num_kv_heads)
        shape = (batch.num_pages, 2, *(page if config.kv_layout == "NHD" else page[::-1]), config.head_dim)
        generator = torch.Generator(device).manual_seed(seed)
        cache = torch.randn(shape, generator=generator, device=device, dtype=q.dtype)
    else:
        cache = make_kv_cache(config, batch.num_pages, form=form, seed=seed + 1, device=device, **scales)
    judged = list(range(len(batch.seq_lens))) if judged is None else judged
    rows = batch.rows_of(judged)
    given = (q[rows], cache, *batch.permuted(judged))
    oracle, oracle_lse = dense_attention(config, *given, **options)
    # Capped logits that are all off by a factor are as wrong as FlashInfer's tanh may make them.
    off = {
        "sm_scale": config.softmax_scale * (1 + TANH_ERROR),
        "logits_soft_cap": config.logits_soft_cap * (1 + TANH_ERROR),
    }
    as_exact = config.model_copy(update=off if config.logits_soft_cap else {})
    plain = plain_attention(as_exact, *given, **options)
    return Problem(config, batch, q, cache, options, rows, oracle, oracle_lse, plain)


def with_backends(plan: CascadePlan, *backends: str) -> CascadePlan:
    """The plan with one kernel for each level, the last one given for all that follow.

    "decode" falls back to "fa2" on levels that it cannot run: with groups of several rows, or of other group sizes.
    """
    decodes = plan.config.group_size in DECODE_GROUP_SIZES
    parts = []
    for part in plan.parts:
        chosen = []
        for number, level in enumerate(plan.levels(part)):
            backend = backends[min(number, len(backends) - 1)]
            if backend == "decode" and not (decodes and (np.diff(level.qo_indptr) == 1).all()):
                backend = "fa2"
            chosen.append(backend)
        parts.append(replace(part, backends=tuple(chosen)))
    return replace(plan, parts=tuple(parts))


def tree_batch(spec: str, *, page_size: int = 16, qo_len: int = 1, seed: int = 0) -> RandomBatch:
    """`bench.workloads.tree`, its requests in a random order, with `qo_len` new tokens each."""
    work = tree(spec, page_size, seed).shuffled(seed)
    tables = [row[row >= 0].tolist() for row in work.block_tables]
    return RandomBatch(tables, work.seq_lens.tolist(), [qo_len] * work.num_requests)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session", name="make_problem")
def make_problem_fixture(device: torch.device) -> Callable[..., Problem]:
    return partial(make_problem, device=device)


@pytest.fixture(scope="session", name="with_backends")
def with_backends_fixture() -> Callable[..., CascadePlan]:
    return with_backends


@pytest.fixture(scope="session", name="tree_batch")
def tree_batch_fixture() -> Callable[..., RandomBatch]:
    return tree_batch


@pytest.fixture(scope="session")
def delay() -> Callable[[], None]:
    """Keeps the current stream busy for some milliseconds, without waiting for it."""
    return partial(torch.cuda._sleep, 10_000_000)


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> list[str]:
    """What this GPU can run."""
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return ["fa2", "fa2_uncut", "decode", *(["fa3"] if is_hopper else [])]

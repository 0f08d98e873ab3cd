"""One attention launch over paged KV: the only module that speaks FlashInfer's spelling."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.cost import DECODE_GROUP_SIZES, Backend
from flashinfer_cascade.errors import BackendUnavailableError, CapacityError, UnsupportedError
from flashinfer_cascade.plan import Level
from flashinfer_cascade.runtime.buffers import to_int32

PREFILL_PLAN = (
    "qo_indptr",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim_qk",
    "page_size",
    "causal",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "disable_split_kv",
)
DECODE_PLAN = (
    "indptr",
    "indices",
    "last_page_len",
    "num_qo_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
)
RUN = ("k_scale", "v_scale", "out", "lse", "return_lse")

MAX_TILE_ROWS = 128

SLOW_S = 2.0
"""A plan that takes longer compiles."""

_planned_before: set[tuple[str | int | bool, ...]] = set()
"""Kernels that this process has compiled or loaded."""


def import_flashinfer() -> Any:
    """FlashInfer, once its signatures are known to be what this module passes.

    Raises:
        BackendUnavailableError: it is missing, or too old or too new.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise BackendUnavailableError(
            f"FlashInfer cannot be imported ({error}): pip install flashinfer-python, or use device='cpu'"
        ) from error
    check_signatures(flashinfer)
    return flashinfer


@functools.cache
def check_signatures(flashinfer: Any) -> None:
    """Refuse a FlashInfer that no longer takes the keywords that are passed to it.

    Raises:
        BackendUnavailableError: names what is missing.
    """
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    for wrapper, method, keywords in (
        (prefill, "plan", PREFILL_PLAN),
        (prefill, "run", RUN),
        (decode, "plan", DECODE_PLAN),
        (decode, "run", RUN),
    ):
        parameters = inspect.signature(getattr(wrapper, method)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):  # decode since 0.7, which passes all on
            parameters = inspect.signature(wrapper._plan_impl).parameters
        missing = set(keywords) - set(parameters)
        if missing:
            raise BackendUnavailableError(
                f"FlashInfer {flashinfer.__version__} does not take {', '.join(sorted(missing))} in "
                f"{wrapper.__name__}.{method}: install a version from 0.6 up to 0.7"
            )
    if os.environ.get("FLASHINFER_TRACE_APPLY"):
        warnings.warn(
            "FLASHINFER_TRACE_APPLY is set: FlashInfer may run other kernels than those planned for. "
            "Unset it before you trust results or times",
            RuntimeWarning,
            stacklevel=2,
        )


def float_workspace_bytes(config: CascadeConfig, num_sms: int) -> int:
    """What fa2 needs for cut KV: a float32 partial and an LSE for every row of every tile it may cut.

    FlashInfer cuts only while all blocks run at once, two an SM, so the need is bounded whatever the batch. Before
    0.7.2 it reserved a row for every query head of a tile's rows.
    Source: flashinfer/attention/scheduler.cuh, PrefillPlan.
    """
    numbers = re.findall(r"\d+", import_flashinfer().__version__)[:3]
    over = 1 if tuple(map(int, numbers)) >= (0, 7, 2) else config.group_size
    return 4 * 2 * num_sms * MAX_TILE_ROWS * over * (config.head_dim + 1) + 2**20


class PagedLaunch:
    """A FlashInfer paged-prefill launch that is planned again for every batch.

    Args:
        config: what every plan has in common.
        workspace: uint8, on the device; launches that run one after the other on one stream share it.
    """

    def __init__(self, config: CascadeConfig, workspace: torch.Tensor) -> None:
        self._config = config
        self._workspace = workspace
        self._wrappers: dict[str, Any] = {}
        self._planned: Any = None

    def plan(self, level: Level, kv_indices: torch.Tensor, *, causal: bool, backend: Backend) -> None:
        """Prepare for one batch. FlashInfer copies its own small arrays to the device on the current stream.

        Args:
            level: the groups, on the CPU.
            kv_indices: int32[level.kv_indptr[-1]], on the device: its page ids.
            causal: whether each group's last rows are its new tokens.
            backend: which kernel, and whether it may cut KV.
        """
        # Wrappers are kept: each holds 8 MiB on the device and as much pinned memory.
        wrapper = self._wrapper(backend.removesuffix("_uncut"))
        qo_indptr, kv_indptr, last_page_len = map(to_int32, (level.qo_indptr, level.kv_indptr, level.kv_last_page_len))
        arguments = plan_arguments(self._config, backend, qo_indptr, kv_indptr, last_page_len, kv_indices, causal)
        try:
            with tell_if_slow(backend, self._config):
                wrapper.plan(**arguments)
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            raise CapacityError(
                f"FlashInfer's workspace of {self._workspace.numel()} bytes is too small for this plan ({error}): "
                "split the batch, or report the configuration"
            ) from error
        self._planned = wrapper

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        k_scale: float,
        v_scale: float = 1.0,
    ) -> None:
        """Attend; writes every row of `out`, and of `lse` (float32, base 2) when given."""
        self._planned.run(
            q,
            kv_cache,
            k_scale=None if k_scale == 1.0 else k_scale,
            v_scale=None if v_scale == 1.0 else v_scale,
            out=out,
            lse=lse,
            return_lse=lse is not None,
        )

    def _wrapper(self, backend: str) -> Any:
        if backend not in self._wrappers:
            flashinfer = import_flashinfer()
            if backend == "fa3":
                check_fa3(self._workspace.device)
            if backend == "decode":
                self._wrappers[backend] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, self._config.kv_layout, use_tensor_cores=False
                )
            else:
                self._wrappers[backend] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, self._config.kv_layout, backend=backend
                )
        return self._wrappers[backend]


def has_fa3(device: torch.device) -> bool:
    """Whether a GPU runs fa3."""
    return torch.cuda.get_device_capability(device)[0] == 9


def check_fa3(device: torch.device) -> None:
    """Refuse fa3 where it does not run.

    Raises:
        UnsupportedError: the GPU is no Hopper.
    """
    if not has_fa3(device):
        raise UnsupportedError(
            "the plan asks for fa3, which runs on Hopper GPUs only: plan with the profile of this GPU, "
            f"{torch.cuda.get_device_name(device)}"
        )


def plan_arguments(
    config: CascadeConfig,
    backend: Backend,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_indices: torch.Tensor,
    causal: bool,
) -> dict[str, Any]:
    """The keyword arguments of FlashInfer's ``plan`` for one launch; the groups are those of a `Level`, on the CPU."""
    common = {
        "num_qo_heads": config.num_qo_heads,
        "num_kv_heads": config.num_kv_heads,
        "page_size": config.page_size,
        "sm_scale": config.softmax_scale,
        "window_left": config.window_left,
        "logits_soft_cap": config.logits_soft_cap,
        "q_data_type": getattr(torch, config.dtype),
        "kv_data_type": getattr(torch, config.kv_dtype),
    }
    if backend == "decode":
        groups = {"indptr": kv_indptr, "indices": kv_indices, "last_page_len": kv_last_page_len}
        return common | groups | {"head_dim": config.head_dim}
    return common | {
        "qo_indptr": qo_indptr,
        "paged_kv_indptr": kv_indptr,
        "paged_kv_indices": kv_indices,
        "paged_kv_last_page_len": kv_last_page_len,
        "head_dim_qk": config.head_dim,
        "causal": causal,
        "disable_split_kv": backend == "fa2_uncut",
    }


def compile_backend(config: CascadeConfig, backend: Backend, device: torch.device) -> None:
    """Run a backend once, so that FlashInfer compiles it, or loads what it has compiled before.

    Raises:
        UnsupportedError: the GPU or the configuration does not allow this backend.
    """
    if backend == "decode" and config.group_size not in DECODE_GROUP_SIZES:
        raise UnsupportedError(f"the decode kernel takes group sizes {DECODE_GROUP_SIZES}, not {config.group_size}")
    if backend == "fa3" and config.kv_dtype != config.dtype:
        raise UnsupportedError(f"fa3 takes KV of q's dtype only, not {config.kv_dtype}")
    with torch.cuda.device(device):
        dtype, kv_dtype = getattr(torch, config.dtype), getattr(torch, config.kv_dtype)
        cache = torch.zeros(1, 2, *config.page_shape, dtype=dtype, device=device).to(kv_dtype)
        q = torch.zeros(1, config.num_qo_heads, config.head_dim, dtype=dtype, device=device)
        lse = torch.empty(1, config.num_qo_heads, device=device)
        indptr = np.array([0, 1], np.int32)
        level = Level(indptr, indptr, np.zeros(1, np.int32), np.ones(1, np.int32))
        launch = PagedLaunch(config, torch.empty(2**25, dtype=torch.uint8, device=device))
        launch.plan(level, torch.zeros(1, dtype=torch.int32, device=device), causal=False, backend=backend)
        launch.run(q, cache, torch.empty_like(q), lse, k_scale=1.0)
        torch.cuda.synchronize()


def plan_on_fa2(wrapper: Any, config: CascadeConfig, arguments: dict[str, Any]) -> None:
    """Plan FlashInfer's multi-level wrapper with all of its levels on fa2.

    The wrapper has no argument for the backend, and on Hopper chooses fa3, which is slower than no cascade at all
    on most batches; it reads the backend of each level's own wrapper when it plans.
    """
    for level in wrapper._batch_prefill_wrappers:
        level._backend = "fa2"
    with tell_if_slow("fa2", config):
        wrapper.plan(**arguments)


@contextlib.contextmanager
def tell_if_slow(kernel: str, config: CascadeConfig) -> Iterator[None]:
    """Say that FlashInfer compiles when the first plan of a kernel takes longer than planning ever does."""
    module = (
        kernel,
        config.dtype,
        config.kv_dtype,
        config.head_dim,
        config.logits_soft_cap > 0,
        config.window_left >= 0,
    )
    if module in _planned_before:
        yield
        return
    timer = threading.Timer(
        SLOW_S,
        lambda: logging.getLogger("flashinfer_cascade").warning(
            "FlashInfer compiles a kernel for %s on first use, which takes 20 to 90 s; "
            "'flashinfer-cascade doctor --compile' does it beforehand",
            kernel,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
        _planned_before.add(module)
    finally:
        timer.cancel()

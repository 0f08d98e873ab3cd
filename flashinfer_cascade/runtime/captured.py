"""A FlashInfer launch inside a captured CUDA graph: planned once in full, then again for every batch, directly.

FlashInfer's public ``plan`` copies each small array to the device by itself and costs some 200 us. Here the arrays lie
in one staging area already, so that only the part that computes the schedule is called: the compiled module's own
``plan``. It is not a public interface, and this is the only module that uses it.

Source: flashinfer/prefill.py (BatchPrefillWithPagedKVCacheWrapper.plan) and flashinfer/decode.py
(BatchDecodeWithPagedKVCacheWrapper._plan_impl) of FlashInfer 0.7.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import BackendUnavailableError, CascadeError
from flashinfer_cascade.runtime.launch import import_flashinfer, plan_arguments, tell_if_slow
from flashinfer_cascade.runtime.shapes import LaunchSpec

WRAPPER_ATTRIBUTES = (
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_pin_memory_int_workspace_buffer",
    "_plan_info",
    "_cached_module",
)
"""Set by FlashInfer's wrappers, read or set here."""


class GroupArrays(NamedTuple):
    """The groups of a launch, one set on the host and one on the device.

    Attributes:
        qo_indptr: int32[num_slots + 1], in rows.
        kv_indptr: int32[num_slots + 1], into the page ids of the whole plan.
        kv_last_page_len: int32[num_slots].
        kv_len: int32[num_slots], in tokens.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor
    kv_len: torch.Tensor


def int_workspace_bytes(config: CascadeConfig, spec: LaunchSpec, num_sms: int) -> int:
    """What FlashInfer needs on the device, and pinned, for the schedule of a launch.

    Source: flashinfer/attention/scheduler.cuh, PrefillPlanImpl, PrefillSM90Plan and DecodePlanImpl.
    """
    if spec.backend == "fa3":
        return 4 * (7 * spec.num_tiles(config) * config.num_qo_heads + num_sms + 1) + 2**12
    blocks = max(spec.num_tiles(config), spec.num_slots, 2 * num_sms)
    return 13 * blocks + 4 * (spec.num_slots + spec.planned_rows) + 2**12


def float_workspace_bytes(config: CascadeConfig, spec: LaunchSpec, num_sms: int) -> int:
    """What a captured fa2 launch needs for cut KV: a float32 partial and an LSE for every row that a block may hold.

    Source: flashinfer/attention/scheduler.cuh, PrefillPlanImpl.
    """
    if spec.backend != "fa2":
        return 0
    blocks = max(2 * num_sms // config.num_kv_heads, spec.num_tiles(config))
    rows = -(-blocks * spec.tile(config) // config.group_size)
    return 4 * config.num_qo_heads * rows * (config.head_dim + 1) + 2**12


class CapturedLaunch:
    """One attention launch of a captured graph.

    Args:
        config: the attention.
        spec: what is fixed of it.
        workspace: uint8, on the device: FlashInfer's float workspace.
        int_workspaces: uint8: one on the device, and pinned ones that take turns.
        groups: on the device: what the kernel will read.
        pages: int32[max_kv_indices], on the device: page ids of the whole plan.
        host: the groups that the first plan is made of, on the CPU.

    Raises:
        BackendUnavailableError: FlashInfer is of another version than the direct call is known to work with.
    """

    def __init__(
        self,
        config: CascadeConfig,
        spec: LaunchSpec,
        workspace: torch.Tensor,
        int_workspaces: tuple[torch.Tensor, list[torch.Tensor]],
        groups: GroupArrays,
        pages: torch.Tensor,
        host: GroupArrays,
    ) -> None:
        self._config, self.spec, self._workspace = config, spec, workspace
        self._on_device, self._pinned = int_workspaces
        flashinfer = import_flashinfer()
        buffers = (groups.kv_indptr, pages, groups.kv_last_page_len)
        if spec.backend == "decode":
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                config.kv_layout,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=buffers[0],
                paged_kv_indices_buffer=buffers[1],
                paged_kv_last_page_len_buffer=buffers[2],
            )
        else:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                config.kv_layout,
                use_cuda_graph=True,
                qo_indptr_buf=groups.qo_indptr,
                paged_kv_indptr_buf=buffers[0],
                paged_kv_indices_buf=buffers[1],
                paged_kv_last_page_len_buf=buffers[2],
                backend=spec.backend.removesuffix("_uncut"),
            )
        check_wrapper(flashinfer, self._wrapper)
        with tell_if_slow(spec.backend, config):
            self._wrapper.plan(
                **plan_arguments(config, spec.backend, *host[:3], torch.empty(0, dtype=torch.int32), spec.causal)
            )
        self._module = self._wrapper._cached_module
        # The wrapper's own are 8 MiB each, on the device and pinned; captured graphs need a small part of that.
        self._wrapper._int_workspace_buffer = self._on_device
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[0]
        torch.cuda.current_stream(workspace.device).synchronize()
        self._info: list[int] | None = None
        self._empty = (
            torch.empty(0, dtype=getattr(torch, config.dtype)),
            torch.empty(0, dtype=getattr(torch, config.kv_dtype)),
        )

    def plan(self, host: GroupArrays, turn: int) -> None:
        """Schedule one batch; the schedule is copied to the device on the current stream.

        Args:
            host: its groups, on the CPU.
            turn: which pinned area to use: its last copy must be done.

        Raises:
            CascadeError: FlashInfer would launch other blocks than those captured.
        """
        config, spec = self._config, self.spec
        if spec.backend == "decode":
            # Without cuts the launch is the same for every batch, and eager planning does not cut for graphs' sake.
            info = self._module.plan(
                self._workspace,
                self._on_device,
                self._pinned[turn],
                host.kv_indptr,
                spec.num_slots,
                config.num_qo_heads,
                config.num_kv_heads,
                config.page_size,
                False,  # enable_cuda_graph
                config.window_left,
                config.logits_soft_cap,
                config.head_dim,
                config.head_dim,
                *self._empty,
            )
        else:
            arguments = [
                self._workspace,
                self._on_device,
                self._pinned[turn],
                host.qo_indptr,
                host.kv_indptr,
                host.kv_len,
                spec.planned_rows,
                spec.num_slots,
                config.num_qo_heads,
                config.num_kv_heads,
                config.page_size,
                True,  # enable_cuda_graph
                config.head_dim,
                config.head_dim,
                spec.causal,
                config.window_left,
            ]
            if spec.backend != "fa3":
                # fixed_split_size, disable_split_kv, num_colocated_ctas, uniform_q_len
                arguments += [-1, spec.backend == "fa2_uncut", 0, 0]
            info = self._module.plan(*arguments)
        launched = list(info)
        if self._info is None:
            self._info = launched
            self._wrapper._plan_info = info
        elif launched != self._info:
            raise CascadeError(
                f"FlashInfer planned {spec.backend} as {launched}, but {self._info} was captured: this is a defect, "
                "report the plan that caused it"
            )

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        k_scale: float,
        v_scale: float = 1.0,
    ) -> None:
        """Launch, to be captured; writes every row of `out`, and of `lse`, that lies in a group."""
        self._wrapper.run(
            q,
            kv_cache,
            k_scale=None if k_scale == 1.0 else k_scale,
            v_scale=None if v_scale == 1.0 else v_scale,
            out=out,
            lse=lse,
            return_lse=lse is not None,
        )


def check_wrapper(flashinfer: Any, wrapper: Any) -> None:
    """Refuse a FlashInfer whose wrappers are not built as the direct call expects.

    Raises:
        BackendUnavailableError: names the attribute that is missing.
    """
    source = inspect.getsource(type(wrapper))
    missing = [name for name in WRAPPER_ATTRIBUTES if f"self.{name}" not in source]
    if missing or "self._cached_module.plan(" not in source:
        raise BackendUnavailableError(
            f"FlashInfer {flashinfer.__version__} plans its graphs in another way ({type(wrapper).__name__} lacks "
            f"{', '.join(missing) or 'a call of its module'}): use 0.7, or run without CUDA graphs"
        )

"""A FlashInfer launch inside a captured CUDA graph: planned once in full, then again for every batch, directly.

FlashInfer's public ``plan`` copies each small array to the device by itself and costs some 200 us. Here the arrays lie
in one staging area already, so that only the part that computes the schedule is called: the compiled module's own
``plan``. It is not a public interface, and this is the only module that uses it.

Source: flashinfer/prefill.py (BatchPrefillWithPagedKVCacheWrapper.plan) and flashinfer/decode.py
(BatchDecodeWithPagedKVCacheWrapper._plan_impl) of FlashInfer 0.7.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array
from flashinfer_cascade.errors import BackendUnavailableError, CascadeError
from flashinfer_cascade.runtime.launch import check_fa3, import_flashinfer, plan_arguments, tell_if_slow
from flashinfer_cascade.runtime.schedule import UncutSchedule, is_planned_alike
from flashinfer_cascade.runtime.shapes import LaunchSpec

FIRST_VERSION = (0, 7, 2)
"""Before, the module's plan took other arguments, and more workspace."""

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


class LaunchMemory(NamedTuple):
    """What a launch reads and works in, on the device unless said otherwise.

    Attributes:
        workspace: uint8: FlashInfer's float workspace.
        int_workspaces: uint8: one on the device, and pinned ones that take turns.
        groups: what the kernel reads.
        schedule: uint8: staged schedule of an uncut fa2 launch.
        pages: int32[max_kv_indices]: page ids of the whole plan.
    """

    workspace: torch.Tensor
    int_workspaces: tuple[torch.Tensor, list[torch.Tensor]]
    groups: GroupArrays
    schedule: torch.Tensor
    pages: torch.Tensor


MAX_DECODE_BLOCKS_PER_SM = 32
"""No SM holds more blocks at once. Source: CUDA C++ programming guide, "Technical Specifications"."""


def int_workspace_bytes(config: CascadeConfig, spec: LaunchSpec, num_sms: int) -> int:
    """What FlashInfer needs on the device, and pinned, for the schedule of a launch.

    Source: flashinfer/attention/scheduler.cuh, PrefillPlanImpl, PrefillSM90Plan and DecodePlanImpl.
    """
    if spec.backend == "fa3":
        return 4 * (7 * spec.num_blocks * config.num_qo_heads + num_sms + 1) + 2**12
    blocks = max(spec.num_blocks, spec.num_slots, 2 * num_sms)
    return 13 * blocks + 4 * (spec.num_slots + spec.planned_rows) + 2**12


def float_workspace_bytes(config: CascadeConfig, spec: LaunchSpec, num_sms: int) -> int:
    """What a captured launch needs for cut KV: a float32 partial and an LSE for every row that a block may hold.

    Source: flashinfer/attention/scheduler.cuh, PrefillPlanImpl and DecodePlanImpl.
    """
    if spec.backend == "decode":  # its first plan reserves for cuts
        rows = MAX_DECODE_BLOCKS_PER_SM * num_sms // config.num_kv_heads + 1
    elif spec.backend == "fa2":
        blocks = max(2 * num_sms // config.num_kv_heads, spec.num_blocks)
        rows = -(-blocks * spec.tile // config.group_size)
    else:
        return 0
    return 4 * config.num_qo_heads * rows * (config.head_dim + 1) + 2**12


class CapturedLaunch:
    """One attention launch of a captured graph.

    How it is scheduled for a batch depends on its kernel: once and for all where every row is a group of its own and KV
    is not cut; by `UncutSchedule`, in the arrays that are staged anyway; or by FlashInfer's module, with a copy of
    its own.

    Args:
        config: the attention.
        spec: what is fixed of it.
        memory: what it reads and works in.
        host: the groups that the first plan is made of, on the CPU: all rows, without KV.
        num_sms: of the device.

    Raises:
        BackendUnavailableError: FlashInfer is of another version than the direct calls are known to work with.
    """

    def __init__(
        self, config: CascadeConfig, spec: LaunchSpec, memory: LaunchMemory, host: GroupArrays, num_sms: int
    ) -> None:
        self._config, self.spec, self._memory = config, spec, memory
        flashinfer = import_flashinfer()
        groups, workspace = memory.groups, memory.workspace
        if spec.backend == "fa3":
            check_fa3(workspace.device)
        if spec.backend == "decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                config.kv_layout,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=groups.kv_indptr,
                paged_kv_indices_buffer=memory.pages,
                paged_kv_last_page_len_buffer=groups.kv_last_page_len,
            )
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                config.kv_layout,
                use_cuda_graph=True,
                qo_indptr_buf=groups.qo_indptr,
                paged_kv_indptr_buf=groups.kv_indptr,
                paged_kv_indices_buf=memory.pages,
                paged_kv_last_page_len_buf=groups.kv_last_page_len,
                backend=spec.backend.removesuffix("_uncut"),
            )
        self._wrapper = wrapper
        check_wrapper(flashinfer, wrapper)
        with tell_if_slow(spec.backend, config):
            wrapper.plan(
                **plan_arguments(config, spec.backend, *host[:3], torch.empty(0, dtype=torch.int32), spec.causal)
            )
        torch.cuda.current_stream(workspace.device).synchronize()
        self._module = wrapper._cached_module
        self._info: list[int] | None = None
        self._schedule: UncutSchedule | None = None
        if spec.is_fixed:
            # The same for every batch, once FlashInfer plans it as it would without a graph.
            size = int_workspace_bytes(config, spec, num_sms)
            on_device = torch.zeros(size, dtype=torch.uint8, device=workspace.device)
            pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            wrapper._plan_info = self._call_module(host, on_device, pinned, is_graph=False)
            wrapper._int_workspace_buffer = on_device
            torch.cuda.current_stream(workspace.device).synchronize()
        elif spec.backend == "fa2_uncut":
            planned = list(wrapper._plan_info)
            pinned = wrapper._pin_memory_int_workspace_buffer
            if not is_planned_alike(planned, pinned.numpy(), host.qo_indptr.numpy(), config.group_size):
                raise BackendUnavailableError(
                    f"FlashInfer {flashinfer.__version__} schedules fa2 in another way than 0.7: install 0.7, or run "
                    "without CUDA graphs"
                )
            self._schedule = UncutSchedule(config, spec)
            wrapper._plan_info = self._schedule.plan_info(planned)
            wrapper._int_workspace_buffer = memory.schedule
        else:
            wrapper._int_workspace_buffer = memory.int_workspaces[0]
        # FlashInfer's own is 8 MiB.
        wrapper._pin_memory_int_workspace_buffer = None

    def plan(self, host: GroupArrays, qo_indptr: Int32Array, schedule: Int32Array, turn: int) -> None:
        """Schedule one batch.

        Args:
            host: its groups, on the CPU.
            qo_indptr: the same as ``host.qo_indptr``.
            schedule: this launch's part of what is staged.
            turn: which pinned area FlashInfer's module may use: its last copy must be done.

        Raises:
            CascadeError: FlashInfer would launch other blocks than those captured.
        """
        if self._schedule is not None:
            self._schedule.write(schedule, qo_indptr)
        elif self.spec.backend in ("fa2", "fa3"):
            on_device, pinned = self._memory.int_workspaces
            info = self._call_module(host, on_device, pinned[turn], is_graph=True)
            launched = list(info)
            if self._info is None:
                self._info, self._wrapper._plan_info = launched, info
            elif launched != self._info:
                raise CascadeError(
                    f"FlashInfer planned {self.spec.backend} as {launched}, but {self._info} was captured: this is a "
                    "defect, report the plan that caused it"
                )

    def _call_module(self, host: GroupArrays, on_device: torch.Tensor, pinned: torch.Tensor, is_graph: bool) -> Any:
        config, spec = self._config, self.spec
        begin = (self._memory.workspace, on_device, pinned)
        if spec.backend == "decode":
            return self._module.plan(
                *begin,
                host.kv_indptr,
                spec.num_slots,
                config.num_qo_heads,
                config.num_kv_heads,
                config.page_size,
                is_graph,
                config.window_left,
                config.logits_soft_cap,
                config.head_dim,
                config.head_dim,
                torch.empty(0, dtype=getattr(torch, config.dtype)),
                torch.empty(0, dtype=getattr(torch, config.kv_dtype)),
            )
        # fixed_split_size, disable_split_kv, num_colocated_ctas, uniform_q_len
        fa2_only = () if spec.backend == "fa3" else (-1, spec.backend == "fa2_uncut", 0, 0)
        return self._module.plan(
            *begin,
            host.qo_indptr,
            host.kv_indptr,
            host.kv_len,
            spec.planned_rows,
            spec.num_slots,
            config.num_qo_heads,
            config.num_kv_heads,
            config.page_size,
            is_graph,
            config.head_dim,
            config.head_dim,
            spec.causal,
            config.window_left,
            *fa2_only,
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
            # Idle blocks end without waiting for the launch before: with a programmatic launch, what comes behind
            # could begin before that one is done.
            enable_pdl=False if self.spec.may_idle else None,
        )


def check_wrapper(flashinfer: Any, wrapper: Any) -> None:
    """Refuse a FlashInfer whose wrappers are not built as the direct call expects.

    Raises:
        BackendUnavailableError: names the attribute that is missing.
    """
    source = inspect.getsource(type(wrapper))
    missing = [name for name in WRAPPER_ATTRIBUTES if f"self.{name}" not in source]
    version = tuple(map(int, re.findall(r"\d+", flashinfer.__version__)[:3]))
    if version < FIRST_VERSION:
        missing.append(f"the arguments of {'.'.join(map(str, FIRST_VERSION))}")
    if missing or "self._cached_module.plan(" not in source:
        raise BackendUnavailableError(
            f"FlashInfer {flashinfer.__version__} plans its graphs in another way ({type(wrapper).__name__} lacks "
            f"{', '.join(missing) or 'a call of its module'}): use 0.7.2, or run without CUDA graphs"
        )

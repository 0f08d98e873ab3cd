"""Launches of the kernels in CUDA C++, compiled for one configuration at a time.

`kernels/wide.cu` attends for wide segments on Hopper, `kernels/stream.cu` for narrow ones from Ampere on.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.nvrtc import CudaKernel, can_compile

KERNELS = Path(__file__).with_name("kernels")

WARPS, STAGES, TILE = 2, 2, 16
"""Of stream.cu: warps of a block, tiles in the ring of each, KV tokens of a tile. `lower.Tiling.of` counts on them."""

WIDE_TILE, WIDE_STAGES, WIDE_THREADS = 64, 5, 384
"""Of wide.cu: KV tokens of a tile, tiles in the ring, threads of a block."""


@functools.cache
def has_stream(device: int) -> bool:
    """Whether stream.cu can be compiled for a GPU: from sm_80 on, where there is an NVRTC that knows it."""
    capability = torch.cuda.get_device_capability(device)
    return capability[0] >= 8 and can_compile(capability)


@functools.cache
def has_wide(device: int) -> bool:
    """Whether wide.cu can be compiled for a GPU: sm_90, where there is an NVRTC that knows it."""
    capability = torch.cuda.get_device_capability(device)
    return capability[0] == 9 and can_compile(capability)


class Order(NamedTuple):
    """How a launch follows the one before it, with programmatic dependent launch.

    Attributes:
        first: it waits for all before, once, before it reads anything.
        waits: it may begin before the one in front of it has ended, and waits for that before it ends itself.
        triggers: it lets the next one begin.
    """

    first: bool
    waits: bool
    triggers: bool


class Tables(NamedTuple):
    """What both kernels read of `segment_kernels.SegmentArrays`, and where pieces go: `segment_kernels.Partials`."""

    pages: torch.Tensor
    row_map: torch.Tensor | None
    row_pos: torch.Tensor | None
    partial_indptr: torch.Tensor
    partials: torch.Tensor
    partial_lse: torch.Tensor


@functools.cache
def _kernel(
    device: int, name: str, features: str, shared_bytes: int, defines: tuple[tuple[str, int], ...]
) -> CudaKernel:
    source = "".join((KERNELS / file).read_text() for file in ("common.cuh", f"{name}.cu"))
    return CudaKernel(source, name, dict(defines), shared_bytes, features)


def launch_stream(
    config: CascadeConfig,
    call: LayerCall,
    columns: int,
    items: torch.Tensor,
    runs: torch.Tensor,
    tables: Tables,
    order: Order,
) -> None:
    """Launch stream.cu on the current stream.

    Args:
        config: the attention, with 16-bit KV.
        call: the layer.
        columns: packed query heads that an item has at most: 8 or 16.
        items: as in `segment_kernels.SegmentArrays`.
        runs: likewise.
        tables: likewise.
        order: among the launches.
    """
    defines = {"COLUMNS": columns, "TILE": TILE, "STAGES": STAGES, "WARPS": WARPS}
    defines |= _defines(config, call, tables, order)
    shared_bytes = WARPS * STAGES * (2 * TILE + columns) * config.head_dim * 2
    kernel = _kernel(torch.cuda.current_device(), "stream", "", shared_bytes, tuple(defines.items()))
    arguments = (*_arguments(config, call, items, runs, tables), ctypes.c_int(len(runs)))
    blocks = -(-len(runs) * config.num_kv_heads // WARPS)
    kernel.launch(blocks, WARPS * 32, arguments, early=order.first or order.waits)


def launch_wide(
    config: CascadeConfig,
    call: LayerCall,
    num_sms: int,
    items: torch.Tensor,
    counts: torch.Tensor | tuple[int, int],
    tables: Tables,
    order: Order,
) -> None:
    """Launch wide.cu on the current stream.

    Args:
        config: the attention, with 16-bit KV and a head_dim of 64 or 128.
        call: the layer.
        num_sms: of the GPU: blocks at most.
        items: as in `segment_kernels.SegmentArrays`.
        counts: how many of them there are, and how many are of two tiles: int32[2] on the device, or numbers.
        tables: likewise.
        order: among the launches.
    """
    defines = _defines(config, call, tables, order)
    tile_bytes, own = WIDE_TILE * config.head_dim * 2, config.head_dim // 2
    barriers = 2 * 2 + 3 * WIDE_STAGES
    shared_bytes = (2 + 2 * WIDE_STAGES) * tile_bytes + (own + 4) * 128 * 4 + barriers * 8 + 32
    kernel = _kernel(torch.cuda.current_device(), "wide", "a", shared_bytes, tuple(defines.items()))
    on_device, numbers = (counts, (0, 0)) if isinstance(counts, torch.Tensor) else (None, counts)
    arguments = (*_arguments(config, call, items, on_device, tables), *map(ctypes.c_int, numbers))
    blocks = min(len(items) * config.num_kv_heads, num_sms)
    kernel.launch(blocks, WIDE_THREADS, arguments, early=order.first or order.waits)


def _kv(call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
    cache = call.kv_cache
    return (cache[:, 0], cache[:, 1]) if isinstance(cache, torch.Tensor) else cache


def _defines(config: CascadeConfig, call: LayerCall, tables: Tables, order: Order) -> dict[str, int]:
    """What common.cuh takes."""
    k, _ = _kv(call)
    token, head = (1, 2) if config.kv_layout == "NHD" else (2, 1)
    return {
        "T_BF16": int(config.dtype == "bfloat16"),
        "NUM_HEADS": config.num_qo_heads,
        "NUM_KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "PAGE_SIZE": config.page_size,
        "PAGE_STRIDE": k.stride(0),
        "TOKEN_STRIDE": k.stride(token),
        "HEAD_STRIDE": k.stride(head),
        "CAUSAL": int(tables.row_pos is not None),
        "CAPPED": int(config.logits_soft_cap > 0),
        "HAS_ROW_MAP": int(tables.row_map is not None),
        "HAS_SINKS": int(call.sinks is not None),
        "HAS_LSE": int(call.lse is not None),
        "FIRST": int(order.first),
        "WAITS": int(order.waits),
        "TRIGGERS": int(order.triggers),
    }


def _arguments(
    config: CascadeConfig, call: LayerCall, items: torch.Tensor, others: torch.Tensor | None, tables: Tables
) -> tuple[ctypes._SimpleCData[int] | ctypes._SimpleCData[float] | ctypes.c_void_p, ...]:
    """What both kernels take first; `others` are the runs or the number of items."""
    cap, natural = config.logits_soft_cap, config.softmax_scale * call.k_scale
    scale = natural / cap if cap else natural * 1.4426950408889634
    pointers = (call.q, *_kv(call), items, others, *tables, call.out, call.lse, call.sinks)
    strides = (call.q.stride(0), call.q.stride(1), call.out.stride(0), call.out.stride(1))
    return (
        *(ctypes.c_void_p(0 if tensor is None else tensor.data_ptr()) for tensor in pointers),
        *map(ctypes.c_float, (scale, cap, call.v_scale)),
        *map(ctypes.c_longlong, strides),
    )

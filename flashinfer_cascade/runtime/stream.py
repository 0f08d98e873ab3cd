"""Launches of stream.cu: narrow segments on tensor cores, compiled for one configuration at a time."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.nvrtc import CudaKernel, can_compile

SOURCE = Path(__file__).with_name("kernels") / "stream.cu"
WARPS, STAGES, TILE = 2, 2, 16
"""Warps of a block, tiles in the ring of each, KV tokens of a tile: `lower.Tiling.of` counts on them."""


@functools.cache
def is_available(device: int) -> bool:
    """Whether the kernel can be compiled for a GPU: from sm_80 on, where there is an NVRTC that knows it."""
    capability = torch.cuda.get_device_capability(device)
    return capability[0] >= 8 and can_compile(capability)


@functools.cache
def _kernel(device: int, shared_bytes: int, defines: tuple[tuple[str, int], ...]) -> CudaKernel:
    return CudaKernel(SOURCE.read_text(), "stream", dict(defines), shared_bytes)


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def launch_stream(
    config: CascadeConfig,
    call: LayerCall,
    columns: int,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    row_map: torch.Tensor | None,
    row_pos: torch.Tensor | None,
    partials: tuple[torch.Tensor, torch.Tensor],
    *,
    first: bool,
    waits: bool,
    triggers: bool,
) -> None:
    """Launch on the current stream.

    Args:
        config: the attention, with 16-bit KV.
        call: the layer.
        columns: packed query heads that an item has at most: 8 or 16.
        tables: items, runs, pages and partial_indptr, as in `segment_kernels.SegmentArrays`.
        row_map: likewise.
        row_pos: likewise.
        partials: values and lse.
        first: waits for all before, once, before it reads anything.
        waits: may begin before the kernel in front of it has ended, and waits for that before it ends itself.
        triggers: lets the kernel behind it begin before it ends.
    """
    items, runs, pages, partial_indptr = tables
    k, v = (call.kv_cache[:, 0], call.kv_cache[:, 1]) if isinstance(call.kv_cache, torch.Tensor) else call.kv_cache
    token, head = (1, 2) if config.kv_layout == "NHD" else (2, 1)
    cap, natural = config.logits_soft_cap, config.softmax_scale * call.k_scale
    defines = {
        "T_BF16": int(config.dtype == "bfloat16"),
        "NUM_HEADS": config.num_qo_heads,
        "NUM_KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "PAGE_SIZE": config.page_size,
        "PAGE_STRIDE": k.stride(0),
        "TOKEN_STRIDE": k.stride(token),
        "HEAD_STRIDE": k.stride(head),
        "COLUMNS": columns,
        "TILE": TILE,
        "STAGES": STAGES,
        "WARPS": WARPS,
        "CAUSAL": int(row_pos is not None),
        "CAPPED": int(cap > 0),
        "HAS_ROW_MAP": int(row_map is not None),
        "HAS_SINKS": int(call.sinks is not None),
        "HAS_LSE": int(call.lse is not None),
        "FIRST": int(first),
        "WAITS": int(waits),
        "TRIGGERS": int(triggers),
    }
    shared_bytes = WARPS * STAGES * (2 * TILE + columns) * config.head_dim * 2
    kernel = _kernel(torch.cuda.current_device(), shared_bytes, tuple(defines.items()))
    scale = natural / cap if cap else natural * 1.4426950408889634
    pointers = (call.q, k, v, items, runs, pages, row_map, row_pos, partial_indptr, *partials, call.out, call.lse)
    strides = (call.q.stride(0), call.q.stride(1), call.out.stride(0), call.out.stride(1))
    arguments = (
        *map(_pointer, (*pointers, call.sinks)),
        *map(ctypes.c_float, (scale, cap, call.v_scale)),
        *map(ctypes.c_longlong, strides),
        ctypes.c_int(len(runs)),
    )
    blocks = -(-len(runs) * config.num_kv_heads // WARPS)
    kernel.launch(blocks, WARPS * 32, arguments, early=first or waits)

"""Reading and writing vLLM's KV cache in plain torch: its dtype, its order in memory, its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from flashinfer_cascade.errors import UnsupportedError

KVLayout = Literal["NHD", "HND"]

WriteKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str, Any, Any], object]
"""``(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)``, as `write_kv` takes them:
the signature of vLLM's ``reshape_and_cache_flash``."""

STRIDE_ORDER: dict[KVLayout, tuple[int, ...]] = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4)}
"""Order in memory of ``[num_blocks, 2, block_size, num_kv_heads, head_size]``; each is its own inverse."""

FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_DTYPES = {"half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16, **FP8_DTYPES}


def kv_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Of vLLM's name for it; "auto" is the model's.

    Raises:
        UnsupportedError: no kernel reads that.
    """
    if kv_cache_dtype == "auto":
        return model_dtype
    if kv_cache_dtype not in KV_DTYPES:
        raise UnsupportedError(
            f"kv_cache_dtype={kv_cache_dtype!r}: use auto or one of {', '.join(KV_DTYPES)}, or leave this model on its "
            "own attention backend"
        )
    return KV_DTYPES[kv_cache_dtype]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Write new tokens to their slots. It waits for the GPU: a CUDA graph needs vLLM's own function instead.

    Args:
        key: ``[num_tokens, num_kv_heads, head_size]``.
        value: likewise.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides; uint8 when it holds fp8.
        value_cache: likewise.
        slot_mapping: int64[>= num_tokens], block times block_size plus offset; a token at -1 is not written.
        kv_cache_dtype: vLLM's name of it.
        k_scale: what fp8 keys are divided by: a number, or a tensor of one.
        v_scale: likewise.
    """
    slots = slot_mapping[: len(key)]
    written = slots >= 0
    block, offset = slots[written] // key_cache.shape[1], slots[written] % key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        tokens = new[written]
        if kv_cache_dtype in FP8_DTYPES:
            dtype = FP8_DTYPES[kv_cache_dtype]
            limit = torch.finfo(dtype).max
            tokens = (tokens.float() / scale).clamp(-limit, limit).to(dtype).view(torch.uint8)
            cache.view(torch.uint8)[block, offset] = tokens
        else:
            cache[block, offset] = tokens.to(cache.dtype)


def swap_blocks(src_kv_cache: torch.Tensor, dst_kv_cache: torch.Tensor, src_to_dst: torch.Tensor) -> None:
    """Copy blocks of one layer's cache to another's, on the same or another device.

    Args:
        src_kv_cache: ``[num_blocks, 2, block_size, num_kv_heads, head_size]``, any strides.
        dst_kv_cache: likewise.
        src_to_dst: int64[num_swapped, 2], from which block to which.
    """
    src, dst = src_to_dst.unbind(1)
    dst_kv_cache[dst.to(dst_kv_cache.device)] = src_kv_cache[src.to(src_kv_cache.device)].to(dst_kv_cache.device)


def copy_blocks(kv_caches: Sequence[torch.Tensor], src_to_dists: torch.Tensor) -> None:
    """Copy blocks within each layer's cache.

    Args:
        kv_caches: one a layer, as for `swap_blocks`.
        src_to_dists: int64[num_copied, 2], from which block to which.
    """
    for kv_cache in kv_caches:
        swap_blocks(kv_cache, kv_cache, src_to_dists)

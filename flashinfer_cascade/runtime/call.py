"""One layer's tensors, checked once against the batch and the configuration."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.errors import InvalidBatchError, check_type, told
from flashinfer_cascade.plan import CascadePlan

KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

COPY_BYTES = 16
"""What the kernels copy at once of q, KV and out, ours as FlashInfer's: it is aligned to as much."""


class LayerCall(NamedTuple):
    """What an executor gets for one layer: the arguments of `CascadeRuntime.run`, checked.

    Attributes:
        q: ``[num_rows, num_qo_heads, head_dim]``.
        kv_cache: one 5-D tensor, or K and V.
        out: shape and dtype of q; an executor writes exactly its rows.
        lse: float32[num_rows, num_qo_heads], likewise; None is not wanted.
        k_scale, v_scale: what the cache's keys and values are multiplied by.
        sinks: float32[num_qo_heads] or None.
    """

    q: torch.Tensor
    kv_cache: KVCache
    out: torch.Tensor
    lse: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: torch.Tensor | None = None


def check_tensors(
    config: CascadeConfig,
    device: torch.device,
    num_rows: int,
    q: torch.Tensor,
    kv_cache: KVCache,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Hold a layer's tensors against the configuration and the number of rows; their values stay unread.

    Raises:
        InvalidBatchError: names the tensor, what it is and what it should be.
    """
    shape, dtype = (num_rows, config.num_qo_heads, config.head_dim), getattr(torch, config.dtype)
    _check("q", q, shape, dtype, device, "pass the rows of the batch that the loaded plan was made for")
    _check_copies("q", q)
    _check_cache(config, device, kv_cache)
    if sinks is not None:
        _check("sinks", sinks, shape[1:2], torch.float32, device, "give one natural-log logit per query head")
    if out is not None:
        _check("out", out, shape, dtype, device, "it receives the rows of q")
        _check_copies("out", out)


def check_scale(name: str, value: Any) -> float:
    """What a cache is multiplied by, as a float.

    Raises:
        InvalidBatchError: it is no number, not finite, or not above 0.
    """
    if type(value) is float and 0.0 < value < math.inf:  # what layers give
        return value
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise InvalidBatchError(
            f"{told(name, value)}: give a finite number above 0 (of a tensor, take it once, when the model is loaded)"
        )
    return float(value)


def num_cache_pages(kv_cache: KVCache) -> int:
    """Pages that a KV cache holds."""
    return len(kv_cache) if isinstance(kv_cache, torch.Tensor) else len(kv_cache[0])


def check_plan(config: CascadeConfig, plan: object) -> None:
    """Refuse what is no plan, or one for another configuration.

    Raises:
        InvalidBatchError: names the difference.
    """
    check_type("plan", plan, CascadePlan, "give the CascadePlan that planner.plan returns")
    assert isinstance(plan, CascadePlan)
    if plan.config is not config and plan.config != config:
        theirs, ours = plan.config.model_dump(), config.model_dump()
        differing = ", ".join(f"{name}={theirs[name]!r}" for name in ours if theirs[name] != ours[name])
        raise InvalidBatchError(
            f"the plan was made with {differing}, unlike this runtime's configuration: "
            "build planner and runtime from one CascadeConfig"
        )


def check_pages(plan: CascadePlan, num_pages: int) -> None:
    """Refuse a plan that reads pages which the KV cache does not have.

    Raises:
        InvalidBatchError: names both.
    """
    if num_pages >= plan.config.max_kv_pages:  # no plan reads more
        return
    highest = int(plan.seg_pages.max(initial=-1))
    if num_pages <= highest:
        raise InvalidBatchError(
            f"the plan reads page {highest}, but kv_cache holds {num_pages} pages: "
            "pass the cache that the block tables index"
        )


def _check(
    name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, remedy: str
) -> None:
    if not isinstance(x, torch.Tensor):
        raise InvalidBatchError(f"{told(name, x)}; expected a torch.Tensor, {dtype} {list(shape)}: {remedy}")
    if x.shape != shape or x.dtype != dtype or x.device != device:
        raise InvalidBatchError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; expected {dtype} {list(shape)} on {device}: {remedy}"
        )
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise InvalidBatchError(
            f"{name} has a stride of {x.stride(-1)} in its last dimension: the kernels read that one as a whole, "
            "make it contiguous"
        )


def _check_copies(name: str, x: torch.Tensor) -> None:
    address, size, together = x.data_ptr(), x.element_size(), x.data_ptr()
    for stride in x.stride()[:-1]:
        together |= stride * size
    if together % COPY_BYTES == 0:
        return
    used = [stride for stride, length in zip(x.stride()[:-1], x.shape, strict=False) if length > 1]
    if address % COPY_BYTES or any(stride * size % COPY_BYTES for stride in used):
        raise InvalidBatchError(
            f"{name} has strides {x.stride()} of {size} bytes from an address that is {address % COPY_BYTES} modulo "
            f"{COPY_BYTES}: the kernels copy {COPY_BYTES} bytes at once, pad it to multiples of that or pass a "
            "contiguous copy"
        )


def _check_cache(config: CascadeConfig, device: torch.device, kv_cache: KVCache) -> None:
    remedy = f"the layout is {config.kv_layout}; view a cache stored as bytes in its own dtype"
    if isinstance(kv_cache, torch.Tensor):
        caches = {"kv_cache": kv_cache}
        shape: tuple[int, ...] = (_length(kv_cache), 2, *config.page_shape)
    else:
        if not isinstance(kv_cache, (tuple, list)):
            raise InvalidBatchError(f"{told('kv_cache', kv_cache)}: pass one 5-D tensor, or (k, v)")
        if len(kv_cache) != 2:
            raise InvalidBatchError(f"kv_cache holds {len(kv_cache)} tensors: pass one 5-D tensor, or (k, v)")
        caches = {"kv_cache[0]": kv_cache[0], "kv_cache[1]": kv_cache[1]}
        shape = (_length(kv_cache[0]), *config.page_shape)
    for name, cache in caches.items():
        _check(name, cache, shape, getattr(torch, config.kv_dtype), device, remedy)
        _check_copies(name, cache)
    if len({cache.stride() for cache in caches.values()}) > 1:
        raise InvalidBatchError(
            f"K has strides {kv_cache[0].stride()} and V {kv_cache[1].stride()}: the kernels take one set of "
            "strides for both, allocate them alike"
        )


def _length(x: Any) -> int:
    """Of the first dimension, which is free; 0 for what has none."""
    return len(x) if isinstance(x, torch.Tensor) and x.ndim else 0

"""`CascadeRuntime.run` as one opaque operator, for models that are compiled piece by piece."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from flashinfer_cascade.errors import CascadeError

_runtimes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(runtime: Any) -> int:
    """A number by which `attention` finds a runtime, for as long as it lives."""
    number = next(_numbers)
    _runtimes[number] = runtime
    return number


@torch.library.custom_op("flashinfer_cascade::attention", mutates_args=("out",))
def _attention(
    number: int,
    q: torch.Tensor,
    kv_cache: list[torch.Tensor],
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
) -> None:
    runtime = _runtimes.get(number)
    if runtime is None:
        raise CascadeError(f"runtime {number} is gone: keep it alive for as long as the compiled model runs")
    cache = kv_cache[0] if len(kv_cache) == 1 else tuple(kv_cache)
    runtime.run(q, cache, out=out, k_scale=k_scale, v_scale=v_scale, sinks=sinks)


@_attention.register_fake
def _attention_fake(
    number: int,
    q: torch.Tensor,
    kv_cache: list[torch.Tensor],
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
) -> None:
    return None


def attention(
    number: int,
    q: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`CascadeRuntime.run` by the runtime's number: torch.compile sees one operator, `flashinfer_cascade::attention`.

    Args:
        number: `CascadeRuntime.number`.
        q: as for `CascadeRuntime.run`, and so are the others.
        kv_cache: likewise.
        k_scale: likewise.
        v_scale: likewise.
        sinks: likewise.
        out: likewise.

    Returns:
        out: shape and dtype of q.

    Raises:
        CascadeError: that runtime is gone.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    caches = [kv_cache] if isinstance(kv_cache, torch.Tensor) else list(kv_cache)
    torch.ops.flashinfer_cascade.attention(number, q, caches, out, k_scale, v_scale, sinks)
    return out

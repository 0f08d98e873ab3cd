"""Attention of one layer: new tokens go to the cache, then the loaded plan runs."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_cascade.errors import CascadeError, UnsupportedError
from flashinfer_cascade.integrations.vllm_v0.cache import FP8_DTYPES, STRIDE_ORDER
from flashinfer_cascade.integrations.vllm_v0.metadata import CascadeMetadata, CascadeWrapper

TRAILING = ("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name")
"""Positional arguments that follow kv_cache_dtype. Until 0.9 blocksparse_params came before them.
Source: vllm/attention/layer.py, Attention.__init__."""


class CascadeImpl:
    """A layer of any version from 0.6.3 to 0.10.0.

    Args:
        num_heads: query heads of this rank.
        head_size: of q, k and v.
        scale: of the logits.
        num_kv_heads: of this rank; None is num_heads.
        alibi_slopes: None.
        sliding_window: tokens that a query sees, itself included; None is all.
        kv_cache_dtype: vLLM's name of it.
        *trailing: see `TRAILING`.
        **extra: likewise by name, or `sinks`: float32[num_heads], natural-log logits that join the denominator.

    Raises:
        UnsupportedError: an argument asks for attention that no cascade computes.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        *trailing: Any,
        **extra: Any,
    ) -> None:
        is_new = len(trailing) > 1 and isinstance(trailing[1], str)
        names = TRAILING if is_new else ("blocksparse_params", *TRAILING)
        if len(trailing) > len(names):
            raise UnsupportedError(f"{len(trailing)} arguments behind kv_cache_dtype: vLLM v0 gives {', '.join(names)}")
        extra |= zip(names, trailing, strict=False)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = float(extra.pop("logits_soft_cap", None) or 0.0)
        self.sinks: torch.Tensor | None = extra.pop("sinks", None)
        _check_attn_type(extra.pop("attn_type", "decoder"))
        for name, value in {"alibi_slopes": alibi_slopes, **extra}.items():
            if value is not None and value is not False:
                raise UnsupportedError(f"{name}={value!r}: leave this model on its own attention backend")

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``(layer, query, key, value, kv_cache, attn_metadata, output=None)``; until 0.6 without `layer`.

        Then `k_scale`, `v_scale` and `attn_type` follow attn_metadata. Tensors of q, k and v have a row a token, heads
        apart or side by side. kv_cache is of `CascadeBackend.get_kv_cache_shape`, or empty in a profile run.

        Returns:
            out: shape of query.

        Raises:
            CascadeError: the step has not begun.
            UnsupportedError: the layer is not of the kind that was planned, or the output is to be quantized.
        """
        return (self._forward_until_0_6 if isinstance(args[0], torch.Tensor) else self._forward)(*args, **kwargs)

    def _forward_until_0_6(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        attn_metadata: CascadeMetadata,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        attn_type: Any = "decoder",
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _check_attn_type(attn_type)
        return self._attend(query, key, value, kv_cache, attn_metadata, output, (k_scale, v_scale), (k_scale, v_scale))

    def _forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        attn_metadata: CascadeMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None:
            raise UnsupportedError("output_scale: the output is not quantized here, turn fused quantization off")
        scales = layer._k_scale, layer._v_scale
        # Their values on the host, so that reading them does not wait for the GPU.
        on_host = layer._k_scale_float, layer._v_scale_float
        return self._attend(query, key, value, kv_cache, attn_metadata, output, scales, on_host)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: CascadeMetadata,
        output: torch.Tensor | None,
        scales: tuple[Any, Any],
        scales_on_host: tuple[float, float],
    ) -> torch.Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format) if output is None else output
        if kv_cache is None or not kv_cache.numel():
            return output.zero_()  # a profile run measures memory, nobody reads its results
        wrapper = metadata.wrapper
        if wrapper is None:
            raise CascadeError("the step has not begun: call the state's begin_forward before the model's forward")
        self._check(wrapper)
        heads = (-1, self.num_kv_heads, self.head_size)
        slots = metadata.slot_mapping.flatten()
        caches = kv_cache[:, 0], kv_cache[:, 1]
        wrapper.write_kv(key.view(heads), value.view(heads), *caches, slots, self.kv_cache_dtype, *scales)
        if self.kv_cache_dtype in FP8_DTYPES:
            kv_cache = kv_cache.view(FP8_DTYPES[self.kv_cache_dtype])
        rows = (-1, self.num_heads, self.head_size)
        k_scale, v_scale = scales_on_host
        wrapper.run(
            query.view(rows),
            kv_cache.permute(STRIDE_ORDER[wrapper.config.kv_layout]),
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=self.sinks,
            out=output.view(rows),
        )
        return output.view(query.shape)

    def _check(self, wrapper: CascadeWrapper) -> None:
        ours = self.scale, self.window_left, self.logits_soft_cap
        planned = wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap
        if ours != planned:
            raise UnsupportedError(
                f"a layer of (scale, window_left, logits_soft_cap) {ours} in a model planned for {planned}: all layers "
                "must be alike, leave this model on its own attention backend"
            )


def _check_attn_type(attn_type: Any) -> None:
    """A string, or an enum before 0.6.4."""
    name = str(getattr(attn_type, "name", attn_type)).lower()
    if name != "decoder":
        raise UnsupportedError(
            f"attn_type={name!r}: only decoder attention is causal, leave this model on its own backend"
        )

"""A model's configuration, gathered from a vLLM model runner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashinfer_cascade.config import MAX_INT32, CascadeConfig, PlannerPolicy
from flashinfer_cascade.errors import UnsupportedError
from flashinfer_cascade.integrations.vllm_v0.cache import KVLayout, WriteKV, kv_dtype, write_kv
from flashinfer_cascade.integrations.vllm_v0.impl import CascadeImpl
from flashinfer_cascade.profile import DeviceProfile


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What `make_backend` was called with; see there."""

    write_kv: WriteKV = write_kv
    kv_layout: KVLayout = "NHD"
    policy: PlannerPolicy | None = None
    profile: str | DeviceProfile = "h200"
    max_kv_indices: int = 0


def attention_layers(model: Any) -> Iterator[CascadeImpl]:
    """The layers of a model, a torch module, that run on this backend."""
    for module in model.modules():
        impl = getattr(module, "impl", None)
        if isinstance(impl, CascadeImpl):
            yield impl


def runner_config(runner: Any, options: BackendOptions) -> CascadeConfig:
    """The configuration of a runner's model on its tensor-parallel rank, once its KV cache has its size.

    Raises:
        UnsupportedError: the layers differ, or none runs on this backend, or no kernel computes their attention.
    """
    kinds = {(impl.scale, impl.window_left, impl.logits_soft_cap) for impl in attention_layers(runner.model)}
    if len(kinds) != 1:
        listed = "; ".join(f"scale={scale}, window_left={left}, soft cap={cap}" for scale, left, cap in sorted(kinds))
        raise UnsupportedError(
            f"{len(kinds)} kinds of attention layers ({listed}), but vLLM v0 makes one metadata for all: leave this "
            "model on its own attention backend"
        )
    (kind,) = kinds
    model, scheduler = runner.model_config, runner.scheduler_config
    # The largest graph may have more rows than there may be sequences.
    batch = max(scheduler.max_num_seqs, len(runner.graph_block_tables))
    num_blocks = runner.cache_config.num_gpu_blocks
    longest = min(-(-model.max_model_len // runner.block_size), num_blocks)
    return CascadeConfig(
        num_qo_heads=model.get_num_attention_heads(runner.parallel_config),
        num_kv_heads=model.get_num_kv_heads(runner.parallel_config),
        head_dim=model.get_head_size(),
        page_size=runner.block_size,
        dtype=str(model.dtype),
        kv_dtype=str(kv_dtype(runner.kv_cache_dtype, model.dtype)),
        kv_layout=options.kv_layout,
        sm_scale=kind[0],
        window_left=kind[1],
        logits_soft_cap=kind[2],
        max_batch_size=batch,
        max_num_rows=max(scheduler.max_num_batched_tokens, batch),
        max_kv_pages=num_blocks,
        max_kv_indices=options.max_kv_indices or min(batch * longest, MAX_INT32),
    )

"""The backend: where vLLM finds all other classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from flashinfer_cascade.config import SUPPORTED_HEAD_DIMS, PlannerPolicy
from flashinfer_cascade.integrations.vllm_v0 import cache
from flashinfer_cascade.integrations.vllm_v0.builder import CascadeMetadataBuilder
from flashinfer_cascade.integrations.vllm_v0.cache import KVLayout, WriteKV
from flashinfer_cascade.integrations.vllm_v0.impl import CascadeImpl
from flashinfer_cascade.integrations.vllm_v0.metadata import CascadeMetadata
from flashinfer_cascade.integrations.vllm_v0.options import BackendOptions
from flashinfer_cascade.integrations.vllm_v0.state import CascadeState
from flashinfer_cascade.profile import DeviceProfile


class CascadeBackend:
    """Takes the place of vLLM's FlashInfer backend; see `make_backend`.

    Attributes:
        options: what it was made with.
        accept_output_buffer: vLLM allocates the output, so that nothing is copied.
    """

    options: ClassVar[BackendOptions] = BackendOptions()
    accept_output_buffer: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """A name that vLLM knows."""
        return "FLASHINFER"

    @staticmethod
    def get_impl_cls() -> type[CascadeImpl]:
        """Attention of one layer."""
        return CascadeImpl

    @staticmethod
    def get_metadata_cls() -> type[CascadeMetadata]:
        """Of one step."""
        return CascadeMetadata

    @staticmethod
    def get_state_cls() -> type[CascadeState]:
        """Of the model runner."""
        return CascadeState

    @staticmethod
    def get_builder_cls() -> type[CascadeMetadataBuilder]:
        """Makes metadata."""
        return CascadeMetadataBuilder

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> CascadeMetadata:
        """What a rank that got the fields by broadcast calls."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Of FlashInfer's kernels."""
        return [*SUPPORTED_HEAD_DIMS]

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """By index, whatever the order in memory."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def get_kv_cache_stride_order(cls) -> tuple[int, ...]:
        """Order in memory of the dimensions of `get_kv_cache_shape`."""
        return cache.STRIDE_ORDER[cls.options.kv_layout]

    @staticmethod
    def swap_blocks(src_kv_cache: torch.Tensor, dst_kv_cache: torch.Tensor, src_to_dst: torch.Tensor) -> None:
        """See `cache.swap_blocks`."""
        cache.swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)

    @staticmethod
    def copy_blocks(kv_caches: Sequence[torch.Tensor], src_to_dists: torch.Tensor) -> None:
        """See `cache.copy_blocks`."""
        cache.copy_blocks(kv_caches, src_to_dists)


def make_backend(
    *,
    write_kv: WriteKV = cache.write_kv,
    kv_layout: KVLayout = "NHD",
    policy: PlannerPolicy | None = None,
    profile: str | DeviceProfile = "h200",
    max_kv_indices: int = 0,
) -> type[CascadeBackend]:
    """An attention backend class for vLLM v0.

    Args:
        write_kv: writes new tokens to the cache: ``vllm._custom_ops.reshape_and_cache_flash``. The default is plain
            torch and waits for the GPU, so that no graph can be captured with it.
        kv_layout: order in memory of the KV cache.
        policy: how the planner chooses; None is `PlannerPolicy()`.
        profile: the GPU, as for `CascadePlanner`.
        max_kv_indices: page ids over all block tables of a batch; 0 is what can ever be: all sequences at
            max_model_len.
    """
    options = BackendOptions(write_kv, kv_layout, policy, profile, max_kv_indices)
    return type("CascadeBackend", (CascadeBackend,), {"options": options, "__module__": __name__})

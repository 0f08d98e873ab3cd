"""One tensor-parallel rank in a process of its own: reads what it is sent on stdin, answers on stdout, in pickle.

Each rank has its share of the heads of the cache and of q, and makes its configuration from them.
"""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import torch

from flashinfer_cascade import CascadeConfig, CascadePlan, PlannerPolicy
from flashinfer_cascade.integrations import EngineAdapter
from flashinfer_cascade.integrations.vllm_v0 import CascadeImpl, make_backend


def rank_config(world: int, **changes: Any) -> CascadeConfig:
    """The configuration of one of so many ranks."""
    return CascadeConfig(
        num_qo_heads=16 // world, num_kv_heads=8 // world, head_dim=64, page_size=4, dtype="bfloat16", **changes
    )


def from_metadata(message: dict[str, Any]) -> tuple[torch.Tensor, CascadePlan]:
    """As vLLM's worker has it: metadata from the broadcast fields, planned again in begin_forward."""
    config = rank_config(message["world"])
    backend = make_backend(policy=PlannerPolicy(executor="levels", fold=False))
    impl = CascadeImpl(config.num_qo_heads, config.head_dim, config.softmax_scale, config.num_kv_heads)
    runner = SimpleNamespace(
        attn_backend=backend,
        scheduler_config=SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=512),
        graph_block_tables=[None] * 32,
        cache_config=SimpleNamespace(num_gpu_blocks=len(message["kv_cache"])),
        model=SimpleNamespace(modules=lambda: [SimpleNamespace(impl=impl)]),
        model_config=SimpleNamespace(
            max_model_len=256,
            dtype=torch.bfloat16,
            get_num_attention_heads=lambda parallel_config: config.num_qo_heads,
            get_num_kv_heads=lambda parallel_config: config.num_kv_heads,
            get_head_size=lambda: config.head_dim,
        ),
        parallel_config=None,
        block_size=config.page_size,
        kv_cache_dtype="auto",
        device=torch.device("cpu"),
    )
    state = backend.get_state_cls()(runner)
    metadata = backend.make_metadata(**message["metadata"])
    state.begin_forward(SimpleNamespace(attn_metadata=metadata))
    return metadata.wrapper.run(message["q"], message["kv_cache"]), metadata.plan


def from_plan(message: dict[str, Any]) -> tuple[torch.Tensor, CascadePlan]:
    """As an engine with a scheduler process has it: the plan itself is sent."""
    adapter = EngineAdapter(message["plan"].config, "cpu")
    adapter.load(message["plan"])
    return adapter.attention()(message["q"], message["kv_cache"]), message["plan"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    message = pickle.load(sys.stdin.buffer)
    answer = (from_metadata if "metadata" in message else from_plan)(message)
    pickle.dump(answer, sys.stdout.buffer)

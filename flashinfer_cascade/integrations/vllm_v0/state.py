"""What lives as long as vLLM's model runner: planner, runtime, and the buffers of its captured graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from flashinfer_cascade.errors import CascadeError, UnsupportedError
from flashinfer_cascade.integrations.adapter import EngineAdapter
from flashinfer_cascade.integrations.vllm_v0.metadata import MULTI_STEP, CascadeMetadata, CascadeWrapper
from flashinfer_cascade.integrations.vllm_v0.options import BackendOptions, runner_config

NOWHERE = -1
"""Slot of a token that is not written. Source: vllm/attention/backends/utils.py, PAD_SLOT_ID."""


class CascadeState:
    """The runner's attention state.

    Args:
        runner: vLLM's model runner, or a weak proxy of it.

    Raises:
        UnsupportedError: the runner schedules several steps at once.
    """

    def __init__(self, runner: Any) -> None:
        steps = getattr(runner.scheduler_config, "num_scheduler_steps", 1)
        if steps > 1:
            raise UnsupportedError(f"num_scheduler_steps={steps}: {MULTI_STEP}")
        self.runner = runner
        self._options: BackendOptions = runner.attn_backend.options
        self._adapter: EngineAdapter | None = None
        self._capture_slots: torch.Tensor | None = None

    @property
    def adapter(self) -> EngineAdapter:
        """Planner, runtime and graph buffers, made on first use: when model and KV cache are there."""
        if self._adapter is None:
            options = self._options
            config = runner_config(self.runner, options)
            self._adapter = EngineAdapter(config, self.runner.device, policy=options.policy, profile=options.profile)
        return self._adapter

    def plan(self, metadata: CascadeMetadata) -> None:
        """Give the metadata its plan, unless it has one."""
        if metadata.plan is None:
            metadata.plan = self.adapter.plan(*metadata.planner_input(), graph=metadata.graph)

    def begin_forward(self, model_input: Any) -> None:
        """Load the step's plan, into the runtime or what the graph of its batch size reads, on the current stream.

        A rank that got its metadata by broadcast plans here; on the driver the plan is there.

        Raises:
            CascadeError: graphs are being captured.
        """
        if self._capture_slots is not None:
            raise CascadeError("begin_forward while graphs are being captured: leave graph_capture first")
        metadata: CascadeMetadata = model_input.attn_metadata
        if metadata.is_profile_run:
            return
        self.plan(metadata)
        assert metadata.plan is not None
        self.adapter.load(metadata.plan, graph=metadata.graph)
        wrapper = self._wrapper(metadata.graph)
        metadata.prefill_wrapper = wrapper if metadata.num_prefills else None
        metadata.decode_wrapper = wrapper if metadata.num_decode_tokens else None

    @contextlib.contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """Within it graphs are captured; what only capturing needs is dropped behind it."""
        sizes = self._capture_sizes(max_batch_size)
        self.adapter.reserve(sizes)
        device = self.adapter.runtime.device
        self._capture_slots = torch.full((max_batch_size,), NOWHERE, dtype=torch.int64, device=device)
        try:
            yield
        finally:
            self._capture_slots = None

    def _capture_sizes(self, max_batch_size: int) -> list[int]:
        """Batch sizes that vLLM is about to capture."""
        compilation = getattr(getattr(self.runner, "vllm_config", None), "compilation_config", None)
        sizes = getattr(compilation, "cudagraph_capture_sizes", None) or [1, 2, 4, *range(8, max_batch_size + 1, 8)]
        return sorted(size for size in sizes if size <= max_batch_size)

    def graph_clone(self, batch_size: int) -> CascadeState:
        """The state that vLLM keeps with a captured graph; it shares planner, runtime and buffers.

        Raises:
            CascadeError: outside of `graph_capture`.
        """
        self._check_capturing()
        clone = type(self)(self.runner)
        clone._adapter = self.adapter
        return clone

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> CascadeMetadata:
        """Metadata to capture a decode graph with: no row sees or writes anything.

        Raises:
            CascadeError: outside of `graph_capture`.
            UnsupportedError: the model has an encoder.
        """
        if is_encoder_decoder_model:
            raise UnsupportedError("is_encoder_decoder_model: leave such models on their own attention backend")
        slots, config = self._check_capturing(), self.adapter.config
        self.adapter.reserve([batch_size])
        return CascadeMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=batch_size,
            slot_mapping=slots[:batch_size],
            use_cuda_graph=True,
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=config.page_size,
            data_type=getattr(torch, config.kv_dtype),
            q_data_type=getattr(torch, config.dtype),
            device=slots.device,
            window_left=config.window_left,
            logits_soft_cap=config.logits_soft_cap,
            sm_scale=config.softmax_scale,
            decode_wrapper=self._wrapper(batch_size),
        )

    def get_graph_input_buffers(
        self, attn_metadata: CascadeMetadata, is_encoder_decoder_model: bool = False
    ) -> dict[str, torch.Tensor]:
        """What vLLM copies before each replay; all else lies in buffers that `begin_forward` loads."""
        return {"slot_mapping": attn_metadata.slot_mapping}

    def prepare_graph_input_buffers(
        self, input_buffers: dict[str, Any], attn_metadata: CascadeMetadata, is_encoder_decoder_model: bool = False
    ) -> None:
        """Nothing is left to prepare."""

    def _check_capturing(self) -> torch.Tensor:
        if self._capture_slots is None:
            raise CascadeError("graphs are captured within `with state.graph_capture(max_batch_size)`")
        return self._capture_slots

    def _wrapper(self, graph: int | None) -> CascadeWrapper:
        return CascadeWrapper(self.adapter.config, self.adapter.attention(graph=graph), self._options.write_kv)

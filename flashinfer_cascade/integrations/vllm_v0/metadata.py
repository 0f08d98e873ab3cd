"""One step's metadata: what vLLM's model runner broadcasts to all ranks, and what layers read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from flashinfer_cascade.batch import CsrTables
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.errors import InvalidBatchError, UnsupportedError
from flashinfer_cascade.integrations.vllm_v0.cache import WriteKV
from flashinfer_cascade.plan import CascadePlan

MULTI_STEP = (
    "multi-step scheduling moves lengths and pages on the GPU between steps, where no plan can follow: start vLLM with "
    "num_scheduler_steps=1, or leave it on its own attention backend"
)


class CascadeWrapper:
    """Stands where vLLM has a FlashInfer wrapper: runs the loaded plan, and exposes what layers hold theirs against.

    `run` takes the rows of the whole batch. In batches of prefill rows alone or decode rows alone that is also what
    vLLM's own implementation passes.

    Args:
        config: the attention.
        run: `CascadeRuntime.run` or `GraphState.run`; see there.
        write_kv: see `cache.write_kv`.
    """

    def __init__(self, config: CascadeConfig, run: Callable[..., Any], write_kv: WriteKV) -> None:
        self.config, self.run, self.write_kv = config, run, write_kv
        self._causal = True
        self._window_left = config.window_left
        self._logits_soft_cap = config.logits_soft_cap
        self._sm_scale = config.softmax_scale


@dataclass
class CascadeMetadata:
    """vLLM's FlashInfer metadata by its names, plus `qo_lens` and `plan`.

    Attributes:
        num_prefills: requests that are prompts; they come first.
        num_prefill_tokens: their rows.
        num_decode_tokens: rows of the others, those that pad a graph's batch included.
        slot_mapping: int64[num_rows], on the device, where each new token goes; -1 is nowhere.
        multi_modal_placeholder_index_maps: by modality; None before 0.6.4.
        enable_kv_scales_calculation: read by vLLM.
        max_prefill_seq_len: tokens of the longest prompt; 0 without one.
        max_decode_seq_len: of the longest other request; 0 without one.
        decode_query_len: most rows of a decode request.
        use_cuda_graph: whether the batch is padded for a graph, be it by nothing.
        is_profile_run: no KV cache is there yet; nothing is planned.
        seq_start_loc: int32[num_padded_requests + 1], on the device, in KV tokens.
        query_start_loc: int32[num_requests + 1], on the device, in rows; not padded.
        block_tables: int32, on the device, vLLM's 2-D form: rows of padding and entries behind a table's end hold
            anything. Nothing here reads it.
        seq_lens_tensor: int32[num_padded_requests], on the device, KV tokens.
        block_table_bound: int32[num_padded_requests], CPU, zeros.
        paged_kv_indptr: int32[num_padded_requests + 1], CPU, in pages; padding repeats the last.
        paged_kv_indices: int32[>= paged_kv_indptr[-1]], CPU, page ids.
        paged_kv_last_page_len: int32[num_padded_requests], CPU, in tokens, 1..page_size; 0 for padding.
        qo_lens: int32[num_requests], CPU, rows of each; not padded.
        num_qo_heads, num_kv_heads: of this rank.
        head_dim, page_size: of the cache.
        data_type: of the KV cache.
        q_data_type: of q.
        device: of the model.
        window_left, logits_soft_cap, sm_scale: of all layers; not set in a profile run.
        prefill_wrapper, decode_wrapper: one object, once the step has begun; None without such requests.
        plan: of this step; every rank makes the same.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: torch.Tensor
    multi_modal_placeholder_index_maps: dict[str, Any] | None = None
    enable_kv_scales_calculation: bool = False
    max_prefill_seq_len: int = 0
    max_decode_seq_len: int = 0
    decode_query_len: int = 1
    use_cuda_graph: bool = True
    is_profile_run: bool = False
    seq_start_loc: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens_tensor: torch.Tensor | None = None
    block_table_bound: torch.Tensor | None = None
    paged_kv_indptr: torch.Tensor | None = None
    paged_kv_indices: torch.Tensor | None = None
    paged_kv_last_page_len: torch.Tensor | None = None
    qo_lens: torch.Tensor | None = None
    num_qo_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    page_size: int | None = None
    data_type: torch.dtype | None = None
    q_data_type: torch.dtype | None = None
    device: torch.device | None = None
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    prefill_wrapper: CascadeWrapper | None = None
    decode_wrapper: CascadeWrapper | None = None
    plan: CascadePlan | None = None

    LOCAL: ClassVar[frozenset[str]] = frozenset({"prefill_wrapper", "decode_wrapper", "plan"})
    """Fields that each rank makes by itself."""

    @property
    def prefill_metadata(self) -> CascadeMetadata | None:
        """This, if it holds prompts."""
        return self if self.num_prefills else None

    @property
    def decode_metadata(self) -> CascadeMetadata | None:
        """This, if it holds decode rows."""
        return self if self.num_decode_tokens else None

    @property
    def graph(self) -> int | None:
        """Batch size of the graph that is replayed for it; None when it runs without one."""
        return self.num_decode_tokens if self.use_cuda_graph and not self.num_prefills else None

    @property
    def wrapper(self) -> CascadeWrapper | None:
        """What runs it; None before the step has begun."""
        return self.decode_wrapper if self.prefill_wrapper is None else self.prefill_wrapper

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        """What the driver broadcasts, without copies: all fields but `skip_fields` and those that ranks make."""
        skipped = self.LOCAL if skip_fields is None else self.LOCAL | skip_fields
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in skipped}

    def planner_input(self) -> tuple[CsrTables, Int64Array, Any]:
        """``block_tables, seq_lens, qo_lens`` of the live requests, for `CascadePlanner.plan`.

        Raises:
            InvalidBatchError: there is nothing to plan.
        """
        indptr, indices, last_page_len = self.paged_kv_indptr, self.paged_kv_indices, self.paged_kv_last_page_len
        if indptr is None or indices is None or last_page_len is None or self.qo_lens is None or self.page_size is None:
            raise InvalidBatchError(
                "the metadata holds no paged_kv arrays: build it from a batch that has block tables"
            )
        num_requests = len(self.qo_lens)
        kv_indptr = indptr[: num_requests + 1].numpy().astype("int64")
        seq_lens = (kv_indptr[1:] - kv_indptr[:-1] - 1) * self.page_size + last_page_len[:num_requests].numpy()
        return CsrTables(kv_indptr, indices), seq_lens, self.qo_lens

    def advance_step(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the next step must be built anew.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"advance_step: {MULTI_STEP}")

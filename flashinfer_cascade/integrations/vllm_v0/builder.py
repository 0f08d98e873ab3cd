"""From vLLM's input builder to metadata, on the driver rank: lengths, slots, block tables, padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from flashinfer_cascade.errors import InvalidBatchError, UnsupportedError
from flashinfer_cascade.integrations.vllm_v0.cache import kv_dtype
from flashinfer_cascade.integrations.vllm_v0.metadata import CascadeMetadata
from flashinfer_cascade.integrations.vllm_v0.state import NOWHERE


class CascadeMetadataBuilder:
    """Fills one metadata at a time: `prepare`, then `build`.

    Until 0.6 vLLM makes a builder for each step and never calls `prepare`; later it keeps one.

    Args:
        input_builder: vLLM's, or a weak proxy of it.
    """

    def __init__(self, input_builder: Any) -> None:
        self.input_builder = input_builder
        self.runner = input_builder.runner
        self.block_size: int = input_builder.block_size
        self.prepare()

    def prepare(self) -> None:
        """Forget the last step."""
        self.slot_mapping: list[int] = []
        self.prefill_seq_lens: list[int] = []
        self.decode_seq_lens: list[int] = []
        self.num_prefill_tokens = 0
        self.block_tables: list[Sequence[int]] = []
        self.paged_kv_indices: list[int] = []
        self.paged_kv_indptr: list[int] = [0]
        self.paged_kv_last_page_len: list[int] = []
        self.placeholder_maps: dict[str, Any] = {}
        self.is_profile_run = False

    def _add_seq_group(self, inter_data: Any, chunked_prefill_enabled: bool) -> None:
        """Take in one sequence group.

        Raises:
            UnsupportedError: a decode request with several new tokens.
            InvalidBatchError: a table is shorter than its sequence.
        """
        is_prompt, tables = inter_data.is_prompt, inter_data.block_tables
        no_tables = tables is None or all(table is None for table in tables.values())
        self.is_profile_run |= no_tables
        if is_prompt:
            for modality, placeholders in (getattr(inter_data, "multi_modal_placeholder_maps", None) or {}).items():
                merged = self.placeholder_maps.setdefault(modality, type(placeholders)())
                merged.extend(placeholders)
        for seq_id, tokens, seq_len, windowed_len, query_len, context_len, window_blocks in zip(
            inter_data.seq_ids,
            inter_data.input_tokens,
            inter_data.orig_seq_lens,
            inter_data.seq_lens,
            inter_data.query_lens,
            inter_data.context_lens,
            inter_data.curr_sliding_window_blocks,
            strict=True,
        ):
            if is_prompt:
                self.num_prefill_tokens += len(tokens)
                self.prefill_seq_lens.append(seq_len)
            elif query_len == 1:
                self.decode_seq_lens.append(windowed_len)
            else:
                raise UnsupportedError(
                    f"sequence {seq_id} decodes {query_len} tokens at once, but vLLM v0 plans one: score draft tokens "
                    "by batch expansion"
                )
            if no_tables:
                self.block_tables.append([])
                self.slot_mapping += [NOWHERE] * seq_len
                continue
            table = tables[seq_id]
            if inter_data.prefix_cache_hit:
                self.block_tables.append(inter_data.computed_block_nums)
            elif chunked_prefill_enabled or not is_prompt:
                self.block_tables.append(table[-window_blocks:])  # 0 is all of it
            else:
                self.block_tables.append([])
            num_pages = -(-seq_len // self.block_size)  # a table may be longer: blocks of tokens to come
            if len(table) < num_pages:
                raise InvalidBatchError(
                    f"sequence {seq_id}: its table has {len(table)} blocks, but {seq_len} tokens need {num_pages} at "
                    f"block_size={self.block_size}: allocate the step's blocks before building"
                )
            self._add_slots(table, context_len, seq_len)
            self.paged_kv_indices += table[:num_pages]
            self.paged_kv_indptr.append(self.paged_kv_indptr[-1] + num_pages)
            self.paged_kv_last_page_len.append((seq_len - 1) % self.block_size + 1)

    def _add_slots(self, table: Sequence[int], begin: int, end: int) -> None:
        """Slots of tokens [begin, end), with a sliding window also those that it will have left behind.

        vLLM's own builders leave these out, but rows of a prompt read the cache here, and early ones see them.
        """
        first, offset = divmod(begin, self.block_size)
        if end == begin + 1:
            self.slot_mapping.append(table[first] * self.block_size + offset)
            return
        blocks = np.asarray(table[first : -(-end // self.block_size)], np.int64)
        positions = np.arange(begin, end)
        slots = blocks[positions // self.block_size - first] * self.block_size + positions % self.block_size
        self.slot_mapping += slots.tolist()

    def build(
        self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int
    ) -> CascadeMetadata:
        """The step's metadata, planned unless it is a profile run.

        Args:
            seq_lens: KV tokens of each request, capped by a sliding window; with a graph padded by ones.
            query_lens: rows of each request; not padded.
            cuda_graph_pad_size: requests that pad the batch for a graph; -1 is no graph, 0 a graph without padding.
            batch_size: rows, padded.

        Raises:
            InvalidBatchError: as for `_add_seq_group`.
            CapacityError: the batch is larger than the limits of vLLM's scheduler, or than max_kv_indices.
        """
        for inter_data in self.input_builder.inter_data_list:
            self._add_seq_group(inter_data, self.input_builder.chunked_prefill_enabled)
        runner = self.runner
        use_cuda_graph = cuda_graph_pad_size != -1
        num_padding = cuda_graph_pad_size if use_cuda_graph else 0
        num_prefills, num_decode_tokens = len(self.prefill_seq_lens), len(self.decode_seq_lens)
        if use_cuda_graph:
            num_decode_tokens = batch_size - self.num_prefill_tokens
        num_requests = len(query_lens)
        paged: dict[str, Any] = {}
        if not self.is_profile_run:
            indptr = self.paged_kv_indptr + self.paged_kv_indptr[-1:] * num_padding
            lists = {
                "paged_kv_indptr": indptr,
                "paged_kv_indices": self.paged_kv_indices,
                "paged_kv_last_page_len": self.paged_kv_last_page_len + [0] * num_padding,
                "block_table_bound": [0] * (num_requests + num_padding),
                "qo_lens": query_lens,
            }
            paged = {name: torch.from_numpy(np.array(values, np.int32)) for name, values in lists.items()}
        model = runner.model_config
        metadata = CascadeMetadata(
            num_prefills=num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            slot_mapping=self._to_device(self.slot_mapping + [NOWHERE] * num_padding, torch.int64),
            multi_modal_placeholder_index_maps={
                modality: placeholders.index_map() for modality, placeholders in self.placeholder_maps.items()
            },
            max_prefill_seq_len=max(self.prefill_seq_lens, default=0),
            max_decode_seq_len=max(self.decode_seq_lens, default=0),
            decode_query_len=max(query_lens[num_prefills:], default=1),
            use_cuda_graph=use_cuda_graph,
            is_profile_run=self.is_profile_run,
            seq_start_loc=self._to_device([*accumulate(seq_lens, initial=0)], torch.int32),
            query_start_loc=self._to_device([*accumulate(query_lens, initial=0)], torch.int32),
            block_tables=self._block_tables(batch_size if use_cuda_graph else None),
            seq_lens_tensor=self._to_device(seq_lens, torch.int32),
            num_qo_heads=model.get_num_attention_heads(runner.parallel_config),
            num_kv_heads=model.get_num_kv_heads(runner.parallel_config),
            head_dim=model.get_head_size(),
            page_size=self.block_size,
            data_type=kv_dtype(runner.kv_cache_dtype, model.dtype),
            q_data_type=model.dtype,
            device=runner.device,
            **paged,
        )
        if not self.is_profile_run:
            config = runner.attn_state.adapter.config
            metadata.window_left, metadata.logits_soft_cap = config.window_left, config.logits_soft_cap
            metadata.sm_scale = config.softmax_scale
            runner.attn_state.plan(metadata)
        return metadata

    def _block_tables(self, batch_size: int | None) -> torch.Tensor:
        """The 2-D form, on the device: with a graph, rows of a table that the runner keeps and never clears."""
        if batch_size is None:
            table = np.zeros((len(self.block_tables), max(map(len, self.block_tables), default=0)), np.int32)
        else:
            table = self.runner.graph_block_tables[:batch_size]
        width = table.shape[1]
        for row, blocks in zip(table, self.block_tables, strict=False):
            row[: len(blocks)] = blocks[:width]
        return torch.from_numpy(table).to(self.runner.device, non_blocking=True)

    def _to_device(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        host = torch.tensor(values, dtype=dtype, pin_memory=self.runner.pin_memory)
        return host.to(self.runner.device, non_blocking=True)

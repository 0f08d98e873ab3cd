"""A stand-in for vLLM's v0 model runner: builds inputs, captures, replays and steps as it does, on the CPU or a GPU.

After vllm/worker/model_runner.py and vllm/attention/layer.py of 0.6.3 to 0.10.0. Tests reach it by the fixture `v0`,
for the test modules cannot import from here.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig, PlannerPolicy
from flashinfer_cascade.integrations.vllm_v0 import make_backend
from flashinfer_cascade.testing import assert_close, dense_attention, plain_attention

FORCED = PlannerPolicy(executor="levels", fold=False, max_levels=64)


@dataclass
class Seq:
    """A sequence.

    Attributes:
        seq_id: its name.
        length: tokens, prompt and generated.
        computed: tokens that are in the cache already.
        table: block ids; None while there is no cache.
    """

    seq_id: int
    length: int
    computed: int
    table: list[int] | None


@dataclass
class Group:
    """What the scheduler gives for one request.

    Attributes:
        seqs: one for a prompt; parallel samples may be several.
        is_prompt: whether it is still at its prompt.
        chunk: prompt tokens scheduled in this step.
        computed_block_nums: blocks that the prefix cache holds.
        has_tables: False in a profile run.
    """

    seqs: list[Seq]
    is_prompt: bool
    chunk: int = 1
    computed_block_nums: list[int] = field(default_factory=list)
    has_tables: bool = True


class InputBuilder:
    """ModelInputForGPUBuilder: from groups to a model input."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.sliding_window = runner.sliding_window
        self.block_size = runner.block_size
        self.chunked_prefill_enabled = runner.scheduler_config.chunked_prefill_enabled
        self.scheduler_config = runner.scheduler_config
        self.attn_metadata_builder = runner.attn_backend.get_builder_cls()(weakref.proxy(self))
        self.inter_data_list: list[Any] = []
        self.decode_only = True

    def prepare(self) -> None:
        """From 0.7 on, where one builder serves all steps."""
        self.inter_data_list, self.decode_only = [], True
        self.attn_metadata_builder.prepare()

    def add_seq_group(self, group: Group) -> None:
        self.decode_only &= not group.is_prompt
        data = SimpleNamespace(
            seq_ids=[seq.seq_id for seq in group.seqs],
            is_prompt=group.is_prompt,
            block_tables={seq.seq_id: seq.table for seq in group.seqs} if group.has_tables else None,
            computed_block_nums=group.computed_block_nums,
            prefix_cache_hit=bool(group.computed_block_nums and self.sliding_window is None and group.is_prompt),
            multi_modal_placeholder_maps=None,
            **{name: [] for name in ("input_tokens", "seq_lens", "orig_seq_lens", "query_lens", "context_lens")},
            curr_sliding_window_blocks=[],
        )
        for seq in group.seqs:
            context_len = seq.computed
            seq_len = min(seq.length, context_len + group.chunk) if group.is_prompt else seq.length
            cached = len(group.computed_block_nums) * self.block_size
            if data.prefix_cache_hit:
                if context_len < cached < seq_len:
                    context_len = cached
                elif seq_len <= cached:
                    context_len = seq_len - 1
            window_blocks, windowed_len = 0, seq_len
            if not group.is_prompt and self.sliding_window is not None:
                window_blocks = -(-self.sliding_window // self.block_size)
                extra = seq_len % self.block_size
                windowed_len = min(seq_len, window_blocks * self.block_size + extra)
                window_blocks += extra > 0
            data.input_tokens.append([0] * (seq_len - context_len))
            data.seq_lens.append(windowed_len)
            data.orig_seq_lens.append(seq_len)
            data.query_lens.append(seq_len - context_len)
            data.context_lens.append(context_len)
            data.curr_sliding_window_blocks.append(window_blocks)
        self.inter_data_list.append(data)

    def build(self) -> SimpleNamespace:
        seq_lens = [length for data in self.inter_data_list for length in data.seq_lens]
        query_lens = [length for data in self.inter_data_list for length in data.query_lens]
        pad = self.runner.pad_size(len(seq_lens)) if self.decode_only else -1
        batch_size = sum(query_lens) + max(pad, 0)
        seq_lens += [1] * max(pad, 0)
        metadata = self.attn_metadata_builder.build(seq_lens, query_lens, pad, batch_size)
        return SimpleNamespace(
            input_tokens=torch.zeros(batch_size, dtype=torch.int64, device=self.runner.device),
            attn_metadata=metadata,
            seq_lens=seq_lens,
            query_lens=query_lens,
            virtual_engine=0,
        )


class Layer(torch.nn.Module):
    """vllm.attention.Attention: holds an implementation, scales and a cache."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.version, model = runner.version, runner.model_config
        trailing = {
            "0.6.3": (None, runner.soft_cap),
            "0.8.5": (None, runner.soft_cap, "decoder"),
            "0.10.0": (runner.soft_cap, "decoder", None),
        }[self.version]
        self.impl = runner.attn_backend.get_impl_cls()(
            model.num_heads, model.head_size, runner.scale, model.num_kv_heads, None, runner.sliding_window,
            runner.kv_cache_dtype, *trailing,
        )  # fmt: skip
        self.impl.sinks = runner.sinks
        self._k_scale_float, self._v_scale_float = runner.kv_scales
        self._k_scale, self._v_scale = map(torch.tensor, runner.kv_scales)
        self.kv_cache = torch.tensor([])

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Rows with their heads side by side, as in a model."""
        rows = [x.flatten(1) for x in (q, k, v)]
        if self.version == "0.6.3":
            scales = self._k_scale_float, self._v_scale_float
            return self.impl.forward(*rows, self.kv_cache, metadata, *scales)
        output = torch.full_like(rows[0], torch.nan)
        self.impl.forward(self, *rows, self.kv_cache, metadata, output=output)
        return output


class GraphRunner:
    """CUDAGraphRunner. Without a GPU the model runs again at each replay, with metadata and tensors of the capture."""

    def __init__(self, runner: Runner, batch_size: int, metadata: Any) -> None:
        self.runner, self.metadata = runner, metadata
        self.attn_state = runner.attn_state.graph_clone(batch_size)
        self.qkv = [
            torch.full((batch_size, *shape), torch.nan, dtype=runner.dtype, device=runner.device)
            for shape in runner.qkv_shapes
        ]
        runner.model(*self.qkv, metadata)
        self.graph = None
        if runner.device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = runner.model(*self.qkv, metadata)
        self.input_buffers = self.attn_state.get_graph_input_buffers(metadata, False)

    def __call__(self, qkv: list[torch.Tensor], metadata: Any) -> torch.Tensor:
        for static, given in zip(self.qkv, qkv, strict=True):
            static[: len(given)] = given
            static[len(given) :] = torch.nan
        self.input_buffers["slot_mapping"].copy_(metadata.slot_mapping)
        self.attn_state.prepare_graph_input_buffers(self.input_buffers, metadata, False)
        if self.graph is None:
            return self.runner.model(*self.qkv, self.metadata)
        self.graph.replay()
        return self.output.clone()


class Model(torch.nn.Module):
    """Layers side by side: all get the same rows."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any) -> torch.Tensor:
        return torch.stack([layer(q, k, v, metadata) for layer in self.layers])


class Runner:
    """GPUModelRunnerBase, as far as attention sees it."""

    def __init__(
        self,
        *,
        version: str = "0.8.5",
        backend: Any = None,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 64,
        block_size: int = 4,
        num_blocks: int = 512,
        dtype: torch.dtype = torch.bfloat16,
        kv_cache_dtype: str = "auto",
        kv_scales: tuple[float, float] = (1.0, 1.0),
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        scale: float = 0.125,
        chunked_prefill: bool = True,
        max_num_seqs: int = 20,
        max_model_len: int = 1024,
        max_seq_len_to_capture: int = 512,
        num_layers: int = 1,
        num_scheduler_steps: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        self.version, self.dtype = version, dtype
        self.attn_backend = make_backend(policy=FORCED) if backend is None else backend
        self.scale, self.soft_cap, self.sinks, self.kv_scales = scale, soft_cap, sinks, kv_scales
        self.parallel_config = SimpleNamespace()
        self.model_config = SimpleNamespace(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            max_model_len=max_model_len,
            get_num_attention_heads=lambda parallel_config: num_heads,
            get_num_kv_heads=lambda parallel_config: num_kv_heads,
            get_head_size=lambda: head_size,
        )
        self.scheduler_config = SimpleNamespace(
            chunked_prefill_enabled=chunked_prefill,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            num_scheduler_steps=num_scheduler_steps,
        )
        self.cache_config = SimpleNamespace(num_gpu_blocks=None)
        self.num_blocks, self.block_size, self.sliding_window = num_blocks, block_size, sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.device = torch.device(device)
        self.pin_memory = self.device.type == "cuda"
        self.max_batchsize_to_capture = next(
            size for size in (1, 2, 4, *range(8, 2048, 8)) if size >= max_num_seqs
        )  # fmt: skip
        self.max_seq_len_to_capture = max_seq_len_to_capture
        width = -(-max_seq_len_to_capture // block_size)
        self.graph_block_tables = np.zeros((self.max_batchsize_to_capture, width), np.int32)
        self.attn_state = self.attn_backend.get_state_cls()(weakref.proxy(self))
        self.graphs: dict[int, GraphRunner] = {}
        self.model = Model([Layer(self) for _ in range(num_layers)])
        self.builder: InputBuilder | None = None

    @property
    def qkv_shapes(self) -> list[tuple[int, int]]:
        model = self.model_config
        return [(heads, model.head_size) for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)]

    def pad_size(self, num_seqs: int) -> int:
        """_get_cuda_graph_pad_size; -1 before anything is captured."""
        size = min((size for size in self.graphs if size >= num_seqs), default=None)
        return -1 if size is None else size - num_seqs

    def init_cache(self) -> None:
        """CacheEngine._allocate_kv_cache, for all layers; filled with what a cache may hold."""
        self.cache_config.num_gpu_blocks = self.num_blocks
        model, order = self.model_config, self.attn_backend.get_kv_cache_stride_order()
        shape = self.attn_backend.get_kv_cache_shape(
            self.num_blocks, self.block_size, model.num_kv_heads, model.head_size
        )
        generator = torch.Generator().manual_seed(0)
        for layer in self.model.layers:
            cache = torch.randn([shape[i] for i in order], generator=generator)
            if self.kv_cache_dtype != "auto":
                cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)
            else:
                cache = cache.to(self.dtype)
            layer.kv_cache = cache.to(self.device).permute(*order)

    def capture(self) -> None:
        """capture_model, the largest batch first."""
        sizes = [size for size in (1, 2, 4, *range(8, 2048, 8)) if size <= self.max_batchsize_to_capture]
        with self.attn_state.graph_capture(self.max_batchsize_to_capture):
            for size in reversed(sizes):
                metadata = self.attn_state.graph_capture_get_metadata_for_batch(size, is_encoder_decoder_model=False)
                self.graphs[size] = GraphRunner(self, size, metadata)

    def prepare(self, groups: list[Group]) -> SimpleNamespace:
        """prepare_model_input: prompts first."""
        if self.version == "0.6.3" or self.builder is None:
            self.builder = InputBuilder(self)
        if self.version != "0.6.3":
            self.builder.prepare()
        for group in groups:
            self.builder.add_seq_group(group)
        return self.builder.build()

    def execute(self, model_input: SimpleNamespace, qkv: list[torch.Tensor]) -> torch.Tensor:
        """execute_model: [num_layers, rows, hidden], padding included."""
        self.attn_state.begin_forward(model_input)
        metadata = model_input.attn_metadata
        if metadata.prefill_metadata is None and metadata.decode_metadata.use_cuda_graph:
            return self.graphs[len(model_input.input_tokens)](qkv, metadata)
        return self.model(*qkv, metadata)

    def random_qkv(self, num_rows: int, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = self.qkv_shapes
        return [torch.randn(num_rows, *shape, generator=generator).to(self.device, self.dtype) for shape in shapes]


def scheduled(runner: Runner, groups: list[Group]) -> list[tuple[list[int], int, int]]:
    """Block table, KV tokens and rows of each sequence of a step, straight from the scheduler's view."""
    batch = []
    for group in groups:
        for seq in group.seqs:
            length, computed = seq.length, seq.computed
            if group.is_prompt:
                length = min(length, computed + group.chunk)
                if runner.sliding_window is None:
                    computed = max(computed, min(len(group.computed_block_nums) * runner.block_size, length - 1))
            else:
                computed = length - 1
            batch.append((seq.table, length, length - computed))
    return batch


def check_step(runner: Runner, groups: list[Group], seed: int = 0) -> Any:
    """Run one step and hold it against the oracle: new tokens are in the cache, outputs within the error budget."""
    batch = scheduled(runner, groups)
    num_rows = sum(rows for _, _, rows in batch)
    qkv = runner.random_qkv(num_rows, seed)
    # Where requests write to one slot, a cached prompt's last, they write the same: on a GPU nobody knows who is last.
    first_to: dict[tuple[int, int], int] = {}
    positions = [(table, seq_len - rows + row) for table, seq_len, rows in batch for row in range(rows)]
    for number, (table, position) in enumerate(positions):
        slot = table[position // runner.block_size], position % runner.block_size
        first = first_to.setdefault(slot, number)
        for new in qkv[1:]:
            new[number] = new[first]
    before = [layer.kv_cache.clone() for layer in runner.model.layers]
    model_input = runner.prepare(groups)
    outs = runner.execute(model_input, qkv)
    assert len(outs[0]) == len(model_input.input_tokens)
    assert (outs[:, num_rows:] == 0).all(), "padding rows see nothing"
    q, *new = qkv
    for layer, out, cache in zip(runner.model.layers, outs, before, strict=True):
        begin = 0
        for table, seq_len, rows in batch:
            for row in range(rows):
                position = seq_len - rows + row
                for which, (tokens, scale) in enumerate(zip(new, runner.kv_scales, strict=True)):
                    token = tokens[begin + row]
                    if runner.kv_cache_dtype != "auto":
                        token = (token.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
                    block, offset = table[position // runner.block_size], position % runner.block_size
                    cache[block, which, offset] = token
            begin += rows
        # The last block is nobody's; in a graph, tokens that go nowhere go there.
        judged = slice(None) if runner.device.type == "cpu" else slice(-1)
        assert torch.equal(layer.kv_cache[judged], cache[judged]), "exactly the step's new tokens are written"
        fp8 = runner.kv_cache_dtype != "auto"
        config = oracle_config(runner)
        options = dict(zip(("k_scale", "v_scale"), runner.kv_scales, strict=True), sinks=runner.sinks)
        args = config, q, cache.view(torch.float8_e4m3fn) if fp8 else cache, *map(list, zip(*batch, strict=True))
        assert_close(
            out[:num_rows].view(q.shape), dense_attention(*args, **options)[0], plain_attention(*args, **options)
        )
    return model_input.attn_metadata


def oracle_config(runner: Runner) -> CascadeConfig:
    """The attention that the model asks for, whatever the backend made of it; the cache by index is always NHD."""
    model = runner.model_config
    return CascadeConfig(
        num_qo_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_size,
        page_size=runner.block_size,
        dtype=str(runner.dtype),
        kv_dtype="float8_e4m3fn" if runner.kv_cache_dtype != "auto" else str(runner.dtype),
        sm_scale=runner.scale,
        logits_soft_cap=runner.soft_cap or 0.0,
        window_left=-1 if runner.sliding_window is None else runner.sliding_window - 1,
        max_kv_pages=runner.num_blocks,
    )


def random_groups(
    rng: np.random.Generator, runner: Runner, *, prompts: bool, decodes: bool, max_seqs: int = 12
) -> list[Group]:
    """Requests over a few shared prompts: cold, cached in part or in full, in chunks; parallel samples; lookahead."""
    size, groups, seq_ids = runner.block_size, [], itertools.count()
    free = iter(rng.permutation(runner.num_blocks - 1).tolist())
    roots = [[next(free) for _ in range(int(rng.integers(1, 6)))] for _ in range(3)]

    def table_of(length: int, prefix: list[int]) -> list[int]:
        pages = -(-length // size) + int(rng.integers(0, 3))  # up to two for tokens to come
        shared = prefix[: int(rng.integers(0, len(prefix) + 1))]
        return shared[:pages] + [next(free) for _ in range(pages - len(shared))]

    for _ in range(int(rng.integers(1, max_seqs)) if prompts else 0):
        length = int(rng.integers(1, 8 * size))
        table = table_of(length, roots[rng.integers(3)])
        cached = [] if rng.random() < 0.4 else table[: int(rng.integers(0, -(-length // size) + 1))]
        computed = int(rng.integers(0, length)) if runner.scheduler_config.chunked_prefill_enabled else 0
        chunk = int(rng.integers(1, length - computed + 1)) if computed or rng.random() < 0.3 else length
        if not runner.scheduler_config.chunked_prefill_enabled:
            chunk = length
        groups.append(Group([Seq(next(seq_ids), length, computed, table)], True, chunk, cached))
    num_left = int(rng.integers(1, max_seqs)) if decodes else 0
    while num_left > 0:
        samples = min(num_left, int(rng.choice([1, 1, 3])))
        root = roots[rng.integers(3)]
        length = int(rng.integers(1, 10 * size))
        seqs = [Seq(next(seq_ids), length, length - 1, table_of(length, root)) for _ in range(samples)]
        groups.append(Group(seqs, False))
        num_left -= samples
    return groups


@pytest.fixture
def v0() -> SimpleNamespace:
    """The stand-in, by name."""
    return SimpleNamespace(
        Seq=Seq,
        Group=Group,
        Runner=Runner,
        FORCED=FORCED,
        scheduled=scheduled,
        check_step=check_step,
        random_groups=random_groups,
    )

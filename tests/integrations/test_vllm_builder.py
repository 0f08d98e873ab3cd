"""The metadata builder against a straightforward reading of vLLM's contract, on random batches."""

import numpy as np
import pytest
import torch

from flashinfer_cascade import InvalidBatchError, UnsupportedError

VERSIONS = ["0.6.3", "0.8.5", "0.10.0"]


def contract(runner, groups, pad_size, last_graph_table):
    """What the metadata must hold, one sequence after the other, in plain Python."""
    size = runner.block_size
    indptr, indices, last_page_len, slots, tables = [0], [], [], [], []
    seq_lens, qo_lens, num_prefill_tokens = [], [], 0
    for group in groups:
        for seq in group.seqs:
            context = seq.computed if group.is_prompt else seq.length - 1
            length = seq.length if not group.is_prompt else min(seq.length, seq.computed + group.chunk)
            hit = group.is_prompt and len(group.computed_block_nums) > 0
            if hit and len(group.computed_block_nums) * size > context:
                context = min(len(group.computed_block_nums) * size, length - 1)
            num_pages = 0
            while num_pages * size < length:
                indices.append(seq.table[num_pages])
                num_pages += 1
            indptr.append(len(indices))
            last_page_len.append(length - (num_pages - 1) * size)
            slots += [seq.table[p // size] * size + p % size for p in range(context, length)]
            seq_lens.append(length)
            qo_lens.append(length - context)
            num_prefill_tokens += length - context if group.is_prompt else 0
            if hit:
                tables.append(group.computed_block_nums)
            elif group.is_prompt and not runner.scheduler_config.chunked_prefill_enabled:
                tables.append([])
            else:
                tables.append(seq.table)
    padding = max(pad_size, 0)
    if pad_size == -1:
        width = max(len(table) for table in tables)
        table_2d = [[*table, *[0] * (width - len(table))] for table in tables]
    else:
        table_2d = last_graph_table[: len(tables) + padding].tolist()
        for row, table in zip(table_2d, tables, strict=False):
            row[: len(table)] = table[: len(row)]
    return {
        "paged_kv_indptr": indptr + [len(indices)] * padding,
        "paged_kv_indices": indices,
        "paged_kv_last_page_len": last_page_len + [0] * padding,
        "slot_mapping": slots + [-1] * padding,
        "block_tables": table_2d,
        "query_start_loc": [sum(qo_lens[:r]) for r in range(len(qo_lens) + 1)],
        "seq_start_loc": [sum((seq_lens + [1] * padding)[:r]) for r in range(len(seq_lens) + padding + 1)],
        "seq_lens_tensor": seq_lens + [1] * padding,
        "qo_lens": qo_lens,
        "num_prefills": sum(len(group.seqs) for group in groups if group.is_prompt),
        "num_prefill_tokens": num_prefill_tokens,
        "num_decode_tokens": sum(qo_lens) + padding - num_prefill_tokens,
        "use_cuda_graph": pad_size != -1,
    }


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_random_batches(version, chunked, graphs, v0):
    runner = v0.Runner(version=version, chunked_prefill=chunked)
    runner.init_cache()
    if graphs:
        runner.capture()
    pad_sizes = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        kinds = [(True, False), (False, True), (True, True)][: 3 if chunked else 2]
        prompts, decodes = kinds[seed % len(kinds)]
        groups = v0.random_groups(rng, runner, prompts=prompts, decodes=decodes)
        num_seqs = sum(len(group.seqs) for group in groups)
        pad_size = runner.pad_size(num_seqs) if not prompts else -1
        pad_sizes.add(pad_size)
        wanted = contract(runner, groups, pad_size, runner.graph_block_tables.copy())
        metadata = runner.prepare(groups).attn_metadata
        for name, value in wanted.items():
            got = getattr(metadata, name)
            got = got.tolist() if isinstance(got, torch.Tensor) else got
            assert got == value, f"{name}, seed {seed}"
        for name in ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "qo_lens"):
            tensor = getattr(metadata, name)
            assert (tensor.dtype, tensor.device.type) == (torch.int32, "cpu")
        assert metadata.slot_mapping.dtype == torch.int64
        assert metadata.page_size == runner.block_size
        assert (metadata.q_data_type, metadata.data_type) == (torch.bfloat16, torch.bfloat16)
    assert not graphs or pad_sizes >= {-1, 0, 1}, "graph batches with and without padding came up"


@pytest.mark.parametrize("graphs", [False, True])
def test_the_plan_is_that_of_the_live_requests(graphs, v0):
    runner = v0.Runner()
    runner.init_cache()
    if graphs:
        runner.capture()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        groups = v0.random_groups(rng, runner, prompts=not graphs, decodes=True)
        plan = runner.prepare(groups).attn_metadata.plan
        tables, seq_lens, qo_lens = zip(*v0.scheduled(runner, groups), strict=True)
        assert plan == runner.attn_state.adapter.planner.plan(list(tables), list(seq_lens), list(qo_lens))
        assert plan.num_requests == len(tables)


def test_stale_rows_of_the_graph_table_are_never_shared(v0):
    """A small batch after a large one: rows and tails of the persistent table still hold old ids."""
    runner = v0.Runner()
    runner.init_cache()
    runner.capture()
    shared = [*range(8)]
    runner.prepare([v0.Group([v0.Seq(r, 40, 39, [*shared, 100 + r, 200 + r])], False) for r in range(16)])
    small = [v0.Group([v0.Seq(r, 3, 2, [300 + r])], False) for r in range(5)]
    metadata = runner.prepare(small).attn_metadata
    assert (metadata.block_tables[:, 1:8] == torch.arange(1, 8)).all(), "the stale entries are there"
    assert metadata.plan.num_levels == 1
    assert sorted(metadata.plan.seg_pages.tolist()) == [300, 301, 302, 303, 304]


@pytest.mark.parametrize("block_tables", ["none", "all values none"])
@pytest.mark.parametrize("version", VERSIONS)
def test_profile_run(version, block_tables, v0):
    """No cache yet: nothing is planned, and layers give zeros."""
    runner = v0.Runner(version=version)
    has_tables = block_tables != "none"
    groups = [v0.Group([v0.Seq(r, 10 + r, 0, None)], True, chunk=99, has_tables=has_tables) for r in range(3)]
    model_input = runner.prepare(groups)
    metadata = model_input.attn_metadata
    assert metadata.is_profile_run
    assert metadata.slot_mapping.tolist() == [-1] * 33
    assert metadata.plan is None
    assert metadata.paged_kv_indptr is None
    out = runner.execute(model_input, runner.random_qkv(33))
    assert (out == 0).all()


def test_an_empty_profile_run_plans_nothing_when_asked(v0):
    runner = v0.Runner()
    metadata = runner.prepare([v0.Group([v0.Seq(0, 4, 0, None)], True, chunk=9, has_tables=False)]).attn_metadata
    with pytest.raises(InvalidBatchError, match="holds no paged_kv arrays"):
        metadata.planner_input()


def test_placeholder_maps_are_merged(v0):
    class Placeholders:
        def __init__(self, ranges=()):
            self.ranges = [*ranges]

        def extend(self, other):
            self.ranges += other.ranges

        def index_map(self):
            return tuple(self.ranges)

    runner = v0.Runner()
    runner.init_cache()
    groups = [v0.Group([v0.Seq(r, 4, 0, [r])], True, chunk=4) for r in range(3)]
    runner.prepare(groups)
    builder = runner.builder
    for data, ranges in zip(builder.inter_data_list, ([1], [], [2, 3]), strict=True):
        data.multi_modal_placeholder_maps = {"image": Placeholders(ranges)} if ranges else None
    builder.attn_metadata_builder.prepare()
    assert builder.build().attn_metadata.multi_modal_placeholder_index_maps == {"image": (1, 2, 3)}


def test_tables_that_are_too_short_are_refused(v0):
    runner = v0.Runner()
    runner.init_cache()
    with pytest.raises(InvalidBatchError, match=r"sequence 7: its table has 2 blocks, but 9 tokens need 3 at block_si"):
        runner.prepare([v0.Group([v0.Seq(7, 9, 8, [1, 2])], False)])


def test_several_tokens_a_decode_are_refused(v0):
    runner = v0.Runner()
    runner.init_cache()
    runner.prepare([v0.Group([v0.Seq(0, 9, 8, [1, 2, 3])], False)])
    runner.builder.inter_data_list[0].query_lens = [3]
    runner.builder.attn_metadata_builder.prepare()
    with pytest.raises(UnsupportedError, match="sequence 0 decodes 3 tokens at once"):
        runner.builder.build()

"""Whole steps through the stand-in runner, eager and by graph, against the fp64 oracle."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeError, PlannerPolicy
from flashinfer_cascade.integrations.vllm_v0 import make_backend

VERSIONS = ["0.6.3", "0.8.5", "0.10.0"]


def decodes(v0, num, length=21, shared=4, first_page=100):
    """Requests that share their first pages."""
    prefix = [*range(shared)]
    return [
        v0.Group([v0.Seq(r, length, length - 1, [*prefix, *range(first_page + 9 * r, first_page + 9 * r + 3)])], False)
        for r in range(num)
    ]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_random_steps(version, graphs, v0):
    runner = v0.Runner(version=version, num_layers=2)
    runner.init_cache()
    if graphs:
        runner.capture()
    cascaded = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        kind = (True, False) if seed % 4 == 0 else (False, True) if graphs else (True, True)
        groups = v0.random_groups(rng, runner, prompts=kind[0], decodes=kind[1])
        cascaded += v0.check_step(runner, groups, seed).plan.num_levels > 1
    assert cascaded >= 3


@pytest.mark.parametrize("num_requests", [1, 3, 8, 16, 17])
def test_padded_graph_batches(num_requests, v0):
    """Padding of 0, 1, 5 and 7 rows; and the next, smaller batch in the same graph."""
    runner = v0.Runner()
    runner.init_cache()
    runner.capture()
    metadata = v0.check_step(runner, decodes(v0, num_requests))
    assert metadata.use_cuda_graph
    assert len(metadata.slot_mapping) == runner.pad_size(num_requests) + num_requests
    assert metadata.plan.num_levels == (2 if num_requests > 1 else 1)
    if num_requests > 9:
        v0.check_step(runner, decodes(v0, num_requests - 1, length=6, shared=1))


@pytest.mark.parametrize("graphs", [False, True])
def test_fp8_cache(graphs, v0):
    runner = v0.Runner(kv_cache_dtype="fp8", kv_scales=(0.5, 0.25))
    runner.init_cache()
    if graphs:
        runner.capture()
    assert runner.model.layers[0].kv_cache.dtype == torch.uint8
    metadata = v0.check_step(runner, decodes(v0, 5))
    assert metadata.data_type == torch.float8_e4m3fn
    assert metadata.plan.num_levels == 2


@pytest.mark.parametrize("chunked", [False, True])
def test_sliding_window(chunked, v0):
    """Flat; early rows of a prompt longer than the window see what is left behind by its end."""
    runner = v0.Runner(sliding_window=10, backend=make_backend(), chunked_prefill=chunked)
    runner.init_cache()
    prompts = [v0.Group([v0.Seq(r, 30, 0, [*range(20 * r, 20 * r + 8)])], True, chunk=30) for r in range(2)]
    metadata = v0.check_step(runner, prompts)
    assert metadata.window_left == 9
    metadata = v0.check_step(runner, decodes(v0, 4))
    assert "window_left=9 does not cover" in metadata.plan.parts[0].reason
    assert metadata.plan.num_levels == 1


def test_a_window_that_covers_all_contexts_may_cascade(v0):
    runner = v0.Runner(sliding_window=40)
    runner.init_cache()
    assert v0.check_step(runner, decodes(v0, 4)).plan.num_levels == 2


def test_planner_policy_reaches_the_planner(v0):
    runner = v0.Runner(backend=make_backend(policy=PlannerPolicy(executor="flat")))
    runner.init_cache()
    assert v0.check_step(runner, decodes(v0, 4)).plan.parts[0].reason == "the policy asks for flat"


def test_layers_are_injected_with_the_function_that_writes(v0):
    """A real install passes vLLM's reshape_and_cache_flash, which takes these arguments."""
    calls = []

    def write_kv(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
        calls.append([*(tuple(x.shape) for x in (key, value, key_cache, value_cache, slot_mapping)), kv_cache_dtype])

    runner = v0.Runner(backend=make_backend(write_kv=write_kv))
    runner.init_cache()
    groups = decodes(v0, 3)
    runner.execute(runner.prepare(groups), runner.random_qkv(3))
    assert calls == [[(3, 2, 64), (3, 2, 64), (512, 4, 2, 64), (512, 4, 2, 64), (3,), "auto"]]


def test_wrappers_expose_what_vllm_layers_hold_theirs_against(v0):
    """The checks of vLLM's own FlashInferImpl, which may also run on our wrappers."""
    runner = v0.Runner(soft_cap=20.0, scale=0.25)
    runner.init_cache()
    model_input = runner.prepare(decodes(v0, 4))
    metadata = model_input.attn_metadata
    runner.attn_state.begin_forward(model_input)
    assert metadata.prefill_wrapper is None
    wrapper = metadata.decode_metadata.decode_wrapper
    assert wrapper._causal
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (-1, 20.0, 0.25)
    q, _, _ = runner.random_qkv(4)
    cache = runner.model.layers[0].kv_cache
    out = wrapper.run(q, cache.permute(0, 1, 2, 3, 4), k_scale=1.0, v_scale=1.0)
    assert torch.equal(out, runner.attn_state.adapter.runtime.run(q, cache))


def test_a_layer_before_its_step(v0):
    runner = v0.Runner()
    runner.init_cache()
    model_input = runner.prepare(decodes(v0, 4))
    with pytest.raises(CascadeError, match="call the state's begin_forward"):
        runner.model(*runner.random_qkv(4), model_input.attn_metadata)


def test_graph_methods_outside_of_a_capture(v0):
    runner = v0.Runner()
    runner.init_cache()
    with pytest.raises(CascadeError, match="within `with state"):
        runner.attn_state.graph_clone(4)
    with pytest.raises(CascadeError, match="within `with state"):
        runner.attn_state.graph_capture_get_metadata_for_batch(4)
    model_input = runner.prepare(decodes(v0, 4))
    with pytest.raises(ZeroDivisionError, match="division"), runner.attn_state.graph_capture(8):  # noqa: PT012
        with pytest.raises(CascadeError, match="leave graph_capture first"):
            runner.attn_state.begin_forward(model_input)
        1 / 0  # noqa: B018
    runner.attn_state.begin_forward(model_input)  # a capture that failed is over


def test_capture_metadata_is_of_rows_that_do_nothing(v0):
    runner = v0.Runner()
    runner.init_cache()
    before = runner.model.layers[0].kv_cache.clone()
    runner.capture()
    assert torch.equal(runner.model.layers[0].kv_cache, before), "capturing writes nothing"
    metadata = runner.graphs[8].metadata
    assert metadata.slot_mapping.tolist() == [-1] * 8
    assert metadata.decode_metadata is metadata
    assert metadata.prefill_metadata is None
    assert runner.graphs[8].input_buffers.keys() == {"slot_mapping"}
    assert runner.attn_state.adapter.graph_sizes == [1, 2, 4, 8, 16, 24]
    clones = [graph.attn_state for graph in runner.graphs.values()]
    assert all(clone.adapter is runner.attn_state.adapter for clone in clones)


def test_prompts_never_run_in_a_graph(v0):
    """Even if padded for one, as with several steps at once."""
    runner = v0.Runner()
    runner.init_cache()
    runner.capture()
    metadata = runner.prepare([v0.Group([v0.Seq(0, 6, 0, [1, 2])], True, chunk=6), *decodes(v0, 2)]).attn_metadata
    metadata.use_cuda_graph = True
    assert metadata.graph is None


def test_sizes_of_graphs_that_vllm_names(v0):
    """From 0.7 on the configuration lists them; those that it does not list are added when they are captured."""
    runner = v0.Runner()
    runner.init_cache()
    sizes = [24, 12, 1, 512]
    runner.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))
    with runner.attn_state.graph_capture(24):
        assert runner.attn_state.adapter.graph_sizes == [1, 12, 24]
        runner.attn_state.graph_capture_get_metadata_for_batch(7)
        assert runner.attn_state.adapter.graph_sizes == [1, 7, 12, 24]


def test_a_graph_that_was_not_captured(v0):
    runner = v0.Runner()
    runner.init_cache()
    runner.graphs[6] = None
    with pytest.raises(CascadeError, match=r"no graph of batch size 6 is reserved, only \[\]"):
        runner.prepare(decodes(v0, 5))

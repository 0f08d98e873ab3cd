"""The backend's classes: what vLLM asks of them, what they refuse, blocks that move; vLLM's own abstract classes."""

import enum
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch

from flashinfer_cascade import UnsupportedError
from flashinfer_cascade.integrations.vllm_v0 import (
    CascadeBackend,
    CascadeImpl,
    CascadeMetadata,
    CascadeMetadataBuilder,
    CascadeState,
    make_backend,
)
from flashinfer_cascade.integrations.vllm_v0.cache import kv_dtype


def impl(*trailing, **changes):
    values = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2} | changes
    first = ["num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"]
    defaults = {"kv_cache_dtype": "auto"}
    return CascadeImpl(*(values.pop(name, defaults.get(name)) for name in first), *trailing, **values)


def test_the_classes_of_a_backend():
    backend = make_backend(kv_layout="HND")
    assert issubclass(backend, CascadeBackend)
    assert backend.get_name() == "FLASHINFER"
    assert backend.get_impl_cls() is CascadeImpl
    assert backend.get_builder_cls() is CascadeMetadataBuilder
    assert backend.get_state_cls() is CascadeState
    assert backend.get_metadata_cls() is CascadeMetadata
    assert backend.get_kv_cache_shape(9, 16, 8, 128) == (9, 2, 16, 8, 128)
    assert backend.get_kv_cache_stride_order() == (0, 1, 3, 2, 4)
    assert backend.get_supported_head_sizes() == [64, 128, 256]
    assert CascadeBackend.get_kv_cache_stride_order() == (0, 1, 2, 3, 4), "of another backend"


@pytest.mark.parametrize(
    ("trailing", "extra"),
    [
        ((None, 30.0), {}),  # 0.6
        ((None, 30.0, "decoder"), {}),  # 0.7 and 0.8
        ((None, 30.0, "decoder"), {"use_irope": False}),
        ((None, 30.0, "decoder", None), {}),  # 0.9
        ((30.0, "decoder", None), {}),  # 0.10
        ((), {"logits_soft_cap": 30.0, "attn_type": "decoder", "blocksparse_params": None}),
    ],
)
def test_arguments_of_all_versions(trailing, extra):
    layer = impl(*trailing, sliding_window=128, **extra)
    assert (layer.scale, layer.window_left, layer.logits_soft_cap) == (0.125, 127, 30.0)
    assert impl().logits_soft_cap == 0.0
    assert impl().window_left == -1


@pytest.mark.parametrize(
    ("trailing", "changes", "match"),
    [
        ((None, None, "encoder"), {}, "attn_type='encoder'"),
        ((None, "encoder_decoder", None), {}, "attn_type='encoder_decoder'"),
        ((), {"alibi_slopes": [1.0]}, r"alibi_slopes=\[1.0\]"),
        (({"local_blocks": 4}, None), {}, "blocksparse_params="),
        ((None, None, "decoder", "layers.0"), {}, "kv_sharing_target_layer_name='layers.0'"),
        ((None, "decoder", "layers.0"), {}, "kv_sharing_target_layer_name='layers.0'"),
        ((), {"use_irope": True}, "use_irope=True"),
        ((1, 2, 3, 4, 5), {}, "5 arguments behind kv_cache_dtype"),
    ],
)
def test_layers_that_are_refused(trailing, changes, match):
    with pytest.raises(UnsupportedError, match=match):
        impl(*trailing, **changes)


def test_attention_types_before_0_6_4_are_an_enum():
    kinds = enum.Enum("AttentionType", ["DECODER", "ENCODER"])
    q, kv = torch.ones(3, 256), torch.ones(3, 128)
    metadata = SimpleNamespace(wrapper=None)
    assert (impl().forward(q, kv, kv, torch.tensor([]), metadata, 1.0, 1.0, attn_type=kinds.DECODER) == 0).all()
    with pytest.raises(UnsupportedError, match="attn_type='encoder'"):
        impl().forward(q, kv, kv, torch.tensor([]), metadata, 1.0, 1.0, attn_type=kinds.ENCODER)


def test_quantized_output_is_refused():
    q = torch.ones(3, 256)
    with pytest.raises(UnsupportedError, match="output_scale"):
        impl().forward(SimpleNamespace(), q, q, q, torch.tensor([]), None, output_scale=torch.ones(1))


@pytest.mark.parametrize("attribute", ["scale", "window_left", "logits_soft_cap"])
def test_a_layer_unlike_the_others(attribute, v0):
    """Found when the model's configuration is gathered, or at the layer when it was changed later."""
    runner = v0.Runner(num_layers=2)
    runner.init_cache()
    groups = [v0.Group([v0.Seq(0, 4, 3, [1])], False)]
    setattr(runner.model.layers[1].impl, attribute, 5)
    with pytest.raises(UnsupportedError, match="2 kinds of attention layers"):
        runner.prepare(groups)
    runner = v0.Runner()
    runner.init_cache()
    model_input = runner.prepare(groups)
    setattr(runner.model.layers[0].impl, attribute, 5)
    with pytest.raises(UnsupportedError, match="in a model planned for"):
        runner.execute(model_input, runner.random_qkv(1))


def test_a_model_without_layers_of_this_backend(v0):
    runner = v0.Runner(num_layers=0)
    runner.init_cache()
    with pytest.raises(UnsupportedError, match="0 kinds of attention layers"):
        runner.prepare([v0.Group([v0.Seq(0, 4, 3, [1])], False)])


def test_multi_step_is_refused(v0):
    with pytest.raises(UnsupportedError, match=r"num_scheduler_steps=8: .* start vLLM with num_scheduler_steps=1"):
        v0.Runner(num_scheduler_steps=8)
    runner = v0.Runner()
    runner.init_cache()
    metadata = runner.prepare([v0.Group([v0.Seq(0, 4, 3, [1])], False)]).attn_metadata
    with pytest.raises(UnsupportedError, match="advance_step: multi-step scheduling moves lengths"):
        metadata.advance_step(None, None, 4, 1, 1)


def test_encoders_are_refused(v0):
    runner = v0.Runner()
    runner.init_cache()
    with (
        runner.attn_state.graph_capture(4),
        pytest.raises(UnsupportedError, match="is_encoder_decoder_model"),
    ):
        runner.attn_state.graph_capture_get_metadata_for_batch(4, is_encoder_decoder_model=True)


def test_limits_follow_the_runner(v0):
    runner = v0.Runner(max_num_seqs=20, num_blocks=100, max_model_len=128)
    runner.init_cache()
    config = runner.attn_state.adapter.config
    assert config.max_batch_size == 24, "the largest graph has more rows than there may be sequences"
    assert config.max_num_rows == 2048
    assert config.max_kv_pages == 100
    assert config.max_kv_indices == 24 * 32
    runner = v0.Runner(num_blocks=10, backend=make_backend(max_kv_indices=77))
    runner.init_cache()
    assert runner.attn_state.adapter.config.max_kv_indices == 77


def test_kv_dtypes():
    assert kv_dtype("auto", torch.float16) == torch.float16
    assert kv_dtype("fp8_e5m2", torch.float16) == torch.float8_e5m2
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='int8'"):
        kv_dtype("int8", torch.float16)


@pytest.mark.parametrize("version", ["0.6.3", "0.8.5", "0.10.0"])
def test_what_is_broadcast(version, v0):
    """All that other ranks need, by value; nothing that each makes by itself."""
    runner = v0.Runner(version=version)
    runner.init_cache()
    model_input = runner.prepare([v0.Group([v0.Seq(r, 9, 8, [0, 1, 2 + r])], False) for r in range(3)])
    runner.attn_state.begin_forward(model_input)
    metadata = model_input.attn_metadata
    sent = metadata.asdict_zerocopy()
    assert not sent.keys() & {"plan", "prefill_wrapper", "decode_wrapper"}
    assert sent["slot_mapping"] is metadata.slot_mapping, "without copies"
    skipped = {"block_tables"}
    assert "block_tables" not in metadata.asdict_zerocopy(skipped)
    assert skipped == {"block_tables"}, "the caller's set stays as it was"
    received = runner.attn_backend.make_metadata(**pickle.loads(pickle.dumps(sent)))
    other = v0.Runner(version=version)
    other.init_cache()
    other.attn_state.begin_forward(SimpleNamespace(attn_metadata=received))
    assert received.plan == metadata.plan


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_blocks_move(layout, dtype):
    backend = make_backend(kv_layout=layout)
    order = backend.get_kv_cache_stride_order()
    shape = [backend.get_kv_cache_shape(6, 4, 2, 64)[i] for i in order]
    caches = [torch.randint(0, 200, shape).to(dtype).permute(*order) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    backend.copy_blocks(caches, torch.tensor([[0, 3], [0, 5], [2, 1]]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 2, 2, 0, 4, 0]])
    on_cpu = torch.zeros(3, *caches[0].shape[1:], dtype=dtype)
    backend.swap_blocks(caches[0], on_cpu, torch.tensor([[4, 0], [1, 2]]))
    assert torch.equal(on_cpu[[0, 2]], caches[0][[4, 1]])
    assert (on_cpu[1] == 0).all()


def test_vllms_abstract_classes_are_filled():
    """Where vLLM is installed: no method is missing, and each takes what vLLM's own takes."""
    reason = "vLLM 0.6.3 to 0.10.0 is not installed"
    abstract = pytest.importorskip("vllm.attention.backends.abstract", reason=reason)
    if not hasattr(abstract, "AttentionMetadataBuilder") or not hasattr(abstract, "AttentionState"):
        pytest.skip(reason)
    pairs = {
        "AttentionBackend": CascadeBackend,
        "AttentionMetadata": CascadeMetadata,
        "AttentionMetadataBuilder": CascadeMetadataBuilder,
        "AttentionState": CascadeState,
        "AttentionImpl": CascadeImpl,
    }
    for name, ours in pairs.items():
        theirs = getattr(abstract, name)
        methods = {m: f for m, f in inspect.getmembers(theirs) if getattr(f, "__isabstractmethod__", False)}
        assert methods.keys() <= set(dir(ours)), name
        for method, function in methods.items():
            if isinstance(function, property) or method == "__init__":
                continue
            wanted, given = ([*inspect.signature(f).parameters] for f in (function, getattr(ours, method)))
            if given[-2:] != ["args", "kwargs"]:
                assert given[: len(wanted)] == wanted, f"{name}.{method}"

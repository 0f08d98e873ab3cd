"""The runtime: within the error budget on any batch, rows in the caller's order, and strict at its edge."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import (
    BackendUnavailableError,
    CascadeConfig,
    CascadeError,
    CascadePlanner,
    CascadeRuntime,
    InvalidBatchError,
    PlannerPolicy,
    UnsupportedError,
)
from flashinfer_cascade.testing import (
    RandomBatch,
    assert_close,
    assert_lse_close,
    dense_attention,
    make_kv_cache,
    make_q,
    plain_attention,
    random_batch,
)

FORCED = PlannerPolicy(executor="levels", fold=False, max_levels=64)
MIXED = RandomBatch([[0, 1, 2], [0, 3, 4], [0, 1, 5], [], [0, 3, 6, 7, 8, 9]], [9, 10, 12, 0, 22], [1, 2, 1, 1, 17])


def config(**changes):
    values = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "dtype": "bfloat16"}
    return CascadeConfig(**(values | changes))


def loaded(cfg, batch, policy=FORCED):
    plan = CascadePlanner(cfg, policy).plan(*batch)
    runtime = CascadeRuntime(cfg, "cpu")
    runtime.load(plan)
    return runtime, plan


@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 16, 64]),
    heads=st.sampled_from([(2, 2), (4, 1), (8, 1)]),
    head_dim=st.sampled_from([64, 128, 256]),
    kv=st.sampled_from([("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float8_e5m2")]),
    max_new=st.sampled_from([1, 20]),
    with_sinks=st.booleans(),
)
def test_within_the_error_budget(seed, page_size, heads, head_dim, kv, max_new, with_sinks):
    batch = random_batch(np.random.default_rng(seed), page_size=page_size, max_new=max_new, num_requests=6)
    cfg = config(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        dtype=kv[0],
        kv_dtype=kv[1],
    )
    scales = {} if kv[0] == kv[1] else {"k_scale": 0.5, "v_scale": 0.25}
    q, cache = make_q(cfg, batch.num_rows), make_kv_cache(cfg, batch.num_pages, **scales)
    options = {**scales, "sinks": torch.linspace(-2, 2, heads[0]) if with_sinks else None}
    runtime, _ = loaded(cfg, batch)
    poisoned = torch.full_like(q, math.nan)
    out, lse = runtime.run(q, cache, out=poisoned, return_lse=True, **options)
    assert out is poisoned
    oracle, oracle_lse = dense_attention(cfg, q, cache, *batch, **options)
    assert_close(out, oracle, plain_attention(cfg, q, cache, *batch, **options), factor=1.5)
    assert lse.dtype == torch.float32
    assert_lse_close(lse, oracle_lse, out.dtype, atol=1e-4)


@given(seed=st.integers(0, 2**32 - 1))
def test_permuting_requests_permutes_outputs(seed):
    rng = np.random.default_rng(seed)
    cfg = config(page_size=2)
    batch = random_batch(rng, page_size=2, max_new=20)
    order = rng.permutation(len(batch.seq_lens)).tolist()
    q, cache = make_q(cfg, batch.num_rows), make_kv_cache(cfg, batch.num_pages)
    runtime, _ = loaded(cfg, batch)
    straight = runtime.run(q, cache)
    permuted, rows = batch.permuted(order), batch.rows_of(order)
    runtime, _ = loaded(cfg, permuted)
    # Not bit for bit: one product over more rows may sum in another order.
    torch.testing.assert_close(runtime.run(q[rows], cache), straight[rows], rtol=2**-7, atol=1e-4)


def test_padding_alone():
    batch = RandomBatch([[], [0, 0]], [0, 0], [1, 2])
    cfg = config()
    runtime, _ = loaded(cfg, batch)
    q = make_q(cfg, 3)
    out, lse = runtime.run(q, make_kv_cache(cfg, 1), out=torch.full_like(q, math.nan), return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    sinks = torch.tensor([0.0, 1.0, -1.0, 5.0])
    out, lse = runtime.run(q, make_kv_cache(cfg, 1), sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, (sinks * math.log2(math.e)).expand(3, 4))


def test_parts_together_are_the_whole():
    cfg = config()
    runtime, plan = loaded(cfg, MIXED)
    assert [part.name for part in plan.parts] == ["decode", "append"]
    q, cache = make_q(cfg, MIXED.num_rows), make_kv_cache(cfg, MIXED.num_pages)
    whole, whole_lse = runtime.run(q, cache, return_lse=True)
    out = torch.full_like(q, math.nan)
    runtime.run(q, cache, part="append", out=out)
    assert out[:5].isnan().all()
    assert torch.equal(out[5:], whole[5:])
    runtime.run(q, cache, part=plan.parts[0], out=out)
    assert torch.equal(out, whole)
    out, lse = runtime.run(q, cache, part="decode", return_lse=True)
    assert torch.equal(out[:5], whole[:5])
    assert torch.equal(lse[:5], whole_lse[:5])
    assert (out[5:] == 0).all()
    assert (lse[5:] == -math.inf).all()


def test_one_plan_serves_all_layers_and_the_next_plan_replaces_it():
    cfg = config()
    runtime, _ = loaded(cfg, MIXED)
    q = make_q(cfg, MIXED.num_rows)
    caches = [make_kv_cache(cfg, MIXED.num_pages, seed=layer) for layer in range(3)]
    layers = [runtime.run(q, cache) for cache in caches]
    decode = RandomBatch([[4, 2], [4, 1]], [8, 7], [1, 1])
    runtime.load(CascadePlanner(cfg).plan(*decode))
    runtime.run(q[:2], caches[0])
    for cache, out in zip(caches, layers, strict=True):
        assert_close(out, dense_attention(cfg, q, cache, *MIXED)[0], plain_attention(cfg, q, cache, *MIXED))
    assert (runtime.stats.loads, runtime.stats.runs) == (2, 4)
    assert runtime.stats.parts_run == {("decode", "reference"): 4, ("append", "reference"): 3}


def test_strided_q_and_out():
    cfg = config()
    runtime, _ = loaded(cfg, MIXED)
    q, cache = make_q(cfg, MIXED.num_rows), make_kv_cache(cfg, MIXED.num_pages, form="permuted")
    fused = torch.cat((q, q), 1)[:, :4]
    out = torch.empty(2 * MIXED.num_rows, 4, 64, dtype=q.dtype)[::2]
    assert torch.equal(runtime.run(fused, cache, out=out), runtime.run(q, cache))
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(runtime.run(heads_first, cache), runtime.run(q, cache))
    assert runtime.run(heads_first, cache).is_contiguous()


def shifted(x):
    """The same values, one number further on in memory."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x)


def padded(x):
    """The same values, with rows 8 bytes longer."""
    memory = torch.empty(*x.shape[:-1], x.shape[-1] + 8 // x.element_size(), dtype=x.dtype)
    return memory[..., : x.shape[-1]].copy_(x)


@pytest.mark.parametrize("changed", [shifted, padded])
@pytest.mark.parametrize("name", ["q", "kv_cache", "out"])
@pytest.mark.parametrize("kv_dtype", ["float16", "float8_e5m2"])
def test_memory_that_is_not_aligned(name, changed, kv_dtype):
    cfg = config(dtype="float16", kv_dtype=kv_dtype)
    runtime, _ = loaded(cfg, MIXED)
    q = make_q(cfg, MIXED.num_rows)
    given = {"q": q, "kv_cache": make_kv_cache(cfg, MIXED.num_pages), "out": torch.empty_like(q)}
    says = rf"{name} has strides \(.*\) of \d bytes from an address that is [012] modulo 16: the kernels copy 16 bytes"
    with pytest.raises(InvalidBatchError, match=says):
        runtime.run(**(given | {name: changed(given[name])}))


def test_strides_along_which_there_is_one_alone_do_not_count():
    cfg = config(num_qo_heads=1, num_kv_heads=1)
    runtime, _ = loaded(cfg, MIXED)
    q, cache = make_q(cfg, MIXED.num_rows), make_kv_cache(cfg, MIXED.num_pages)
    odd = q.as_strided(q.shape, (q.stride(0), 7, 1))
    assert torch.equal(runtime.run(odd, cache), runtime.run(q, cache))


def test_run_before_load():
    cfg = config()
    with pytest.raises(CascadeError, match=r"no plan is loaded: call load\(plan\) before run"):
        CascadeRuntime(cfg, "cpu").run(make_q(cfg, 1), make_kv_cache(cfg, 1))


def test_devices_without_an_executor():
    for device, told in (
        ("meta", "'meta'"),
        ("bogus", "'bogus'"),
        (2**80, str(2**80)),
        (None, "None"),
        ([1], r"\[1\]"),
    ):
        with pytest.raises(UnsupportedError, match=f"device={told}: use 'cuda' or 'cuda:0', say, or 'cpu' for the ref"):
            CascadeRuntime(config(), device=device)


def test_a_cpu_of_any_number_is_the_cpu():
    runtime = CascadeRuntime(config(), device="cpu:3")
    runtime.load(CascadePlanner(config()).plan([[0]], [3]))
    assert runtime.run(make_q(config(), 1), make_kv_cache(config(), 1)).device == torch.device("cpu")


def test_a_gpu_beyond_those_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        BackendUnavailableError, match="device='cuda:2', but torch sees 2 CUDA devices: count from cuda:0"
    ):
        CascadeRuntime(config(), device="cuda:2")


def test_what_is_no_configuration_or_state():
    with pytest.raises(InvalidBatchError, match="config is None: give a CascadeConfig"):
        CascadeRuntime(None, device="cpu")
    runtime = CascadeRuntime(config(), device="cpu")
    for state in (None, runtime):
        with (
            pytest.raises(InvalidBatchError, match=r"state is .*: give a state that graph_state made"),
            runtime.using(state),
        ):
            pass
    with pytest.raises(InvalidBatchError, match="shape is 5: give a SegmentShape, GraphShape or StockShape"):
        runtime.graph_state(2, shape=5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_no_silent_fallback(device):
    with pytest.raises(BackendUnavailableError, match=f"device='{device}', but torch .* sees no CUDA device"):
        CascadeRuntime(config(), device=device)


def test_a_plan_of_another_configuration():
    runtime, _ = loaded(config(), MIXED)
    other = CascadePlanner(config(window_left=64, num_kv_heads=4)).plan(*MIXED)
    with pytest.raises(InvalidBatchError, match="the plan was made with num_kv_heads=4, window_left=64, unlike"):
        runtime.load(other)
    with pytest.raises(InvalidBatchError, match="plan is None: give the CascadePlan that planner"):
        runtime.load(None)
    assert runtime.stats.loads == 1
    with pytest.raises(CascadeError, match="no plan is loaded"):
        runtime.run(make_q(config(), MIXED.num_rows), make_kv_cache(config(), MIXED.num_pages))


CFG = config()
Q, CACHE = make_q(CFG, MIXED.num_rows), make_kv_cache(CFG, MIXED.num_pages)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"q": Q[:-1]}, r"q is torch.bfloat16 \[21, 4, 64\] on cpu; expected torch.bfloat16 \[22, 4, 64\] on cpu"),
        ({"q": Q.half()}, r"q is torch.float16 .*; expected torch.bfloat16"),
        ({"q": Q.to("meta")}, r"q is .* on meta; expected .* on cpu"),
        ({"q": None}, r"q is None; expected a torch.Tensor, torch.bfloat16 \[22, 4, 64\]: pass the rows of the batch"),
        ({"q": Q.float().numpy()}, "q is a ndarray; expected a torch.Tensor"),
        ({"kv_cache": None}, r"kv_cache is None: pass one 5-D tensor, or \(k, v\)"),
        ({"kv_cache": {"k": CACHE[:, 0], "v": CACHE[:, 1]}}, "kv_cache is a dict: pass one 5-D tensor"),
        ({"kv_cache": (None, CACHE[:, 1])}, r"kv_cache\[0\] is None; expected a torch.Tensor"),
        ({"kv_cache": torch.zeros((), dtype=torch.bfloat16)}, r"kv_cache is torch.bfloat16 \[\] on cpu"),
        ({"q": Q.flatten(1)}, r"q is torch.bfloat16 \[22, 256\] on cpu"),
        ({"kv_cache": CACHE[:-1]}, "the plan reads page 9, but kv_cache holds 9 pages"),
        ({"kv_cache": CACHE.float()}, "kv_cache is torch.float32"),
        ({"kv_cache": CACHE.to("meta")}, "kv_cache is .* on meta"),
        ({"kv_cache": CACHE[:, 0]}, r"kv_cache is .*; expected .* \[10, 2, 4, 2, 64\] on cpu: the layout is NHD"),
        ({"kv_cache": CACHE.transpose(2, 3)}, r"kv_cache is torch.bfloat16 \[10, 2, 2, 4, 64\]"),
        ({"kv_cache": CACHE.transpose(0, 1)}, r"kv_cache is .*; expected .* \[2, 2, 4, 2, 64\]"),
        ({"kv_cache": (CACHE[:, 0], CACHE[:-1, 1])}, r"kv_cache\[1\] is .* \[9, 4, 2, 64\]"),
        ({"kv_cache": (CACHE[:, 0],)}, "kv_cache holds 1 tensors"),
        ({"out": Q[:-1]}, r"out is torch.bfloat16 \[21, 4, 64\]"),
        ({"out": Q.float()}, r"out is torch.float32"),
        ({"sinks": torch.zeros(3)}, r"sinks is torch.float32 \[3\] on cpu; expected torch.float32 \[4\]"),
        ({"sinks": [0.0] * 4}, r"sinks is a list; expected a torch.Tensor, torch.float32 \[4\]"),
        ({"k_scale": None}, "k_scale is None: give a finite number"),
        ({"k_scale": math.nan}, "k_scale is nan: give a finite number"),
        ({"k_scale": 0.0}, "k_scale is 0.0: give a finite number above 0"),
        ({"v_scale": -1}, "v_scale is -1: give a finite number above 0"),
        ({"v_scale": -math.inf}, "v_scale is -inf: give a finite number"),
        ({"v_scale": "1"}, "v_scale is '1': give a finite number"),
        ({"v_scale": True}, "v_scale is True: give a finite number"),
        ({"k_scale": torch.ones(())}, "k_scale is a Tensor: give a finite number"),
        ({"part": 5}, "part is 5: give the name of one of the plan's parts"),
        ({"sinks": torch.zeros(4).half()}, r"sinks is torch.float16 \[4\]"),
        ({"part": "prefill"}, "the loaded plan has no part 'prefill', only 'decode' and 'append'"),
        ({"part": CascadePlanner(CFG).plan(*MIXED).parts[0]}, "no part 'decode of another plan'"),
    ],
)
def test_the_edge_is_checked(changes, match):
    runtime, _ = loaded(CFG, MIXED)
    out = torch.full_like(Q, math.nan)
    with pytest.raises(InvalidBatchError, match=match):
        runtime.run(**({"q": Q, "kv_cache": CACHE, "out": out} | changes))
    assert out.isnan().all(), "nothing is written before everything is checked"
    assert runtime.stats.runs == 0


def test_scales_of_any_numeric_type():
    runtime, _ = loaded(CFG, MIXED)
    expected = runtime.run(Q, CACHE, k_scale=2.0, v_scale=0.5)
    assert torch.equal(runtime.run(Q, CACHE, k_scale=2, v_scale=np.float32(0.5)), expected)


def test_hnd_caches():
    cfg = config(kv_layout="HND")
    runtime, _ = loaded(cfg, MIXED)
    assert torch.equal(runtime.run(Q, CACHE.transpose(2, 3)), loaded(CFG, MIXED)[0].run(Q, CACHE))
    with pytest.raises(InvalidBatchError, match="the layout is HND"):
        runtime.run(Q, CACHE)


def test_fp8_caches_stored_as_bytes():
    cfg = config(kv_dtype="float8_e4m3fn")
    runtime, _ = loaded(cfg, MIXED)
    with pytest.raises(InvalidBatchError, match="view a cache stored as bytes in its own dtype"):
        runtime.run(Q, make_kv_cache(cfg, MIXED.num_pages).view(torch.uint8))

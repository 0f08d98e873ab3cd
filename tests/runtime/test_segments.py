"""The segments' kernels in Triton's interpreter against the fp64 oracle; tests/gpu runs them compiled."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy, UnsupportedError
from flashinfer_cascade.lower import WINDOW, Tiling, lower, wide_shared_bytes
from flashinfer_cascade.runtime.buffers import PAGE_SLACK, to_int32
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.testing import (
    RandomBatch,
    assert_close,
    assert_lse_close,
    dense_attention,
    make_kv_cache,
    make_q,
    plain_attention,
    random_batch,
    relative_errors,
)

TILING = Tiling(num_sms=4, min_cut=64, short_tokens=64)
# The interpreter multiplies no bfloat16.
BASE = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "float16"}
NO_PAGE = 2**30
"""Behind the ids that a plan has: an address far outside the cache."""


def run(config, plan, q, kv_cache, *, loops=False, out=None, tiling=TILING, **options):
    """Run a plan's only part, over poisoned memory.

    Args:
        config: the attention.
        plan: what to run.
        q: its queries.
        kv_cache: likewise.
        loops: give the number of wide items as graphs do, behind which the table holds nonsense.
        out: where to; None allocates it.
        tiling: the kernels'.
        **options: of `LayerCall`.
    """
    from flashinfer_cascade.runtime.segment_kernels import Partials, SegmentArrays, SegmentKernels

    (part,) = plan.parts
    lowered = lower(plan, part, tiling)
    wide = to_int32(lowered.wide)
    if loops:
        wide = torch.cat((wide, torch.full((50, wide.shape[1]), NO_PAGE, dtype=torch.int32)))
    arrays = SegmentArrays(
        wide=wide if len(wide) else None,
        num_wide=torch.tensor([len(lowered.wide), lowered.num_double], dtype=torch.int32) if loops else None,
        num_double=lowered.num_double,
        short=to_int32(lowered.short) if len(lowered.short) > WINDOW else None,
        short_runs=to_int32(lowered.short_runs),
        narrow=to_int32(lowered.narrow) if len(lowered.narrow) > WINDOW else None,
        narrow_runs=to_int32(lowered.narrow_runs),
        partial_indptr=to_int32(lowered.partial_indptr),
        combined=to_int32(lowered.combined),
        pages=to_int32(np.append(plan.seg_pages, [NO_PAGE] * PAGE_SLACK)),
        row_map=None if plan.row_order is None else to_int32(plan.row_order),
        row_pos=to_int32(plan.row_pos) if plan.num_rows > plan.num_requests else None,
    )
    heads = lowered.num_partials, config.num_qo_heads
    partials = Partials(torch.full((*heads, config.head_dim), math.nan, dtype=q.dtype), torch.full(heads, math.nan))
    out, lse = torch.empty_like(q) if out is None else out, torch.full(q.shape[:2], math.nan)
    out.fill_(math.nan)
    call = LayerCall(q, kv_cache, out, lse, **options)
    combines = bool((lowered.combined >= 0).any())
    SegmentKernels(config, tiling, interpreted=True).run(
        call, arrays, partials, num_rows=plan.num_rows, combines=combines
    )
    used = {
        "wide": arrays.wide is not None,
        "short": arrays.short is not None,
        "narrow": arrays.narrow is not None,
        "combine": combines,
    }
    return out, lse, {name for name, there in used.items() if there}


def rooted(batch, config):
    """Let the last few requests share a short segment more, most others a wide one, and some none."""
    page_size, used = config.page_size, batch.num_pages
    long = list(range(used, used + -(-160 // page_size)))
    short = list(range(used + len(long), used + len(long) + max(48 // page_size, 1)))
    tables, seq_lens, rows = list(batch.block_tables), list(batch.seq_lens), 0
    for request in reversed(range(len(tables))):
        if not seq_lens[request] or request % 5 == 0:
            continue
        rows += batch.qo_lens[request]
        prefix = short if rows * config.group_size <= TILING.short_rows else long
        tables[request] = prefix + tables[request]
        seq_lens[request] += len(prefix) * page_size
    return RandomBatch(tables, seq_lens, batch.qo_lens)


# Changes to the configuration, requests, most new tokens of a request, whether wide items are looped over.
CASES = {
    "decode": ({}, 28, 1, False),
    "soft cap, appends": ({"logits_soft_cap": 5.0}, 14, 4, False),
    "page 1, group 5, loops": ({"page_size": 1, "num_qo_heads": 10}, 14, 1, True),
    "page 64, HND, group 16, appends, loops": (
        {"page_size": 64, "num_qo_heads": 16, "num_kv_heads": 1, "kv_layout": "HND"},
        7,
        3,
        True,
    ),
    "e4m3, group 1": ({"num_qo_heads": 3, "num_kv_heads": 3, "kv_dtype": "float8_e4m3fn"}, 20, 1, False),
    "e5m2, group 8": ({"num_qo_heads": 8, "num_kv_heads": 1, "kv_dtype": "float8_e5m2"}, 10, 1, True),
    "group 4, appends": ({"num_qo_heads": 8}, 16, 3, False),
}


def far_apart(q):
    """The same queries, and room for as many results, with more than 2**31 numbers between the first and the last head.

    Of that memory, only what is written is there. The interpreter would copy all of it onto itself.
    """
    torch.UntypedStorage.copy_ = lambda self, source, non_blocking=False: self
    rows, heads, dim = q.shape
    stride = 8 * (2**31 // (heads - 1) // 8 + 1)
    memory = torch.empty((heads - 1) * stride + 2 * rows * dim, dtype=q.dtype)
    there, out = (memory[at:].as_strided(q.shape, (dim, stride, 1)) for at in (0, rows * dim))
    return there.copy_(q), out


def check_case(name, far=False, tiling=TILING):
    changes, num_requests, max_new, loops = CASES[name]
    config = CascadeConfig(**(BASE | changes))
    rng = np.random.default_rng([*name.encode()])
    batch = random_batch(
        rng, page_size=config.page_size, num_requests=num_requests, max_new=max_new, max_len=max(60, config.page_size)
    )
    batch = rooted(batch, config)
    batch = batch.permuted(rng.permutation(num_requests).tolist())
    policy = PlannerPolicy(executor="segments", fold=False, max_levels=64, max_decode_rows=64)
    plan = CascadePlanner(config, policy).plan(*batch)
    options = {"k_scale": 0.7, "v_scale": 1.3}
    if len(name) % 2:
        options["sinks"] = torch.linspace(-3, 3, config.num_qo_heads)
    q, kv_cache = make_q(config, batch.num_rows), make_kv_cache(config, batch.num_pages)
    q, out = far_apart(q) if far else (q, None)
    out, lse, used = run(config, plan, q, kv_cache, loops=loops, out=out, tiling=tiling, **options)
    oracle, oracle_lse = dense_attention(config, q, kv_cache, *batch, **options)
    assert_close(out, oracle, plain_attention(config, q, kv_cache, *batch, **options))
    assert_lse_close(lse, oracle_lse, q.dtype)
    return used


def check_request_that_is_nan():
    """Its neighbours in a run, and those that share a prefix with it, are as they would be."""
    config = CascadeConfig(**BASE)
    tables = [[0, 1, 10 + 2 * request, 11 + 2 * request] for request in range(24)]
    batch = RandomBatch(tables, [32 + 17 + request % 8 for request in range(24)], [1] * 24)
    plan = CascadePlanner(config, PlannerPolicy(executor="segments", fold=False)).plan(*batch)
    q, kv_cache = make_q(config, 24), make_kv_cache(config, 60)
    spoilt = [9, 12, 17]  # the first two of these are followed by others in their runs
    oracle, _ = dense_attention(config, q, kv_cache, *batch)
    for request in spoilt:
        kv_cache[tables[request][2]] = math.nan
    out, _, used = run(config, plan, q, kv_cache)
    assert used == {"wide", "narrow", "combine"}
    rest = [row for row in range(24) if row not in spoilt]
    assert out[spoilt].isnan().all()
    assert float(relative_errors(out[rest], oracle[rest]).amax()) < 2e-3


def check_slots_that_hold_nan():
    """Of pages that nobody reads, and behind a request's last token."""
    config = CascadeConfig(**BASE)
    lens = [1, 15, 16, 17, 33, 70]
    tables = [[8 * request + page for page in range(-(-seq_len // 16))] for request, seq_len in enumerate(lens)]
    batch = RandomBatch(tables, lens, [1] * len(lens))
    plan = CascadePlanner(config, PlannerPolicy(executor="segments")).plan(*batch)
    q, whole = make_q(config, len(lens)), make_kv_cache(config, 60)
    kv_cache = torch.full_like(whole, math.nan)
    for table, seq_len in zip(tables, lens, strict=True):
        for token in range(seq_len):
            kv_cache[table[token // 16], :, token % 16] = whole[table[token // 16], :, token % 16]
    out, _, _ = run(config, plan, q, kv_cache)
    oracle, _ = dense_attention(config, q, whole, *batch)
    assert_close(out, oracle, plain_attention(config, q, whole, *batch))


def check_appends_longer_than_a_tile():
    """Of a full tile of KV the first rows see a part, the last ones all, and some nothing."""
    config = CascadeConfig(**BASE)
    seq_lens, qo_lens = [32 + 200, 32 + 130, 32 + 64], [150, 70, 64]
    tables = [[0, 1, *range(10 + 20 * request, 25 + 20 * request)] for request in range(3)]
    batch = RandomBatch(tables, seq_lens, qo_lens)
    plan = CascadePlanner(config, PlannerPolicy(executor="segments", fold=False)).plan(*batch)
    wide = lower(plan, plan.parts[0], TILING).wide
    full, seen = ((wide[:, field] - wide[:, 3]) // TILING.wide_tokens for field in (4, 5))
    assert (seen < full).any()
    q, kv_cache = make_q(config, batch.num_rows), make_kv_cache(config, 80)
    for loops in (False, True):
        out, lse, _ = run(config, plan, q, kv_cache, loops=loops)
        oracle, oracle_lse = dense_attention(config, q, kv_cache, *batch)
        assert_close(out, oracle, plain_attention(config, q, kv_cache, *batch))
        assert_lse_close(lse, oracle_lse, q.dtype)


def check_all():
    used = set()
    for name in CASES:
        used |= {(kind, CASES[name][2] > 1, CASES[name][3]) for kind in check_case(name)}
        print(name)
    # Every kernel ran for decode and for appends, the wide one with a loop and without.
    for kind in "wide", "short", "narrow", "combine":
        assert {appends for ran, appends, _ in used if ran == kind} == {True, False}, kind
    assert {loops for ran, _, loops in used if ran == "wide"} == {True, False}
    assert "wide" in check_case("group 4, appends", tiling=replace(TILING, wide_tokens=32, wide_stages=2))
    check_request_that_is_nan()
    check_slots_that_hold_nan()
    print("NaN")
    check_appends_longer_than_a_tile()
    print("long appends")


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "tokens", "stages"), [((8, 0), 64, 2), ((8, 6), 32, 2)])
def test_shared_memory_of_wide_blocks(capability, tokens, stages, tmp_path, monkeypatch):
    """Triton, which compiles for GPUs that are not there, reserves what `wide_shared_bytes` says."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget

    from flashinfer_cascade.runtime.kernels.segments import _block_kernel as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    config = CascadeConfig(**(BASE | {"head_dim": 256}))
    constants = {
        "num_heads": config.num_qo_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "page_size": config.page_size,
        "page_stride": 2 * config.page_size * config.num_kv_heads * config.head_dim,
        "token_stride": config.num_kv_heads * config.head_dim,
        "head_stride": config.head_dim,
        "tile_rows": 64,
        "tile_tokens": tokens,
        "stages": stages,
        **dict.fromkeys(("causal", "has_row_map", "has_lse"), True),
        **dict.fromkeys(("capped", "has_sinks", "loops", "first", "waits", "triggers"), False),
        **dict.fromkeys(("count", "sinks"), None),
    }
    aligned = ("q", "k_cache", "v_cache", "out", "partials")
    types = dict.fromkeys(aligned, "*fp16") | dict.fromkeys(("partial_lse", "lse"), "*fp32")
    types |= dict.fromkeys(("scale", "soft_cap", "v_scale"), "fp32")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i64" if name.endswith("stride") else "*i32")
        for name in kernel.arg_names
    }
    places = {(number,): name for number, name in enumerate(kernel.arg_names)}
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        {place: constants[name] for place, name in places.items() if name in constants},
        {place: [["tt.divisibility", 16]] for place, name in places.items() if name in (*aligned, "q_row_stride")},
    )
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    compiled = triton.compile(source, target, {"num_warps": 4})
    assert compiled.metadata.shared == wide_shared_bytes(config, capability, tokens, stages)


@pytest.mark.parametrize(("capability", "dtype"), [((8, 6), "float8_e4m3fn"), ((7, 5), "float16")])
def test_gpus_that_do_not_take_the_kv(capability, dtype, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from flashinfer_cascade.runtime.segments import SegmentsExecutor

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    config = CascadeConfig(**(BASE | {"kv_dtype": dtype}))
    says = rf"the plan asks for segments with {dtype} KV on a GPU of .*; plan with the profile of this GPU, some GPU"
    with pytest.raises(UnsupportedError, match=says):
        SegmentsExecutor(config, torch.device("cuda"))


def interpreted(script):
    """What a script prints in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="triton is not installed")
    paths = f"import sys; sys.path[:0] = {[os.path.dirname(__file__), *sys.path]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + script],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_in_the_interpreter():
    assert interpreted("from test_segments import check_all\ncheck_all()") == [*CASES, "NaN", "long appends"]


def test_heads_far_apart():
    script = "from test_segments import check_case\nprint(*sorted(check_case('group 4, appends', far=True)))"
    assert interpreted(script) == ["combine narrow short wide"]


def test_triton_without_dependent_launches():
    script = """
import types
import triton.language.extra
sys.modules["triton.language.extra.cuda"] = types.ModuleType("one of before Triton 3.4")
import test_segments
from flashinfer_cascade.runtime.kernels.segments import HAS_DEPENDENT_LAUNCHES
print(HAS_DEPENDENT_LAUNCHES, test_segments.check_case("group 4, appends") == {"wide", "short", "narrow", "combine"})
"""
    assert interpreted(script) == ["False True"]

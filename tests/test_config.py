"""What a configuration refuses, and how it says so."""

import numpy as np
import pytest
from pydantic import ValidationError

from flashinfer_cascade import CascadeConfig, PlannerPolicy, UnsupportedError

GOOD = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}


def test_defaults():
    c = CascadeConfig(**GOOD)
    assert c.kv_dtype == "bfloat16"
    assert c.max_num_rows == 8192
    assert c.max_kv_indices == 4 * c.max_kv_pages
    assert c.softmax_scale == pytest.approx(128**-0.5)
    assert (c.group_size, c.kv_token_bytes) == (4, 4096)
    assert CascadeConfig(**GOOD, max_batch_size=10_000).max_num_rows == 10_000
    assert CascadeConfig(**GOOD, kv_dtype="float8_e5m2").kv_token_bytes == 2048
    assert CascadeConfig(**GOOD, sm_scale=0.5).softmax_scale == 0.5


def test_defaults_follow_numpy_integers():
    assert CascadeConfig(**GOOD, max_kv_pages=np.int64(1000)).max_kv_indices == 4000
    assert CascadeConfig(**GOOD, max_batch_size=np.int32(10_000)).max_num_rows == 10_000
    with pytest.raises(ValidationError, match="valid integer"):
        CascadeConfig(**GOOD, max_num_rows=False)
    with pytest.raises(ValidationError, match="kv_dtype"):
        CascadeConfig(**GOOD, kv_dtype=0)


def test_numpy_ints_and_torch_dtypes_are_taken():
    torch = pytest.importorskip("torch")
    c = CascadeConfig(**(GOOD | {"page_size": np.int32(16), "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}))
    assert (c.page_size, c.dtype, c.kv_dtype) == (16, "bfloat16", "float8_e4m3fn")
    assert CascadeConfig(**(GOOD | {"dtype": np.dtype("float16")})).dtype == "float16"


def test_frozen_hashable_and_round_trips():
    c = CascadeConfig(**GOOD)
    with pytest.raises(ValidationError, match="frozen"):
        c.page_size = 32
    assert hash(c) == hash(CascadeConfig(**GOOD))
    assert CascadeConfig.model_validate_json(c.model_dump_json()) == c


INVALID = {
    "heads": ({"num_qo_heads": 30}, "num_qo_heads=30 is not a multiple of num_kv_heads=8.*one tensor-parallel rank"),
    "no heads": ({"num_kv_heads": 0}, "greater than or equal to 1"),
    "page size 0": ({"page_size": 0}, "page_size=0 must be at least 1"),
    "page size -16": ({"page_size": -16}, "page_size=-16 must be at least 1"),
    "page size text": ({"page_size": "16"}, "valid integer"),
    "page size float": ({"page_size": 16.0}, "valid integer"),
    "page size bool": ({"page_size": True}, "valid integer"),
    "dtype": ({"dtype": "float32"}, "dtype='float32' must be one of float16, bfloat16"),
    "fp8 q": ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' must be one of"),
    "kv dtype": ({"kv_dtype": "int8"}, "kv_dtype='int8' must be one of"),
    "mixed dtypes": ({"kv_dtype": "float16"}, "a 16-bit KV cache has q's dtype"),
    "layout": ({"kv_layout": "nhd"}, "'NHD' or 'HND'"),
    "scale": ({"sm_scale": 0.0}, "greater than 0"),
    "nan scale": ({"sm_scale": float("nan")}, "finite number"),
    "cap": ({"logits_soft_cap": -1.0}, "greater than or equal to 0"),
    "infinite cap": ({"logits_soft_cap": float("inf")}, "finite number"),
    "window": ({"window_left": -2}, "greater than or equal to -1"),
    "no requests": ({"max_batch_size": 0}, "greater than or equal to 1"),
    "rows below requests": ({"max_num_rows": 100}, "max_num_rows=100 is below max_batch_size=256"),
    "no pages": ({"max_kv_pages": 0}, "greater than or equal to 1"),
    "pages beyond int32": ({"max_kv_pages": 2**31}, "less than or equal to 2147483647"),
    "negative indices": ({"max_kv_indices": -1}, "greater than or equal to 0"),
    "unknown field": ({"num_heads": 8}, "Extra inputs are not permitted"),
}


@pytest.mark.parametrize(("change", "match"), INVALID.values(), ids=INVALID)
def test_nonsense_is_refused(change, match):
    with pytest.raises(ValidationError, match=match):
        CascadeConfig(**(GOOD | change))


UNSUPPORTED = {
    "head_dim": ({"head_dim": 80}, "head_dim=80: the kernels take 64, 128, 256.*Pad the heads"),
    "rope": ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode='ROPE_LLAMA'.*Rotate q and k before"),
    "alibi": ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode='ALIBI'"),
}


@pytest.mark.parametrize(("change", "match"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_no_kernel_computes_is_refused_by_name(change, match):
    with pytest.raises(UnsupportedError, match=match):
        CascadeConfig(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"executor": "cascade"}, "'auto', 'flat', 'levels', 'segments' or 'stock'"),
        ({"max_levels": 1}, "greater than or equal to 2"),
        ({"min_speedup": 0.5}, "greater than or equal to 1"),
        ({"max_decode_rows": 0}, "greater than or equal to 1"),
    ],
)
def test_policies_refuse_nonsense(change, match):
    with pytest.raises(ValidationError, match=match):
        PlannerPolicy(**change)


def test_a_missing_field_is_named():
    with pytest.raises(ValidationError, match=r"dtype\s+Field required"):
        CascadeConfig(num_qo_heads=8, num_kv_heads=8, head_dim=64, page_size=16)

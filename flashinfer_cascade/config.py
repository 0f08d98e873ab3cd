"""Configuration: what the model's attention looks like, and how the planner may choose.

Both classes are validated once, when they are built, and never change afterwards.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from flashinfer_cascade.errors import UnsupportedError

MAX_INT32 = 2**31 - 1
DEFAULT_NUM_ROWS = 8192
SUPPORTED_HEAD_DIMS = (64, 128, 256)
Q_DTYPES = ("float16", "bfloat16")
KV_DTYPES = (*Q_DTYPES, "float8_e4m3fn", "float8_e5m2")
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def _as_int(value: Any) -> Any:
    """Accept numpy integers; leave bools, floats and strings for pydantic to refuse."""
    if isinstance(value, bool):
        return str(value)
    try:
        return operator.index(value)
    except TypeError:
        return value


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0


def _as_dtype_name(value: Any) -> Any:
    """``torch.bfloat16``, ``np.dtype("float16")`` and ``"bfloat16"`` all become the bare name."""
    return None if value is None else str(value).rsplit(".", 1)[-1]


_Int = Annotated[int, BeforeValidator(_as_int)]
_DtypeName = Annotated[str, BeforeValidator(_as_dtype_name)]


class CascadeConfig(BaseModel):
    """The attention of one group of layers, per tensor-parallel rank, and what to reserve for it.

    Raises:
        pydantic.ValidationError: a value is out of range or contradicts another.
        UnsupportedError: the values are valid but no kernel computes them in a cascade.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_qo_heads: _Int = Field(ge=1, le=1024, description="query heads on this rank")
    num_kv_heads: _Int = Field(ge=1, le=1024, description="KV heads on this rank; divides num_qo_heads")
    head_dim: _Int = Field(description="64, 128 or 256")
    page_size: _Int = Field(le=65536, description="tokens a KV page holds")
    dtype: _DtypeName = Field(description="of q and of the output: float16 or bfloat16")
    kv_dtype: _DtypeName = Field(
        default="", description="of the KV cache: dtype (the default), float8_e4m3fn or float8_e5m2"
    )
    kv_layout: Literal["NHD", "HND"] = Field(default="NHD", description="order of token, head and dim in a page")
    sm_scale: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="softmax scale; None is head_dim ** -0.5"
    )
    logits_soft_cap: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="cap * tanh(logits / cap); 0 is off"
    )
    window_left: _Int = Field(
        default=-1,
        ge=-1,
        le=MAX_INT32,
        description="a query sees this many tokens to its left; -1 is all. "
        "A batch whose contexts outgrow the window is never cascaded",
    )
    pos_encoding_mode: str = Field(default="NONE", description="NONE only: apply RoPE to q and k before attention")
    max_batch_size: _Int = Field(default=256, ge=1, le=MAX_INT32, description="requests in a batch")
    max_num_rows: _Int = Field(
        default=0, ge=0, le=MAX_INT32, description="query tokens in a batch; 0 is max(max_batch_size, 8192)"
    )
    max_kv_pages: _Int = Field(
        default=65536,
        ge=1,
        le=MAX_INT32,
        description="pages in the KV cache; page ids lie in [0, max_kv_pages)",
    )
    max_kv_indices: _Int = Field(
        default=0,
        ge=0,
        le=MAX_INT32,
        description="page ids over all block tables of a batch, each bounded by its seq_len; 0 is 4 * max_kv_pages",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.get("kv_dtype") in (None, "") and "dtype" in data:
            data["kv_dtype"] = data["dtype"]
        values = {name: _as_int(data.get(name, field.default)) for name, field in cls.model_fields.items()}
        batch, pages = values["max_batch_size"], values["max_kv_pages"]
        # Values of a wrong type are left for their own fields to refuse.
        if _is_zero(values["max_num_rows"]):
            data["max_num_rows"] = max(batch, DEFAULT_NUM_ROWS) if type(batch) is int else DEFAULT_NUM_ROWS
        if _is_zero(values["max_kv_indices"]):
            data["max_kv_indices"] = max(min(4 * pages, MAX_INT32), 1) if type(pages) is int else 1
        return data

    @model_validator(mode="after")
    def _check(self) -> CascadeConfig:
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads={self.num_qo_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "give the head counts of one tensor-parallel rank"
            )
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} must be at least 1: give the KV cache's tokens per page")
        if self.dtype not in Q_DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(Q_DTYPES)}: cast q to one of them")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype={self.kv_dtype!r} must be one of {', '.join(KV_DTYPES)}")
        if self.kv_dtype in Q_DTYPES and self.kv_dtype != self.dtype:
            raise ValueError(f"kv_dtype={self.kv_dtype!r} with dtype={self.dtype!r}: a 16-bit KV cache has q's dtype")
        if self.max_num_rows < self.max_batch_size:
            raise ValueError(
                f"max_num_rows={self.max_num_rows} is below max_batch_size={self.max_batch_size}: "
                "every request has at least one row"
            )
        if self.head_dim not in SUPPORTED_HEAD_DIMS:
            raise UnsupportedError(
                f"head_dim={self.head_dim}: the kernels take {', '.join(map(str, SUPPORTED_HEAD_DIMS))}. "
                "Pad the heads to the next of these, or leave this model on its own attention backend"
            )
        if self.pos_encoding_mode != "NONE":
            raise UnsupportedError(
                f"pos_encoding_mode={self.pos_encoding_mode!r}: a cascade level sees positions relative to its "
                "own first token, so in-kernel RoPE and ALiBi are wrong there. Rotate q and k before attention "
                "and use 'NONE'"
            )
        return self

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Of one page of K or V in the KV cache, in the order of `kv_layout`."""
        if self.kv_layout == "HND":
            return self.num_kv_heads, self.page_size, self.head_dim
        return self.page_size, self.num_kv_heads, self.head_dim

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token, all heads of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    @property
    def softmax_scale(self) -> float:
        """``sm_scale``, or its default when that is None."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


class PlannerPolicy(BaseModel):
    """How the planner may choose.

    Raises:
        pydantic.ValidationError: a value is out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    executor: Literal["auto", "flat", "levels", "segments", "stock"] = Field(
        default="auto",
        description="auto lets the cost model choose; flat never cascades; levels cascades wherever pages "
        "are shared, on FlashInfer's kernels; segments does so on this library's own; stock on FlashInfer's "
        "multi-level wrapper",
    )
    max_levels: _Int = Field(default=8, ge=2, le=64, description="most levels of a plan, the requests' own KV included")
    fold: bool = Field(
        default=True,
        description="merge nodes too small to pay into their descendants; False keeps every node that "
        "max_levels allows",
    )
    min_speedup: float = Field(
        default=1.02,
        ge=1.0,
        le=10.0,
        description="cascade only when predicted this many times faster than flat",
    )
    max_decode_rows: _Int = Field(
        default=16,
        ge=1,
        le=MAX_INT32,
        description="a request with more new tokens than this is planned in the append part of the batch",
    )

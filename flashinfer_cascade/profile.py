"""What the cost model knows of a GPU, and the GPUs that it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashinfer_cascade.errors import InvalidBatchError

_Rate = Annotated[float, Field(ge=1e-3, le=1e9)]
_Time = Annotated[float, Field(ge=0, le=1e6)]
_Positive = Annotated[float, Field(ge=1e-6, le=1e6)]
_Share = Annotated[float, Field(ge=1e-3, le=1)]


class DeviceProfile(BaseModel):
    """What the cost model knows of a GPU. Triples are for query tiles of 16, 64 and 128 rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(min_length=1)
    num_sms: int = Field(ge=1, le=4096)
    capability: tuple[int, int] = Field(
        default=(9, 0), description="compute capability; decides which KV the segments executor takes"
    )
    hbm_gb_per_s: _Rate = Field(description="rate of streaming KV from HBM, 1e9 B/s")
    l2_gb_per_s: _Rate = Field(description="rate of reading KV that L2 holds, 1e9 B/s")
    tensor_tflops: _Rate = Field(description="dense 16-bit matmul, 1e12 FLOP/s")
    tile_efficiency: tuple[_Share, _Share, _Share] = Field(
        default=(0.25, 0.39, 0.46), description="share of tensor_tflops that fa2 reaches with each tile"
    )
    fa3_efficiency: float = Field(
        default=0.0, ge=0.0, le=1.0, description="share that fa3's 128-row tiles reach; 0: no fa3 on this device"
    )
    fa3_block_us: _Time = Field(default=2.4, description="block_us of fa3")
    fp8_token_ratio: _Positive = Field(
        default=1.7,
        description="SM time of a token of 8-bit KV, which is converted, against one of 16-bit KV: flat, levels",
    )
    block_us: tuple[_Positive, _Positive, _Positive] = Field(
        default=(2.9, 2.5, 1.4), description="SM time of a block apart from its tokens"
    )
    lone_block: tuple[_Positive, _Positive, _Positive] = Field(
        default=(2.0, 0.65, 1.1),
        description="time a token takes in one block, however idle the GPU, in units of its SM time",
    )
    launch_us: _Time = Field(default=5.1, description="fixed time of a launch")
    split_us: _Time = Field(default=2.3, description="fixed time of merging cut KV")
    split_row_ns: _Time = Field(default=2.4, description="and per row and query head at head_dim 128")
    decode_launch_us: _Time = Field(default=3.0, description="launch_us of decode")
    decode_block_us: tuple[_Positive, _Positive] = Field(
        default=(0.1, 0.35), description="SM time of a decode block: fixed, and to be divided by the group size"
    )
    decode_token_ns: tuple[_Positive, _Positive] = Field(
        default=(2.0, 5.0), description="SM time of a token in decode: fixed, and per query head, at head_dim 128"
    )
    decode_lone_block: _Positive = Field(default=1.8, description="lone_block of decode")
    merge_us: _Time = Field(default=2.5, description="fixed time of merging all levels")
    merge_row_ns: _Time = Field(default=0.09, description="and per row, query head and level at head_dim 128")
    segment_item_ns: tuple[_Positive, _Positive] = Field(
        default=(33, 457),
        description="SM time of a narrow and of a wide tile of the segments executor, apart from KV",
    )
    segment_token_ns: tuple[_Positive, _Positive] = Field(
        default=(15.1, 8.0), description="and per token and KV head, at head_dim 128 and 16-bit KV"
    )
    segment_fp8_token_ns: tuple[_Positive, _Positive] = Field(
        default=(20.5, 22.0), description="segment_token_ns with 8-bit KV, which is converted"
    )
    segment_partial_ns: _Time = Field(
        default=176, description="SM time of a partial result, per row and KV head of 4 query heads at head_dim 128"
    )
    segment_lone_block: tuple[_Positive, _Positive] = Field(
        default=(1.39, 1.13), description="time a token takes in one block, in units of its SM time"
    )
    segment_launch_us: _Time = Field(default=6.6, description="fixed time of the segments executor")


def read_profile(path: str | Path) -> DeviceProfile:
    """A profile that ``flashinfer-cascade calibrate`` wrote.

    Raises:
        InvalidBatchError: it is no such file, with what is wrong in it.
    """
    try:
        return DeviceProfile.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"])) or "the file"
        raise InvalidBatchError(f"{path} is no device profile: {where}: {found['msg']}. Calibrate again") from error


# The H200's constants are fitted. The others keep its per-tile constants and take their rates from datasheets,
# scaled by what the H200 reaches of its own.
PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            name="h200",
            num_sms=132,
            hbm_gb_per_s=4330,
            l2_gb_per_s=9870,
            tensor_tflops=790,
            fa3_efficiency=0.79,
        ),
        DeviceProfile(
            name="h100",
            num_sms=132,
            segment_token_ns=(22.4, 8.0),
            hbm_gb_per_s=3020,
            l2_gb_per_s=9870,
            tensor_tflops=790,
            fa3_efficiency=0.79,
        ),
        DeviceProfile(
            name="a100",
            num_sms=108,
            capability=(8, 0),
            hbm_gb_per_s=1840,
            l2_gb_per_s=5800,
            tensor_tflops=249,
            segment_item_ns=(63, 640),
            segment_token_ns=(30.1, 27.0),
        ),
        DeviceProfile(
            name="l40s",
            num_sms=142,
            capability=(8, 9),
            hbm_gb_per_s=780,
            l2_gb_per_s=5400,
            tensor_tflops=289,
            segment_item_ns=(63, 640),
            segment_token_ns=(93.2, 30.6),
        ),
    )
}

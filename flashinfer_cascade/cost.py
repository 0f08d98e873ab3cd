"""Predicted GPU time of flat attention and of each candidate cascade, from a profile of the device.

The model follows what FlashInfer's fa2 paged kernels do: the host picks a query tile from the average packed
rows (rows times group size) of a launch, cuts KV so that two blocks run on each SM, and merges the pieces. A
launch takes the longer of its tiles' time on the SMs and its unique bytes from HBM, rounded together.

Source: FlashInfer 0.7, include/flashinfer/attention/scheduler.cuh (PrefillSplitQOKVIndptr) and utils.cuh
(FA2DetermineCtaTileQ); constants fitted to measured times, see docs/cost_model.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from flashinfer_cascade.batch import Int64Array
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.fold import Cut, FoldCosts
from flashinfer_cascade.forest import PrefixForest

TILES = (16, 64, 128)
"""Query rows (times group size) that an fa2 block can take."""

BLOCKS_PER_SM = 2
MIN_SPLIT_TOKENS = 128
"""FlashInfer never cuts KV into shorter pieces."""


class DeviceProfile(BaseModel):
    """What the cost model knows of a GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(min_length=1)
    num_sms: int = Field(ge=1, le=4096)
    hbm_gb_per_s: float = Field(gt=0, allow_inf_nan=False, description="achievable HBM read bandwidth, 1e9 B/s")
    l2_gb_per_s: float = Field(gt=0, allow_inf_nan=False, description="rate at which SMs read KV that L2 holds")
    l2_mb: float = Field(gt=0, allow_inf_nan=False, description="L2 capacity, 1e6 bytes")
    tensor_tflops: float = Field(gt=0, allow_inf_nan=False, description="achievable dense 16-bit matmul rate")
    tile_efficiency: tuple[float, float, float] = Field(
        default=(0.16, 0.31, 0.457), description="share of tensor_tflops that tiles of 16, 64, 128 rows reach"
    )
    fa3_efficiency: float = Field(
        default=0.0, ge=0, le=1, description="share that fa3's 128-row tiles reach; 0: no fa3 on this device"
    )
    block_us: tuple[float, float, float] = Field(
        default=(3.4, 5.0, 7.0), description="SM time of a block of 16, 64, 128 rows apart from its tokens"
    )
    launch_us: float = Field(default=5.0, ge=0, description="fixed time of a launch")
    level_us: float = Field(default=5.0, ge=0, description="fixed time of each further level: fill, merge, gap")
    partial_us: float = Field(default=0.001, ge=0, description="SM time to write and merge one (row, head) partial")


# Other devices are scaled from the H200 by their datasheets; only the H200's constants were fitted.
PROFILES: dict[str, DeviceProfile] = {
    p.name: p
    for p in (
        DeviceProfile(name="h200", num_sms=132, hbm_gb_per_s=4470, l2_gb_per_s=9600, l2_mb=60, tensor_tflops=790, fa3_efficiency=0.78),
        DeviceProfile(name="h100", num_sms=132, hbm_gb_per_s=3000, l2_gb_per_s=9600, l2_mb=50, tensor_tflops=790, fa3_efficiency=0.78),
        DeviceProfile(name="a100", num_sms=108, hbm_gb_per_s=1800, l2_gb_per_s=5500, l2_mb=40, tensor_tflops=280),
        DeviceProfile(name="l40s", num_sms=142, hbm_gb_per_s=780, l2_gb_per_s=6000, l2_mb=96, tensor_tflops=320),
    )
}


def round_tokens(tokens: Int64Array) -> Int64Array:
    """Round lengths up to steps of an eighth to a quarter of themselves, at least 16 tokens.

    The planner decides on rounded lengths, so that a decode step seldom moves a decision.
    """
    # frexp gives the exact binary exponent: 2**(exponent - 1) <= tokens < 2**exponent.
    exponent = np.frexp(np.maximum(tokens - 1, 0).astype(np.float64))[1].astype(np.int64)
    step = np.int64(1) << np.maximum(exponent - 3, 4)
    out: Int64Array = -(-tokens // step) * step
    return out


@dataclass(frozen=True, slots=True)
class PartShape:
    """What the cost model needs to know of a part; lengths rounded by `round_tokens`.

    Attributes:
        forest: sharing among the part's requests.
        page_size: tokens a page holds.
        rows: int64[num_requests], query rows of the request at each position.
        row_indptr: int64[num_requests + 1], their running sum.
        context: int64[num_requests], KV tokens of the request at each position, its own run rounded up.
    """

    forest: PrefixForest
    page_size: int
    rows: Int64Array
    row_indptr: Int64Array
    context: Int64Array

    def seen(self, tokens: Int64Array) -> Int64Array:
        """Tokens that a row sees on average when the request's last rows are causal."""
        return np.maximum(tokens - self.rows // 2, 0)

    def hbm_tokens(self, l2_tokens: float) -> float:
        """KV tokens that flat attention reads from HBM: unique ones, and shared ones again that outgrow L2."""
        forest = self.forest
        node_tokens = forest.num_pages.astype(np.int64) * self.page_size
        own = self.context - forest.tail_begin.astype(np.int64) * self.page_size
        again = node_tokens * (forest.end - forest.begin - 1)
        missed = np.maximum(1.0 - l2_tokens / np.maximum(node_tokens, 1), 0.0)
        return float(own.sum() + node_tokens.sum()) + float((again * missed).sum())


@dataclass(frozen=True, slots=True)
class Launch:
    """The groups of one kernel launch.

    Attributes:
        rows: int64[num_groups], query rows.
        tokens: int64[num_groups], KV tokens that a row of the group sees, on average.
        num_empty: groups without KV beside these.
        hbm_tokens: tokens of KV that come from HBM rather than from L2.
    """

    rows: Int64Array
    tokens: Int64Array
    num_empty: int
    hbm_tokens: float


class CostModel:
    """Predicts microseconds a layer for one configuration on one device."""

    def __init__(self, config: CascadeConfig, profile: DeviceProfile) -> None:
        self.config = config
        self.profile = profile
        p, heads, dim = profile, config.num_kv_heads, config.head_dim
        self.hbm_us_per_token = config.kv_token_bytes / (p.hbm_gb_per_s * 1e3)
        l2_us = config.kv_token_bytes / heads * p.num_sms / (p.l2_gb_per_s * 1e3)
        sm_flops_per_us = p.tensor_tflops * 1e6 / p.num_sms
        # SM time of one KV token and head under one tile: fed from L2, or computed.
        self.token_us = tuple(
            max(l2_us, 4.0 * dim * tile / (sm_flops_per_us * share))
            for tile, share in zip(TILES, p.tile_efficiency, strict=True)
        )
        self.l2_tokens = p.l2_mb * 1e6 / config.kv_token_bytes

    def tile_index(self, average_packed_rows: float) -> int:
        """FlashInfer's choice: index into TILES."""
        if average_packed_rows > TILES[1] and self.config.head_dim < 256:  # noqa: PLR2004 - its own limit
            return 2
        return 1 if average_packed_rows > TILES[0] else 0

    def fa2_us(self, launch: Launch) -> float:
        """One fa2 launch over paged KV, with the merge of what it cuts."""
        p, config = self.profile, self.config
        packed = launch.rows * config.group_size
        tile = self.tile_index(float(packed.sum()) / (len(packed) + launch.num_empty))
        tiles = -(-packed // TILES[tile])
        chunks, longest = self._split(tiles, launch.tokens)
        blocks = int((tiles * chunks).sum()) * config.num_kv_heads
        sm_us = blocks * p.block_us[tile]
        sm_us += int((tiles * launch.tokens).sum()) * config.num_kv_heads * self.token_us[tile]
        last_block_us = p.block_us[tile] + longest * self.token_us[tile]
        busy = sm_us / p.num_sms + 0.5 * last_block_us
        merged = int((launch.rows * chunks * (chunks > 1)).sum()) * config.num_qo_heads
        return (
            p.launch_us
            + _longer(busy, launch.hbm_tokens * self.hbm_us_per_token)
            + (p.level_us if merged else 0.0)
            + merged * p.partial_us / p.num_sms
        )

    def _split(self, tiles: Int64Array, tokens: Int64Array) -> tuple[Int64Array, int]:
        """KV pieces of each group, and the longest piece in tokens: FlashInfer's binary search."""
        page = self.config.page_size
        pages = np.maximum(-(-tokens // page), 1)
        longest = int(pages.max())
        budget = BLOCKS_PER_SM * self.profile.num_sms // self.config.num_kv_heads
        low, high = min(max(MIN_SPLIT_TOKENS // page, 1), longest), longest
        if int(tiles.sum()) > budget:
            low = high
        while low < high:
            middle = (low + high) // 2
            if int((tiles * -(-pages // middle)).sum()) > budget:
                low = middle + 1
            else:
                high = middle
        return -(-pages // low), low * page

    def flat_us(self, shape: PartShape) -> float:
        """No cascade: every request reads its whole context."""
        launch = Launch(shape.rows, shape.seen(shape.context), 0, shape.hbm_tokens(self.l2_tokens))
        return min(self.fa2_us(launch), self.fa3_us(launch))

    def levels_us(self, shape: PartShape, cut: Cut) -> float:
        """FlashInfer's multi-level path: a launch per level, each merged into the result."""
        total_rows = int(shape.rows.sum())
        merge_us = self.profile.level_us + total_rows * self.config.num_qo_heads * self.profile.partial_us / self.profile.num_sms
        forest = shape.forest
        page_end = forest.page_begin + forest.num_pages
        us = merge_us * (cut.num_levels - 1)
        for level in range(cut.num_levels - 1):
            nodes = np.flatnonzero(cut.kept & (cut.node_level == level))
            begin, end = forest.begin[nodes], forest.end[nodes]
            tokens = (page_end[nodes] - cut.node_start[nodes]) * self.config.page_size
            gaps = int((begin[1:] > end[:-1]).sum()) + int(begin[0] > 0) + int(end[-1] < len(forest.order))
            launch = Launch(shape.row_indptr[end] - shape.row_indptr[begin], tokens, gaps, float(tokens.sum()))
            us += min(self.fa2_us(launch), self.fa3_us(launch))
        own = shape.context - cut.tail_start * self.config.page_size
        return us + self.fa2_us(Launch(shape.rows, shape.seen(own), 0, float(own.sum())))

    def fa3_us(self, launch: Launch) -> float:
        """One fa3 launch: query heads are not packed, KV is never cut; infinite where there is no fa3."""
        p, config = self.profile, self.config
        if not p.fa3_efficiency or config.kv_dtype != config.dtype:
            return math.inf
        tiles = -(-launch.rows // TILES[2])
        token_us = 4.0 * config.head_dim * TILES[2] * p.num_sms / (p.tensor_tflops * 1e6 * p.fa3_efficiency)
        block_us = p.block_us[2] + launch.tokens * token_us
        busy = float((tiles * block_us).sum()) * config.num_qo_heads / p.num_sms + 0.5 * float(block_us.max())
        return p.launch_us + _longer(busy, launch.hbm_tokens * self.hbm_us_per_token)

    def fold_costs(self, shape: PartShape) -> FoldCosts:
        """What the segments over a part's forest cost, each on its own, for three weights of a level."""
        p, config, forest = self.profile, self.config, shape.forest
        heads, page = config.num_kv_heads, config.page_size
        node_rows = shape.row_indptr[forest.end] - shape.row_indptr[forest.begin]
        fixed, per_token = self._block_costs(node_rows)
        tail_fixed, tail_per_token = self._block_costs(shape.rows)
        own = shape.context - forest.tail_begin * page
        inside = forest.tail_node >= 0
        node = forest.tail_node[inside]

        def at_nodes(values: NDArray[Any]) -> NDArray[Any]:
            return np.bincount(node, values[inside], forest.num_nodes)

        level_ps = (p.launch_us + p.level_us) * p.num_sms * 1e6 / int(shape.rows.sum())
        partial_ps = 1e6 * p.partial_us * config.num_qo_heads
        weights = np.rint(partial_ps + level_ps * np.array([0.25, 1.0, 4.0]))
        return FoldCosts(
            node_fixed=fixed * heads,
            node_per_page=per_token * heads * page,
            tail_fixed=at_nodes((tail_fixed + tail_per_token * own) * heads),
            tail_per_page=at_nodes(tail_per_token * heads * page),
            partial=weights[:, None] * node_rows,
        )

    def _block_costs(self, rows: Int64Array) -> tuple[NDArray[Any], NDArray[Any]]:
        """Picoseconds on one SM of a segment's blocks over one KV head: fixed, and per token."""
        packed = rows * self.config.group_size
        tile = (packed > TILES[0]).astype(np.int64)
        if self.config.head_dim < 256:  # noqa: PLR2004 - FlashInfer's own limit
            tile += packed > TILES[1]
        tiles = -(-packed // np.array(TILES)[tile])
        fixed = np.rint(np.array(self.profile.block_us) * 1e6)
        per_token = np.rint(np.array(self.token_us) * 1e6)
        return tiles * fixed[tile], tiles * per_token[tile]


def _longer(a: float, b: float) -> float:
    """The longer of two times that overlap imperfectly: their 4-norm."""
    # Square roots are exact to the last bit on every processor; other powers are not.
    return math.sqrt(math.sqrt(a**4 + b**4))

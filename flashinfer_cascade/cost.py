"""Predicted GPU time of flat attention and of each candidate cascade, from a profile of the device.

The model follows what FlashInfer's fa2 paged kernels do. The host picks one query tile for a launch, from its
average packed rows (rows times group size), and cuts KV so that at most two blocks run on each SM. A launch takes
the longer of its blocks' time on the SMs and its unique bytes from HBM, or a little more where they are alike; merging
what was cut comes on top. Shared KV that many blocks read at once comes from L2, at any size: the blocks walk it in
step.

Source: FlashInfer 0.7, include/flashinfer/attention/scheduler.cuh (PrefillSplitQOKVIndptr) and utils.cuh
(FA2DetermineCtaTileQ). The constants are fitted to measured times: docs/cost_model.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.batch import Batch
from flashinfer_cascade.capacity import level_edges, nodes_at
from flashinfer_cascade.config import DTYPE_BYTES, CascadeConfig
from flashinfer_cascade.csr import Int64Array, indptr
from flashinfer_cascade.fold import Cut, FoldCosts, no_cut
from flashinfer_cascade.forest import PrefixForest
from flashinfer_cascade.profile import DeviceProfile

Backend = Literal["fa2", "fa2_uncut", "fa3", "decode", "segments"]
"""A kernel. FlashInfer's: fa2: tensor cores, with KV cut; fa2_uncut: without. fa3: Hopper only, for wide
groups. decode: CUDA cores, one row a group, best for short KV and small group sizes. segments: this library's own, for
all levels of a part at once."""

TILES = (16, 64, 128)
"""Query rows (times group size) that an fa2 block can take."""

BLOCKS_PER_SM = 2
"""Blocks that FlashInfer wants on each SM: it cuts KV until there are so many."""

MIN_SPLIT_TOKENS = 128
"""FlashInfer never cuts KV into shorter pieces."""

FA3_MIN_ROWS = 8
"""Groups of fewer rows on average waste too much of fa3's 128-row tile to be worth predicting."""

DECODE_GROUP_SIZES = (1, 2, 3, 4, 8)
"""Group sizes that FlashInfer's decode kernel is compiled for, in every version since 0.6."""

DECODE_BLOCKS_PER_SM = 12
"""With fewer blocks than this FlashInfer may cut KV in its decode kernel, which is not modelled."""

STOCK_LEVEL_US, STOCK_LEVEL_ROW_NS = 4.9, 0.28
"""A further level of FlashInfer's own wrapper: fixed, and per row and query head at head_dim 128. Fitted on an H200."""

LEVEL_WEIGHTS = (0.5, 2.0)
"""Each weight of a level's fixed time gives candidate cascades; the whole model then compares them."""


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

    @classmethod
    def of(cls, batch: Batch, forest: PrefixForest) -> PartShape:
        """The shape of a batch, or of the part of it that the forest is over."""
        shared = forest.tail_begin * batch.page_size
        rows = batch.qo_lens[forest.order]
        own = round_tokens(batch.seq_lens[forest.order] - shared)
        return cls(forest, batch.page_size, rows, indptr(rows), shared + own)

    @property
    def node_rows(self) -> Int64Array:
        """Query rows that each node covers: int64[num_nodes]."""
        return self.row_indptr[self.forest.end] - self.row_indptr[self.forest.begin]

    def seen(self, tokens: Int64Array) -> Int64Array:
        """Tokens that a row sees on average when the request's last rows are causal."""
        seen: Int64Array = np.maximum(tokens - self.rows // 2, 0)
        return seen

    def unique_tokens(self) -> int:
        """KV tokens that must come from HBM at least once."""
        own = self.context - self.forest.tail_begin * self.page_size
        return int(own.sum()) + int(self.forest.num_pages.sum()) * self.page_size


@dataclass(frozen=True, slots=True)
class Launch:
    """The groups of one kernel launch.

    Attributes:
        rows: int64[num_groups], query rows.
        tokens: int64[num_groups], KV tokens that a row of the group sees, on average; 0 for a group without KV.
        hbm_tokens: KV tokens that come from HBM; repeated reads come from L2.
    """

    rows: Int64Array
    tokens: Int64Array
    hbm_tokens: int


class CostModel:
    """Predicts microseconds a layer for one configuration on one device."""

    def __init__(self, config: CascadeConfig, profile: DeviceProfile) -> None:
        self.config = config
        self.profile = profile
        p, heads, dim = profile, config.num_kv_heads, config.head_dim
        self.hbm_us_per_token = config.kv_token_bytes / (p.hbm_gb_per_s * 1e3)
        is_fp8 = DTYPE_BYTES[config.kv_dtype] == 1
        ratio = p.fp8_token_ratio if is_fp8 else 1.0
        l2_us = config.kv_token_bytes * (2 if is_fp8 else 1) / heads * p.num_sms / (p.l2_gb_per_s * 1e3)
        sm_flops_per_us = p.tensor_tflops * 1e6 / p.num_sms
        # SM time of one KV token and head under one tile: read from L2, or computed.
        self.token_us = tuple(
            ratio * max(l2_us, 4.0 * dim * tile / (sm_flops_per_us * share))
            for tile, share in zip(TILES, p.tile_efficiency, strict=True)
        )
        self._tiles = np.array(TILES)
        self.block_ps = np.rint(np.array(p.block_us) * 1e6)
        self.token_ps = np.rint(np.array(self.token_us) * 1e6)
        group = config.group_size
        self.decode_block_us = p.decode_block_us[0] + p.decode_block_us[1] / group
        fixed_ns, head_ns = p.decode_token_ns
        self.decode_token_us = ratio * max(l2_us, (fixed_ns + group * head_ns) * 1e-3 * dim / 128)
        self.row_heads_at_128 = config.num_qo_heads * config.head_dim / 128
        # Neither is tested with windows, nor fa3 at head_dim 256.
        self.has_decode = group in DECODE_GROUP_SIZES and config.window_left < 0
        same_dtype = config.kv_dtype == config.dtype
        self.has_fa3 = p.fa3_efficiency > 0 and same_dtype and config.head_dim <= 128 and config.window_left < 0
        fa3_flops_per_us = p.tensor_tflops * 1e6 * p.fa3_efficiency
        self.fa3_token_us = 4.0 * dim * TILES[2] * p.num_sms / fa3_flops_per_us if self.has_fa3 else math.inf

    def tile_index(self, average_packed_rows: int) -> int:
        """FlashInfer's choice: index into TILES."""
        if average_packed_rows > TILES[1] and self.config.head_dim < 256:
            return 2
        return 1 if average_packed_rows > TILES[0] else 0

    def best_launch(self, launch: Launch) -> tuple[float, Backend]:
        """Predicted microseconds with the fastest backend, and which that is."""
        num_rows = int(launch.rows.sum())
        us, is_cut = self._fa2(launch, num_rows, may_cut=True)
        backend: Backend = "fa2" if is_cut else "fa2_uncut"
        if is_cut:
            uncut_us, _ = self._fa2(launch, num_rows, may_cut=False)
            if uncut_us < us:
                us, backend = uncut_us, "fa2_uncut"
        if num_rows == len(launch.rows):
            decode_us = self.decode_us(launch)
            if decode_us < us:
                us, backend = decode_us, "decode"
        if num_rows >= FA3_MIN_ROWS * len(launch.rows):
            fa3_us = self.fa3_us(launch)
            if fa3_us < us:
                us, backend = fa3_us, "fa3"
        return us, backend

    def fa2_us(self, launch: Launch) -> float:
        """One fa2 launch over paged KV, with the merge of what it cuts."""
        return self._fa2(launch, int(launch.rows.sum()), may_cut=True)[0]

    def _fa2(self, launch: Launch, num_rows: int, may_cut: bool) -> tuple[float, bool]:
        """Microseconds, and whether KV is cut."""
        p, config = self.profile, self.config
        tile = self.tile_index(num_rows * config.group_size // len(launch.rows))
        tiles = -(-(launch.rows * config.group_size) // TILES[tile])
        blocks, longest, is_cut = self._blocks(tiles, launch.tokens, may_cut)
        tokens = int(tiles @ launch.tokens) * config.num_kv_heads
        busy_us = (blocks * p.block_us[tile] + tokens * self.token_us[tile]) / p.num_sms
        # Blocks of equal length run in waves; one longer than the others runs on alone.
        mean = tokens / blocks
        waves = -(-blocks // (BLOCKS_PER_SM * p.num_sms))
        alone_us = (mean * waves + longest - mean) * self.token_us[tile] * p.lone_block[tile]
        us = p.launch_us + longer(max(busy_us, alone_us), launch.hbm_tokens * self.hbm_us_per_token)
        if is_cut:
            us += p.split_us + num_rows * self.row_heads_at_128 * p.split_row_ns * 1e-3
        return us, is_cut

    def _blocks(self, tiles: Int64Array, tokens: Int64Array, may_cut: bool) -> tuple[int, int, bool]:
        """Blocks of a launch, tokens of its longest, and whether KV is cut: FlashInfer's binary search."""
        page, heads = self.config.page_size, self.config.num_kv_heads
        budget = BLOCKS_PER_SM * self.profile.num_sms // heads
        num_tiles, longest = int(tiles.sum()), int(tokens.max())
        most = max(-(-longest // page), 1)
        low = max(MIN_SPLIT_TOKENS // page, 1)
        if not may_cut or num_tiles > budget or low >= most:
            return num_tiles * heads, longest, False
        pages = np.maximum(-(-tokens // page), 1)
        high = most
        while low < high:
            middle = (low + high) // 2
            if int(tiles @ -(-pages // middle)) > budget:
                low = middle + 1
            else:
                high = middle
        return int(tiles @ -(-pages // low)) * heads, min(low * page, longest), low < most

    def fa3_us(self, launch: Launch) -> float:
        """One fa3 launch: no packed query heads, no cut KV, one block per SM.

        Infinite where it cannot run.
        """
        p, config = self.profile, self.config
        if not self.has_fa3:
            return math.inf
        tiles = -(-launch.rows // TILES[2])
        blocks = int(tiles.sum()) * config.num_qo_heads
        mean = int(tiles @ launch.tokens) * config.num_qo_heads / blocks
        waves = -(-blocks // p.num_sms)
        busy_us = waves * p.fa3_block_us + (mean * waves + int(launch.tokens.max()) - mean) * self.fa3_token_us
        return p.launch_us + longer(busy_us, launch.hbm_tokens * self.hbm_us_per_token)

    def flat(self, shape: PartShape) -> tuple[float, tuple[Backend, ...]]:
        """No cascade: one launch in which every request reads its whole context."""
        (launch,) = self.level_launches(shape, no_cut(shape.forest))
        if self.config.window_left >= 0:
            tokens = np.minimum(launch.tokens, self.config.window_left + 1 + launch.rows // 2)
            launch = Launch(launch.rows, tokens, min(launch.hbm_tokens, int(tokens.sum())))
        us, backend = self.best_launch(launch)
        return us, (backend,)

    def levels(self, shape: PartShape, cut: Cut) -> tuple[float, tuple[Backend, ...]]:
        """A cascade: a launch per level, each on its fastest backend, and one merge."""
        p = self.profile
        best = [self.best_launch(launch) for launch in self.level_launches(shape, cut)]
        row_heads = int(shape.row_indptr[-1]) * self.row_heads_at_128 * len(best)
        us = 0.0  # added up in order: sum() compensates for rounding in some versions of Python
        for launch_us, _ in best:
            us += launch_us
        us += p.merge_us + row_heads * p.merge_row_ns * 1e-3
        return us, tuple(backend for _, backend in best)

    def decode_us(self, launch: Launch) -> float:
        """One launch of FlashInfer's decode kernel, for one row a group.

        Infinite where it cannot run, or would cut KV.
        """
        p, config = self.profile, self.config
        blocks = len(launch.rows) * config.num_kv_heads
        longest = int(launch.tokens.max())
        is_cut = longest > MIN_SPLIT_TOKENS and blocks < DECODE_BLOCKS_PER_SM * p.num_sms
        if is_cut or not self.has_decode:
            return math.inf
        tokens = int(launch.tokens.sum()) * config.num_kv_heads
        busy_us = (blocks * self.decode_block_us + tokens * self.decode_token_us) / p.num_sms
        alone_us = longest * self.decode_token_us * p.decode_lone_block
        return p.decode_launch_us + longer(max(busy_us, alone_us), launch.hbm_tokens * self.hbm_us_per_token)

    def stock(self, shape: PartShape, cut: Cut) -> tuple[float, tuple[Backend, ...]]:
        """A cascade on FlashInfer's own multi-level wrapper, forced to fa2: zero-fills and a merge for each level."""
        launches = self.level_launches(shape, cut)
        level_us = STOCK_LEVEL_US + int(shape.row_indptr[-1]) * self.row_heads_at_128 * STOCK_LEVEL_ROW_NS * 1e-3
        backends: list[Backend] = ["fa2"] * len(launches)
        return sum(map(self.fa2_us, launches)) + (len(launches) - 1) * level_us, tuple(backends)

    def level_launches(self, shape: PartShape, cut: Cut) -> list[Launch]:
        """The launches of a cut, the most shared level first."""
        forest, page = shape.forest, self.config.page_size
        page_end = forest.page_begin + forest.num_pages
        launches = []
        for level in range(cut.num_levels - 1):
            nodes = nodes_at(forest, cut, level)
            edges = level_edges(forest.begin[nodes], forest.end[nodes], len(forest.order))
            tokens = np.zeros(len(edges) - 1, np.int64)
            tokens[np.searchsorted(edges, forest.begin[nodes])] = (page_end[nodes] - cut.node_start[nodes]) * page
            borders = shape.row_indptr[edges]
            launches.append(Launch(borders[1:] - borders[:-1], tokens, int(tokens.sum())))
        own = shape.context - cut.tail_start * page
        # Runs that several requests read for themselves come from HBM once.
        unique = shape.unique_tokens() - int(forest.num_pages[cut.kept].sum()) * page
        return [*launches, Launch(shape.rows, shape.seen(own), unique)]

    def fold_costs(self, shape: PartShape) -> FoldCosts:
        """What the segments over a part's forest cost, each on its own, for several candidates.

        The candidates differ in the weight of a level's fixed time, and in the kernel that the requests' own KV is
        thought to run on.
        """
        p, config, forest = self.profile, self.config, shape.forest
        heads, page = config.num_kv_heads, config.page_size
        node_rows = shape.node_rows
        fixed, per_token = self._block_costs(node_rows)
        own = shape.context - forest.tail_begin * page
        inside = forest.tail_node >= 0
        node = forest.tail_node[inside]
        kernels = [self._block_costs(shape.rows)]
        if config.group_size in DECODE_GROUP_SIZES and int(shape.row_indptr[-1]) == len(shape.rows):
            one = np.ones(len(shape.rows))
            kernels.append((one * round(self.decode_block_us * 1e6), one * round(self.decode_token_us * 1e6)))

        candidates = len(LEVEL_WEIGHTS) * len(kernels)
        tail_fixed, tail_per_page = np.empty((2, candidates, forest.num_nodes))
        for first, (block, token) in enumerate(kernels):
            rows = slice(first * len(LEVEL_WEIGHTS), (first + 1) * len(LEVEL_WEIGHTS))
            tail_fixed[rows] = np.bincount(node, ((block + token * own) * heads)[inside], forest.num_nodes)
            tail_per_page[rows] = np.bincount(node, (token * (heads * page))[inside], forest.num_nodes)
        # A level's fixed time, spread over the rows: too little for a node that is alone at its level, too much
        # for one of many.
        level_ps = p.launch_us * p.num_sms * 1e6 / int(shape.row_indptr[-1])
        partial_ps = self.row_heads_at_128 * p.merge_row_ns * p.num_sms * 1e3
        weights = np.rint(partial_ps + level_ps * np.array(LEVEL_WEIGHTS * len(kernels)))
        return FoldCosts(
            node_fixed=fixed * heads,
            node_per_page=per_token * (heads * page),
            tail_fixed=tail_fixed,
            tail_per_page=tail_per_page,
            partial=weights[:, None] * node_rows,
        )

    def _block_costs(self, rows: Int64Array) -> tuple[NDArray[Any], NDArray[Any]]:
        """Picoseconds on one SM of a segment's blocks over one KV head: fixed, and per token."""
        packed = rows * self.config.group_size
        tile = (packed > TILES[0]).astype(np.int64)
        if self.config.head_dim < 256:
            tile += packed > TILES[1]
        tiles = -(-packed // self._tiles[tile])
        return tiles * self.block_ps[tile], tiles * self.token_ps[tile]


def longer(a: float, b: float) -> float:
    """The longer of two times that overlap imperfectly: their 4-norm."""
    # Products and square roots are exact to the last bit on every processor; powers are not.
    a, b = a * a, b * b
    return math.sqrt(math.sqrt(a * a + b * b))

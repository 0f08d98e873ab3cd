"""Predicted GPU time of the segments executor.

Two kinds of kernels run one after the other, each with blocks of one tile, whatever the tree: wide and narrow ones.
Each takes the sum of its segments' SM time, spread over the SMs, or as long as its longest block or its bytes from HBM
take, or a little more where these are alike. Partial results come on top, and a fixed time.

Source: the kernels' own measured times; docs/cost_model.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.config import DTYPE_BYTES, CascadeConfig
from flashinfer_cascade.cost import PartShape, longer
from flashinfer_cascade.csr import Int64Array
from flashinfer_cascade.fold import Cut, FoldCosts
from flashinfer_cascade.profile import DeviceProfile

NARROW_ROWS, WIDE_ROWS = 16, 64
"""Packed query rows of the tiles that the time of a segment is reckoned in."""

BLOCKS_PER_SM, MIN_TOKENS = (8, 2), (64, 384)
"""Narrow and wide blocks that an SM runs at once, and tokens below which their KV is not cut."""

MAX_GROUP_SIZE = 16
"""Query heads of a KV head that fit the narrow tile."""

MIN_CAPABILITY, MIN_E4M3_CAPABILITY = (8, 0), (8, 9)
"""Compute capabilities from which the kernels compile, and from which they do for KV of float8_e4m3fn. Source: Triton,
CUDAOptions.supported_fp8_dtypes."""


def why_no_segments(config: CascadeConfig, capability: tuple[int, int]) -> str | None:
    """What the segments' kernels do not take of a configuration on a GPU, windows apart; None if they take it."""
    if config.group_size > MAX_GROUP_SIZE:
        return f"{config.group_size} query heads for each KV head: its kernels take up to {MAX_GROUP_SIZE}"
    needed = MIN_E4M3_CAPABILITY if config.kv_dtype == "float8_e4m3fn" else MIN_CAPABILITY
    if capability < needed:
        has, needs = (".".join(map(str, version)) for version in (capability, needed))
        return f"{config.kv_dtype} KV on a GPU of capability {has}: its kernels take that from {needs} on"
    return None


class SegmentCost:
    """Predicts microseconds a layer for one configuration on one device."""

    def __init__(self, config: CascadeConfig, profile: DeviceProfile) -> None:
        self.config, self.profile = config, profile
        p = profile
        self.runs = why_no_segments(config, p.capability) is None and config.window_left < 0
        wide = config.head_dim / 128
        token_ns = p.segment_fp8_token_ns if DTYPE_BYTES[config.kv_dtype] == 1 else p.segment_token_ns
        self.hbm_us_per_token = config.kv_token_bytes / (p.hbm_gb_per_s * 1e3)
        self.item_ps = np.rint(np.array(p.segment_item_ns) * 1e3)
        self.token_ps = np.rint(np.array(token_ns) * wide * 1e3)
        self.partial_ps = round(p.segment_partial_ns * config.num_kv_heads * wide * config.group_size / 4 * 1e3)
        self.rows_per_tile = WIDE_ROWS // config.group_size if self.runs else 1

    def _item_costs(self, rows: Int64Array) -> tuple[NDArray[Any], NDArray[Any]]:
        """Picoseconds on one SM of a segment over all KV heads: fixed, and per token."""
        is_wide = (rows * self.config.group_size > NARROW_ROWS).astype(np.int64)
        tiles = np.where(is_wide, -(-rows // self.rows_per_tile), 1) * self.config.num_kv_heads
        return tiles * self.item_ps[is_wide], tiles * self.token_ps[is_wide]

    def fold_costs(self, shape: PartShape) -> FoldCosts:
        """What the segments over a part's forest cost, each on its own; one candidate."""
        forest, page = shape.forest, self.config.page_size
        fixed, per_token = self._item_costs(shape.node_rows)
        own = shape.context - forest.tail_begin * page
        inside = forest.tail_node >= 0
        node = forest.tail_node[inside]
        tail_fixed, tail_token = self._item_costs(shape.rows)
        return FoldCosts(
            node_fixed=fixed,
            node_per_page=per_token * page,
            tail_fixed=_sums(node, (tail_fixed + tail_token * own)[inside], forest.num_nodes),
            tail_per_page=_sums(node, (tail_token * page)[inside], forest.num_nodes),
            partial=(self.partial_ps * shape.node_rows.astype(np.float64))[None],
        )

    def predict(self, shape: PartShape, cut: Cut) -> float:
        """Microseconds of a cut, which may keep no node."""
        forest, page, p = shape.forest, self.config.page_size, self.profile
        kept = cut.kept.nonzero()[0]
        node_tokens = (forest.page_begin[kept] + forest.num_pages[kept] - cut.node_start[kept]) * page
        own_tokens = shape.context - cut.tail_start * page  # masked, not left out, where a row does not see them yet
        rows = np.concatenate((shape.node_rows[kept], shape.rows))
        tokens = np.concatenate((node_tokens, own_tokens))
        fixed, per_token = self._item_costs(rows)
        work_ps = fixed + per_token * tokens
        is_wide = rows * self.config.group_size > NARROW_ROWS
        pieces = np.ones(len(rows), np.int64)
        us = p.segment_launch_us
        for kind in (1, 0):  # as they run
            of = is_wide == kind
            if of.any():
                busy_us = int(work_ps[of].sum()) * 1e-6 / p.num_sms
                tiles = -(-rows[of] // self.rows_per_tile) if kind else np.ones(int(of.sum()), np.int64)
                slots = BLOCKS_PER_SM[kind] * p.num_sms
                share = max(MIN_TOKENS[kind], int(tiles @ tokens[of]) * self.config.num_kv_heads / slots)
                pieces[of] = np.maximum(np.rint(tokens[of] / share), 1.0)
                longest = min(share, int(tokens[of].max()))
                if kind:  # tiles of one segment read its KV from HBM once
                    busy_us = longer(busy_us, int(tokens[of].sum()) * self.hbm_us_per_token)
                us += longer(busy_us, longest * float(self.token_ps[kind]) * 1e-6 * p.segment_lone_block[kind])
        # A row's own KV in one piece is merged as it is computed.
        merged = (np.arange(len(rows)) < len(kept)) | (pieces > 1)
        return us + int((rows * pieces)[merged].sum()) * self.partial_ps * 1e-6 / p.num_sms


def _sums(node: Int64Array, values: NDArray[Any], num_nodes: int) -> NDArray[np.float64]:
    """Sums by node, of the one candidate."""
    return np.bincount(node, values, num_nodes).astype(np.float64)[None]

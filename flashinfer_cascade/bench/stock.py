"""Predicted times of what FlashInfer offers by itself, for comparison with a record of measured ones."""

from __future__ import annotations

import numpy as np

from flashinfer_cascade.batch import make_batch
from flashinfer_cascade.bench.workloads import Workload
from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.cost import CostModel, PartShape
from flashinfer_cascade.fold import cut_at, no_cut
from flashinfer_cascade.forest import build_forest
from flashinfer_cascade.profile import DeviceProfile

DECODE_ROW_NS = 0.58
"""Merge of flat decode in CUDA graphs, where FlashInfer merges even what it did not cut; per row and query head at
head_dim 128. Fitted on an H200.
"""


def predict_stock(config: CascadeConfig, profile: DeviceProfile, work: Workload) -> dict[str, float]:
    """Microseconds a layer of FlashInfer's own ways to run a workload.

    ``flat``: BatchDecodeWithPagedKVCacheWrapper on tensor cores, planned for CUDA graphs (decode only).
    ``fa2``, ``fa3``: one paged-prefill launch on that backend.
    ``levels``: MultiLevelCascadeAttentionWrapper on fa2, every node of the prefix forest a group.
    """
    model = CostModel(config, profile)
    batch = make_batch(config, work.block_tables, work.seq_lens, work.qo_lens)
    shape = PartShape.of(batch, build_forest(batch))
    rows_us = int(shape.row_indptr[-1]) * model.row_heads_at_128 * 1e-3
    (flat,) = model.level_launches(shape, no_cut(shape.forest))
    cut = cut_at(shape.forest, np.ones(shape.forest.num_nodes, np.bool_))
    return {
        "flat": model.fa2_us(flat) + rows_us * DECODE_ROW_NS,
        "fa2": model.fa2_us(flat),
        "fa3": model.fa3_us(flat),
        "levels": model.stock(shape, cut)[0],
    }

"""Executing plans: the runtime at the edge, and one module per executor. Torch begins here."""

from __future__ import annotations

from flashinfer_cascade.runtime.graph_state import GraphState
from flashinfer_cascade.runtime.runtime import CascadeRuntime, RuntimeStats
from flashinfer_cascade.runtime.shapes import Bucket, GraphShape, SegmentShape, StockShape

__all__ = ["Bucket", "CascadeRuntime", "GraphShape", "GraphState", "RuntimeStats", "SegmentShape", "StockShape"]

"""Executing plans: the runtime at the edge, and one module per executor. Torch begins here."""

from __future__ import annotations

from flashinfer_cascade.runtime.runtime import CascadeRuntime, RuntimeStats

__all__ = ["CascadeRuntime", "RuntimeStats"]

"""Serving engines that call this package. They may import anything above, and never their engine."""

from __future__ import annotations

from flashinfer_cascade.integrations.adapter import EngineAdapter

__all__ = ["EngineAdapter"]

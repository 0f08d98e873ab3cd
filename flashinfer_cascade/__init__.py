"""Read a shared KV prefix once: cascade plans from block tables, and their execution.

`CascadePlanner` turns a batch's block tables into a `CascadePlan` on the CPU, without torch;
`CascadeRuntime` executes plans, and `capture_cuda_graphs` captures CUDA graphs that replay any of them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from flashinfer_cascade.batch import CsrTables
from flashinfer_cascade.capacity import PlanCapacity
from flashinfer_cascade.config import CascadeConfig, PlannerPolicy
from flashinfer_cascade.errors import (
    BackendUnavailableError,
    CapacityError,
    CascadeError,
    InvalidBatchError,
    UnsupportedError,
)
from flashinfer_cascade.plan import CascadePlan
from flashinfer_cascade.planner import CascadePlanner
from flashinfer_cascade.profile import DeviceProfile

if TYPE_CHECKING:
    from flashinfer_cascade.graphs import GraphPool, capture_cuda_graphs
    from flashinfer_cascade.runtime import CascadeRuntime, GraphState

__all__ = [
    "BackendUnavailableError",
    "CapacityError",
    "CascadeConfig",
    "CascadeError",
    "CascadePlan",
    "CascadePlanner",
    "CascadeRuntime",
    "CsrTables",
    "DeviceProfile",
    "GraphPool",
    "GraphState",
    "InvalidBatchError",
    "PlanCapacity",
    "PlannerPolicy",
    "UnsupportedError",
    "capture_cuda_graphs",
]

try:
    __version__ = version("flashinfer-cascade")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+source"


def __getattr__(name: str) -> Any:
    # These need torch; a scheduler process that only plans must not pay for it.
    if name in ("CascadeRuntime", "GraphState"):
        from flashinfer_cascade import runtime

        return getattr(runtime, name)
    if name in ("GraphPool", "capture_cuda_graphs"):
        from flashinfer_cascade import graphs

        return getattr(graphs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

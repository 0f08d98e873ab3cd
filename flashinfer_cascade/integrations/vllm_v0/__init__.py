"""An attention backend for vLLM's v0 engine, 0.6.3 to 0.10.0: `make_backend`.

It fits the interface by structure and never imports vLLM. In the order of a step: `builder` turns block tables into
`metadata`, and has them planned; `state` loads the plan, into the runtime or a captured graph; `impl` runs it.
"""

from __future__ import annotations

from flashinfer_cascade.integrations.vllm_v0.backend import CascadeBackend, make_backend
from flashinfer_cascade.integrations.vllm_v0.builder import CascadeMetadataBuilder
from flashinfer_cascade.integrations.vllm_v0.impl import CascadeImpl
from flashinfer_cascade.integrations.vllm_v0.metadata import CascadeMetadata, CascadeWrapper
from flashinfer_cascade.integrations.vllm_v0.state import CascadeState

__all__ = [
    "CascadeBackend",
    "CascadeImpl",
    "CascadeMetadata",
    "CascadeMetadataBuilder",
    "CascadeState",
    "CascadeWrapper",
    "make_backend",
]

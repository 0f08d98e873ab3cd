"""What this machine can run, and why not the rest.

torch, FlashInfer and triton are imported in a process of their own (``python -m flashinfer_cascade.doctor``), so
that a broken one is a finding rather than a crash.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashinfer_cascade import __version__
from flashinfer_cascade.errors import BackendUnavailableError
from flashinfer_cascade.native import load_core
from flashinfer_cascade.profile import PROFILES

PROBE_SECONDS = 120
MIN_CAPABILITY = (8, 0)
"""Of FlashInfer's fa2 kernels."""


class Finding(NamedTuple):
    """One thing looked at: what was found, and whether the GPU executors can do with it."""

    name: str
    found: str
    ok: bool


def examine() -> dict[str, Any]:
    """Everything found, ready for JSON: versions, tools, GPUs and executors, each with a reason."""
    probed = _probe_apart()
    tools = {"nvcc": _nvcc(), "ninja": shutil.which("ninja")}
    why_not = _why_no_gpu_executor(probed)
    versions = {"flashinfer-cascade": __version__, "python": platform.python_version(), "numpy": np.__version__}
    return {
        "platform": platform.platform(),
        "versions": versions,
        "native_core": load_core() is not None,
        "libraries": probed["libraries"],
        "cuda": probed["cuda"],
        "gpus": probed["gpus"],
        "nvrtc": probed["nvrtc"],
        "tools": tools,
        "executors": {
            "reference": probed["libraries"]["torch"]["error"],
            "flat": why_not,
            "levels": why_not,
            "segments": why_not,
            "stock": why_not,
        },
    }


def findings(examined: dict[str, Any]) -> list[Finding]:
    """The same, a line each, worded for people."""
    lines = [Finding(name, found, True) for name, found in examined["versions"].items()]
    native = "there" if examined["native_core"] else "not built, for want of a C compiler: plans take longer"
    lines.append(Finding("native core of the planner", native, examined["native_core"]))
    for name, library in examined["libraries"].items():
        found = library["version"] or "not installed"
        error = library["error"] if library["version"] else None
        lines.append(Finding(name, f"{found}, but {error}" if error else found, not library["error"]))
    cuda = examined["cuda"]
    lines.append(Finding("torch's CUDA", cuda or "built without CUDA", cuda is not None))
    for gpu in examined["gpus"]:
        profile = f"profile {gpu['profile']}" if gpu["profile"] else "no profile of its own"
        text = f"{gpu['name']}, {gpu['memory_gb']:.0f} GB, capability {gpu['capability']}, {profile}"
        lines.append(Finding("GPU", text, tuple(map(int, gpu["capability"].split("."))) >= MIN_CAPABILITY))
    if not examined["gpus"]:
        lines.append(Finding("GPU", "none that torch can use", False))
    if examined["gpus"]:
        missing = "not found, or too old for the GPU: segments of few rows run on Triton, which takes longer"
        nvrtc = "there" if examined["nvrtc"] else missing
        lines.append(Finding("NVRTC", nvrtc, examined["nvrtc"]))
    for tool, path in examined["tools"].items():
        lines.append(Finding(tool, path or "not found; FlashInfer needs it to compile kernels", path is not None))
    return lines


def probe() -> dict[str, Any]:
    """Import the libraries here and now, and ask torch for GPUs."""
    packages = {"torch": "torch", "flashinfer": "flashinfer-python", "triton": "triton"}
    libraries = {module: _library(module, package) for module, package in packages.items()}
    found: dict[str, Any] = {"libraries": libraries, "cuda": None, "gpus": [], "nvrtc": False}
    if libraries["torch"]["error"] is None:
        import torch

        from flashinfer_cascade.runtime.nvrtc import can_compile

        found["cuda"] = torch.version.cuda
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            name = gpu.name.lower()
            found["gpus"].append(
                {
                    "name": gpu.name,
                    "memory_gb": gpu.total_memory / 1e9,
                    "capability": f"{gpu.major}.{gpu.minor}",
                    "profile": next((profile for profile in PROFILES if profile in name), None),
                }
            )
        found["nvrtc"] = all(
            can_compile(torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())
        )
        if libraries["flashinfer"]["error"] is None:
            from flashinfer_cascade.runtime.launch import import_flashinfer

            try:
                import_flashinfer()
            except BackendUnavailableError as error:
                libraries["flashinfer"]["error"] = str(error)
    return found


def _library(module: str, package: str) -> dict[str, str | None]:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return {"version": None, "error": f"{package} is not installed"}
    try:
        importlib.import_module(module)
    except Exception as error:
        text = str(error).splitlines() or [type(error).__name__]
        return {"version": installed, "error": f"import fails: {text[0]}"}
    return {"version": installed, "error": None}


def _probe_apart() -> dict[str, Any]:
    command = [sys.executable, "-m", "flashinfer_cascade.doctor"]
    here = Path(__file__).resolve().parents[1]  # -m looks there first, so that it runs this copy
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        broken = {"version": None, "error": f"looking at it failed: {lines[-1]}"}
        libraries = dict.fromkeys(("torch", "flashinfer", "triton"), broken)
        return {"libraries": libraries, "cuda": None, "gpus": [], "nvrtc": False}
    return found


def _why_no_gpu_executor(probed: dict[str, Any]) -> str | None:
    """Why no executor but the reference can run; None when they can: they come together."""
    libraries = probed["libraries"]
    if libraries["torch"]["error"]:
        return f"torch: {libraries['torch']['error']}"
    if probed["cuda"] is None:
        return "torch is built without CUDA"
    if not probed["gpus"]:
        return "torch finds no CUDA GPU"
    if all(tuple(map(int, gpu["capability"].split("."))) < MIN_CAPABILITY for gpu in probed["gpus"]):
        return "no GPU has capability 8.0 or newer"
    for name in ("flashinfer", "triton"):
        if libraries[name]["error"]:
            return f"{name}: {libraries[name]['error']}"
    return None


def _nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (path := Path(home) / "bin" / "nvcc").is_file():
            return str(path)
    return shutil.which("nvcc")


if __name__ == "__main__":
    print(json.dumps(probe()))

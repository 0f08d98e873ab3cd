"""What all tests share: the GPU marker, hypothesis profiles, and a header that says what is tested."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

# "ci": the same examples every time. "fresh": new ones, and many: for hunting, HYPOTHESIS_PROFILE=fresh.
# Neither judges by the clock, which says more about a busy machine than about the code.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fresh",
    deadline=None,
    derandomize=False,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@functools.cache
def why_no_gpu() -> str | None:
    """Return why tests marked `gpu` cannot run here, None if they can.

    Called once such a test is about to run, and not before: importing torch takes seconds.
    """
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA GPU: torch is not installed"
    import torch

    if torch.version.cuda is None:
        return f"needs a CUDA GPU: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: torch finds no CUDA device"
    return None


@pytest.hookimpl(tryfirst=True)  # before fixtures touch the device
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where there is none, or fail it if FLASHINFER_CASCADE_REQUIRE_GPU=1."""
    if item.get_closest_marker("gpu") is None:
        return
    reason = why_no_gpu()
    if reason is None:
        return
    if os.environ.get("FLASHINFER_CASCADE_REQUIRE_GPU") == "1":
        pytest.fail(f"FLASHINFER_CASCADE_REQUIRE_GPU=1, but this test {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_report_header() -> str:
    """Name the copy of the package that is tested: installed, or a source tree on PYTHONPATH."""
    spec = importlib.util.find_spec("flashinfer_cascade")
    return f"flashinfer_cascade: {spec.origin if spec else 'not installed; run scripts/test'}"

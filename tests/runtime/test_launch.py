"""What is passed to FlashInfer, checked against the FlashInfer that is installed, and what is said to the user."""

import logging
import threading
import types

import pytest

from flashinfer_cascade import BackendUnavailableError, CascadeConfig
from flashinfer_cascade.runtime import launch


def test_the_installed_flashinfer_takes_what_is_passed_to_it():
    flashinfer = pytest.importorskip("flashinfer")
    launch.check_signatures.__wrapped__(flashinfer)
    assert launch.import_flashinfer() is flashinfer


class Wrapper:
    def plan(self, *, qo_indptr, paged_kv_indptr):
        """An old signature."""

    def run(self, q, kv):
        """Likewise."""


def test_changed_signatures_are_refused_by_name():
    old = types.SimpleNamespace(
        __version__="0.1", BatchPrefillWithPagedKVCacheWrapper=Wrapper, BatchDecodeWithPagedKVCacheWrapper=Wrapper
    )
    with pytest.raises(BackendUnavailableError, match=r"FlashInfer 0\.1 does not take .*disable_split_kv.* in Wrapper"):
        launch.check_signatures.__wrapped__(old)


def test_substituted_kernels_are_warned_of(monkeypatch):
    flashinfer = pytest.importorskip("flashinfer")
    monkeypatch.setenv("FLASHINFER_TRACE_APPLY", "1")
    with pytest.warns(RuntimeWarning, match="FLASHINFER_TRACE_APPLY is set"):
        launch.check_signatures.__wrapped__(flashinfer)


def config(**changes):
    values = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "float16"}
    return CascadeConfig(**(values | changes))


def test_a_first_plan_that_takes_long_says_that_it_compiles(monkeypatch, caplog):
    monkeypatch.setattr(launch, "SLOW_S", 0.01)
    monkeypatch.setattr(launch, "_planned_before", set())
    with caplog.at_level(logging.WARNING), launch.tell_if_slow("fa3", config()):
        threading.Event().wait(0.3)
    assert "FlashInfer compiles a kernel for fa3 on first use" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), launch.tell_if_slow("fa3", config()):
        threading.Event().wait(0.1)
    assert not caplog.text


def test_the_workspace_holds_every_tile_that_may_be_cut(monkeypatch):
    flashinfer = types.SimpleNamespace(__version__="0.7.2.post1")
    monkeypatch.setattr(launch, "import_flashinfer", lambda: flashinfer)
    rows = 2 * 132 * 128
    assert launch.float_workspace_bytes(config(), 132) >= rows * (64 + 1) * 4
    flashinfer.__version__ = "0.6.0"
    assert launch.float_workspace_bytes(config(), 132) >= 4 * rows * (64 + 1) * 4

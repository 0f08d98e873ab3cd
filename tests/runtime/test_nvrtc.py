"""Which NVRTC is loaded and what it is asked for; tests/gpu runs what it compiles."""

import ctypes
import types

import pytest
import torch

from flashinfer_cascade import BackendUnavailableError
from flashinfer_cascade.runtime import cuda, nvrtc


class Library:
    """An NVRTC that knows some architectures."""

    def __init__(self, *known):
        self.known = known

    def nvrtcGetNumSupportedArchs(self, count):
        count._obj.value = len(self.known)

    def nvrtcGetSupportedArchs(self, archs):
        archs[:] = self.known


@pytest.mark.parametrize(("capability", "known", "can"), [((9, 0), (80, 90), True), ((12, 0), (80, 90), False)])
def test_an_nvrtc_that_is_older_than_the_gpu(capability, known, can, monkeypatch):
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: Library(*known))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    nvrtc.can_compile.cache_clear()
    assert nvrtc.can_compile(capability) == can
    assert cuda.has_stream.__wrapped__(0) == can
    assert cuda.has_wide.__wrapped__(0) == can
    nvrtc.can_compile.cache_clear()


def test_pips_libraries_come_before_an_unversioned_one(monkeypatch, tmp_path):
    tried = []

    def load(name):
        tried.append(name)
        raise OSError(name)

    for package in "cuda_nvrtc", "cu13":
        (tmp_path / package / "lib").mkdir(parents=True)
        (tmp_path / package / "lib" / "libnvrtc.so.13").touch()
        (tmp_path / package / "lib" / "libnvrtc.so.12").touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(BackendUnavailableError, match=r"libnvrtc\.so\.13 cannot be loaded"):
        nvrtc._nvrtc.__wrapped__()
    pip = [str(tmp_path / package / "lib" / "libnvrtc.so.13") for package in ("cu13", "cuda_nvrtc")]
    assert tried == ["libnvrtc.so.13", *pip, "libnvrtc.so"]


class Driver:
    """One that notes what is called, in a thread that has a context or not."""

    def __init__(self, context):
        self.context, self.calls = context, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuCtxGetCurrent":
                arguments[0]._obj.value = self.context
            if name == "cuDevicePrimaryCtxRetain":
                assert arguments[1] == 3
                arguments[0]._obj.value = 17
            if name == "cuCtxSetCurrent":
                self.context = arguments[0].value
            return 0

        return call


@pytest.mark.parametrize("context", [None, 5])
def test_a_thread_without_a_context(context, monkeypatch):
    driver = Driver(context)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda source, options: b"")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    entered = ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"] if context is None else []
    kernel = nvrtc.CudaKernel("", "name", {}, 0)
    assert driver.calls[: 2 + len(entered)] == ["cuCtxGetCurrent", *entered, "cuModuleLoadData"]
    driver.calls, driver.context = [], context  # compiled by one thread, launched by another
    kernel.launch(1, 32, (), early=False)
    assert driver.calls == ["cuCtxGetCurrent", *entered, "cuLaunchKernelEx"]

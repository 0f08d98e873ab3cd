"""CUDA C++ kernels, compiled at run time by the NVRTC that torch brings, and launched through the driver.

Source: NVRTC documentation, "Basic Usage"; CUDA driver API, cuLaunchKernelEx and CUlaunchAttribute.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashinfer_cascade.errors import BackendUnavailableError, CascadeError

MAX_DYNAMIC_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").split(".")[0]
    names = [f"libnvrtc.so.{major}"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        names += sorted(str(path) for path in Path(folder).glob(f"*/lib/libnvrtc.so.{major}*"))
    # The system's own may be of any version.
    for name in (*names, "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BackendUnavailableError(
        f"libnvrtc.so.{major} cannot be loaded, which torch's CUDA builds depend on: install the NVRTC of CUDA {major}"
    )


@functools.cache
def can_compile(capability: tuple[int, int]) -> bool:
    """Whether there is an NVRTC that compiles for GPUs of a compute capability."""
    try:
        nvrtc = _nvrtc()
    except BackendUnavailableError:
        return False
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    return capability[0] * 10 + capability[1] in known


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _enter_context() -> None:
    """Make the current device's context that of this thread: torch does so only once it calls CUDA itself."""
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if context.value is None:
        device = torch.cuda.current_device()
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def _check(result: int, what: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        raise CascadeError(f"{what} failed with {name.value.decode() if name.value else result}")


def compile_cubin(source: str, options: Sequence[str]) -> bytes:
    """Compile one source file for a real architecture.

    Raises:
        BackendUnavailableError: NVRTC is missing, or refuses the source; with its log.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    encoded = [option.encode() for option in options]
    result = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
    size = ctypes.c_size_t()
    if result:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BackendUnavailableError(f"NVRTC cannot compile a kernel: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


class CudaKernel:
    """One kernel with its constants compiled in, on the current device.

    Args:
        source: CUDA C++ without includes.
        name: of its extern "C" function.
        defines: of the preprocessor.
        shared_bytes: dynamic shared memory of a block.
        features: "a" for what this architecture alone has.
    """

    def __init__(self, source: str, name: str, defines: dict[str, int], shared_bytes: int, features: str = "") -> None:
        major, minor = torch.cuda.get_device_capability()
        options = [f"--gpu-architecture=sm_{major}{minor}{features}", "--std=c++17", "-default-device"]
        cubin = compile_cubin(source, options + [f"-D{key}={value}" for key, value in defines.items()])
        driver = _driver()
        _enter_context()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), "cuModuleGetFunction")
        _check(
            driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes),
            f"reserving {shared_bytes} bytes of shared memory",
        )
        self._shared_bytes = shared_bytes

    def launch(self, grid: int, threads: int, arguments: Sequence[Any], *, early: bool) -> None:
        """Launch on the current stream.

        Args:
            grid: blocks.
            threads: of a block.
            arguments: ctypes values, in the kernel's order.
            early: may begin before the kernel in front of it has ended.
        """
        _enter_context()
        attribute = _Attribute(id=PROGRAMMATIC_SERIALIZATION, value=1)
        config = _Config(
            (grid, 1, 1),
            (threads, 1, 1),
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            int(early),
        )
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None), "cuLaunchKernelEx")

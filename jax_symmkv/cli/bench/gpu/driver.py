"""What the CUDA driver is asked directly."""

from __future__ import annotations

import ctypes
import functools


def make_current(device: int) -> None:
    """Makes a GPU the calling thread's: what `_cuda` creates without naming a GPU lies there.

    By its primary context, which XLA and CUDA's runtime use too. To be called after XLA has set it up.
    """
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _handle(device))
    _call("cuCtxSetCurrent", context)


def uuid(device: int) -> str:
    """Names the GPU, or the MIG slice, among all."""
    found = (ctypes.c_ubyte * 16)()
    _call("cuDeviceGetUuid_v2", ctypes.byref(found), _handle(device))
    return bytes(found).hex()


def cuda_version() -> str:
    """The newest CUDA that the driver speaks."""
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    if status := library.cuInit(0):
        raise RuntimeError(f"cuInit failed with CUDA error {status}")
    return library


def _handle(device: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    return handle


def _call(name: str, *args: object) -> None:
    if status := getattr(_library(), name)(*args):
        raise RuntimeError(f"{name} failed with CUDA error {status}")

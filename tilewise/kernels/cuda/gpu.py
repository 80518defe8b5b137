"""The GPU as launches see it: PyTorch's current device and stream, and the driver's functions."""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any

import torch

SHARED_BY_DEFAULT = 48 << 10  # a kernel that needs more dynamic shared memory must ask for it


class LaunchError(RuntimeError):
    """The driver refuses a launch, in its own words."""


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


# -- PyTorch ----------------------------------------------------------------------------------------------------------
# torch.cuda's own functions for these look at more than is needed here, and take microseconds.


def current_device() -> int:
    return torch._C._cuda_getDevice()  # type: ignore[no-any-return]


def as_current(device: int) -> Any:
    """A context in which a device is the current one."""
    return torch.cuda.device(device)


def current_stream(device: int) -> int:
    """The driver's handle."""
    return torch._C._cuda_getCurrentRawStream(device)  # type: ignore[no-any-return]


def is_capturing() -> bool:
    """Whether what is launched now is recorded for a CUDA graph."""
    return torch._C._cuda_isCurrentStreamCapturing()  # type: ignore[no-any-return]


def hold_until_done(x: Any, device: int) -> None:
    """Memory that is let go while a launch of the current stream reads it stays as it is till then."""
    x.record_stream(torch.cuda.current_stream(device))


def zeros(count: int, device: int) -> Any:
    """Integers on a device, 0 for every stream from now on."""
    made = torch.zeros(count, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return made


def whole_numbers(count: int, device: int) -> Any:
    """Room for them, on the current stream."""
    return torch.empty(count, dtype=torch.int32, device=device)


def moved(numbers: Any, device: int) -> Any:
    """A NumPy array's numbers on a device, once they are there."""
    return torch.from_numpy(numbers).to(device)


@cache
def capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)  # type: ignore[no-any-return]


@cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count  # type: ignore[no-any-return]


# -- the driver -------------------------------------------------------------------------------------------------------
# By cuda-bindings, though compiler.py takes cuda-core: a launch of cuda-core's is told stream, sizes and arguments as
# objects, which Python makes or checks in each call. Here all of them are numbers that lie ready, and host time counts.


class Library:
    """Loaded machine code, which is unloaded when nothing holds it."""

    def __init__(self, code: bytes) -> None:
        error, self.handle = _driver().cuLibraryLoadData(code, [], [], 0, [], [], 0)
        _check(error, "loading a kernel")
        weakref.finalize(self, _driver().cuLibraryUnload, self.handle).atexit = False


def load(code: bytes, entry: str) -> tuple[Library, Any]:
    """A library, and its kernel for every device of the architecture."""
    library = Library(code)
    error, kernel = _driver().cuLibraryGetKernel(library.handle, entry.encode())
    _check(error, f"the kernel {entry!r}")
    return library, _driver().CUfunction(int(kernel))


def allow_shared(function: Any, shared_bytes: int, device: int) -> None:
    """Let a kernel have more shared memory than the usual on a device."""
    if shared_bytes <= SHARED_BY_DEFAULT:
        return
    driver = _driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel = driver.CUkernel(int(function))
    (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, driver.CUdevice(device))
    _check(error, f"asking for {shared_bytes} bytes of shared memory")


def tensor_map_at(address: int) -> Any:
    """The driver's view of a tensor map in the host's memory."""
    return _driver().CUtensorMap(address)


def replace_address(tensor_map: Any, address: int) -> None:
    """Another array of the same layout in a tensor map."""
    (error,) = _driver().cuTensorMapReplaceAddress(tensor_map, address)
    if error:
        _check(error, f"a tensor map at {address:#x}")


def launch(function: Any, blocks: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
    """Start a kernel on a stream of the current device."""
    launch = _driver().cuLaunchKernel
    (error,) = launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0)
    if error:
        _check(error, f"launching {blocks} blocks of {threads} threads")


_of_thread = threading.local()


def ensure_context(device: int) -> None:
    """The driver wants one, and a thread that never asked CUDA for anything has none: PyTorch may have had memory."""
    if getattr(_of_thread, "device", None) != device:
        error, context = _driver().cuCtxGetCurrent()
        _check(error, "the current context")
        if not int(context):
            _check(_driver().cuCtxSetCurrent(_context(device))[0], f"making the context of device {device} current")
        _of_thread.device = device


@cache
def _context(device: int) -> Any:
    """The one that PyTorch uses too."""
    error, context = _driver().cuDevicePrimaryCtxRetain(_driver().CUdevice(device))
    _check(error, f"the context of device {device}")
    return context


def _check(error: Any, what: str) -> None:
    if error:
        _, words = _driver().cuGetErrorString(error)
        raise LaunchError(f"{what}: {error.name} ({words.decode() if words else 'no words for it'})")

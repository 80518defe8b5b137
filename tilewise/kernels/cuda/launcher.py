"""Launches on a GPU: kernels loaded once for each source and architecture, tables of plans kept on the device.

Nothing here waits for the GPU. A launch goes to the caller's current stream of the arrays' device; in a CUDA graph's
capture it is recorded, if the same call was made once before (which compiles, loads and uploads).
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from tilewise.kernels.cuda import compiler, marshal
from tilewise.kernels.cuda.marshal import Tables
from tilewise.kernels.cuda.source import ENTRY, Source
from tilewise.sharing import Lock
from tilewise.spec import Attention, Shape, Tile

_SHARED_BY_DEFAULT = 48 << 10  # a kernel that needs more dynamic shared memory must ask for it
_MOST_KERNELS, _MOST_TABLES = 512, 256


class LaunchError(RuntimeError):
    """The driver refuses a launch, in its own words."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A kernel that can be launched on every device of its architecture."""

    module: Any  # cuda-core's, which unloads it when nothing holds it
    function: Any


_kernels: OrderedDict[tuple[str, str], Loaded] = OrderedDict()
_tables: OrderedDict[tuple[Any, ...], tuple[Tables, Any, Any]] = OrderedDict()
_opted_in: set[tuple[int, int]] = set()
_lock = Lock()


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for; 9.0 has instructions of its own."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def launch(source: Source, device: Any, blocks: int, params: ctypes.Structure) -> None:
    """Start a kernel on the current stream of a torch device, which must be the current one."""
    import torch
    from cuda.bindings import driver

    loaded = _load(source, architecture(torch.cuda.get_device_capability(device)))
    _opt_in(loaded, source.shared_bytes, device.index)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    (error,) = driver.cuLaunchKernel(
        loaded.function, blocks, 1, 1, source.threads, 1, 1, source.shared_bytes,
        torch.cuda.current_stream(device).cuda_stream, ctypes.addressof(arguments), 0,
    )  # fmt: skip
    _check(error, f"launching the kernel {source.rung!r} with {blocks} blocks of {source.threads} threads")


def _load(source: Source, arch: str) -> Loaded:
    with _lock:
        found = _kernels.pop((source.text, arch), None)
        if found is not None:
            _kernels[source.text, arch] = found
            return found
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    module = ObjectCode.from_cubin(compiler.machine_code(source, arch), name=source.rung)
    # cuda-core's own launch takes no structs, so the kernel is called by the driver's function.
    made = Loaded(module, driver.CUfunction(int(module.get_kernel(ENTRY).handle)))
    with _lock:
        _kernels[source.text, arch] = made
        if len(_kernels) > _MOST_KERNELS:
            _kernels.popitem(last=False)
    return made


def _opt_in(loaded: Loaded, shared_bytes: int, device: int) -> None:
    """Let a kernel have more shared memory than the usual, once a device."""
    key = (int(loaded.function), device)
    if shared_bytes <= _SHARED_BY_DEFAULT or key in _opted_in:
        return
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel = driver.CUkernel(int(loaded.function))
    (error,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, driver.CUdevice(device))
    _check(error, f"asking for {shared_bytes} bytes of shared memory")
    _opted_in.add(key)


def _check(error: Any, what: str) -> None:
    from cuda.bindings import driver

    if error != driver.CUresult.CUDA_SUCCESS:
        _, words = driver.cuGetErrorString(error)
        raise LaunchError(f"{what}: {error.name} ({words.decode() if words else 'no words for it'})")


# -- tables -----------------------------------------------------------------------------------------------------------


def tables_on(device: Any, spec: Attention, shape: Shape, tile: Tile, planned: bool) -> tuple[Tables, Any]:
    """The tables of a call and their numbers on the device: kept, since they follow from shapes and the variant."""
    import torch

    lengths = () if spec.lengths is None else (spec.lengths.q.tobytes(), spec.lengths.k.tobytes())
    expressions = tuple(expr.key for expr in spec.expressions)
    constants = [slot.array for slot in spec.loaded if slot.constant]
    key = (device.index, shape, tile, planned, lengths, expressions, *map(id, constants))
    with _lock:
        found = _tables.pop(key, None)
        if found is not None:
            _tables[key] = found
            return found[0], found[1]
    made = marshal.tables(spec, shape, tile, planned)
    numbers = torch.from_numpy(made.numbers).to(device)
    with _lock:
        _tables[key] = made, numbers, constants  # which keeps them alive, so that no other array has their id
        if len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
    return made, numbers

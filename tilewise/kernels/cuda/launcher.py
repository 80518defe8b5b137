"""Launches on a GPU: kernels loaded once for each source and architecture, tables of plans kept on the device.

Once that is done nothing here waits for the GPU: a launch goes to the caller's current stream of the arrays' device. In
the capture of a CUDA graph it is recorded, and what the graph will need again is never let go.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tilewise.kernels.cuda import compiler, marshal
from tilewise.kernels.cuda.marshal import Tables
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.source import ENTRY, Source
from tilewise.sharing import Lock
from tilewise.spec import Attention, Shape, Tile

T = TypeVar("T")

_SHARED_BY_DEFAULT = 48 << 10  # a kernel that needs more dynamic shared memory must ask for it
_MOST_KERNELS, _MOST_TABLES = 512, 256


_FIRST_IN_GRAPH = (
    "a CUDA graph is captured around a call that was never made before; make it once first, "
    "so that its kernel is compiled and its plan is on the GPU"
)


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
_in_graphs: dict[int, Any] = {}  # kernels and tables that a captured graph may use at any time
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


def _kept(cache: OrderedDict[Any, T], key: Any) -> T | None:
    """What is there already, as the one used last."""
    import torch

    capturing = torch.cuda.is_current_stream_capturing()
    with _lock:
        found = cache.pop(key, None)
        if found is not None:
            cache[key] = found
            if capturing:
                _in_graphs[id(found)] = found
    if found is None and capturing:
        raise LaunchError(_FIRST_IN_GRAPH)
    return found


def _keep(cache: OrderedDict[Any, T], key: Any, made: T, most: int) -> T:
    with _lock:
        cache[key] = made
        if len(cache) > most:
            cache.popitem(last=False)
    return made


def _load(source: Source, arch: str) -> Loaded:
    found = _kept(_kernels, (source.text, arch))
    if found is not None:
        return found
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    module = ObjectCode.from_cubin(compiler.machine_code(source, arch), name=source.rung)
    # cuda-core's own launch takes no structs, so the kernel is called by the driver's function.
    made = Loaded(module, driver.CUfunction(int(module.get_kernel(ENTRY).handle)))
    return _keep(_kernels, (source.text, arch), made, _MOST_KERNELS)


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


# -- counts -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Counts:
    """Counts in a device's memory, 0 between launches: one a stream, and one for each launch that a graph captures."""

    room: Any
    of_stream: dict[int, int] = field(default_factory=dict)
    taken: int = 0

    def take(self) -> int:
        if self.taken == len(self.room):
            raise LaunchError(f"more than {len(self.room)} streams and captured launches on one device")
        self.taken += 1
        return int(self.room.data_ptr()) + 4 * (self.taken - 1)


_counts: dict[int, _Counts] = {}
_ROOM = 1 << 20


def count_on(device: Any) -> int:
    """The address of a count that no launch beside this one uses. Launches of one stream follow each other; those of
    captured graphs may be replayed on any stream, so each has its own."""
    import torch

    capturing = torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream
    with _lock:
        counts = _counts.get(device.index)
        if counts is None:
            if capturing:
                raise LaunchError(_FIRST_IN_GRAPH)
            room = torch.zeros(_ROOM, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # once: other streams may not see them before they are 0
            counts = _counts[device.index] = _Counts(room)
        if capturing:
            return counts.take()
        if stream not in counts.of_stream:
            counts.of_stream[stream] = counts.take()
        return counts.of_stream[stream]


# -- tables -----------------------------------------------------------------------------------------------------------


def tables_on(device: Any, spec: Attention, shape: Shape, tile: Tile, rung: Rung) -> tuple[Tables, Any]:
    """The tables of a call and their numbers on the device: kept, since they follow from shapes and the variant."""
    import torch

    lengths = () if spec.lengths is None else (spec.lengths.q.tobytes(), spec.lengths.k.tobytes())
    expressions = tuple(expr.key for expr in spec.expressions)
    constants = [slot.array for slot in spec.loaded if slot.constant]
    key = (device.index, shape, tile, rung.name, lengths, expressions, *map(id, constants))
    found = _kept(_tables, key)
    if found is None:
        made = marshal.tables(spec, shape, tile, rung)
        # The constants stay with it, so that no other array gets their id.
        found = _keep(_tables, key, (made, torch.from_numpy(made.numbers).to(device), constants), _MOST_TABLES)
    tables, numbers, _ = found
    numbers.record_stream(torch.cuda.current_stream(device))  # it may be let go while a kernel still reads it
    return tables, numbers

"""What launches share: kernels loaded once for each source and architecture, tables of plans and counts on the device,
and room for parameters.

Once that is there nothing here waits for the GPU. In the capture of a CUDA graph launches are recorded, and what the
graph will need again is never let go.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tilewise.kernels.cuda import compiler, gpu, marshal, structs
from tilewise.kernels.cuda.gpu import LaunchError
from tilewise.kernels.cuda.marshal import Tables
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.source import ENTRY, Source
from tilewise.sharing import Lock
from tilewise.spec import Attention, Shape, Tile

T = TypeVar("T")

_MOST_KERNELS, _MOST_TABLES = 512, 256
_FIRST_IN_GRAPH = (
    "a CUDA graph is captured around a call that was never made before; make it once first, "
    "so that its kernel is compiled and its plan is on the GPU"
)

_logger = logging.getLogger("tilewise")
_in_graphs: dict[int, Any] = {}  # what a captured graph may use at any time
_lock = Lock()


def hold_for_graphs(used: Any) -> None:
    _in_graphs[id(used)] = used


def _kept(cache: OrderedDict[Any, T], key: Any) -> T | None:
    """What is there already, as the one used last."""
    with _lock:
        found = cache.pop(key, None)
        if found is not None:
            cache[key] = found
    if found is None and gpu.is_capturing():
        raise LaunchError(_FIRST_IN_GRAPH)
    return found


def _keep(cache: OrderedDict[Any, T], key: Any, made: T, most: int) -> T:
    with _lock:
        cache[key] = made
        if len(cache) > most:
            cache.popitem(last=False)
    return made


# -- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Loaded:
    """A kernel that can be launched on every device of its architecture."""

    module: Any  # held: the kernel is the library's
    function: Any
    allowed: set[int] = field(default_factory=set)  # the devices on which it may have its shared memory


_kernels: OrderedDict[tuple[str, str], Loaded] = OrderedDict()


def loaded(source: Source, device: int) -> Loaded:
    """The kernel of a source, for launches on a device."""
    arch = compiler.architecture(gpu.capability(device))
    found = _kept(_kernels, (source.text, arch))
    if found is None:
        found = _keep(_kernels, (source.text, arch), _load(source, arch), _MOST_KERNELS)
    if device not in found.allowed:
        gpu.allow_shared(found.function, source.shared_bytes, device)
        found.allowed.add(device)
    return found


def _load(source: Source, arch: str) -> Loaded:
    shipped = compiler.prebuilt(source, arch)
    if shipped is not None:
        try:
            return Loaded(*gpu.load(shipped, ENTRY))
        except LaunchError as error:  # made by a compiler newer than the driver
            _logger.info("the prebuilt kernel %r is compiled anew: %s", source.rung, error)
    return Loaded(*gpu.load(compiler.machine_code(source, arch), ENTRY))


# -- parameters -------------------------------------------------------------------------------------------------------


class Room:
    """Memory for the parameters of one launch. Its address stays, so what the driver is told of it does.

    What the last launch left is there still: `owner` tells whose parameters these are, and `mapped` which addresses the
    tensor maps have.
    """

    owner: Any = None
    mapped: tuple[int, ...] = ()

    def __init__(self) -> None:
        memory = structs.aligned(_Most)
        address = ctypes.addressof(memory)
        self.bytes = memoryview(memory.bytes).cast("B")
        self.words = self.bytes.cast("Q")
        size = ctypes.sizeof(structs.TensorMapBytes)
        self.maps = [gpu.tensor_map_at(address + i * size) for i in range(len(structs.MAPS))]
        self._pointers = (ctypes.c_void_p * 1)(address)
        self.arguments = ctypes.addressof(self._pointers)


class _Most(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * structs.MOST_BYTES)]


_rooms: list[Room] = []  # those that no launch uses; a list gives and takes in one step, whatever the threads


def take_room() -> Room:
    try:
        return _rooms.pop()
    except IndexError:
        return Room()


def give_back(room: Room) -> None:
    """After the launch: the driver has copied the parameters."""
    _rooms.append(room)


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


def count_on(device: int, stream: int, capturing: bool) -> int:
    """The address of a count that no launch beside this one uses. Launches of one stream follow each other; those of
    captured graphs may be replayed on any stream, so each has its own."""
    counts = _counts.get(device)
    if counts is not None and not capturing and stream in counts.of_stream:
        return counts.of_stream[stream]
    with _lock:
        if device not in _counts:
            if capturing:
                raise LaunchError(_FIRST_IN_GRAPH)
            _counts[device] = _Counts(gpu.zeros(_ROOM, device))
        counts = _counts[device]
        if capturing:
            return counts.take()
        if stream not in counts.of_stream:
            counts.of_stream[stream] = counts.take()
        return counts.of_stream[stream]


# -- tables -----------------------------------------------------------------------------------------------------------

_tables: OrderedDict[tuple[Any, ...], tuple[Tables, Any, Any]] = OrderedDict()


def tables_on(device: int, spec: Attention, shape: Shape, tile: Tile, rung: Rung) -> tuple[Tables, Any]:
    """The tables of a call and their numbers on the device: kept, since they follow from shapes and the variant."""
    lengths = () if spec.lengths is None else (spec.lengths.q.tobytes(), spec.lengths.k.tobytes())
    expressions = tuple(expr.key for expr in spec.expressions)
    constants = [slot.array for slot in spec.loaded if slot.constant]
    key = (device, shape, tile, rung.name, lengths, expressions, *map(id, constants))
    found = _kept(_tables, key)
    if found is None:
        made = marshal.tables(spec, shape, tile, rung)
        # The constants stay with it, so that no other array gets their id.
        found = _keep(_tables, key, (made, gpu.moved(made.numbers, device), constants), _MOST_TABLES)
    tables, numbers, _ = found
    return tables, numbers

"""What launches share: kernels loaded once for each source and architecture, tables of plans and counts on the device,
and room for parameters.

Once that is there nothing here waits for the GPU. In the capture of a CUDA graph launches are recorded, and what the
graph will need again is never let go.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.arrays import Array
from tilewise.expr import Loaded as Slot
from tilewise.kernels.cuda import compiler, gpu, marshal, structs
from tilewise.kernels.cuda.gpu import LaunchError
from tilewise.kernels.cuda.marshal import Tables
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.source import ENTRY, Source
from tilewise.pytorch import graphs
from tilewise.sharing import Kept, Lock
from tilewise.spec import Attention, Shape, Tile

_MOST_KERNELS, _MOST_TABLES = 512, 256

_logger = logging.getLogger("tilewise")
_lock = Lock()


def _not_in_a_graph() -> None:
    """What is made now is compiled, or copied to the GPU: nothing that a graph could repeat."""
    if gpu.is_capturing():
        raise LaunchError(graphs.FIRST)


# -- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Loaded:
    """A kernel that can be launched on every device of its architecture."""

    module: Any  # held: the kernel is the library's
    function: Any
    allowed: set[int] = field(default_factory=set)  # the devices on which it may have its shared memory


_kernels: Kept[Loaded] = Kept(_MOST_KERNELS)


def loaded(source: Source, device: int) -> Loaded:
    """The kernel of a source, for launches on a device."""
    arch = compiler.architecture(gpu.capability(device))
    found = _kernels.found((source.text, arch), lambda: _load(source, arch))
    if device not in found.allowed:
        gpu.allow_shared(found.function, source.shared_bytes, device)
        found.allowed.add(device)
    return found


def _load(source: Source, arch: str) -> Loaded:
    _not_in_a_graph()
    shipped = compiler.prebuilt(source, arch)
    if shipped is not None:
        try:
            return Loaded(*gpu.load(shipped, ENTRY))
        except LaunchError as error:  # made by a compiler newer than the driver
            _logger.info("the prebuilt kernel %r is compiled anew: %s", source.rung, error)
    try:
        return Loaded(*gpu.load(compiler.machine_code(source, arch), ENTRY))
    except LaunchError as error:
        if not compiler.forget(source, arch, error):
            raise
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
        self.maps = [gpu.tensor_map_at(address + i * size) for i in range(len(structs.BACKWARD_MAPS))]
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
                raise LaunchError(graphs.FIRST)
            _counts[device] = _Counts(gpu.zeros(_ROOM, device))
        counts = _counts[device]
        if capturing:
            return counts.take()
        if stream not in counts.of_stream:
            counts.of_stream[stream] = counts.take()
        return counts.of_stream[stream]


# -- tables -----------------------------------------------------------------------------------------------------------

_tables: Kept[tuple[Tables, Any, Any]] = Kept(_MOST_TABLES)


def tables_on(device: int, spec: Attention, shape: Shape, tile: Tile, rung: Rung) -> tuple[Tables, Any]:
    """The tables of a call and their numbers on the device: kept, since they follow from shapes and the variant."""
    lengths = () if spec.lengths is None else (spec.lengths.q.tobytes(), spec.lengths.k.tobytes())
    expressions = tuple(expr.key for expr in spec.expressions)
    constants = [slot.array for slot in spec.loaded if slot.constant]
    key = (device, shape, tile, rung.persistent, rung.planned, rung.by_key, lengths, expressions, *map(id, constants))

    def make() -> tuple[Tables, Any, Any]:
        _not_in_a_graph()
        made = marshal.tables(spec, shape, tile, rung)
        return made, gpu.moved(made.numbers, device), constants  # which stay, so that no other array gets their id

    tables, numbers, _ = _tables.found(key, make)
    return tables, numbers


_readers: Kept[tuple[Any, Any, Any]] = Kept(_MOST_TABLES)


def readers_on(
    device: int, key: tuple[Any, ...], slots: Sequence[Slot], make: Callable[[], tuple[Array, Array]]
) -> tuple[Any, Any]:
    """Who reads each cell of an array, on the device. It is kept, unless callers' arrays decide: those may change."""
    looked_at = [slot.array for slot in slots]

    def made() -> tuple[Any, Any, Any]:
        _not_in_a_graph()
        order, begins = (gpu.moved(x, device) for x in make())
        return order, begins, looked_at  # which stay, so that no other array gets their id

    is_kept = all(slot.constant for slot in slots)
    order, begins, _ = _readers.found((device, key, *map(id, looked_at)), made) if is_kept else made()
    return order, begins

"""A call made ready: its kernel loaded, its plan on the device, its parameters filled in but for addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tilewise.kernels.cuda import gpu, launcher, marshal, structs
from tilewise.kernels.cuda.choice import chosen
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.rungs import Rung
from tilewise.kernels.cuda.source import Source, assembled
from tilewise.spec import Attention, Shape, Tile

_WORD = 8  # bytes


class Prepared:
    """Launches a kernel on arrays that lie as those it was prepared for, wherever that is.

    Threads may share one: a launch fills in a room of its own.
    """

    def __init__(
        self, device: int, source: Source, blocks: int, params: Any, places: Sequence[int], tables: Any
    ) -> None:
        self._device, self._blocks = device, blocks
        self._threads, self._shared_bytes = source.threads, source.shared_bytes
        self._kernel = launcher.loaded(source, device)
        self._template, self._places = bytes(params), places
        self._next_item = type(params).next_item.offset // _WORD if _is_persistent(params) else None
        self._tables = tables  # held: the template has their address
        self._streams: set[int] = set()  # those on which the tables were ever read

    def launch(self, addresses: Sequence[int]) -> None:
        """On the current stream of the device; the addresses of q, k, v, out, lse, the loaded arrays, and of sinks, if
        there are any."""
        if gpu.current_device() != self._device:
            with gpu.as_current(self._device):
                return self.launch(addresses)
        stream, capturing = gpu.current_stream(self._device), gpu.is_capturing()
        room = launcher.take_room()
        room.bytes[: len(self._template)] = self._template
        for place, address in zip(self._places, addresses, strict=True):
            room.words[place] = address
        if self._next_item is not None:
            for tensor_map, address in zip(room.maps, addresses, strict=False):
                gpu.replace_address(tensor_map, address)
            room.words[self._next_item] = launcher.count_on(self._device, stream, capturing)
        self._hold(stream, capturing)
        gpu.launch(
            self._kernel.function, self._blocks, self._threads, self._shared_bytes, self._device, stream, room.arguments
        )
        launcher.give_back(room)
        return None

    def _hold(self, stream: int, capturing: bool) -> None:
        if capturing:
            launcher.hold_for_graphs(self)
        elif stream not in self._streams:
            gpu.hold_until_done(self._tables, self._device)
            self._streams.add(stream)


def prepare(
    named: Rung | None, spec: Attention, shape: Shape, views: dict[str, View], loaded: Sequence[View],
    sinks: View | None, device: int, tile: Tile | None = None,
) -> Prepared | None:  # fmt: skip
    """A call on a device, which must be the current one; None if there is nothing to compute.

    views: q, k, v, out and lse. loaded: the arrays that the variant reads, in the order of spec.loaded.
    """
    rung = chosen(named, shape, views, gpu.capability(device))
    tile = rung.fitting(tile or rung.default_tile(spec, shape), shape)
    tables, numbers = launcher.tables_on(device, spec, shape, tile, rung)
    blocks = marshal.blocks(shape, tables)
    if blocks == 0:
        return None
    source, slots = assembled(rung, spec, shape, tile)
    place = {id(slot.array): i for i, slot in enumerate(slots)}
    order = [place[id(slot.array)] for slot in spec.loaded]
    in_order = [view for _, view in sorted(zip(order, loaded, strict=True), key=lambda pair: pair[0])]
    params = marshal.params(spec, shape, tables, numbers.data_ptr(), views, sinks, in_order, source.constants)
    if rung.persistent:
        maps = {name: x.encoded() for name, x in marshal.tensor_maps(views, shape.dtype, tile).items()}
        blocks = min(blocks, gpu.multiprocessors(device))
        params = marshal.launch(params, spec, shape, tables, maps, 0, blocks)
    return Prepared(device, source, blocks, params, _places(params, order, sinks is not None), numbers)


def _places(params: Any, order: Sequence[int], has_sinks: bool) -> list[int]:
    """Where the addresses of a launch stand in its parameters, counted in words; `order`: of the loaded arrays."""
    inner = type(params.params if _is_persistent(params) else params)
    first = type(params).params.offset if _is_persistent(params) else 0
    offsets = [getattr(inner, name).offset for name in ("q", "k", "v", "out", "lse")]
    offsets += [inner.arrays.offset + i * ctypes.sizeof(structs.Slot) for i in order]
    offsets += [inner.sinks.offset] if has_sinks else []
    return [(first + offset) // _WORD for offset in offsets]


def _is_persistent(params: Any) -> bool:
    """Whether these are the parameters of a kernel that loads with TMA: Launch of structs.py, not Params."""
    return hasattr(params, "next_item")

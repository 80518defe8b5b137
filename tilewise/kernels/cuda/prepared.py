"""A call made ready: its kernel loaded, its plan on the device, its parameters filled in but for addresses."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewise.derivative import score_slopes
from tilewise.expr import Expr, S
from tilewise.kernels.cuda import gpu, launcher, marshal, marshal_backward, structs
from tilewise.kernels.cuda.backward_rungs import BACKWARD, Hoppers
from tilewise.kernels.cuda.choice import chosen
from tilewise.kernels.cuda.launcher import Room
from tilewise.kernels.cuda.marshal import Tables, View
from tilewise.kernels.cuda.rungs import REFINE, REFINE_BACKWARD, Rung
from tilewise.kernels.cuda.source import Source, assembled
from tilewise.pytorch import graphs
from tilewise.schedule import is_unseen
from tilewise.spec import Attention, Shape, Tile

_WORD = 8  # bytes
OPERANDS = ("q", "k", "v", "out", "lse")  # whose addresses come first in a launch


class Prepared:
    """Launches a kernel on arrays that lie as those it was prepared for, wherever that is.

    Threads may share one: a launch fills in a room of its own.
    """

    def __init__(
        self, device: int, source: Source, blocks: int, params: Any, places: Sequence[int], tables: Sequence[Any],
        refining: Refining | None = None, mapped: Sequence[int] = (), keeps_remainder: bool = False,
    ) -> None:  # fmt: skip
        self.keeps_remainder = keeps_remainder  # whether it stores what rounding takes from out
        self._device, self._blocks = device, blocks
        self._threads, self._shared_bytes = source.threads, source.shared_bytes
        self._kernel = launcher.loaded(source, device)
        self._template, self._places = bytes(params), places
        self._owner = object()  # by which rooms know this, without holding it
        self._next_item = type(params).next_item.offset // _WORD if _is_persistent(params) else None
        self._tables = tables  # held: the template has their address
        self._streams: set[int] = set()  # those on which the tables were ever read
        self._refining = refining
        self._mapped = mapped  # which addresses tensor maps are of

    def launch(self, addresses: Sequence[int]) -> None:
        """On the current stream of the device; the addresses of q, k, v, out, lse, the loaded arrays, of sinks, if
        there are any, and of the remainder, if it keeps one."""
        if gpu.current_device() != self._device:
            with gpu.as_current(self._device):
                return self.launch(addresses)
        gpu.ensure_context(self._device)
        stream, capturing = gpu.current_stream(self._device), gpu.is_capturing()
        room = launcher.take_room()
        if room.owner is not self._owner:
            room.bytes[: len(self._template)] = self._template
            room.owner, room.mapped = self._owner, ()
        for place, address in zip(self._places, addresses, strict=True):
            room.words[place] = address
        if self._next_item is not None:
            self._map(room, tuple([addresses[i] for i in self._mapped]))
            room.words[self._next_item] = launcher.count_on(self._device, stream, capturing)
        if self._refining is not None:
            refined = self._refining.launch(addresses)  # held until the launch: another thread may use this stream
            for place, address in self._refining.places_in(refined):
                room.words[place] = address
        self._hold(stream, capturing)
        gpu.launch(self._kernel.function, self._blocks, self._threads, self._shared_bytes, stream, room.arguments)
        launcher.give_back(room)
        return None

    def _map(self, room: Room, mapped: tuple[int, ...]) -> None:
        """Tensor maps of arrays at these addresses; often they are where those of the last launch were."""
        if mapped == room.mapped:
            return
        for tensor_map, address in zip(room.maps, mapped, strict=False):
            gpu.replace_address(tensor_map, address)
        room.mapped = mapped

    def hold_in_graphs(self, used: Any) -> None:
        """What a launch that a graph captured just now reads."""
        if gpu.is_capturing():
            graphs.hold(used)

    def _hold(self, stream: int, capturing: bool) -> None:
        if capturing:
            graphs.hold(self)
        elif stream not in self._streams:
            for table in self._tables:
                gpu.hold_until_done(table, self._device)
            self._streams.add(stream)


class Refining:
    """What runs before a kernel whose mask reads arrays of the GPU: the tiles' kinds are looked up there.

    Each launch has plans of its own: another may run beside it, with other arrays. numbers: whole ones that refined
    plans take. places: which words of the kernel's parameters say where a part of them is, and which number is the
    part's first.
    """

    def __init__(
        self, launches: Sequence[Prepared], numbers: int, places: Mapping[int, int], takes: int, device: int
    ) -> None:
        self._launches, self._numbers, self._device = launches, numbers, device
        self._places = [(word, 4 * first) for word, first in places.items()]
        self._takes = takes  # of the addresses, so many

    def launch(self, addresses: Sequence[int]) -> Any:
        """The refined plans, in memory of the stream, which what follows on it may read."""
        refined = gpu.whole_numbers(self._numbers, self._device)
        for prepared in self._launches:
            prepared.launch([*addresses[: self._takes], refined.data_ptr()])
        return refined

    def places_in(self, refined: Any) -> Iterator[tuple[int, int]]:
        """Which words of the kernel's parameters have which addresses."""
        first = refined.data_ptr()
        return ((word, first + at) for word, at in self._places)


def prepare(
    named: Rung | None, spec: Attention, shape: Shape, views: dict[str, View], loaded: Sequence[View],
    sinks: View | None, device: int, tile: Tile | None = None,
) -> Prepared | None:  # fmt: skip
    """A call on a device, which must be the current one; None if there is nothing to compute.

    views: q, k, v, out, lse and remainder. loaded: the arrays that the variant reads, in the order of spec.loaded.
    """
    gpu.ensure_context(device)
    rung = chosen(named, shape, views, gpu.capability(device))
    tile = rung.fitting(tile or rung.default_tile(spec, shape), shape)
    tables, numbers = launcher.tables_on(device, spec, shape, tile, rung)
    blocks = marshal.blocks(shape, tables)
    if blocks == 0:
        return None
    source, slots = assembled(rung, spec, shape, tile, tables=all(view.address % 16 == 0 for view in loaded))
    place = {id(slot.array): i for i, slot in enumerate(slots)}
    order = [place[id(slot.array)] for slot in spec.loaded]
    in_order = [view for _, view in sorted(zip(order, loaded, strict=True), key=lambda pair: pair[0])]
    params = marshal.params(spec, shape, tables, numbers.data_ptr(), views, sinks, in_order, source.constants)
    if rung.persistent:
        maps = {
            name: x.encoded()
            for name, x in marshal.tensor_maps(views, shape.dtype, tile, source.table, in_order).items()
        }
        blocks = min(blocks, gpu.multiprocessors(device))
        params = marshal.launch(params, spec, shape, tables, maps, 0, blocks)
    refining = _refining(spec, shape, tile, params, tables, order, device, numbers) if rung.persistent else None
    mapped = [0, 1, 2] if source.table is None else [0, 1, 2, len(OPERANDS) + order.index(source.table.slot)]
    keeps = spec.stores_remainder(shape.dtype)
    places = _places(params, order, sinks is not None, keeps)
    return Prepared(device, source, blocks, params, places, [numbers], refining, mapped, keeps)


def prepare_backward(
    spec: Attention, shape: Shape, views: dict[str, View], loaded: Sequence[View], device: int, tile: Tile | None = None
) -> list[Prepared]:
    """The kernels of a backward pass, one after the other; views: as in `prepare`, and structs.BACKWARD_ARRAYS.

    The addresses of a launch are those of q, k, v, out, lse, the loaded arrays, and structs.BACKWARD_ARRAYS.
    """
    gpu.ensure_context(device)
    made = []
    for rung in BACKWARD:
        fitting = rung.fitting(tile or rung.default_tile(spec, shape), shape)
        tables, numbers = launcher.tables_on(device, spec, shape, fitting, rung)
        blocks = marshal.blocks(shape, tables, rung.by_key)
        if blocks == 0:
            continue
        source, full, order = backward_of(rung, spec, shape, fitting, views, loaded, tables, numbers)
        further = [getattr(type(full), name).offset // _WORD for name in structs.BACKWARD_ARRAYS]
        made.append(Prepared(device, source, blocks, full, [*_places(full, order, False), *further], [numbers]))
    return made


def prepare_backward_sm90(
    hoppers: Hoppers, spec: Attention, shape: Shape, views: dict[str, View], loaded: Sequence[View], device: int
) -> tuple[list[Prepared], list[int]]:
    """Hopper's kernels of a backward pass, as above, and how many floats each of structs.WORKSPACE has, whose addresses
    follow the others. There are queries and keys."""
    gpu.ensure_context(device)
    rungs = hoppers.rungs(shape)
    tile = rungs[0].default_tile(spec, shape)
    by_key, numbers = launcher.tables_on(device, spec, shape, tile, rungs[0])
    by_query, numbers_by_query = launcher.tables_on(device, spec, shape, tile, BACKWARD[0])
    copied = all(view.address % 16 == 0 for view in loaded)
    at_once = gpu.multiprocessors(device)
    made = []
    for number, rung in enumerate(rungs):
        source, full, order = backward_of(rung, spec, shape, tile, views, loaded, by_key, numbers, copied=copied)
        in_order = [loaded[order.index(i)] for i in range(len(order))]
        names = (*structs.BACKWARD_OPERANDS, *structs.BACKWARD_RESULTS)
        described = marshal_backward.maps(views, shape.dtype, tile, source.table, in_order, names)
        maps = {name: x.encoded() for name, x in described.items()}
        at = numbers_by_query.data_ptr()
        launch = marshal_backward.launch(full, shape, tile, by_key, by_query, at, maps, at_once, hoppers.ordered)
        blocks = marshal_backward.blocks(launch, shape, by_query, at_once)[number]
        refining = None
        if rung is rungs[1]:  # which follows the plans
            tables_at = at, numbers.data_ptr()
            refining = _backward_refining(spec, shape, tile, launch, by_query, by_key, tables_at, order, device)
        inner, kind = type(launch).backward.offset, type(full)
        further = [(inner + getattr(kind, name).offset) // _WORD for name in structs.BACKWARD_ARRAYS]
        further += [getattr(type(launch), name).offset // _WORD for name in structs.WORKSPACE]
        first = len(OPERANDS) + len(order)
        mapped = [0, 1, 2, *(first + structs.BACKWARD_ARRAYS.index(name) for name in names[3:])]
        mapped += [] if source.table is None else [len(OPERANDS) + order.index(source.table.slot)]
        places = [place + inner // _WORD for place in _places(full, order, False)]
        tables = [numbers, numbers_by_query]
        made.append(Prepared(device, source, blocks, launch, [*places, *further], tables, refining, mapped))
    return made, list(hoppers.workspace(tile, shape, marshal.blocks(shape, by_query)).values())


def backward_of(
    rung: Rung, spec: Attention, shape: Shape, tile: Tile, views: dict[str, View], loaded: Sequence[View],
    tables: Tables, numbers: Any, slope: Expr | None = None, copied: bool = False,
) -> tuple[Source, Any, list[int]]:  # fmt: skip
    """A kernel's source and its Backward; and the places of the loaded arrays in it. slope: by S, unless told. copied:
    whether the copy engine may bring what the variant reads."""
    slope = score_slopes(spec)[S] if slope is None else slope
    source, slots = assembled(rung, spec, shape, tile, tables=copied, slope=slope)
    place = {id(slot.array): i for i, slot in enumerate(slots)}
    order = [place[id(slot.array)] for slot in spec.loaded]
    in_order = [view for _, view in sorted(zip(order, loaded, strict=True), key=lambda pair: pair[0])]
    operands = {name: views[name] for name in OPERANDS}
    call = marshal.params(spec, shape, tables, numbers.data_ptr(), operands, None, in_order, source.constants)
    return source, marshal_backward.params(call, {name: views[name] for name in structs.BACKWARD_ARRAYS}), order


def _refining(
    spec: Attention, shape: Shape, tile: Tile, params: Any, tables: Tables, order: Sequence[int], device: int,
    numbers: Any,
) -> Refining | None:  # fmt: skip
    if not is_unseen(spec) or 4 * marshal.refined_numbers(tables, tile) > marshal.REFINED_AT_MOST:
        return None
    look, _ = assembled(REFINE, spec, shape, tile)
    join = replace(look, threads=REFINE.JOINERS, shared_bytes=0)
    blocks = {look: marshal.refinement_blocks(tables, tile, look.threads), join: tables.n_records}
    launches = []
    for source in (look, join):
        call = marshal.refinement(params.params, tables, joins=source is join)
        places = [*_places(call, order, spec.sinks is not None), type(call).refined.offset // _WORD]
        launches.append(Prepared(device, source, blocks[source], call, places, [numbers]))
    kind = type(params)
    runs = kind.params.offset + type(params.params).runs.offset
    parts = {kind.records.offset // _WORD: 0, runs // _WORD: marshal.RECORD * tables.n_records}
    takes = len(OPERANDS) + len(order) + (spec.sinks is not None)
    return Refining(launches, marshal.refined_numbers(tables, tile), parts, takes, device)


def _backward_refining(
    spec: Attention, shape: Shape, tile: Tile, launch: Any, by_query: Tables, by_key: Tables, at: tuple[int, int],
    order: Sequence[int], device: int,
) -> Refining | None:  # fmt: skip
    """Before Hopper's backward pass, whose parameters are told that plans come in pairs; at: where the tables are."""
    sizes = marshal_backward.refined_parts(by_query, by_key, tile)
    total = sum(sizes.values())
    if not is_unseen(spec) or by_query.most_tiles == 0 or 4 * total > marshal.REFINED_AT_MOST:
        return None
    look, _ = assembled(REFINE_BACKWARD, spec, shape, tile)
    join = replace(look, threads=REFINE_BACKWARD.JOINERS, shared_bytes=0)
    blocks = marshal_backward.refinement_blocks(by_query, by_key, tile, look.threads)
    launches = []
    for source, count in zip((look, join), blocks, strict=True):
        call = marshal_backward.refinement(launch.backward.params, by_query, by_key, at, joins=source is join)
        places = [*_places(call, order, False), type(call).refined.offset // _WORD]
        launches.append(Prepared(device, source, count, call, places, []))
    launch.offsets_apart = 2
    kind, inner = type(launch), type(launch).backward.offset + type(launch.backward).params.offset
    params = type(launch.backward.params)
    words = {
        "offsets_by_query": kind.offsets.offset, "runs_by_query": kind.runs.offset,
        "offsets_by_key": inner + params.offsets.offset, "runs_by_key": inner + params.runs.offset,
    }  # fmt: skip
    firsts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    parts = {word // _WORD: firsts[name] for name, word in words.items()}
    return Refining(launches, total, parts, len(OPERANDS) + len(order), device)


def _places(params: Any, order: Sequence[int], has_sinks: bool, has_remainder: bool = False) -> list[int]:
    """Where the addresses of a launch stand in its parameters, counted in words; `order`: of the loaded arrays."""
    has_more = hasattr(params, "params")  # Launch and Refinement have Params in them
    inner = type(params.params if has_more else params)
    first = type(params).params.offset if has_more else 0
    offsets = [getattr(inner, name).offset for name in OPERANDS]
    offsets += [inner.arrays.offset + i * ctypes.sizeof(structs.Slot) for i in order]
    offsets += [inner.sinks.offset] if has_sinks else []
    offsets += [inner.remainder.offset] if has_remainder else []
    return [(first + offset) // _WORD for offset in offsets]


def _is_persistent(params: Any) -> bool:
    """Whether these are the parameters of a kernel that loads with TMA: Launch of structs.py, not Params."""
    return hasattr(params, "next_item")

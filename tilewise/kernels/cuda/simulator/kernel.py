"""The kernel system cuda-sim: the CUDA sources on CPU arrays. For tests and for learning; `auto` never takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.derivative import score_slopes
from tilewise.expr import Expr, Loaded, S, with_arrays
from tilewise.kernels import host
from tilewise.kernels.cuda import marshal, marshal_backward, simulator, structs, support
from tilewise.kernels.cuda.array_gradients import gradients
from tilewise.kernels.cuda.array_rungs import ANY_CALL, CELLS, copies
from tilewise.kernels.cuda.backward_rungs import BACKWARD, Hoppers, hoppers_backward
from tilewise.kernels.cuda.choice import HOPPER, chosen, suited
from tilewise.kernels.cuda.marshal import View
from tilewise.kernels.cuda.rungs import Rung, named
from tilewise.kernels.cuda.simulator import Event, Order
from tilewise.kernels.cuda.source import Source, assembled
from tilewise.softmax import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

MULTIPROCESSORS = 2  # of the simulated GPU: enough for persistent blocks to share the work


class CudaSimKernel:
    """`rung` names one of the ladder's kernels, as for CudaKernel; order and seed say how threads take their turns.

    trace: a list for what the warps of forward passes did; None: nothing is noted.
    """

    summary = "the CUDA sources on the CPU simulator; named, never chosen"

    def __init__(
        self, rung: str | None = None, order: Order = Order.FORWARD, seed: int = 1, trace: list[Event] | None = None
    ) -> None:
        self.name = "cuda-sim" if rung is None else f"cuda-sim/{rung}"
        self.rung, self.order, self.seed = None if rung is None else named(rung), order, seed
        self.trace = trace
        self._backward = hoppers_backward(rung)

    def unavailable(self) -> str | None:
        return simulator.unavailable()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        of_rung = None if self.rung is None else self.rung.unsupported(shape)
        named = None if self.rung is None else self.rung.name
        return host.unsupported(shape) or support.unsupported(spec, shape, named) or of_rung

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return (self.rung or suited(shape, HOPPER)).default_tile(spec, shape)

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        run = partial(_forward, named=self.rung, tile=tile, order=self.order, seed=self.seed, trace=self.trace)
        return host.run_forward(run, spec, q, k, v)

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        run = partial(_backward, hoppers=self._backward, tile=tile, order=self.order, seed=self.seed)
        return host.run_backward(run, spec, q, k, v, saved, d_out, d_lse)


def _forward(
    spec: Attention, q: Array, k: Array, v: Array, named: Rung | None, tile: Tile | None, order: Order, seed: int,
    trace: list[Event] | None,
) -> Partial:  # fmt: skip
    spec, shape = _with_walkable(spec), Shape.of(spec, q, k, v)
    stored = np.dtype(np.float32) if spec.wide_out else q.dtype
    # As q lies, so that a caller's layout goes on.
    out = np.empty_like(q, shape=(*q.shape[:3], shape.d_v), dtype=stored)
    if out.strides[-1] != out.itemsize:  # q is broadcast
        out = np.empty(out.shape, out.dtype)
    lse = np.empty(q.shape[:3], np.float32)
    remainder = np.empty_like(out) if spec.stores_remainder(shape.dtype) else None
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **({} if remainder is None else {"remainder": remainder})}
    kept = {name: _walkable(x) for name, x in given.items()}
    views = {name: View.of_numpy(x) for name, x in kept.items()}
    rung = chosen(named, shape, views, HOPPER)
    tile = rung.fitting(tile or rung.default_tile(spec, shape), shape)
    tables = marshal.tables(spec, shape, tile, rung)
    blocks = marshal.blocks(shape, tables)
    if blocks == 0:
        return Partial(out, lse, remainder)
    begins = [int(slot.array.ctypes.data) for slot in spec.loaded]
    text, slots = assembled(rung, spec, shape, tile, simulator.headers(), all(at % 16 == 0 for at in begins))
    sinks = None if spec.sinks is None else _walkable(arrays.as_numpy(spec.sinks))
    loaded = [slot.array for slot in slots]
    loaded_views = [View.of_numpy(x) for x in loaded]
    params = marshal.params(
        spec, shape, tables, int(tables.numbers.ctypes.data), views,
        None if sinks is None else View.of_numpy(sinks), loaded_views, text.constants,
    )  # fmt: skip
    if rung.persistent:
        count = np.zeros(1, np.int32)
        made = marshal.tensor_maps(views, shape.dtype, tile, text.table, loaded_views)
        maps = {name: bytes(x.simulated()) for name, x in made.items()}
        blocks = min(blocks, MULTIPROCESSORS)
        params = marshal.launch(params, spec, shape, tables, maps, int(count.ctypes.data), blocks)
    _launch(text, params, blocks, order, seed, trace)
    return Partial(out, lse, remainder)


def _backward(
    spec: Attention, q: Array, k: Array, v: Array, saved: Partial, d_out: Array, d_lse: Array | None,
    hoppers: Hoppers | None, tile: Tile | None, order: Order, seed: int,
) -> Grads:  # fmt: skip
    """By Hopper's kernels, or by the tiled ones, d_q first, which leaves delta to the other.

    Those serve `forward_sm90` too where a wide gradient of the output makes all float32.
    """
    spec = _with_walkable(spec)
    dtype = arrays.dtype_name(q) if arrays.dtype_name(d_out) == arrays.dtype_name(q) else "float32"  # nothing is lost
    given = {"q": q, "k": k, "v": v, "out": saved.out, "d_out": d_out}
    given |= {} if saved.remainder is None else {"remainder": saved.remainder}
    given = {name: _rows(arrays.narrow(arrays.widen(x, np.float32), dtype)) for name, x in given.items()}
    wide = {"lse": saved.lse, **({} if d_lse is None else {"d_lse": d_lse})}
    given |= {name: np.ascontiguousarray(x, np.float32) for name, x in wide.items()}
    made = {f"d_{name}": np.zeros_like(given[name], order="C") for name in ("q", "k", "v")}
    made["delta"] = np.zeros_like(given["lse"])
    kept = {name: _walkable(x) for name, x in {**given, **made}.items()}
    views = {name: View.of_numpy(x) for name, x in kept.items()}
    shape = Shape.of(spec, given["q"], given["k"], given["v"])
    hopper = hoppers is not None and hoppers.unsupported(shape) is None
    if hoppers is not None and hopper:
        _launch_sm90(hoppers, spec, shape, views, order, seed)
    else:
        _launch_tiled(spec, shape, views, tile, order, seed)
    d_q, d_k, d_v = (arrays.narrow(arrays.widen(made[f"d_{name}"], np.float32), arrays.dtype_name(x))
                     for name, x in (("q", q), ("k", k), ("v", v)))  # fmt: skip
    of_sinks = None if spec.sinks is None else d_sinks(spec.sinks, given["lse"], made["delta"])
    of_arrays = gradients(_Simulated(spec, shape, views, order, seed), spec, shape, tile, hopper)
    stored = zip(of_arrays, spec.wanted, strict=True)
    return Grads(d_q, d_k, d_v, of_sinks, tuple(arrays.narrow(x, arrays.dtype_name(slot.array)) for x, slot in stored))


class _Simulated:
    """Where gradients of arrays are summed up (array_gradients.Machine)."""

    at_once = MULTIPROCESSORS

    def __init__(self, spec: Attention, shape: Shape, views: dict[str, View], order: Order, seed: int) -> None:
        self._spec, self._shape, self._views, self._order, self._seed = spec, shape, views, order, seed

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.zeros(shape, dtype)

    def tables(self, rung: Rung, tile: Tile) -> marshal.Tables:
        return marshal.tables(self._spec, self._shape, tile, rung)

    def sum_up(self, rung: Rung, tile: Tile, slope: Expr, sums: Array, told: dict[str, int], count: int) -> None:
        tables = self.tables(rung, tile)
        text, full, held = _backward_of(rung, self._spec, self._shape, tile, self._views, tables, slope, copies(rung))
        params = marshal_backward.sums(full, View.of_numpy(sums), told)
        if copies(rung):
            loaded = [View.of_numpy(x) for x in held]
            maps = marshal_backward.maps(self._views, self._shape.dtype, tile, text.table, loaded)
            params = marshal_backward.sums_launch(params, {name: bytes(x.simulated()) for name, x in maps.items()})
        _launch(text, params, count, self._order, self._seed)

    def readers(
        self, key: tuple[Any, ...], slots: Sequence[Loaded], make: Callable[[], tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        return make()

    def gather(self, sums: Array, cells: Array, order: Array, begins: Array) -> None:
        sums = np.ascontiguousarray(sums)
        told, count = marshal_backward.gathering(*map(View.of_numpy, (sums, cells, order, begins)))
        text, _ = assembled(CELLS, *ANY_CALL, simulator.headers())
        _launch(text, told, CELLS.blocks(count), self._order, self._seed)


def _launch_tiled(
    spec: Attention, shape: Shape, views: dict[str, View], tile: Tile | None, order: Order, seed: int
) -> None:
    for rung in BACKWARD:
        fitting = rung.fitting(tile or rung.default_tile(spec, shape), shape)
        tables = marshal.tables(spec, shape, fitting, rung)
        blocks = marshal.blocks(shape, tables, rung.by_key)
        if blocks > 0:
            text, full, _held = _backward_of(rung, spec, shape, fitting, views, tables)
            _launch(text, full, blocks, order, seed)


def _launch_sm90(
    hoppers: Hoppers, spec: Attention, shape: Shape, views: dict[str, View], order: Order, seed: int
) -> None:
    rungs = hoppers.rungs(shape)
    tile = rungs[0].default_tile(spec, shape)
    by_key, by_query = (marshal.tables(spec, shape, tile, rung) for rung in (rungs[0], BACKWARD[0]))
    q_tiles = marshal.blocks(shape, by_query)
    if q_tiles == 0:
        return
    numbers = hoppers.workspace(tile, shape, q_tiles)
    space = {name: np.full(count, -1, np.int32) for name, count in numbers.items()}  # NaN, as floats
    space["next_item"] = np.zeros(1, np.int32)
    for number, rung in enumerate(rungs):
        text, full, held = _backward_of(rung, spec, shape, tile, views, by_key, copied=True)
        loaded = [View.of_numpy(x) for x in held]
        names = (*structs.BACKWARD_OPERANDS, *structs.BACKWARD_RESULTS)
        copied = marshal_backward.maps(views, shape.dtype, tile, text.table, loaded, names)
        maps = {name: bytes(x.simulated()) for name, x in copied.items()}
        at = int(by_query.numbers.ctypes.data)
        made = marshal_backward.launch(full, shape, tile, by_key, by_query, at, maps, MULTIPROCESSORS, hoppers.ordered)
        for name, x in space.items():
            setattr(made, name, int(x.ctypes.data))
        blocks = marshal_backward.blocks(made, shape, by_query, MULTIPROCESSORS)[number]
        _launch(text, made, blocks, order, seed)


def _backward_of(
    rung: Rung, spec: Attention, shape: Shape, tile: Tile, views: dict[str, View], tables: marshal.Tables,
    slope: Expr | None = None, copied: bool = False,
) -> tuple[Source, Any, list[Array]]:  # fmt: skip
    """A kernel's source and its Backward; and the arrays that it reads, to be held until it ran. slope: by S, unless
    told. copied: whether the copy engine may bring what it reads."""
    slope = score_slopes(spec)[S] if slope is None else slope
    begins = [int(slot.array.ctypes.data) for slot in spec.loaded]
    copied = copied and all(at % 16 == 0 for at in begins)
    text, slots = assembled(rung, spec, shape, tile, simulator.headers(), copied, slope)
    loaded = [slot.array for slot in slots]
    operands = {name: views[name] for name in ("q", "k", "v", "out", "lse")}
    at, loaded_views = int(tables.numbers.ctypes.data), [View.of_numpy(x) for x in loaded]
    call = marshal.params(spec, shape, tables, at, operands, None, loaded_views, text.constants)
    further = {name: views[name] for name in structs.BACKWARD_ARRAYS if name in views}
    return text, marshal_backward.params(call, further), loaded


def _launch(text: Source, params: Any, blocks: int, order: Order, seed: int, trace: list[Event] | None = None) -> None:
    simulator.compile_source(text.text).launch(
        params, grid=blocks, threads=text.threads, shared_bytes=text.shared_bytes, order=order, seed=seed, trace=trace
    )


def _rows(x: Array) -> Array:
    """Numbers of a row side by side."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def _with_walkable(spec: Attention) -> Attention:
    """The same over arrays that pointers can walk: source texts, made by how these lie, then fit the copies too."""
    copies = {id(slot.array): _walkable(arrays.as_numpy(slot.array)) for slot in spec.loaded}
    if all(copies[id(slot.array)] is slot.array for slot in spec.loaded):
        return spec
    mask, score = (None if x is None else with_arrays(x, lambda slot: copies[id(slot.array)]) for x in (
        spec.mask, spec.score))  # fmt: skip
    return replace(spec, mask=mask, score=score)


def _walkable(x: Array) -> Array:
    """An array that a pointer to its numbers can walk: a field of records, say, may lie anywhere."""
    # NumPy calls every bfloat16 array aligned: to it they are records.
    walks = not x.ctypes.data % x.itemsize and not any(step % x.itemsize for step in x.strides)
    return x if walks else np.array(x, order="C")  # in which the numbers of a row lie side by side

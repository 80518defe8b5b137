"""The backward pass: engine/backward.h on every split of the keys, and how gradients of arrays are summed."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.derivative import ONE, ZERO, score_slopes
from tilewise.expr import Expr, S
from tilewise.kernels.cpu import library, structs
from tilewise.kernels.cpu.marshal import Marshal, splits
from tilewise.kernels.cpu.ops import Assembler, Bytecode
from tilewise.softmax import d_sinks
from tilewise.spec import Attention, Grads, Partial, Shape, Tile
from tilewise.walking import remembered

_PRIVATE_CELLS = 1 << 21  # of all tasks together: up to here each task has sums of its own


class Turns(IntEnum):
    """Which tasks may run at the same time, as in engine.h."""

    AT_ONCE = 0
    HEADS_IN_TURN = 1
    ALL_IN_TURN = 2


def backward(
    spec: Attention, q: Array, k: Array, v: Array, saved: Partial, d_out: Array, d_lse: Array | None, tile: Tile
) -> Grads:
    """Gradients of sum(out * d_out) + sum(lse * d_lse)."""
    shape = Shape.of(spec, q, k, v)
    dtype = arrays.compute_dtype(shape.dtype)
    if arrays.dtype_name(d_out) != shape.dtype:
        return _widened(spec, q, k, v, saved, d_out, d_lse, tile)
    d_q, d_k, d_v = (np.empty_like(x, order="C") for x in (q, k, v))
    delta = np.zeros(saved.lse.shape, dtype)  # the engine adds to it
    if d_lse is not None:
        delta -= arrays.widen(d_lse, dtype)
    marshal = Marshal(spec, shape, tile)
    call = structs.BackwardCall(
        marshal.forward(q, k, v, saved, backward=True),
        marshal.array(d_out), *(marshal.output(x) for x in (delta, d_q, d_k, d_v)),
        slope_at=-1,
    )  # fmt: skip
    totals = _score(spec, shape, marshal, call)
    library.call("tilewise_backward", ctypes.byref(call))
    return Grads(
        d_q, d_k, d_v,
        None if spec.sinks is None else d_sinks(spec.sinks, saved.lse, delta),
        tuple(_finished(totals[id(x.array)], x.array) for x in spec.wanted),
    )  # fmt: skip


def _widened(
    spec: Attention, q: Array, k: Array, v: Array, saved: Partial, d_out: Array, d_lse: Array | None, tile: Tile
) -> Grads:
    """The engine takes one type for all: with another d_out, the one computed with, so that no number of it is lost."""
    stored = arrays.dtype_name(q)
    dtype = arrays.compute_dtype(stored)
    q, k, v, out, d_out = (arrays.widen(x, dtype) for x in (q, k, v, saved.out, d_out))
    if saved.remainder is not None:
        out = out + arrays.widen(saved.remainder, dtype)
    grads = backward(spec, q, k, v, Partial(out, saved.lse), d_out, d_lse, tile)
    d_q, d_k, d_v = (arrays.narrow(x, stored) for x in (grads.q, grads.k, grads.v))
    return replace(grads, q=d_q, k=d_k, v=d_v)


class _Read(NamedTuple):
    """A load whose array wants a gradient: the registers of both, and the variables that are its indices."""

    array: Any
    slope: int
    load: int
    by: frozenset[str]


class _Score(NamedTuple):
    """A score's program, with its slopes."""

    code: Bytecode
    slope_at: int
    reads: list[_Read]


def _assemble(score: Expr, spec: Attention, wide: bool) -> _Score:
    assembler = Assembler(wide)
    at = assembler.add(score).number
    slopes = score_slopes(spec)
    slope = slopes.pop(S)
    slope_at = -1 if slope is ONE else assembler.add(slope).number
    reads = [
        _Read(
            read.payload.array, assembler.add(slope).number, assembler.add(read).number,
            frozenset(index.payload for index in read.args if index.op == "var"),
        )
        for read, slope in slopes.items()
        if slope is not ZERO and math.prod(read.payload.array.shape)
    ]  # fmt: skip
    return _Score(Bytecode(assembler.table(), assembler.slots, at), slope_at, reads)


def _score(spec: Attention, shape: Shape, marshal: Marshal, call: structs.BackwardCall) -> dict[int, Array]:
    """The score's program with its slopes; and the sums for arrays that want gradients, by their id."""
    tasks = shape.batch * shape.heads_k * sum(splits(part.n_k) for part, _, _ in shape.sequences(spec.lengths))
    totals = {id(x.array): _zeros(tuple(x.array.shape), tasks) for x in spec.wanted}
    if spec.score is None:
        return totals
    # Assembled once for each choice of arrays that want gradients: those the score holds, so ids tell them apart.
    wide = marshal.is_wide(spec.score)
    made = remembered(spec.score, ("cpu backward", wide, *totals), lambda score: _assemble(score, spec, wide))
    call.forward.score, call.forward.score_at = marshal.program(made.code), made.code.at
    call.slope_at = made.slope_at
    grads = []
    for read in made.reads:
        total = totals[id(read.array)]
        if len(total) == 1:
            again = sum(x.array is read.array for x in made.reads) > 1
            call.turns = max(call.turns, Turns.ALL_IN_TURN if again else _turns(read.by, spec, shape))
        grid = total[0, ...]
        grads.append(
            structs.ArrayGrad(
                read.slope, read.load, marshal.slot(grid), marshal.data(total), cells=grid.size, copies=len(total)
            )
        )
    call.n_grads, call.grads = len(grads), marshal.table(structs.ArrayGrad, grads)
    return totals


def _zeros(shape: tuple[int, ...], tasks: int) -> Array:
    """Sums for an array: for each task its own where that is little memory, else one for all of them."""
    copies = tasks if math.prod(shape) * tasks <= _PRIVATE_CELLS else 1
    return np.zeros((max(copies, 1), *shape))


def _turns(by: frozenset[str], spec: Attention, shape: Shape) -> Turns:
    """Tasks are a key head of a batch or sequence, and a split of its keys: which of them read cells of their own?"""
    keys = bool(by & {"K", "KP"}) or all(splits(part.n_k) == 1 for part, _, _ in shape.sequences(spec.lengths))
    heads = bool(by & {"H", "HK"}) or shape.heads_k == 1
    sequences = 1 if spec.lengths is None else len(spec.lengths.q) - 1
    batches = bool(by & {"B", "QP", "KP"}) if spec.lengths is not None else "B" in by
    batches = batches or shape.batch * sequences == 1
    if not keys:
        return Turns.ALL_IN_TURN
    return Turns.AT_ONCE if heads and batches else Turns.HEADS_IN_TURN


def _finished(total: Array, array: object) -> Array:
    summed = total[0, ...] if len(total) == 1 else np.asarray(total.sum(axis=0))
    return arrays.narrow(summed, arrays.dtype_name(array))

"""One random call from one seed: sizes, layouts, types, magnitudes, a variant, a tile, gradients to pull back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.fuzzing.dice import Dice
from tests.fuzzing.memory import Memory, any_strides, store
from tests.fuzzing.menu import Anything, ForTensorCores, Lengths
from tests.fuzzing.variants import Variants, drawn_options
from tilewise import arrays, validate
from tilewise.arrays import Array
from tilewise.spec import Positions, Shape, Tile
from tilewise.validate import Call


@dataclass(frozen=True)
class Wanted:
    """Which calls to draw, and on which device to make them."""

    backward_share: float = 0.3  # of calls with a backward pass
    half_share: float = 0.0  # of calls that tensor cores can compute
    pool: int | None = None  # about so many kinds of calls, each a kernel to compile; None: any number
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Drawn:
    """A call to make, and how."""

    call: Call
    tile: Tile | None
    threads: int
    d_out: Array | None  # of a backward pass, if there is to be one
    d_lse: Array | None
    saved_elsewhere: bool  # the backward pass gets another system's out and lse
    names: list[str]  # of the variants it is made of
    kind: str  # dense, packed, decode or part


def draw(compiled: Dice, dice: Dice, memory: Memory, wanted: Wanted) -> Drawn:
    """The next random call; its arrays are in `memory`. ValueError if the variant is refused at these sizes.

    compiled: decides what kernels are compiled for, `dice` the rest; they may be the same.
    """
    menu = ForTensorCores() if wanted.half_share and compiled.chance(wanted.half_share) else Anything()
    kind = compiled.weighted({"dense": 6, "packed": 1.5, "decode": 1, "part": 1.5})
    dtype = compiled.weighted(menu.dtypes)
    lengths = menu.packed_lengths(dice) if kind == "packed" else None
    shape = _shape(menu, compiled, dice, kind, lengths)
    sizes = _sizes(shape, lengths, dice)
    variants = Variants(compiled, memory, sizes, mask_arrays=kind in ("dense", "decode"), reach=menu.reach)
    options = drawn_options(variants)
    if compiled.chance(0.2):
        options["sinks"] = _sinks(compiled, memory, shape.heads)
        variants.names.append("sinks")
    if compiled.chance(0.4):
        options["scale"] = compiled.one_of([0.3, 1.0, 0.05, -0.5, 0.0])
    options["batch_invariant"] = compiled.chance(0.2)
    q, k, v = menu.inputs(dice, memory, shape, dtype, lengths)
    if lengths is not None:
        q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
        call = validate.prepare_varlen(q, k, v, *lengths, **options)
    else:
        call = _part_call(q, k, v, shape, options) if kind == "part" else validate.prepare(q, k, v, **options)
    d_out, d_lse = _gradients(dice, memory, call) if dice.chance(wanted.backward_share) else (None, None)
    tile, threads, saved_elsewhere = menu.tile(compiled, shape), dice.between(2, 4), dice.chance(0.2)
    return Drawn(call, tile, threads, d_out, d_lse, saved_elsewhere, variants.names or ["full"], kind)


# -- sizes ------------------------------------------------------------------------------------------------------------


def _shape(menu: Anything, compiled: Dice, dice: Dice, kind: str, lengths: Lengths | None) -> Shape:
    heads_k, group = dice.weighted({1: 4, 2: 3, 3: 1, 5: 0.5}), dice.weighted({1: 4, 2: 2, 3: 1, 4: 1, 8: 0.5})
    batch, n_q, n_k = dice.weighted({1: 4, 2: 2, 3: 1}), menu.length(dice), menu.length(dice)
    d = menu.head_dim(compiled)
    d_v = d if compiled.chance(0.6) else menu.head_dim(compiled)
    if kind == "decode":
        n_q, n_k, group = 1, dice.between(100, 4000), dice.between(1, 16)
        d, d_v = min(d, 128), min(d_v, 128)
    if lengths is not None:
        batch, n_q, n_k = 1, int(lengths[0][-1]), int(lengths[1][-1])
    while batch * heads_k * group * menu.rows(n_q) * max(n_k, 1) > menu.most_scores and batch * heads_k * group > 1:
        batch, heads_k, group = max(batch - 1, 1), max(heads_k - 1, 1), max(group // 2, 1)
    shape = Shape(batch, heads_k * group, heads_k, n_q, n_k, d, d_v)
    return _part(dice, shape) if kind == "part" else shape


def _part(dice: Dice, shape: Shape) -> Shape:
    """Rows and keys of longer sequences."""
    origin_q, origin_k = dice.between(0, 60), dice.between(0, 60)
    total_q = origin_q + shape.n_q + dice.between(0, 40)
    total_k = origin_k + shape.n_k + dice.between(0, 40)
    return replace(shape, origin_q=origin_q, origin_k=origin_k, total_q=total_q, total_k=total_k)


def _sizes(shape: Shape, lengths: Lengths | None, dice: Dice) -> dict[str, int]:
    """What a table read by a variable must have as its size."""
    n_q, n_k, batch = shape.total_q, shape.total_k, shape.batch
    if lengths is not None:
        batch = len(lengths[0]) - 1
        n_q, n_k = (int(np.diff(x).max()) for x in lengths)
        # A table by position may be longer than any sequence, but not just as long as all together.
        longer = dice.between(0, 9)
        n_q, n_k = (n if n + longer == total else n + longer for n, total in ((n_q, shape.n_q), (n_k, shape.n_k)))
    return {
        "B": batch, "H": shape.heads, "HK": shape.heads_k, "Q": n_q, "K": n_k, "QP": shape.n_q, "KP": shape.n_k,
    }  # fmt: skip


# -- arrays -----------------------------------------------------------------------------------------------------------


def _sinks(dice: Dice, memory: Memory, heads: int) -> Array:
    values = dice.one_of([1.0, 1.0, 10.0]) * dice.normal((heads,))
    if dice.chance(0.2):
        values[dice.below(heads)] = -np.inf
    return any_strides(values, dice.one_of(arrays.FLOAT_DTYPES), memory, dice)


def _part_call(q: Array, k: Array, v: Array, shape: Shape, options: dict[str, Any]) -> Call:
    """A call whose rows and keys are part of longer sequences, which kernels know and the public functions do not."""
    mask, score = options.pop("mask", None), options.pop("score", None)
    call = validate.prepare(q, k, v, **options)
    both = mask if call.spec.mask is None else call.spec.mask if mask is None else call.spec.mask & mask
    where = Positions(shape.origin_q, shape.origin_k, shape.total_q, shape.total_k)
    call = replace(call, spec=replace(call.spec, mask=both, score=validate.score_expression(score), positions=where))
    validate.check_variant(call.spec, call.shape)
    return call


def _gradients(dice: Dice, memory: Memory, call: Call) -> tuple[Array, Any]:
    """d_out and d_lse as callers pass them: of any strides, a sum's broadcast 1 included, at times of another type."""
    s = call.shape
    rows = (s.batch, s.heads, s.n_q)
    dtype = dice.one_of(arrays.FLOAT_DTYPES) if dice.chance(0.15) else s.dtype
    if dice.chance(0.1):
        d_out = np.broadcast_to(store(np.ones(()), dtype, memory, dice), (*rows, s.d_v))
    else:
        d_out = any_strides(dice.normal((*rows, s.d_v)), dtype, memory, dice)
    if dice.chance(0.4):
        return d_out, None
    return d_out, any_strides(dice.normal(rows), str(arrays.compute_dtype(s.dtype)), memory, dice)

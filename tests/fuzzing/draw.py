"""One random call from one seed: sizes, layouts, types, magnitudes, a variant, a tile, gradients to pull back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.fuzzing.dice import Dice
from tests.fuzzing.memory import Memory, any_strides, laid_out, store
from tests.fuzzing.variants import Variants, drawn_options
from tilewise import arrays, validate
from tilewise.arrays import Array
from tilewise.spec import Positions, Shape, Tile
from tilewise.validate import Call

MOST_SCORES = 60_000  # of a call: the reference keeps them all, several times over
MOST_TILES = 400  # a tile costs NumPy a fixed time
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 2}


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


def draw(dice: Dice, memory: Memory, backward_share: float) -> Drawn:
    """The next random call; its arrays are in `memory`. ValueError if the variant is refused at these sizes."""
    kind = dice.weighted({"dense": 6, "packed": 1.5, "decode": 1, "part": 1.5})
    dtype = dice.weighted(DTYPES)
    lengths = _packed_lengths(dice) if kind == "packed" else None
    shape = _shape(dice, kind, lengths)
    variants = Variants(dice, memory, _sizes(shape, lengths, dice), mask_arrays=kind in ("dense", "decode"))
    options = drawn_options(variants)
    if dice.chance(0.2):
        options["sinks"] = _sinks(dice, memory, shape.heads)
        variants.names.append("sinks")
    if dice.chance(0.4):
        options["scale"] = dice.one_of([0.3, 1.0, 0.05, -0.5, 0.0])
    options["batch_invariant"] = dice.chance(0.2)
    q, k, v = _inputs(dice, memory, shape, dtype)
    if lengths is not None:
        q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
        call = validate.prepare_varlen(q, k, v, *lengths, **options)
    else:
        call = _part_call(q, k, v, shape, options) if kind == "part" else validate.prepare(q, k, v, **options)
    d_out, d_lse = _gradients(dice, memory, call) if dice.chance(backward_share) else (None, None)
    tile, threads, saved_elsewhere = _tile(dice, shape), dice.between(2, 4), dice.chance(0.2)
    return Drawn(call, tile, threads, d_out, d_lse, saved_elsewhere, variants.names or ["full"], kind)


# -- sizes ------------------------------------------------------------------------------------------------------------


def _length(dice: Dice) -> int:
    kind = dice.weighted({"none": 0.3, "one": 1, "few": 4, "edge": 4, "any": 1})
    if kind == "edge":  # around what tiles and registers are multiples of
        return max(dice.one_of([8, 16, 32, 64, 96]) * dice.between(1, 3) + dice.between(-1, 1), 1)
    return {"none": 0, "one": 1, "few": dice.between(2, 24), "any": dice.between(1, 300)}[kind]


def _head_dim(dice: Dice) -> int:
    kind = dice.weighted({"few": 5, "odd": 2, "usual": 2, "any": 0.4})
    return {
        "few": dice.between(1, 20),
        "odd": 2 * dice.between(0, 48) + 1,
        "usual": dice.one_of([8, 16, 32, 64, 96, 128]),
        "any": dice.between(1, 512),
    }[kind]


def _shape(dice: Dice, kind: str, lengths: tuple[Array, Array] | None) -> Shape:
    heads_k, group = dice.weighted({1: 4, 2: 3, 3: 1, 5: 0.5}), dice.weighted({1: 4, 2: 2, 3: 1, 4: 1, 8: 0.5})
    batch, n_q, n_k = dice.weighted({1: 4, 2: 2, 3: 1}), _length(dice), _length(dice)
    d = _head_dim(dice)
    d_v = d if dice.chance(0.6) else _head_dim(dice)
    if kind == "decode":
        n_q, n_k, group = 1, dice.between(100, 4000), dice.between(1, 16)
        d, d_v = min(d, 128), min(d_v, 128)
    if lengths is not None:
        batch, n_q, n_k = 1, int(lengths[0][-1]), int(lengths[1][-1])
    while batch * heads_k * group * max(n_q, 1) * max(n_k, 1) > MOST_SCORES and batch * heads_k * group > 1:
        batch, heads_k, group = max(batch - 1, 1), max(heads_k - 1, 1), max(group // 2, 1)
    shape = Shape(batch, heads_k * group, heads_k, n_q, n_k, d, d_v)
    return _part(dice, shape) if kind == "part" else shape


def _part(dice: Dice, shape: Shape) -> Shape:
    """Rows and keys of longer sequences."""
    origin_q, origin_k = dice.between(0, 60), dice.between(0, 60)
    total_q = origin_q + shape.n_q + dice.between(0, 40)
    total_k = origin_k + shape.n_k + dice.between(0, 40)
    return replace(shape, origin_q=origin_q, origin_k=origin_k, total_q=total_q, total_k=total_k)


def _packed_lengths(dice: Dice) -> tuple[Array, Array]:
    """Cumulative lengths of a few sequences, empty ones among them."""
    sequences = dice.between(1, 5)

    def ends() -> Array:
        lengths = [0 if dice.chance(0.2) else min(_length(dice), 100) for _ in range(sequences)]
        return np.cumsum([0, *lengths]).astype(dice.one_of(["int32", "int64"]))

    return ends(), ends()


def _sizes(shape: Shape, lengths: tuple[Array, Array] | None, dice: Dice) -> dict[str, int]:
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


def _tile(dice: Dice, shape: Shape) -> Tile | None:
    if dice.chance(0.5):
        return None
    q, k = (dice.one_of([1, 3, 8, 16, 17, 32, 61, 64, 100]) for _ in range(2))
    while shape.batch * shape.heads * -(-shape.n_q // q) * -(-shape.n_k // k) > MOST_TILES:
        q, k = 2 * q, 2 * k
    return Tile(q, k)


# -- arrays -----------------------------------------------------------------------------------------------------------


def _inputs(dice: Dice, memory: Memory, s: Shape, dtype: str) -> tuple[Array, Array, Array]:
    sizes = ((s.heads, s.n_q, s.d), (s.heads_k, s.n_k, s.d), (s.heads_k, s.n_k, s.d_v))
    if sizes[0] == sizes[1] == sizes[2] and dice.chance(0.5):  # one projection's output
        together = store(_values(dice, (s.batch, s.n_q, 3, s.heads, s.d)), dtype, memory, dice)
        q, k, v = (together[:, :, i].swapaxes(1, 2) for i in range(3))
        return q, k, v
    q, k, v = (laid_out(_values(dice, (s.batch, *size)), dtype, memory, dice) for size in sizes)
    return q, k, v


def _values(dice: Dice, shape: tuple[int, ...]) -> Array:
    kind = dice.weighted({"normal": 12, "tiny": 1, "huge": 1, "whole": 1, "zero": 0.3})
    if kind == "whole":  # ties
        return dice.integers(-1, 1, shape).astype(np.float64)
    return dice.normal(shape) * {"normal": 1.0, "tiny": 1e-4, "huge": 1e4, "zero": 0.0}[kind]


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

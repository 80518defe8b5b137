"""One random linear attention: every feature map and one of an expression, decay of each form, states in and out."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.dice import Dice
from tests.fuzzing.drawing.language import Node, S, where
from tests.fuzzing.drawing.layouts import any_layout, fitted, rows_layout
from tests.fuzzing.drawing.tables import rounded
from tests.fuzzing.question import FLOATS, Given, LinearQuestion, Numbers

_RELU = where(S > 0.0, S, 0.0)
NAMED: dict[str, Node] = {
    "identity": S,
    "elu": where(S > 0.0, S + 1.0, la.exp(S)),
    "relu": _RELU,
    "relu2": _RELU * _RELU,
    "exp": la.exp(S),
}
OWN: tuple[Node, ...] = (
    la.tanh(S) + 1.5,
    la.log(1.0 + la.exp(S)),
    1.0 / (1.0 + la.exp(-S)),
    la.maximum(S, 0.25) * 0.5,
    S * S + 0.1,
    where(abs(S) < 1.0, S * S, abs(S)),
)


def draw(compiled: Dice, dice: Dice, dtypes: tuple[str, ...], backward_share: float) -> LinearQuestion:
    """`compiled` decides the feature map, types and head dimensions, and which options there are."""
    own = compiled.chance(0.35)
    name = None if own else compiled.one_of(list(NAMED))
    feature = compiled.one_of(OWN) if name is None else NAMED[name]
    shares = {"float32": 4, "float16": 1, "bfloat16": 1, "float64": 1.5}
    dtype = compiled.weighted({x: shares[x] for x in dtypes})
    causal, normalize = compiled.chance(0.75), compiled.chance(0.6)
    is_signed = name == "identity"  # sums of weights may be nearly 0, by which no row can be divided
    decay_kind = compiled.weighted({"none": 3, "number": 1, "head": 2, "token": 3}) if causal else "none"
    packed, carried = compiled.chance(0.3), compiled.chance(0.4)
    d = compiled.one_of((8, 16, 32, 64)) if compiled.chance(0.5) else compiled.between(1, 40)
    d_v = d if compiled.chance(0.5) else compiled.between(1, 48)

    heads_k, group = dice.weighted({1: 3, 2: 3, 3: 1}), dice.weighted({1: 3, 2: 2, 3: 1})
    batch = 1 if packed else dice.weighted({1: 3, 2: 2, 3: 1})
    lengths = _ends(dice) if packed else None
    n = _length(dice) if lengths is None else lengths[-1]
    sequences = batch if lengths is None else len(lengths) - 1
    wide = "float64" if dtype == "float64" else "float32"
    q, k, v = (
        _rows(dice, (batch, heads, n, size), dtype)
        for heads, size in ((heads_k * group, d), (heads_k, d), (heads_k, d_v))
    )
    state_shapes = (sequences, heads_k, d, d_v), (sequences, heads_k, d), (sequences, heads_k)
    state = tuple(_state(dice, shape, wide, least=0.0) for shape in state_shapes) if carried else None
    d_out, d_state = None, None
    if dice.chance(backward_share):
        d_out = _pulled(dice, (batch, heads_k * group, n, d_v), dice.one_of(FLOATS) if dice.chance(0.1) else dtype)
        if dice.chance(0.5):
            d_state = tuple(_state(dice, shape, wide, least=-2.0) for shape in state_shapes)
    return LinearQuestion(
        q, k, v, la.text(feature), name, causal, normalize and not is_signed,
        dice.one_of((1.0, 1.0, 0.25, 2.0)), _decay(dice, decay_kind, (batch, heads_k, n), wide), state, lengths, d_out,
        d_state,
        names=(
            "linear", f"feature {name or 'of its own'}", f"decay {decay_kind}", *(["packed"] if packed else []),
            *(["state in"] if carried else []), "causal" if causal else "all of a sequence",
        ),
    )  # fmt: skip


def _length(dice: Dice) -> int:
    """Of chunks that are full, and one that is not."""
    kind = dice.weighted({"none": 0.3, "one": 1, "few": 3, "edge": 4, "any": 3})
    if kind == "edge":
        return dice.one_of((16, 32, 64, 128)) + dice.between(-1, 1)
    return {"none": 0, "one": 1, "few": dice.between(2, 30), "any": dice.between(30, 200)}[kind]


def _ends(dice: Dice) -> tuple[int, ...]:
    lengths = [0 if dice.chance(0.2) else min(_length(dice), 90) for _ in range(dice.between(1, 5))]
    return tuple(accumulate(lengths, initial=0))


def _rows(dice: Dice, shape: tuple[int, ...], dtype: str) -> Given:
    layout = rows_layout(dice, aligned=False)
    values = fitted(dice.normal(shape) * dice.one_of((0.5, 0.5, 1.0)), layout)
    return Given(rounded(values, dtype), dtype, layout)


def _decay(dice: Dice, kind: str, tokens: tuple[int, int, int], wide: str) -> Given | None:
    """Logs, none above 0."""
    if kind == "none":
        return None
    shape = {"number": (), "head": (tokens[1],), "token": tokens}[kind]
    dtype = "float64" if kind == "number" else wide if dice.chance(0.7) else dice.one_of(FLOATS)
    layout = any_layout(dice, shape)
    values: Numbers = np.asarray(fitted(-np.abs(dice.normal(shape)) * dice.one_of((0.05, 0.3, 1.0)), layout))
    return Given(np.asarray(rounded(values, dtype)), dtype, layout)


def _state(dice: Dice, shape: tuple[int, ...], dtype: str, least: float) -> Given:
    layout = any_layout(dice, shape)
    values = fitted(np.clip(np.abs(dice.normal(shape)) + least, least, 2.0), layout)
    return Given(rounded(values, dtype), dtype, layout)


def _pulled(dice: Dice, shape: tuple[int, ...], dtype: str) -> Given:
    layout = any_layout(dice, shape)
    return Given(rounded(fitted(dice.normal(shape), layout), dtype), dtype, layout)

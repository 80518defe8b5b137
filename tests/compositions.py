"""Masks and scores that the fuzz draws from one pool of forms, as expressions over arrays: for tests of one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.fuzzing.drawing.dice import Dice
from tests.fuzzing.drawing.features import meet
from tests.fuzzing.drawing.forms import Pool
from tests.fuzzing.drawing.language import Node, text
from tests.fuzzing.drawing.tables import Table, filled
from tests.fuzzing.drawing.texts import drawn_texts
from tests.fuzzing.question import Given
from tilewise import arrays
from tilewise.expr import Expr, Loaded, from_records, records
from tilewise.spec import Shape
from tilewise.text import parse

Drawn = tuple[Expr | None, Expr | None]


def composed(seed: int, shape: Shape, gradients: bool = False) -> tuple[Expr, Expr]:
    """A mask and a score, a bound of which starts a float of the other. gradients: of arrays that the score reads."""
    dice = Dice(seed)
    while True:
        pool = Pool(dice, 9)
        trees = pool.mask(), pool.score()
        if meet(*trees):
            break
    mask, score = _expressions(trees, pool.tables, shape, dice, gradients)
    assert mask is not None and score is not None
    return mask, score


def drawn(seed: int, shape: Shape) -> Drawn:
    """A mask and a score as the fuzz draws them, by any recipe; either may be missing."""
    dice = Dice(seed)
    texts = drawn_texts(dice, 40)
    mask, score = _expressions((texts.mask, texts.score), texts.tables, shape, dice, gradients=True)
    return mask, score


def _expressions(
    trees: tuple[Node | None, Node | None], tables: Sequence[Table], shape: Shape, dice: Dice, gradients: bool
) -> list[Expr | None]:
    sizes = {
        "B": shape.batch, "H": shape.heads, "HK": shape.heads_k, "Q": shape.total_q, "K": shape.total_k,
        "QP": shape.n_q, "KP": shape.n_k,
    }  # fmt: skip
    given = filled(list(tables), sizes, dice)
    stored = [_stored(x) for x in given]
    mask, score = (None if tree is None else parse(text(tree), stored) for tree in trees)
    wanted = {id(x) for x, of in zip(stored, given, strict=True) if gradients and of.wants_gradient}
    return [mask, None if score is None else _wanting(score, wanted)]


def _stored(given: Given) -> Any:
    return arrays.narrow(given.values, given.dtype) if "float" in given.dtype else given.values.astype(given.dtype)


def _wanting(score: Expr, wanted: set[int]) -> Expr:
    def of(payload: Any) -> Any:
        is_wanted = isinstance(payload, Loaded) and id(payload.array) in wanted
        return replace(payload, grad=True) if is_wanted else payload

    return from_records((op, args, kind, of(payload)) for op, args, kind, payload in records(score))

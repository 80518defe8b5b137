"""A mask and a score of one case, drawn by any recipe from one pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from tests.fuzzing.drawing import gallery, named
from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.dice import Choices
from tests.fuzzing.drawing.forms import Pool
from tests.fuzzing.drawing.grammar import Grammar
from tests.fuzzing.drawing.language import Node
from tests.fuzzing.drawing.named import Named
from tests.fuzzing.drawing.tables import ANY, Table

RECIPES = {"shared forms": 6.0, "gallery": 3.0, "grammar": 3.5, "named": 2.5}
DEPTHS = {1: 1.0, 2: 2.0, 3: 3.0, 4: 2.0, 5: 1.5, 6: 1.0}
MOST_NODES = 160  # of a text
MOST_TABLES = 10

Recipe = Callable[[Pool], Node | Named]


@dataclass(frozen=True, eq=False)
class Texts:
    """What is said about scores, before sizes are known."""

    mask: Node | None
    score: Node | None
    mask_as_written: str | None
    score_as_written: str | None
    tables: list[Table]
    names: list[str]

    @cached_property
    def needs(self) -> set[str]:
        """Variables that must have a place: an array of so many is read elsewhere too, which an empty one cannot be."""
        found: set[str] = set()
        for node in (self.mask, self.score):
            for load in la.nodes(node) if node is not None else ():
                if load.op == "load":
                    dims = self.tables[int(load.value[1:])].dims
                    read = (la.settled(index) for index in load.args)
                    found |= {
                        name
                        for name, index in zip(dims, read, strict=False)
                        if isinstance(name, str) and name != index.value
                    }
        return found - {ANY}


def drawn_texts(dice: Choices, reach: int) -> Texts:
    """Drawn again if it is far longer than most."""
    while True:
        texts = _drawn(Pool(dice, reach))
        sizes = [sum(1 for _ in la.nodes(x)) for x in (texts.mask, texts.score) if x is not None]
        if len(texts.tables) <= MOST_TABLES and max(sizes, default=0) <= MOST_NODES:
            return texts


def _drawn(pool: Pool) -> Texts:
    dice = pool.dice
    recipe = dice.weighted(RECIPES)
    mask_recipe, score_recipe = (dice.weighted(RECIPES) if dice.chance(0.25) else recipe for _ in range(2))
    missing = dice.weighted({"none": 16, "mask": 1.5, "score": 2, "both": 0.4})
    mask = None if missing in ("mask", "both") else _by(mask_recipe, pool, "mask")
    score = None if missing in ("score", "both") else _by(score_recipe, pool, "score")
    mask_node, mask_written = _apart(mask)
    score_node, score_written = _apart(score)
    used = sorted({int(x[1:]) for node in (mask_node, score_node) if node is not None for x in la.arrays(node)})
    return _with_tables(pool, used, Texts(mask_node, score_node, mask_written, score_written, [], pool.names))


def _by(recipe: str, pool: Pool, what: str) -> Node | Named:
    pool.names.append(f"{what} of {recipe}")
    if recipe == "grammar":
        grammar, depth = Grammar(pool), pool.dice.weighted(DEPTHS)
        return grammar.mask(depth) if what == "mask" else grammar.score(depth)
    if recipe == "shared forms":
        return pool.mask() if what == "mask" else pool.score()
    drawn: Recipe = getattr(gallery if recipe == "gallery" else named, what)
    return drawn(pool)


def _apart(made: Node | Named | None) -> tuple[Node | None, str | None]:
    return (made.node, made.written) if isinstance(made, Named) else (made, None)


def _with_tables(pool: Pool, used: list[int], texts: Texts) -> Texts:
    """Arrays that a text reads, and those they have their numbers of; gradients of what the score reads alone."""
    of_score = set() if texts.score is None else la.arrays(texts.score)
    tables = [
        replace(table, wants_gradient=table.wants_gradient and f"a{i}" in of_score)
        for i, table in enumerate(pool.tables)
    ]
    last = max(used, default=-1)  # what was drawn and not used in the end is behind what is
    return replace(texts, tables=tables[: last + 1])

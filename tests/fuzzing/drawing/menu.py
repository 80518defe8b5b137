"""What random calls are drawn from: types, sizes, magnitudes, tiles; what all fits together, draw.py decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import numpy as np

from tests.fuzzing.drawing.dice import Choices, Dice
from tests.fuzzing.question import Numbers

Tile = tuple[int, int]
Ends = tuple[int, ...]  # cumulative lengths of packed sequences

MOST_TILES = 400  # a tile costs NumPy a fixed time


@dataclass(frozen=True)
class Counts:
    """How much there is of everything."""

    batch: int
    heads_k: int
    group: int
    n_q: int
    n_k: int

    @property
    def heads(self) -> int:
        return self.heads_k * self.group


class Anything:
    """All that a caller may pass. key_tile: the keys of a tile where none is asked for."""

    dtypes: ClassVar[dict[str, float]] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 2}
    aligned = False
    most_scores = 24_000  # of a call: who judges it keeps them all, several times over
    longest_packed = 100
    reach = 40  # how far a window sees, at most

    def __init__(self, key_tile: int = 64, most_scores: int | None = None) -> None:
        self.key_tile = key_tile
        self.most_scores = most_scores or self.most_scores

    # -- what is compiled ----------------------------------------------------------------------------------------------
    def head_dim(self, dice: Choices) -> int:
        kind = dice.weighted({"few": 5, "odd": 2, "usual": 2, "any": 0.4})
        return {
            "few": dice.between(1, 20),
            "odd": 2 * dice.between(0, 48) + 1,
            "usual": dice.one_of([8, 16, 32, 64, 96, 128]),
            "any": dice.between(1, 512),
        }[kind]

    def tile(self, dice: Choices) -> Tile | None:
        if dice.chance(0.2 if self.key_tile > 128 else 0.5):
            return None
        return dice.one_of((1, 3, 8, 16, 17, 32, 61, 64, 100)), dice.one_of((1, 3, 8, 16, 17, 32, 61, 64, 100))

    # -- sizes ---------------------------------------------------------------------------------------------------------
    def length(self, dice: Choices) -> int:
        kind = dice.weighted({"none": 0.3, "one": 1, "few": 4, "edge": 4, "any": 1})
        if kind == "edge":  # around what tiles and registers are multiples of
            return max(dice.one_of([8, 16, 32, 64, 96]) * dice.between(1, 3) + dice.between(-1, 1), 1)
        return {"none": 0, "one": 1, "few": dice.between(2, 24), "any": dice.between(1, 300)}[kind]

    def keys(self, dice: Choices, tile: Tile | None) -> int:
        """Mostly of two tiles and more, and none that a tile divides."""
        if dice.chance(0.25):
            return self.length(dice)
        size = self.key_tile if tile is None else tile[1]
        n = dice.between(size + 1, 3 * size) if dice.chance(0.7) else size * dice.between(2, 4) + dice.between(-1, 1)
        return n + 1 if size > 1 and n % size == 0 and dice.chance(0.7) else n

    def counts(self, dice: Choices, tile: Tile | None) -> Counts:
        heads_k, group = dice.weighted({1: 4, 2: 3, 3: 1, 5: 0.5}), dice.weighted({1: 4, 2: 2, 3: 1, 4: 1, 8: 0.5})
        batch = dice.weighted({1: 4, 2: 2, 3: 1})
        return self.fitting(Counts(batch, heads_k, group, self.length(dice), self.keys(dice, tile)), tile)

    def fitting(self, counts: Counts, tile: Tile | None) -> Counts:
        """No more than a call may cost: fewer heads first, then fewer queries, and fewer keys last."""
        while self._cost(counts, tile) > 1:
            if counts.batch * counts.heads > 1:
                batch, heads_k, group = max(counts.batch - 1, 1), max(counts.heads_k - 1, 1), max(counts.group // 2, 1)
                counts = replace(counts, batch=batch, heads_k=heads_k, group=group)
            elif counts.n_q > 1 and self.rows(counts.n_q // 2) < self.rows(counts.n_q):
                counts = replace(counts, n_q=counts.n_q // 2)
            else:
                counts = replace(counts, n_k=counts.n_k // 2)
        return counts

    def _cost(self, counts: Counts, tile: Tile | None) -> float:
        """As a share of the most."""
        q, k = tile or (64, self.key_tile)
        heads = counts.batch * counts.heads
        tiles = heads * -(-counts.n_q // q) * -(-counts.n_k // k)
        return max(tiles / MOST_TILES, heads * self.rows(counts.n_q) * max(counts.n_k, 1) / self.most_scores)

    def rows(self, n_q: int) -> int:
        """How many rows of scores a head costs."""
        return max(n_q, 1)

    def packed(self, dice: Choices, tile: Tile | None) -> tuple[Ends, Ends]:
        """The ends of a few sequences, empty ones among them."""
        sequences = dice.between(1, 5)
        lengths: list[list[int]] = [[], []]
        for _ in range(sequences):
            found = self.length(dice), self.keys(dice, tile)
            for side, n in zip(lengths, found, strict=True):
                side.append(0 if dice.chance(0.2) else min(n, self.longest_packed))
        queries, keys = (tuple(accumulate(side, initial=0)) for side in lengths)
        return queries, keys

    # -- numbers -------------------------------------------------------------------------------------------------------
    def rows_of(self, dice: Dice, shape: tuple[int, ...]) -> Numbers:
        kind = dice.weighted({"normal": 14, "tiny": 1, "huge": 0.7, "whole": 1, "zero": 0.3})
        if kind == "whole":  # ties
            return dice.integers(-1, 1, shape).astype(np.float64)
        return dice.normal(shape) * {"normal": 1.0, "tiny": 1e-4, "huge": 1e4, "zero": 0.0}[kind]

    def spoil(self, dice: Dice, q: Numbers, k: Numbers) -> None:
        """Make the scores harder than random ones are."""


class ForTensorCores(Anything):
    """What kernels take that multiply by tensor cores and load by TMA, and what is hard for them.

    Half precision, arrays and rows that begin at multiples of 16 bytes, several tiles along both sides, scores that
    are far above those of the tiles before.
    """

    dtypes: ClassVar[dict[str, float]] = {"float16": 1, "bfloat16": 1}
    aligned = True
    most_scores = 250_000
    longest_packed = 300
    reach = 300

    def __init__(self, key_tile: int = 64, most_scores: int | None = None) -> None:
        super().__init__(max(key_tile, 128), most_scores)

    def length(self, dice: Choices) -> int:
        kind = dice.weighted({"one": 0.5, "few": 1, "edge": 4, "any": 2})
        if kind == "edge":
            return dice.one_of([16, 64, 80, 96, 128, 192]) * dice.between(1, 3) + dice.between(-1, 1)
        return {"one": 1, "few": dice.between(2, 63), "any": dice.between(64, 500)}[kind]

    def rows(self, n_q: int) -> int:
        return 64 * max(-(-n_q // 64), 1)  # however few there are

    def head_dim(self, dice: Choices) -> int:
        if dice.chance(0.5):
            return dice.one_of([32, 64, 96, 128, 192, 256])
        return 8 * dice.between(1, 32 if dice.chance(0.3) else 12)

    def tile(self, dice: Choices) -> Tile | None:
        return None if dice.chance(0.4) else (64 * dice.between(1, 3), 16 * dice.between(1, 8))

    def spoil(self, dice: Dice, q: Numbers, k: Numbers) -> None:
        if dice.chance(0.5):
            add_steep_scores(dice, q, k)


def add_steep_scores(dice: Dice, q: Numbers, k: Numbers) -> None:
    """Scores that rise along the keys, or fall, some in all rows alike: no row_max of some tiles is near the next's."""
    n, d = k.shape[2:]
    kind, at = dice.weighted({"ramp": 3, "step": 1, "spike": 1}), dice.below(max(n, 1))
    place = np.arange(n)
    rise = {"ramp": place / max(n - 1, 1), "step": place >= at, "spike": place == at}[kind]
    height = dice.one_of([20.0, 60.0, 100.0, 400.0, 2000.0])  # of the scores, at the usual scale
    size = np.sqrt(height * np.sqrt(d))
    signs = 2.0 * dice.integers(0, 1, q.shape[:3] if dice.chance(0.5) else (1, 1, 1)) - 1
    q[..., 0], k[..., 0] = signs * size, rise * size


def spoil_unread(lengths: tuple[Numbers | Ends, Numbers | Ends], k: Numbers, v: Numbers) -> None:
    """Keys and values of a sequence without queries count for nothing, whatever they are."""
    for i in np.flatnonzero(np.diff(lengths[0]) == 0):
        unread = slice(lengths[1][i], lengths[1][i + 1])
        k[:, :, unread] = v[:, :, unread] = np.nan

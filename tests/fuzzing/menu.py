"""What random calls are drawn from: types, sizes, layouts, magnitudes, tiles."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tests.fuzzing.dice import Dice
from tests.fuzzing.memory import Memory, laid_out, store
from tilewise.arrays import Array
from tilewise.spec import Shape, Tile

Lengths = tuple[Array, Array]  # of queries and keys, cumulative

MOST_TILES = 400  # a tile costs NumPy a fixed time


class Anything:
    """All that a caller may pass."""

    dtypes: ClassVar[dict[str, float]] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 2}
    most_scores = 60_000  # of a call: the reference keeps them all, several times over
    longest_packed = 100
    reach = 40  # how far a window sees, at most

    # -- sizes ---------------------------------------------------------------------------------------------------------
    def length(self, dice: Dice) -> int:
        kind = dice.weighted({"none": 0.3, "one": 1, "few": 4, "edge": 4, "any": 1})
        if kind == "edge":  # around what tiles and registers are multiples of
            return max(dice.one_of([8, 16, 32, 64, 96]) * dice.between(1, 3) + dice.between(-1, 1), 1)
        return {"none": 0, "one": 1, "few": dice.between(2, 24), "any": dice.between(1, 300)}[kind]

    def rows(self, n_q: int) -> int:
        """How many rows of scores a head costs."""
        return max(n_q, 1)

    def head_dim(self, dice: Dice) -> int:
        kind = dice.weighted({"few": 5, "odd": 2, "usual": 2, "any": 0.4})
        return {
            "few": dice.between(1, 20),
            "odd": 2 * dice.between(0, 48) + 1,
            "usual": dice.one_of([8, 16, 32, 64, 96, 128]),
            "any": dice.between(1, 512),
        }[kind]

    def packed_lengths(self, dice: Dice) -> Lengths:
        """Those of a few sequences, empty ones among them."""
        sequences = dice.between(1, 5)

        def ends() -> Array:
            lengths = [0 if dice.chance(0.2) else min(self.length(dice), self.longest_packed) for _ in range(sequences)]
            return np.cumsum([0, *lengths]).astype(dice.one_of(["int32", "int64"]))

        return ends(), ends()

    def tile(self, dice: Dice, shape: Shape) -> Tile | None:
        if dice.chance(0.5):
            return None
        q, k = (dice.one_of([1, 3, 8, 16, 17, 32, 61, 64, 100]) for _ in range(2))
        while shape.batch * shape.heads * -(-shape.n_q // q) * -(-shape.n_k // k) > MOST_TILES:
            q, k = 2 * q, 2 * k
        return Tile(q, k)

    # -- arrays --------------------------------------------------------------------------------------------------------
    def inputs(
        self, dice: Dice, memory: Memory, shape: Shape, dtype: str, lengths: Lengths | None
    ) -> tuple[Array, Array, Array]:
        sizes = _sizes(shape)
        if sizes[0] == sizes[1] == sizes[2] and dice.chance(0.5):
            b, h, n, d = sizes[0]
            return split(store(_values(dice, (b, n, 3, h, d)), dtype, memory, dice))
        q, k, v = (laid_out(_values(dice, size), dtype, memory, dice) for size in sizes)
        return q, k, v


def split(together: Array) -> tuple[Array, Array, Array]:
    """q, k and v out of one projection's output."""
    q, k, v = (together[:, :, i].swapaxes(1, 2) for i in range(3))
    return q, k, v


def _sizes(s: Shape) -> list[tuple[int, ...]]:
    """Of q, k and v."""
    return [
        (s.batch, s.heads, s.n_q, s.d), (s.batch, s.heads_k, s.n_k, s.d), (s.batch, s.heads_k, s.n_k, s.d_v),
    ]  # fmt: skip


def _values(dice: Dice, shape: tuple[int, ...]) -> Array:
    kind = dice.weighted({"normal": 12, "tiny": 1, "huge": 1, "whole": 1, "zero": 0.3})
    if kind == "whole":  # ties
        return dice.integers(-1, 1, shape).astype(np.float64)
    return dice.normal(shape) * {"normal": 1.0, "tiny": 1e-4, "huge": 1e4, "zero": 0.0}[kind]


class ForTensorCores(Anything):
    """What kernels take that multiply by tensor cores and load by TMA, and what is hard for them.

    Half precision, arrays and rows that begin at multiples of 16 bytes, several tiles along both sides, scores that
    are far above those of the tiles before.
    """

    dtypes: ClassVar[dict[str, float]] = {"float16": 1, "bfloat16": 1}
    most_scores = 400_000
    longest_packed = 300
    reach = 300

    def length(self, dice: Dice) -> int:
        kind = dice.weighted({"one": 0.5, "few": 1, "edge": 4, "any": 2})
        if kind == "edge":
            return dice.one_of([16, 64, 80, 96, 128, 192]) * dice.between(1, 4) + dice.between(-1, 1)
        return {"one": 1, "few": dice.between(2, 63), "any": dice.between(64, 700)}[kind]

    def rows(self, n_q: int) -> int:
        return 64 * -(-n_q // 64)  # however few there are

    def head_dim(self, dice: Dice) -> int:
        if dice.chance(0.5):
            return dice.one_of([32, 64, 96, 128, 192, 256])
        return 8 * dice.between(1, 32 if dice.chance(0.3) else 12)

    def tile(self, dice: Dice, shape: Shape) -> Tile | None:
        return None if dice.chance(0.4) else Tile(64 * dice.between(1, 3), 16 * dice.between(1, 8))

    def inputs(
        self, dice: Dice, memory: Memory, shape: Shape, dtype: str, lengths: Lengths | None
    ) -> tuple[Array, Array, Array]:
        q, k, v = (_values(dice, size) for size in _sizes(shape))
        if dice.chance(0.5):
            add_steep_scores(dice, q, k)
        if lengths is not None:
            spoil_unread(lengths, k, v)
        if q.shape == k.shape == v.shape and dice.chance(0.3):
            together = np.stack([x.swapaxes(1, 2) for x in (q, k, v)], axis=2)
            return split(store(together, dtype, memory, dice, aligned=True))
        q, k, v = (laid_out(x, dtype, memory, dice, aligned=True) for x in (q, k, v))
        return q, k, v


def add_steep_scores(dice: Dice, q: Array, k: Array) -> None:
    """Scores that rise along the keys, or fall, some in all rows alike: no row_max of some tiles is near the next's."""
    n, d = k.shape[2:]
    kind, at = dice.weighted({"ramp": 3, "step": 1, "spike": 1}), dice.below(max(n, 1))
    place = np.arange(n)
    rise = {"ramp": place / max(n - 1, 1), "step": place >= at, "spike": place == at}[kind]
    height = dice.one_of([20.0, 60.0, 100.0, 400.0, 2000.0])  # of the scores, at the usual scale
    size = np.sqrt(height * np.sqrt(d))
    signs = 2.0 * dice.integers(0, 1, q.shape[:3] if dice.chance(0.5) else (1, 1, 1)) - 1
    q[..., 0], k[..., 0] = signs * size, rise * size


def spoil_unread(lengths: Lengths, k: Array, v: Array) -> None:
    """Keys and values of a sequence without queries count for nothing, whatever they are."""
    for i in np.flatnonzero(np.diff(lengths[0]) == 0):
        unread = slice(lengths[1][i], lengths[1][i + 1])
        k[:, :, unread] = v[:, :, unread] = np.nan

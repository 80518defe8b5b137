"""Rotary position embedding: pairs of a head's numbers are turned by angles that grow with the position.

A product of a turned query and a turned key depends on the difference of their positions alone. Here is what to turn
(Rope), by which angles (tables of cos and sin, made once and kept) and the turning itself (Rotation), for NumPy and,
being plain arithmetic, for tensors too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise import arrays
from tilewise.arrays import Array

if TYPE_CHECKING:
    from tilewise.spec import Lengths, Shape

_FEWEST_ROWS = 256  # of a table that is kept: they double, so that growing lengths make few
_TABLES = 8


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding: pair i is turned by the angle position * base ** (-2 i / dim).

    dim: how many of a head's numbers are turned, the first ones; all unless given.
    interleaved: pairs are neighbours (0 and 1, 2 and 3 ...); else number i goes with number i + dim / 2.
    positions: whole numbers, (n,) or (batch, n), of queries and keys alike; (total,) for packed sequences.
    positions_k: those of keys, where they are others.
    Unless given positions are counted, so that the last query stands where the last key does, as causal() has it; the
    longer of the two begins at 0.
    cos, sin: tables of (rows, dim / 2) numbers, a row a position, in place of base: for scaled frequencies. Neither
    these nor positions have gradients.
    """

    dim: int | None = None
    base: float = 10000.0
    interleaved: bool = False
    positions: Any = None
    positions_k: Any = None
    cos: Any = None
    sin: Any = None

    def __post_init__(self) -> None:
        if self.dim is not None:
            _check_dim(self.dim)
            object.__setattr__(self, "dim", int(self.dim))
        _check_base(self.base)
        object.__setattr__(self, "base", float(self.base))
        if not isinstance(self.interleaved, bool):
            raise TypeError(f"Rope: interleaved must be True or False, got {self.interleaved!r}")
        if self.positions is None and self.positions_k is not None:
            raise ValueError("Rope: positions_k were given without positions; give those of queries too")
        for name in ("positions", "positions_k"):
            _check_positions(name, getattr(self, name))
        _check_tables(self.cos, self.sin, self.dim)

    def pairs(self, d: int) -> int:
        """How many pairs of a head of d numbers are turned."""
        if self.cos is not None:
            return int(self.cos.shape[1])
        return (d if self.dim is None else self.dim) // 2

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that were given, by name."""
        return {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}

    def __repr__(self) -> str:
        said = [("dim", self.dim), ("base", None if self.cos is not None else self.base)]
        said += [("interleaved", self.interleaved or None)]
        given = [f"{name}={tuple(x.shape)} {arrays.dtype_name(x)}" for name, x in self.arrays.items()]
        return f"Rope({', '.join([f'{name}={x}' for name, x in said if x is not None] + given)})"


ARRAYS = ("positions", "positions_k", "cos", "sin")
PLAIN = tuple(field.name for field in fields(Rope) if field.name not in ARRAYS)


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_dim(dim: Any) -> None:
    if isinstance(dim, bool) or not isinstance(dim, Integral) or dim < 2 or dim % 2:
        raise ValueError(f"Rope: dim must be an even number from 2 on, as numbers are turned in pairs, got {dim!r}")


def _check_base(base: Any) -> None:
    if isinstance(base, bool) or not isinstance(base, Real) or not 0 < float(base) < math.inf:
        raise ValueError(f"Rope: base must be a positive number, got {base!r}")


def _check_positions(name: str, x: Any) -> None:
    if x is None:
        return
    if not arrays.is_array(x) or arrays.kind_of(x) != "int":
        found = arrays.dtype_name(x) if arrays.is_array(x) else type(x).__name__
        raise TypeError(f"Rope: {name} must be an array of whole numbers, (n,) or (batch, n), got {found}")
    if len(x.shape) not in (1, 2):
        raise ValueError(f"Rope: {name} must be (n,) or (batch, n), got shape {tuple(x.shape)}")


def _check_tables(cos: Any, sin: Any, dim: int | None) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("Rope: give both tables, cos and sin, or neither")
    if cos is None:
        return
    for name, x in (("cos", cos), ("sin", sin)):
        if not arrays.is_array(x) or arrays.kind_of(x) != "float":
            found = arrays.dtype_name(x) if arrays.is_array(x) else type(x).__name__
            raise TypeError(f"Rope: {name} must be an array of floats, (rows, dim / 2), got {found}")
        wanted = "(rows, dim / 2)" if dim is None else f"(rows, {dim // 2}), for dim is {dim}"
        if len(x.shape) != 2 or (dim is not None and x.shape[1] != dim // 2) or not x.shape[0] or not x.shape[1]:
            raise ValueError(f"Rope: {name} must be {wanted}, got shape {tuple(x.shape)}")
    if tuple(cos.shape) != tuple(sin.shape):
        raise ValueError(f"Rope: sin must have cos's shape {tuple(cos.shape)}, got {tuple(sin.shape)}")


def check(rope: Any, batch: int, rows: dict[str, int], d: int) -> None:
    """Refuse what does not fit a call. rows: how many `positions`, and `positions_k`, are to name."""
    if not isinstance(rope, Rope):
        advice = "; write tw.Rope()" if rope is True or rope is Rope else ""
        raise TypeError(f"rope: expected tw.Rope(...), got {rope!r}{advice}")
    turned = 2 * rope.pairs(d)
    if turned > d:
        raise ValueError(f"rope: {turned} numbers of a head are turned, and it has {d}; give tw.Rope a smaller dim")
    if turned < d and rope.dim is None and rope.cos is None:
        raise ValueError(f"rope: a head has {d} numbers, which make no pairs; say which, as in tw.Rope(dim={d - 1})")
    for name, n in rows.items():
        given = rope.positions_k if name == "positions_k" and rope.positions_k is not None else rope.positions
        if given is not None and tuple(given.shape) not in ((n,), (1, n), (batch, n)):
            advice = "; give positions_k as well, where keys have others" if name == "positions_k" else ""
            raise ValueError(
                f"rope: {name} must be ({n},) or ({batch}, {n}), one a row, got shape {tuple(given.shape)}{advice}"
            )


# -- positions --------------------------------------------------------------------------------------------------------


def positions_of_keys(rope: Rope) -> Any:
    """Those that were given, if any were."""
    return rope.positions if rope.positions_k is None else rope.positions_k


def places(rope: Rope, shape: Shape, lengths: Lengths | None) -> tuple[Any, Any]:
    """Where queries and keys stand: arrays that were given, or what is counted, a range a sequence."""
    if rope.positions is not None:
        return rope.positions, rope.positions if rope.positions_k is None else rope.positions_k
    counted = [_counted(part) for part, _, _ in shape.sequences(lengths)]
    return tuple(q for q, _ in counted), tuple(k for _, k in counted)


def _counted(part: Shape) -> tuple[range, range]:
    """The last query stands where the last key does, and nothing stands before 0, where tables begin."""
    ahead = part.total_k - part.total_q
    first_q, first_k = part.origin_q + max(ahead, 0), part.origin_k + max(-ahead, 0)
    return range(first_q, first_q + part.n_q), range(first_k, first_k + part.n_k)


# -- angles -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rotation:
    """What rows are turned by: cos and sin of each pair's angle, (batch or 1, 1, n, pairs) arrays or tensors."""

    cos: Any
    sin: Any
    interleaved: bool

    def turned(self, x: Any) -> Any:
        """(batch, heads, n, d) numbers of the type computed with; those behind the last pair stay as they are."""
        library, end = arrays.library(x), 2 * self.cos.shape[-1]
        if self.interleaved:
            a, b = x[..., 0:end:2], x[..., 1:end:2]
        else:
            a, b = x[..., : end // 2], x[..., end // 2 : end]
        made = [a * self.cos - b * self.sin, b * self.cos + a * self.sin]
        if self.interleaved:
            made = [library.stack(made, -1).reshape((*x.shape[:-1], end))]
        return library.concatenate([*made, x[..., end:]], -1)

    def back(self) -> Rotation:
        """The opposite: what gradients of turned numbers are turned by."""
        return Rotation(self.cos, -self.sin, self.interleaved)

    def of(self, b: int, rows: slice) -> Rotation:
        """Of one batch index, and of the rows of one sequence: of (n, d) arrays."""
        b = b if len(self.cos) > 1 else 0
        return Rotation(self.cos[b, 0, rows], self.sin[b, 0, rows], self.interleaved)

    def part(self, rows: slice) -> Rotation:
        """Of some rows of an (n, d) array."""
        return Rotation(self.cos[rows], self.sin[rows], self.interleaved)


def rotations(rope: Rope, shape: Shape, lengths: Lengths | None, dtype: npt.DTypeLike) -> tuple[Rotation, Rotation]:
    """What the queries and the keys of a call are turned by, in main memory."""
    q, k = (rotation(rope, where, shape.d, dtype) for where in places(rope, shape, lengths))
    return q, k


def rotation(rope: Rope, where: Any, d: int, dtype: npt.DTypeLike) -> Rotation:
    """where: positions as `places` has them."""
    counted = isinstance(where, tuple)
    if rope.cos is not None:
        cos, sin = (arrays.widen(arrays.as_numpy(x), dtype) for x in (rope.cos, rope.sin))
        check_rows(where, len(cos))
        at = None if counted else arrays.as_numpy(where)
        made = joined((cos, sin), where) if counted else (cos[at], sin[at])
    elif counted:
        made = joined(counted_tables(rope, where, d, dtype), where)
    else:
        made = cos_and_sin(arrays.as_numpy(where), rope, d, dtype)
    return as_rotation(made, rope)


def as_rotation(made: tuple[Any, Any], rope: Rope) -> Rotation:
    """From (n, pairs) or (batch, n, pairs)."""
    cos, sin = (x[None, None] if len(x.shape) == 2 else x[:, None] for x in made)
    return Rotation(cos, sin, rope.interleaved)


def joined(tables: Sequence[Any], where: tuple[range, ...]) -> tuple[Any, Any]:
    """The rows of each range, one range after the other."""
    parts = [[x[r.start : r.stop] for r in where] or [x[:0]] for x in tables]
    cos, sin = (each[0] if len(each) == 1 else arrays.library(each[0]).concatenate(each, 0) for each in parts)
    return cos, sin


def check_rows(where: Any, rows: int) -> None:
    """Positions that tables of so many rows have no angles for."""
    if isinstance(where, tuple):
        least, most = 0, max((r.stop for r in where), default=0) - 1
    else:
        least, most = (int(f(arrays.as_numpy(where), initial=0)) for f in (np.min, np.max))
    if least < 0 or most >= rows:
        raise ValueError(
            f"rope: cos and sin have {rows} rows, for positions 0 to {rows - 1}, and a position is "
            f"{most if most >= rows else least}; give longer tables"
        )


def counted_tables(rope: Rope, where: tuple[range, ...], d: int, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """cos and sin for positions from 0 on, made once."""
    most = max((r.stop for r in where), default=0)
    rows = max(_FEWEST_ROWS, 1 << (most - 1).bit_length())
    return _tables(rope.dim or d, float(rope.base), rows, np.dtype(dtype))


@lru_cache(maxsize=_TABLES)
def _tables(dim: int, base: float, rows: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    return cos_and_sin(np.arange(rows), Rope(dim, base), dim, dtype)


def cos_and_sin(positions: Array, rope: Rope, d: int, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Angles are computed in a wider type than the result's: at position 100,000 one of float32 is off by 0.004."""
    wide = np.float64 if np.dtype(dtype).itemsize < 8 else np.longdouble
    pairs = rope.pairs(d)
    angles = positions.astype(wide)[..., None] * wide(rope.base) ** (np.arange(pairs, dtype=wide) / -pairs)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)

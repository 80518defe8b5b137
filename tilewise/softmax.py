"""The online softmax: the one algorithm behind every kernel of Tilewise. This is its defining version.

For each query row it keeps the largest score so far (row_max), the sum of exp(score - row_max) (row_sum) and the same
sum weighted by the values (acc). A larger maximum rescales what was summed before it by exp(old - new).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.spec import Partial


@dataclass
class State:
    """Running statistics of some query rows: row_max and row_sum (..., rows), acc (..., rows, d_v)."""

    row_max: Array
    row_sum: Array
    acc: Array

    @classmethod
    def init(cls, rows: tuple[int, ...], d_v: int, dtype: npt.DTypeLike) -> State:
        """No key seen yet."""
        return cls(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((*rows, d_v), dtype))

    def step(self, s: Array, v: Array) -> tuple[Array, Array]:
        """Take in scores s (..., rows, keys; -inf where masked) and values v (..., keys, d_v); returns (p, rescale)."""
        # 5 row_max, rescale, p, row_sum
        new_max = np.maximum(self.row_max, s.max(axis=-1, initial=-np.inf))
        shift = finite(new_max)
        rescale = np.exp(self.row_max - shift)
        p = s - shift[..., None]
        np.exp(p, out=p)
        self.row_sum = self.row_sum * rescale + p.sum(axis=-1)
        # 6 acc = acc * rescale + p @ v
        self.acc = self.acc * rescale[..., None] + p @ v
        self.row_max = new_max
        return p, rescale

    def merge(self, other: State) -> State:
        """The state of both sets of keys together."""
        row_max = np.maximum(self.row_max, other.row_max)
        a, b = (np.exp(x.row_max - finite(row_max)) for x in (self, other))
        return State(row_max, self.row_sum * a + other.row_sum * b, self.acc * a[..., None] + other.acc * b[..., None])

    def finish(self, sink: Any = None) -> Partial:
        """Output and lse. A row that saw no key has output 0 and lse -inf."""
        empty = self.row_sum == 0
        row_sum = np.where(empty, 1, self.row_sum)
        lse = np.where(empty, -np.inf, finite(self.row_max) + np.log(row_sum)).astype(self.acc.dtype)
        return add_sink(Partial(self.acc / row_sum[..., None], lse), sink)


def finite(row_max: Array) -> Array:
    """The shift of the exponent: row_max, or 0 for a row that has no key yet (-inf - -inf would be NaN)."""
    return np.where(row_max == -np.inf, row_max.dtype.type(0), row_max)


def add_sink(partial: Partial, sink: Any) -> Partial:
    """Let a logit per row without a value join the row sum (an attention sink)."""
    if sink is None:
        return partial
    lse = np.logaddexp(partial.lse, sink).astype(partial.lse.dtype)
    return Partial(partial.out * np.exp(partial.lse - finite(lse))[..., None], lse)


def d_sinks(sinks: Any, lse: Array, delta: Array) -> Array:
    """A sink's weight is exp(sink - lse) in each row; it has no value, so its share of d_score is -weight * delta."""
    wide = arrays.widen(arrays.as_numpy(sinks), np.float64)
    weight = np.exp(wide[:, None] - finite(lse))
    return arrays.narrow(-(weight * delta).sum(axis=(0, 2)), arrays.dtype_name(sinks))


def merge(partials: Sequence[Partial], sinks: Any = None) -> Partial:
    """Finished results over disjoint keys as one: each weighs exp(its lse - the common lse). Any array library.

    The exponents' shift is a constant to autograd, so that a row with no key at all has gradients of 0.
    """
    torch = sys.modules["torch"] if arrays.is_torch(partials[0].out) else None
    xp: Any = torch or np
    parts = [p.lse for p in partials]
    if sinks is not None:
        # (batch, heads, n) has heads in the middle; packed lse is (total, heads), and others have one head
        parts.append(xp.zeros_like(parts[0]) + (sinks[:, None] if len(parts[0].shape) == 3 else sinks))
    row_max = functools.reduce(xp.maximum, [x.detach() if torch else x for x in parts])
    shift = xp.where(row_max == -np.inf, xp.zeros_like(row_max), row_max)
    weights = [xp.exp(x - shift) for x in parts]
    row_sum = sum(weights)
    safe = xp.where(row_sum == 0, xp.ones_like(row_sum), row_sum)
    out = sum(p.out * w[..., None] for p, w in zip(partials, weights, strict=False)) / safe[..., None]
    return Partial(out, xp.where(row_sum == 0, xp.full_like(row_sum, -np.inf), shift + xp.log(safe)))

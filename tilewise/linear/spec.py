"""What to compute (Linear), on what (Problem), and what comes out (Done, LinearGrads)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import Expr
from tilewise.linear.state import LinearState
from tilewise.sharing import lazy
from tilewise.spec import Shape


@dataclass(frozen=True, eq=False)
class Linear:
    """One linear attention, whatever computes it. The weight of key j for query i is
    scale * feature(q_i) . feature(k_j) * exp(the sum of decay over j + 1 ... i)."""

    feature: Expr  # over S, a number of q or k
    causal: bool = True
    normalize: bool = True  # rows are divided by the sum of their weights
    scale: float = 1.0
    lengths: Array | None = None  # packed sequences: cumulative, [0, ..., total]
    keeps_state: bool = True  # the state after the last key is wanted; a system may compute it anyhow


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked call: q (batch, heads, n, d), k and v with heads that divide q's; packed sequences are a batch of one.

    decay: (batch, key heads, n) logs, or None. initial: the state before the first key, or None.
    """

    spec: Linear
    q: Any
    k: Any
    v: Any
    decay: Any = None
    initial: LinearState | None = None

    @lazy
    def shape(self) -> Shape:
        (batch, heads, n, d), heads_k, d_v = self.q.shape, self.k.shape[1], self.v.shape[3]
        dtype, device = arrays.dtype_name(self.q), arrays.device_name(self.q)
        return Shape(batch, heads, heads_k, n, n, d, d_v, dtype, device)

    @property
    def n_states(self) -> int:
        """One a sequence."""
        return int(self.q.shape[0]) if self.spec.lengths is None else len(self.spec.lengths) - 1

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """The states of the sequences that are computed together, and their rows. Empty ones change no state."""
        if self.spec.lengths is None:
            parts = [(slice(None), slice(0, self.q.shape[2]))]
        else:
            ends = [int(end) for end in self.spec.lengths]
            parts = [(slice(i, i + 1), slice(ends[i], ends[i + 1])) for i in range(self.n_states)]
        return ((at, rows) for at, rows in parts if rows.stop > rows.start)


@dataclass(frozen=True, eq=False)
class Done:
    """out (batch, heads, n, d_v); norm (batch, heads, n): the sum of each row's weights, for the backward pass, or with
    no rows if nothing is normalized; the state after the last key, its parts None if it was not kept."""

    out: Any
    norm: Any
    state: LinearState


@dataclass(frozen=True, eq=False)
class LinearGrads:
    """Gradients of q, k, v, and of decay and the initial state if they were given."""

    q: Any
    k: Any
    v: Any
    decay: Any = None
    initial_state: LinearState | None = None

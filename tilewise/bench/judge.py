"""Is it right: the largest error against the float64 reference, on all query rows or a sample of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tilewise import arrays, reference
from tilewise.arrays import Array
from tilewise.bench.problem import Problem
from tilewise.contract import ROUNDING
from tilewise.spec import Positions
from tilewise.walking import variables

SAMPLED = 256  # query rows; shorter sequences are compared whole
_BLOCKS = 4
# Roundings of the largest number in the stored type; and in the type computed with, also of the terms that are summed,
# which are about 1 as the inputs are. Far above any honest rounding, far below a wrong mask. The contract's own limit
# would need a second dense computation of every cell.
_STORED, _COMPUTED = 32, 128


@dataclass(frozen=True)
class Verdict:
    error: float  # the largest, over all outputs; inf if one has a NaN or infinity
    allowed: float  # of the output that came nearest to its own limit, or passed it
    wrong: bool


@dataclass(frozen=True, eq=False)
class Judge:
    """Compares (out,) or (out, d_q, d_k, d_v) with the reference on chosen rows: O(rows * n), whatever n is."""

    problem: Problem

    @cached_property
    def blocks(self) -> list[slice]:
        """Runs of query rows: all, or the first, the last and two in between."""
        n_q = self.problem.cell.n_q
        if n_q <= SAMPLED:
            return [slice(0, n_q)]
        size = SAMPLED // _BLOCKS
        return [slice(start, start + size) for start in np.linspace(0, n_q - size, _BLOCKS).astype(int).tolist()]

    @property
    def groups(self) -> list[tuple[slice, slice]]:
        """Query heads and their key heads, a group at a time to save memory, unless the variant tells heads apart."""
        cell = self.problem.cell
        if any({"H", "HK"} & variables(expr) for expr in self.problem.spec.expressions):
            return [(slice(cell.heads), slice(cell.heads_k))]
        size = cell.heads // cell.heads_k
        return [(slice(i * size, (i + 1) * size), slice(i, i + 1)) for i in range(cell.heads_k)]

    @property
    def rows(self) -> Array:
        return np.concatenate([np.arange(b.start, b.stop) for b in self.blocks])

    @cached_property
    def d_out(self) -> Array:
        """The gradient that is checked: 0 outside the chosen rows, so that d_k and d_v come from those rows alone."""
        kept = np.zeros_like(self.problem.d_out)
        kept[:, :, self.rows] = self.problem.d_out[:, :, self.rows]
        return kept

    @cached_property
    def expected(self) -> list[Array]:
        """out and d_q on the chosen rows; d_k and d_v whole."""
        groups = [self._expected(*heads) for heads in self.groups]
        return [np.concatenate(parts, axis=1) for parts in zip(*groups, strict=True)]

    def _expected(self, heads: slice, heads_k: slice) -> list[Array]:
        p, out, grads = self.problem, [], []
        k, v = p.k[:, heads_k], p.v[:, heads_k]
        for rows in self.blocks:
            spec = replace(p.spec, positions=Positions(origin_q=rows.start, total_q=p.cell.n_q))
            q = p.q[:, heads, rows]
            out.append(reference.forward(spec, q, k, v).out)
            if p.cell.backward:
                grads.append(reference.backward(spec, q, k, v, p.d_out[:, heads, rows]))
        found: list[Array] = [np.concatenate(out, axis=2)]
        if grads:
            found += [np.concatenate([g.q for g in grads], axis=2), sum(g.k for g in grads), sum(g.v for g in grads)]
        return found

    def verdict(self, outputs: Sequence[Any]) -> Verdict:
        worst, error = (0.0, 0.0), 0.0
        dtype = self.problem.cell.dtype
        stored, computed = ROUNDING[dtype], ROUNDING[str(arrays.compute_dtype(dtype))]
        for i, (found, want) in enumerate(zip(outputs, self.expected, strict=True)):
            with np.errstate(invalid="ignore"):  # memory that nobody wrote may be a NaN of which NumPy warns
                values = arrays.widen(in_main_memory(found), np.float64)
            off = self._error(values, want, sampled=i < 2)
            largest = float(np.abs(want).max(initial=0.0))
            allowed = _STORED * stored * largest + _COMPUTED * computed * (largest + 1)
            worst = max(worst, (off / max(allowed, 1e-300), allowed))
            error = max(error, off)
        return Verdict(error, worst[1], worst[0] > 1)

    def _error(self, values: Array, want: Array, sampled: bool) -> float:
        if not np.isfinite(values).all():
            return float("inf")
        return float(np.abs((values[:, :, self.rows] if sampled else values) - want).max(initial=0.0))


def in_main_memory(x: Any) -> Array:
    return arrays.as_numpy(x.detach().cpu() if arrays.is_torch(x) else x)

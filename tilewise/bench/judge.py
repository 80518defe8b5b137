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

SAMPLED = 256  # query rows; shorter sequences are compared whole
_BLOCKS = 4
# Roundings of the largest number: far above any honest rounding, far below a wrong mask. The contract's own limit
# would need a second dense computation of every cell.
_ALLOWED = 128


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
        n = self.problem.cell.n
        if n <= SAMPLED:
            return [slice(0, n)]
        size = SAMPLED // _BLOCKS
        return [slice(start, start + size) for start in np.linspace(0, n - size, _BLOCKS).astype(int).tolist()]

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
        p, parts, grads = self.problem, [], []
        for rows in self.blocks:
            spec = replace(p.spec, positions=Positions(origin_q=rows.start, total_q=p.cell.n))
            parts.append(reference.forward(spec, p.q[:, :, rows], p.k, p.v).out)
            if p.cell.backward:
                grads.append(reference.backward(spec, p.q[:, :, rows], p.k, p.v, p.d_out[:, :, rows]))
        out: Array = np.concatenate(parts, axis=2)
        if not grads:
            return [out]
        return [out, np.concatenate([g.q for g in grads], axis=2), sum(g.k for g in grads), sum(g.v for g in grads)]

    def verdict(self, outputs: Sequence[Any]) -> Verdict:
        worst, error = (0.0, 0.0), 0.0
        for i, (found, want) in enumerate(zip(outputs, self.expected, strict=True)):
            values = arrays.widen(in_main_memory(found), np.float64)
            off = self._error(values, want, sampled=i < 2)
            allowed = _ALLOWED * ROUNDING[self.problem.cell.dtype] * float(np.abs(want).max(initial=0.0))
            worst = max(worst, (off / max(allowed, 1e-300), allowed))
            error = max(error, off)
        return Verdict(error, worst[1], worst[0] > 1)

    def _error(self, values: Array, want: Array, sampled: bool) -> float:
        if not np.isfinite(values).all():
            return float("inf")
        return float(np.abs((values[:, :, self.rows] if sampled else values) - want).max(initial=0.0))


def in_main_memory(x: Any) -> Array:
    return arrays.as_numpy(x.detach().cpu() if arrays.is_torch(x) else x)


def poison(like: Sequence[Any]) -> None:
    """Fill and free memory of these sizes: a contestant that leaves its output unwritten must not find an older one."""
    spoiled = []
    for x in like:
        if arrays.is_torch(x):
            spoiled += [x.new_full(x.shape, float("nan")) for _ in range(2)]
        else:
            spoiled += [np.full(x.nbytes, 0xFF, np.uint8) for _ in range(2)]  # all ones is NaN in every float type
    del spoiled

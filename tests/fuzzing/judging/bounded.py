"""Rounding bounds of a whole attention, forward and backward: exact values with an error beside each number.

Written as attention is: scores, weights p, out; then delta, d_score, d_s and the gradients. `off` is an error.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from tests.fuzzing.judging.attended import Attended, across, by_key_head, by_query_head, scatter
from tests.fuzzing.judging.errors import FUNCTION, Bounded, Pair
from tests.fuzzing.judging.parts import Part, Problem
from tests.fuzzing.judging.slopes import slopes
from tests.fuzzing.judging.values import evaluate, places
from tests.fuzzing.judging.walk import INT
from tests.fuzzing.judging.widths import HALF, ROUNDING, SMALLEST, wide
from tests.fuzzing.question import Numbers

MOST_SCORE = 2.0**100
MOST_MOVED = 0.02  # how much of its weight a row's rounding may move; beyond it a call says little
LEAST_INTEGER, MOST_INTEGER = -(2**31), 2**31 - 1


class Units:
    """What a kernel may round by, of inputs of a type."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.wide = dtype, wide(dtype)
        self.unit, self.least_wide = ROUNDING[self.wide], SMALLEST[self.wide]
        # Weights, and what becomes of them, may be rounded to the inputs' type before they are multiplied.
        self.rounded, self.least = ROUNDING[dtype] if dtype in HALF else 0.0, SMALLEST[dtype]

    def sum_of(self, terms: int) -> float:
        """As a share of the terms' magnitudes: roundings of mean 0 add up as sqrt(n), and some stand around the sum."""
        return (4 * math.sqrt(terms) + FUNCTION) * self.unit

    def stored(self, values: Numbers, dtype: str | None = None) -> Numbers:
        dtype = dtype or self.dtype
        return ROUNDING[dtype] * np.abs(values) + SMALLEST[dtype]


class Within(Attended):
    """One sequence in float64, with the error of each score and weight."""

    def __init__(self, problem: Problem, part: Part, units: Units) -> None:
        super().__init__(problem, part, np.float64)
        self.units, self.errors = units, Bounded(units.wide)

    # -- scores and weights --------------------------------------------------------------------------------------------
    @cached_property
    def pairs(self) -> list[Pair]:
        """(value, error) of every step of the score's text."""
        given, units, scale = self.given, self.units, self.scale
        s = (scale * across(given.q, given.k)).reshape(self.part.shape)
        magnitude = across(np.abs(given.q), np.abs(given.k)).reshape(self.part.shape)
        off = abs(scale) * magnitude * units.sum_of(given.q.shape[-1]) + units.least_wide
        if self.problem.score is None or not s.size:
            return [(s, off)]
        env = {**self.part.env, "S": (s, off)}
        return evaluate(self.problem.score, env, self.problem.question.arrays, self.errors)

    @cached_property
    def masked(self) -> list[Pair]:
        """The same of the mask's."""
        if self.problem.mask is None or 0 in self.part.shape:
            return []
        return evaluate(self.problem.mask, self.part.env, self.problem.question.arrays, self.errors)

    @cached_property
    def found(self) -> list[Any]:
        return [value for value, _ in self.pairs]

    @cached_property
    def scored(self) -> Pair:
        score, off = (np.broadcast_to(x, self.part.shape) for x in self.pairs[-1])
        if self.masked:
            seen = self.masked[-1][0]
            score, off = np.where(seen, score, -np.inf), np.where(seen, off, 0)
        return score, off

    @cached_property
    def score(self) -> Numbers:
        return self.scored[0]

    @cached_property
    def off_exponent(self) -> Numbers:
        """Exponents are differences of scores and a maximum, in any base."""
        score, off = self.scored
        size = np.abs(score, where=score != -np.inf, out=np.zeros(score.shape))
        return off + 4 * self.units.unit * (size + np.abs(self.saved_lse)[..., None])

    @cached_property
    def off_lse(self) -> Numbers:
        moved = self.softmax[0] * np.expm1(self.off_exponent)
        moved = np.where(np.isnan(moved), np.inf, moved).sum(axis=-1)
        return moved + self.units.sum_of(self.part.shape[3]) + 4 * self.units.unit * np.abs(self.saved_lse)

    @cached_property
    def off_p(self) -> Numbers:
        """As a share of each weight."""
        return np.expm1(self.off_exponent) + self.off_lse[..., None] + self.units.rounded

    @cached_property
    def slope_pairs(self) -> dict[int, Pair]:
        if self.problem.score is None or not self.score.size:
            return {}
        return slopes(self.problem.score, self.pairs, self.problem.wanted, self.errors)

    @cached_property
    def slopes(self) -> dict[int, Any]:
        return {at: value for at, (value, _) in self.slope_pairs.items()}

    # -- what makes a call unfit ---------------------------------------------------------------------------------------
    def unfit(self) -> str | None:
        if not self.score.size:
            return None
        if self._leaves_32_bits():
            return "integers beyond 32 bits"
        score, off = self.scored
        live = score != -np.inf
        if not np.all(np.abs(score) < MOST_SCORE, where=live):
            return "scores NaN, infinite or huge"
        if (self.masked and np.any(self.masked[-1][1])) or np.any(off != 0, where=~live):
            return "a comparison of floats too close to call"
        if not np.all(self.off_lse < MOST_MOVED):
            return "weights that rounding changes"
        if self.problem.question.d_out is not None and not self._has_slopes():
            return "slopes NaN, infinite or huge"
        return None

    def _leaves_32_bits(self) -> bool:
        """Integers that no array takes there are refused; the package's bounds of them may refuse more."""
        for walk, found in ((self.problem.score, self.pairs), (self.problem.mask, self.masked)):
            for step, (value, _) in zip(walk.steps if walk is not None and found else (), found, strict=False):
                computed = step.kind == INT and step.op not in ("var", "where") and not step.reads_array
                if computed and (np.min(value) < LEAST_INTEGER or np.max(value) > MOST_INTEGER):
                    return True
        return False

    def _has_slopes(self) -> bool:
        """They are numbers wherever a key has a weight, in the type computed with too."""
        for value, off in self.slope_pairs.values():
            most = np.abs(value) + off
            if not (np.all(most < MOST_SCORE) or np.all((most < MOST_SCORE) | (self.softmax[0] == 0))):
                return False
        return True

    # -- results -------------------------------------------------------------------------------------------------------
    @cached_property
    def off_out(self) -> Numbers:
        p = self.softmax[0]
        weights = p * (self.off_p + self.units.sum_of(self.part.shape[3])) + self.units.least
        moved = by_key_head(weights, self.part) @ np.abs(self.given.v)
        return by_query_head(moved, self.part) + self.units.stored(self.out)

    def off_gradients(self, into: dict[str, Numbers]) -> None:
        """Add the errors of this sequence's gradients."""
        part, given, units = self.part, self.given, self.units
        p, unit, (batch, heads, n_q, n_k) = self.softmax[0], units.unit, part.shape
        off_p = p * (self.off_p + FUNCTION * unit) + units.least  # exp again, of the lse that was saved
        g = self.problem.numbers("d_out", self.dtype)[part.batch, :, part.rows]
        delta, off_delta = self._delta(g)
        g_rows, wide_v = by_key_head(g, part), units.sum_of(given.v.shape[-1])
        d_p = by_query_head(across(g_rows, given.v), part)
        off_d_p = by_query_head(wide_v * across(np.abs(g_rows), np.abs(given.v)), part)
        apart = d_p - delta[..., None]
        d_score = p * apart
        off = p * (off_d_p + off_delta[..., None]) + (off_p + 4 * unit * p) * np.abs(apart)
        d_s, off_s = self._pulled_to_s(d_score, off)
        off_s = by_key_head(off_s + (4 * unit + units.rounded) * np.abs(d_s) + units.least, part)
        size, scale = by_key_head(np.abs(d_s), part), abs(self.scale)
        keys, queries = units.sum_of(n_k), units.sum_of(n_q * part.group)
        off_q = (off_s + keys * size) @ np.abs(given.k)
        into["d_q"][part.batch, :, part.rows] += scale * by_query_head(off_q, part)
        off_k = (off_s + queries * size).swapaxes(-1, -2) @ np.abs(given.q)
        into["d_k"][part.batch, :, part.keys] += scale * off_k
        off_v = by_key_head(off_p + queries * p, part).swapaxes(-1, -2) @ np.abs(g_rows)
        into["d_v"][part.batch, :, part.keys] += off_v
        total = units.sum_of(batch * heads * n_q * n_k)
        if self.sinks is not None:
            into["d_sinks"] += self._off_sinks(delta, off_delta, total)
        if d_score.size:
            self._off_arrays(d_score, off, total, into)

    def _delta(self, g: Numbers) -> Pair:
        """delta = sum(g * out) - d_lse, of the out that was saved."""
        terms = g * self.out
        delta, size = terms.sum(axis=-1), np.abs(terms).sum(axis=-1)
        if self.problem.question.d_lse is not None:
            d_lse = self.problem.numbers("d_lse", self.dtype)[self.part.batch, :, self.part.rows]
            delta, size = delta - d_lse, size + np.abs(d_lse)
        off = np.sum(np.abs(g) * self.off_out, axis=-1) + self.units.sum_of(g.shape[-1]) * size
        return delta, off

    def _pulled_to_s(self, d_score: Numbers, off: Numbers) -> Pair:
        if self.problem.score is None or not d_score.size:
            return d_score, off
        for at, slope in self.slope_pairs.items():
            if self.problem.score.steps[at].op == "var":
                return self._times_slope(slope, d_score, off)
        return np.zeros_like(d_score), np.zeros_like(off)

    def _times_slope(self, slope: Pair, d_score: Numbers, off: Numbers) -> Pair:
        """Nothing flows where a key has no weight, whatever the slope there."""
        flows = self.score != -np.inf
        value, off_slope = np.where(flows, slope[0], 0), np.where(flows, slope[1], 0)
        passed = np.where(d_score == 0, 0, np.abs(d_score) * off_slope) + np.where(off == 0, 0, off * np.abs(value))
        return d_score * value, passed

    def _off_sinks(self, delta: Numbers, off_delta: Numbers, total: float) -> Numbers:
        sink = self.sinks[:, None]
        weight = np.exp(sink - self.saved_lse)
        size = np.where(np.isfinite(sink), np.abs(sink), 0) + np.abs(self.saved_lse)
        off_weight = self.off_lse + 4 * self.units.unit * size + total
        return np.sum(weight * (off_delta + off_weight * np.abs(delta)), axis=(0, 2))

    def _off_arrays(self, d_score: Numbers, off: Numbers, total: float, into: dict[str, Numbers]) -> None:
        walk = self.problem.score
        for at, slope in self.slope_pairs.items():
            step = walk.steps[at]  # type: ignore[union-attr]
            if step.op == "load":
                value, moved = self._times_slope(slope, d_score, off)
                index = places(self.problem.question.arrays[step.payload], [self.found[a] for a in step.args])
                name = f"d_array {self.problem.wanted.index(step.payload)}"
                scatter(into[name], index, moved + total * np.abs(value))


class Bounds:
    """The bounds of one question's results, by their names."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.units = problem, Units(problem.question.dtype)
        self.parts = [Within(problem, part, self.units) for part in problem.parts]

    def unfit(self) -> str | None:
        """Why the results say nothing about a kernel, or None."""
        return next((why for part in self.parts if (why := part.unfit()) is not None), None)

    def forward(self) -> dict[str, Numbers]:
        rows = self.problem.question.q.values.shape[:3]
        out, lse = np.zeros((*rows, self.problem.question.v.values.shape[3])), np.zeros(rows)
        for one in self.parts:
            out[one.part.batch, :, one.part.rows] = one.off_out
            lse[one.part.batch, :, one.part.rows] = one.off_lse
        return {"out": out, "lse": lse}

    def backward(self, exact: dict[str, Numbers], types: dict[str, str]) -> dict[str, Numbers]:
        """exact, types: the gradients and what they are stored in."""
        into = {what: np.zeros(x.shape) for what, x in exact.items()}
        for one in self.parts:
            one.off_gradients(into)
        for what, values in exact.items():
            into[what] += self.units.stored(values.astype(np.float64), types[what])
        return into

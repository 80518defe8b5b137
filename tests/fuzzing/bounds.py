"""Rounding bounds of a whole attention, forward and backward: the reference again, with an error beside each number.

Written as the reference is: scores, weights p, out; then delta, d_score, d_s and the gradients. `off` is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tests.fuzzing.rounding import FUNCTION, SMALLEST, error_ops
from tilewise import arrays, reference
from tilewise.arrays import Array
from tilewise.contract import ROUNDING
from tilewise.derivative import derivative
from tilewise.expr import Expr, S
from tilewise.kernels.numpy.ops import clamp
from tilewise.reference import _per_key_head, _per_query_head, _softmax, _wanted_loads
from tilewise.spec import Shape
from tilewise.validate import Call
from tilewise.walking import evaluate

MOST_SCORE = 2.0**100
MOST_MOVED = 0.02  # how much of its weight a row's rounding may move; beyond it a call says little


@dataclass(frozen=True, eq=False)
class _Part:
    """One sequence: its inputs for each query head, its variables, and its scores and weights with their errors."""

    shape: Shape
    rows: slice
    cols: slice
    q: Array
    k: Array
    v: Array
    env: dict[str, Any]
    score: Array
    off: Array
    p: Array
    lse: Array
    off_lse: Array
    off_p: Array  # relative
    undecided: bool  # rounding may turn the mask


class Bounds:
    """The bounds of one call's results, by their names."""

    def __init__(self, call: Call) -> None:
        self.call, self.spec = call, call.spec
        self.wide = str(arrays.compute_dtype(call.shape.dtype))
        self.unit = ROUNDING[self.wide]
        half = call.shape.dtype in ("float16", "bfloat16")
        # Weights, and what becomes of them, may be rounded to the inputs' type before they are multiplied.
        self.rounded, self.least = ROUNDING[call.shape.dtype] if half else 0.0, SMALLEST[call.shape.dtype]
        self.ops = error_ops(self.wide)

    def sum_of(self, terms: int) -> float:
        """As a share of the terms' magnitudes: roundings of mean 0 add up as sqrt(n), and some stand around the sum."""
        return (4 * math.sqrt(terms) + FUNCTION) * self.unit

    # -- scores and weights --------------------------------------------------------------------------------------------
    @cached_property
    def parts(self) -> list[_Part]:
        q, k, v = (arrays.widen(arrays.as_numpy(x), np.float64) for x in (self.call.q, self.call.k, self.call.v))
        with np.errstate(all="ignore"):
            return [self._part(q, k, v, *part) for part in self.call.shape.sequences(self.spec.lengths)]

    def _part(self, q: Array, k: Array, v: Array, part: Shape, rows: slice, cols: slice) -> _Part:
        q, k, v = q[:, :, rows], _per_query_head(k[:, :, cols], part), _per_query_head(v[:, :, cols], part)
        b, h = np.arange(part.batch)[:, None, None, None], np.arange(part.heads)[:, None, None]
        places = part.env(b, h, np.arange(part.n_q)[:, None], np.arange(part.n_k))
        s, magnitude = q @ k.swapaxes(-1, -2), np.abs(q) @ np.abs(k).swapaxes(-1, -2)
        off = abs(self.spec.scale) * magnitude * self.sum_of(part.d) + SMALLEST[self.wide]
        env: dict[str, Any] = {name: (at, 0.0) for name, at in places.items()}
        env["S"] = (self.spec.scale * s, off)
        score, off = self._evaluate(self.spec.score, env) if self.spec.score is not None and s.size else env["S"]
        score, off = np.broadcast_to(score, s.shape), np.broadcast_to(off, s.shape)
        undecided = False
        if self.spec.mask is not None and s.size:
            seen, unsure = self._evaluate(self.spec.mask, env)
            undecided = bool(np.any(unsure))
            score, off = np.where(seen, score, -np.inf), np.where(seen, off, 0)
        p, lse = _softmax(self.spec, np.array(score))
        level = np.where(np.isfinite(lse), np.abs(lse), 0)
        # Exponents are differences of scores and a maximum, in any base.
        size = np.where(np.isfinite(score), np.abs(score), 0)
        off_exponent = off + 4 * self.unit * (size + level[..., None])
        moved = np.nan_to_num(p * np.expm1(off_exponent), nan=np.inf).sum(axis=-1)
        off_lse = moved + self.sum_of(part.n_k) + 4 * self.unit * level
        off_p = np.expm1(off_exponent) + off_lse[..., None] + self.rounded
        return _Part(part, rows, cols, q, k, v, env, score, off, p, lse, off_lse, off_p, undecided)

    def _evaluate(self, expr: Expr, env: dict[str, Any]) -> tuple[Any, Any]:
        value, error = evaluate(expr, env, self.ops)
        return value, error

    def unfit(self, backward: bool) -> str | None:
        """Why the call's results say nothing about a kernel, or None."""
        for part in self.parts:
            live = part.score != -np.inf
            if not np.all(np.abs(part.score[live]) < MOST_SCORE):
                return "scores NaN, infinite or huge"
            if part.undecided or np.any(part.off[~live] != 0):
                return "a comparison of floats too close to call"
            if not np.all(part.off_lse < MOST_MOVED):
                return "weights that rounding changes"
            if backward and not self._has_slopes(part):
                return "slopes NaN, infinite or huge"
        return None

    def _has_slopes(self, part: _Part) -> bool:
        """The score's slopes are numbers wherever a key has a weight, in the type computed with too."""
        if self.spec.score is None or not part.p.size:
            return True
        slopes = (derivative(self.spec.score, node) for node in (S, *_wanted_loads(self.spec)))
        with np.errstate(all="ignore"):
            found = [np.abs(value) + off for value, off in (self._evaluate(slope, part.env) for slope in slopes)]
            return all(np.all((most < MOST_SCORE) | (part.p == 0)) for most in found)

    # -- results -------------------------------------------------------------------------------------------------------
    def forward(self) -> dict[str, Array]:
        rows = (self.call.shape.batch, self.call.shape.heads, self.call.shape.n_q)
        out, lse = np.zeros((*rows, self.call.shape.d_v)), np.zeros(rows)
        for part in self.parts:
            out[:, :, part.rows], lse[:, :, part.rows] = self._off_out(part), part.off_lse
        return {"out": out, "lse": lse}

    def _off_out(self, part: _Part) -> Array:
        weights = part.p * (part.off_p + self.sum_of(part.shape.n_k)) + self.least
        return weights @ np.abs(part.v) + self._stored(part.p @ part.v, self.call.shape.dtype)

    def backward(self, d_out: Any, d_lse: Any) -> dict[str, Array]:
        call, spec = self.call, self.spec
        d_out = arrays.widen(arrays.as_numpy(d_out), np.float64)
        d_lse = np.zeros(d_out.shape[:3]) if d_lse is None else np.asarray(d_lse, np.float64)
        bounds = {"d_q": np.zeros(call.q.shape), "d_k": np.zeros(call.k.shape), "d_v": np.zeros(call.v.shape)}
        sinks = np.zeros(call.shape.heads)
        tables = {id(slot.array): np.zeros(slot.array.shape) for slot in spec.wanted}
        with np.errstate(all="ignore"):
            for part in self.parts:
                self._add_gradients(part, d_out[:, :, part.rows], d_lse[:, :, part.rows], bounds, sinks, tables)
        exact = reference.backward(spec, call.q, call.k, call.v, d_out, d_lse)
        for name, values in (("d_q", exact.q), ("d_k", exact.k), ("d_v", exact.v)):
            bounds[name] += self._stored(values, call.shape.dtype)
        if spec.sinks is not None:
            bounds["d_sinks"] = sinks + self._stored(exact.sinks, arrays.dtype_name(spec.sinks))
        for i, (slot, values) in enumerate(zip(spec.wanted, exact.arrays, strict=True)):
            bounds[f"d_array {i}"] = tables[id(slot.array)] + self._stored(values, arrays.dtype_name(slot.array))
        return bounds

    def _add_gradients(
        self, part: _Part, g: Array, d_lse: Array, bounds: dict[str, Array], sinks: Array, tables: dict[int, Array]
    ) -> None:
        p, out, v, shape = part.p, part.p @ part.v, part.v, part.shape
        off_p = p * (part.off_p + FUNCTION * self.unit) + self.least  # exp again, of the lse that was saved
        delta = np.sum(g * out, axis=-1) - d_lse
        off_delta = np.sum(np.abs(g) * self._off_out(part), axis=-1) + self.sum_of(shape.d_v) * (
            np.sum(np.abs(g * out), axis=-1) + np.abs(d_lse)
        )
        d_p, off_d_p = g @ v.swapaxes(-1, -2), self.sum_of(shape.d_v) * (np.abs(g) @ np.abs(v).swapaxes(-1, -2))
        apart = d_p - delta[..., None]
        d_score = p * apart
        off_d_score = p * (off_d_p + off_delta[..., None]) + (off_p + 4 * self.unit * p) * np.abs(apart)
        d_s, off_d_s = self._times_slope(S, part, d_score, off_d_score)
        off_d_s = off_d_s + (4 * self.unit + self.rounded) * np.abs(d_s) + self.least
        scale, keys, queries = abs(self.spec.scale), self.sum_of(shape.n_k), self.sum_of(shape.n_q * shape.group)
        bounds["d_q"][:, :, part.rows] = scale * ((off_d_s + keys * np.abs(d_s)) @ np.abs(part.k))
        d_k = (off_d_s + queries * np.abs(d_s)).swapaxes(-1, -2) @ np.abs(part.q)
        bounds["d_k"][:, :, part.cols] = scale * _per_key_head(d_k, shape)
        d_v = (off_p + queries * p).swapaxes(-1, -2) @ np.abs(g)
        bounds["d_v"][:, :, part.cols] = _per_key_head(d_v, shape)
        total = self.sum_of(shape.batch * shape.heads * shape.n_q * shape.n_k)
        if self.spec.sinks is not None:
            sink = reference._sink_column(self.spec, np.float64)
            weight = np.exp(sink - np.where(part.lse == -np.inf, 0, part.lse))
            size = np.where(np.isfinite(sink), np.abs(sink), 0) + np.where(np.isfinite(part.lse), np.abs(part.lse), 0)
            off_weight = part.off_lse + 4 * self.unit * size + total
            sinks += np.sum(weight * (off_delta + off_weight * np.abs(delta)), axis=(0, 2))
        for node in _wanted_loads(self.spec) if d_score.size else []:
            value, off = self._times_slope(node, part, d_score, off_d_score)
            table = tables[id(node.payload.array)]
            at = [clamp(evaluate(i, part.env, self.ops)[0], n) for i, n in zip(node.args, table.shape, strict=True)]
            index = tuple(np.broadcast_to(x, d_score.shape) for x in at)
            off = off + total * np.abs(value)
            np.add.at(table, index, off if index else off.sum())

    def _times_slope(self, wrt: Expr, part: _Part, d_score: Array, off: Array) -> tuple[Array, Array]:
        """d_score * d score / d wrt; nothing flows where a key has weight 0, whatever the slope there."""
        if self.spec.score is None or not d_score.size:
            return d_score, off
        slope, off_slope = self._evaluate(derivative(self.spec.score, wrt), part.env)
        flows = part.score != -np.inf
        slope, off_slope = np.where(flows, slope, 0), np.where(flows, off_slope, 0)
        passed = np.where(d_score == 0, 0, np.abs(d_score) * off_slope) + np.where(off == 0, 0, off * np.abs(slope))
        return d_score * slope, passed

    def _stored(self, values: Array, dtype: str) -> Array:
        return ROUNDING[dtype] * np.abs(values) + SMALLEST[dtype]

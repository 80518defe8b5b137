"""Dense attention of one sequence in one type of floats: scores, weights, out, and the gradients of all that went in.

Query heads that share a key head are rows of one product, (batch, key heads, group * queries, d), so that no key is
repeated and a key's gradient adds them up by itself. `store` rounds what a kernel would keep in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tests.fuzzing.judging.parts import Part, Problem
from tests.fuzzing.judging.slopes import slopes
from tests.fuzzing.judging.values import Values, evaluate, places
from tests.fuzzing.judging.widths import unrounded
from tests.fuzzing.question import Numbers

Store = Callable[[Numbers], Numbers]


@dataclass(frozen=True, eq=False)
class Operands:
    """What one sequence has of q, k, v: by key heads, the queries of a group one after the other."""

    part: Part
    q: Numbers
    k: Numbers
    v: Numbers

    @classmethod
    def of(cls, problem: Problem, part: Part, dtype: Any) -> Operands:
        q = problem.numbers("q", dtype)[part.batch, :, part.rows]
        k, v = (problem.numbers(name, dtype)[part.batch, :, part.keys] for name in "kv")
        return cls(part, by_key_head(q, part), k, v)


def by_key_head(x: Numbers, part: Part) -> Numbers:
    """(batch, heads, queries, n) as (batch, key heads, group * queries, n)."""
    batch, _, n_q, _ = part.shape
    return x.reshape(batch, part.heads_k, part.group * n_q, x.shape[-1])


def by_query_head(x: Numbers, part: Part) -> Numbers:
    return x.reshape(*part.shape[:3], x.shape[-1])


def across(a: Numbers, b: Numbers) -> Numbers:
    """a b^T"""
    return a @ b.swapaxes(-1, -2)


def softmax(score: Numbers, sinks: Numbers | None) -> tuple[Numbers, Numbers]:
    """Weights and lse. A row with nothing to attend to has weights 0 and lse -inf."""
    top = score.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    level = np.where(top == -np.inf, 0, top).astype(score.dtype)
    weight = np.exp(score - level[..., None])
    total = weight.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - level)
    empty = total == 0
    total = np.where(empty, 1, total).astype(score.dtype)
    return weight / total[..., None], np.where(empty, -np.inf, level + np.log(total)).astype(score.dtype)


class Attended:
    """One sequence, attended to."""

    def __init__(self, problem: Problem, part: Part, dtype: Any, store: Store = unrounded) -> None:
        self.problem, self.part, self.dtype, self.store = problem, part, np.dtype(dtype), store
        self.how, self.scale = Values(dtype), problem.question.scale
        self.given = Operands.of(problem, part, dtype)
        self.sinks = None if problem.question.sinks is None else problem.numbers("sinks", dtype)

    # -- forward -------------------------------------------------------------------------------------------------------
    @cached_property
    def found(self) -> list[Any]:
        """The value of every step of the score's text."""
        s = np.asarray(self.scale * across(self.given.q, self.given.k), self.dtype).reshape(self.part.shape)
        if self.problem.score is None or not s.size:
            return [s]
        return evaluate(self.problem.score, {**self.part.env, "S": s}, self.problem.question.arrays, self.how)

    @cached_property
    def score(self) -> Numbers:
        score = np.broadcast_to(self.found[-1], self.part.shape)
        if self.problem.mask is None or not score.size:
            return score
        return np.where(self.seen, score, self.dtype.type(-np.inf))

    @cached_property
    def seen(self) -> Numbers:
        """Which keys the mask lets count."""
        if self.problem.mask is None:
            return np.ones(self.part.shape, bool)
        found = evaluate(self.problem.mask, self.part.env, self.problem.question.arrays, self.how)[-1]
        return np.broadcast_to(found, self.part.shape)

    @cached_property
    def softmax(self) -> tuple[Numbers, Numbers]:
        return softmax(self.score, self.sinks)

    @property
    def lse(self) -> Numbers:
        return self.softmax[1]

    @cached_property
    def out_unstored(self) -> Numbers:
        weights = by_key_head(self.store(self.softmax[0]), self.part)
        return by_query_head(weights @ self.given.v, self.part)

    @cached_property
    def out(self) -> Numbers:
        return self.store(self.out_unstored)

    # -- backward ------------------------------------------------------------------------------------------------------
    @cached_property
    def slopes(self) -> dict[int, Any]:
        """d score / d S, and by each read of an array that wants a gradient, by their steps."""
        if self.problem.score is None or not self.score.size:
            return {}
        return slopes(self.problem.score, self.found, self.problem.wanted, self.how)

    def slope(self, at: int) -> Any:
        """Nothing flows where a slope is no number: such a key has no weight, or the call is not fit to judge."""
        slope = self.slopes[at]
        return slope if np.isfinite(slope).all() else np.where(np.isfinite(slope), slope, self.how.zero)

    @cached_property
    def saved_lse(self) -> Numbers:
        return np.where(self.lse == -np.inf, self.how.zero, self.lse)

    @cached_property
    def weights_again(self) -> Numbers:
        """Only out and lse cross from forward to backward: in a narrow type weights come from a rounded lse."""
        if self.dtype.itemsize >= 8:
            return self.softmax[0]
        return np.exp(self.score - self.saved_lse[..., None])

    def gradients(self, into: dict[str, Numbers], has_remainder: bool = False) -> None:
        """Add this sequence's to d_q, d_k, d_v, d_sinks and "d_array 0" ...

        has_remainder: what storing took from out has crossed from forward to backward, stored as well.
        """
        part, given, store, n_k = self.part, self.given, self.store, self.part.shape[3]
        g = self.problem.numbers("d_out", self.dtype)[part.batch, :, part.rows]
        remainder = store(self.out_unstored - self.out) if has_remainder else 0
        delta = np.sum(g * (self.out + remainder), axis=-1)
        if self.problem.question.d_lse is not None:
            delta = delta - self.problem.numbers("d_lse", self.dtype)[part.batch, :, part.rows]
        p, g_rows = self.weights_again, by_key_head(g, part)
        d_score = p * (by_query_head(across(g_rows, given.v), part) - delta[..., None])
        p_rows = store(by_key_head(p, part))
        into["d_v"][part.batch, :, part.keys] += p_rows.swapaxes(-1, -2) @ g_rows
        d_s = store(by_key_head(self.pulled_to_s(d_score), part)).reshape(*g_rows.shape[:3], n_k)
        into["d_q"][part.batch, :, part.rows] = by_query_head(self.scale * (d_s @ given.k), part)
        into["d_k"][part.batch, :, part.keys] += self.scale * (d_s.swapaxes(-1, -2) @ given.q)
        if self.sinks is not None:
            weight = np.exp(self.sinks[:, None] - self.saved_lse)
            into["d_sinks"] -= np.sum(weight * delta, axis=(0, 2))
        if d_score.size:
            self._pull_to_arrays(d_score, into)

    def pulled_to_s(self, d_score: Numbers) -> Numbers:
        """The gradient of S."""
        if self.problem.score is None or not d_score.size:
            return d_score
        of_s = [at for at in self.slopes if self.problem.score.steps[at].op == "var"]
        return d_score * self.slope(of_s[0]) if of_s else np.zeros_like(d_score)

    def _pull_to_arrays(self, d_score: Numbers, into: dict[str, Numbers]) -> None:
        walk = self.problem.score
        for at in self.slopes:
            step = walk.steps[at]  # type: ignore[union-attr]
            if step.op == "load":
                name = f"d_array {self.problem.wanted.index(step.payload)}"
                index = places(self.problem.question.arrays[step.payload], [self.found[a] for a in step.args])
                scatter(into[name], index, d_score * self.slope(at), in_order=self.dtype.itemsize < 8)


def scatter(table: Numbers, index: tuple[Any, ...], values: Numbers, in_order: bool = False) -> None:
    """Add each value where it was read. in_order: one after the other, as the contract's dense computation does, and
    not first along the axes that no index varies along, which loses less."""
    if not index:
        table += values.sum()
        return
    flat = np.ravel_multi_index(np.broadcast_arrays(*index), table.shape)
    flat = flat.reshape((1,) * (values.ndim - flat.ndim) + flat.shape)
    if not in_order:
        values = values.sum(axis=tuple(i for i, n in enumerate(flat.shape) if n == 1), keepdims=True)
    np.add.at(table.reshape(-1), np.broadcast_to(flat, values.shape).reshape(-1), values.reshape(-1))

"""The results of one linear attention, as the n x n matrix that it is: no state is carried, no chunks are made.

docs/linear.md: the weight of key j for query i is scale * f(q_i) . f(k_j) * exp(the sum of decay over j + 1 ... i). A
state before the first key is one more column of that matrix, whose "f(k) v" is given; the state after the last key is
one more row, whose "f(q)" is asked for. v has a column of ones, by which a row's sum of weights is one of its numbers.

Every formula below adds products and subtracts nothing. So the same ones, of magnitudes, give how far rounding can move
a result: by a share of its terms' magnitudes, and by what errors of the factors do to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.fuzzing.judging.bounded import MOST_MOVED, MOST_SCORE, Units
from tests.fuzzing.judging.errors import Bounded
from tests.fuzzing.judging.results import Exact, remembered
from tests.fuzzing.judging.slopes import slopes
from tests.fuzzing.judging.values import Values, evaluate
from tests.fuzzing.judging.walk import ExpressionError, Walk, read_score
from tests.fuzzing.judging.widths import ROUNDING, STORED, coarser, exact_type, unrounded, wide
from tests.fuzzing.question import Given, LinearQuestion, Numbers

STATE = ("kv", "z", "log_decay")
BAND, BAND_OF_DECAY = 16, 64  # roundings of sums over a sequence that the contract allows besides
Store = Callable[[Numbers], Numbers]


@dataclass(frozen=True, eq=False)
class Factors:
    """One sequence's, or a batch of equal ones': (batch, key heads, group, n, ...) of queries, a group of 1 of keys.

    d_rows: the gradient of each row of weights @ (v, 1), a backward pass's. slope_q, slope_k: the feature's.
    """

    f_q: Numbers
    f_k: Numbers
    v: Numbers  # with a column of ones
    decay: Numbers  # what each key has lost at each query; 0 where it is not seen
    lost: Numbers  # what is left of the state before, at each query
    left: Numbers  # what is left of each key, at the end
    before: Numbers  # the state before: kv, and z as its last column
    slope_q: Numbers
    slope_k: Numbers
    d_rows: Numbers
    d_after: Numbers

    def weights(self, scale: float) -> Numbers:
        return scale * across(self.f_q, self.f_k) * self.decay

    def rows(self, scale: float, store: Store) -> Numbers:
        """weights @ (v, 1)"""
        return store(self.weights(scale)) @ self.v + scale * self.lost * (self.f_q @ self.before)

    def after(self) -> Numbers:
        """The state after the last key."""
        return (self.f_k * self.left).swapaxes(-1, -2) @ self.v + self.lost[..., -1:, :] * self.before

    def gradients(self, scale: float, store: Store, differences: int = 0) -> dict[str, Numbers]:
        """Of q, k, v, of the decay of each token, and of the state before. differences: how that of decay is found."""
        d_weights = across(self.d_rows, self.v)
        d_product = store(d_weights * self.decay)
        of_before = scale * self.lost * across(self.d_rows, self.before)
        of_after = self.left * across(self.v, self.d_after)
        d_f_q = scale * (d_product @ self.f_k) + of_before
        d_f_k = scale * _group(d_product.swapaxes(-1, -2) @ self.f_q) + of_after
        weights = self.weights(scale)
        d_v = _group(store(weights).swapaxes(-1, -2) @ self.d_rows) + (self.f_k * self.left) @ self.d_after
        d_before = scale * _group((self.lost * self.f_q).swapaxes(-1, -2) @ self.d_rows)
        kept = self.lost[..., -1:, :] * self.d_after
        exponents = _passed(
            _group(d_weights * weights), _group((self.f_q * of_before).sum(-1, keepdims=True))[..., 0],
            (self.f_k * of_after).sum(-1), (kept * self.before).sum((-2, -1)),
        )  # fmt: skip
        if differences:
            exponents = self._by_differences(d_f_q, d_f_k, differences)
        return {
            "d_q": d_f_q * self.slope_q, "d_k": d_f_k * self.slope_k, "d_v": d_v[..., :-1],
            "d_decay": exponents, "d_before": d_before + kept,
        }  # fmt: skip

    def _by_differences(self, d_f_q: Numbers, d_f_k: Numbers, sign: int) -> Numbers:
        """The gradient of the logs of decay as kernels without a matrix have it: what queries gain and keys lose by
        their own cumulative decay, which later cancels. sign: -1, or 1 for magnitudes."""
        of_rows = _group((self.f_q * d_f_q).sum(-1, keepdims=True))[..., 0] + sign * (self.f_k * d_f_k).sum(-1)
        of_rows[..., -1] += (self.d_after * self.after()).sum((-2, -1))
        return np.flip(np.cumsum(np.flip(of_rows, -1), axis=-1), -1)


def _passed(between: Numbers, from_before: Numbers, to_after: Numbers, through: Numbers) -> Numbers:
    """The gradient of each token's log of decay: all that goes past it, from an earlier key to its query or a later
    one. The state before is earlier than all, the state after later."""
    reached = np.flip(np.cumsum(np.flip(between, -2), axis=-2), -2)  # by queries from t on
    past = np.cumsum(reached, axis=-1)  # from keys up to j
    strictly = np.zeros(between.shape[:-1], between.dtype)
    strictly[..., 1:] = np.diagonal(past, offset=-1, axis1=-2, axis2=-1)
    of_after = np.cumsum(to_after, axis=-1) - to_after
    of_before = np.flip(np.cumsum(np.flip(from_before, -1), axis=-1), -1)
    return strictly + of_before + of_after + through[..., None]


def across(a: Numbers, b: Numbers) -> Numbers:
    return a @ b.swapaxes(-1, -2)


def _group(x: Numbers) -> Numbers:
    """The sum over the query heads that share a key head."""
    return x.sum(axis=2, keepdims=True)


class _Linear:
    """A question's sequences, computed in one type of floats."""

    def __init__(self, question: LinearQuestion, walk: Walk, dtype: Any, store: Store) -> None:
        self.question, self.walk, self.dtype, self.store = question, walk, np.dtype(dtype), store
        (self.batch, self.heads, self.n, self.d), self.heads_k = question.q.values.shape, question.k.values.shape[1]
        self.d_v = question.v.values.shape[3]
        ends = question.lengths
        self.n_states = self.batch if ends is None else len(ends) - 1
        whole = [(slice(None), slice(0, self.n))]
        parts = whole if ends is None else [(slice(i, i + 1), slice(*ends[i : i + 2])) for i in range(self.n_states)]
        self.parts = [(at, rows) for at, rows in parts if rows.stop > rows.start]

    def numbers(self, given: Given) -> Numbers:
        return given.values.astype(self.dtype)

    # -- what sequences are made of ------------------------------------------------------------------------------------
    def state(self, parts: tuple[Given, ...] | None) -> Numbers:
        """kv with z as its last column, or zeros."""
        if parts is None:
            return np.zeros((self.n_states, self.heads_k, self.d, self.d_v + 1), self.dtype)
        return np.concatenate([self.numbers(parts[0]), self.numbers(parts[1])[..., None]], axis=-1)

    def log_decay(self, parts: tuple[Given, ...] | None) -> Numbers:
        return np.zeros((self.n_states, self.heads_k), self.dtype) if parts is None else self.numbers(parts[2])

    def d_log_decay(self) -> Numbers:
        return self.log_decay(self.question.d_state)

    def decays(self) -> Numbers:
        """A log each token: (batch, key heads, n)."""
        shape = (self.batch, self.heads_k, self.n)
        if self.question.decay is None:
            return np.zeros(shape, self.dtype)
        given = self.question.decay.values
        if given.ndim == 0:  # a number, which is passed on in the type computed with
            given = given.astype(wide(self.question.dtype))
        given = given.astype(self.dtype)
        return np.broadcast_to(given[:, None] if given.ndim == 1 else given, shape)

    def by_key_head(self, x: Numbers) -> Numbers:
        return x.reshape(x.shape[0], self.heads_k, -1, *x.shape[2:])

    def factors(self, at: slice, rows: slice) -> Factors:
        """Without the gradient of rows, which the rows themselves decide."""
        question = self.question
        q, k, v = (self.by_key_head(self.numbers(x)[:, :, rows]) for x in (question.q, question.k, question.v))
        level = np.cumsum(self.decays()[:, :, None, rows], axis=-1, dtype=self.dtype)
        n = level.shape[-1]
        seen = np.tri(n, dtype=bool) if question.causal else np.ones((n, n), bool)
        apart = np.where(seen, level[..., :, None] - level[..., None, :], -np.inf)
        f_q, f_k = (self.store(self.feature(x)) for x in (q, k))
        none = np.zeros((), self.dtype)
        return Factors(
            f_q, f_k, np.concatenate([v, np.ones_like(v[..., :1])], axis=-1), np.exp(apart), np.exp(level)[..., None],
            np.exp(level[..., -1:] - level)[..., None], self.state(question.state)[at][:, :, None],
            self.slope(q), self.slope(k), none, self.state(question.d_state)[at][:, :, None],
        )  # fmt: skip

    def feature(self, x: Numbers) -> Numbers:
        how = Values(self.dtype)
        return np.broadcast_to(evaluate(self.walk, {"S": x}, (), how)[-1], x.shape).astype(self.dtype)

    def slope(self, x: Numbers) -> Numbers:
        how = Values(self.dtype)
        of_s = slopes(self.walk, evaluate(self.walk, {"S": x}, (), how), (), how)
        return np.broadcast_to(next(iter(of_s.values())), x.shape)

    # -- results -------------------------------------------------------------------------------------------------------
    def results(self) -> dict[str, Numbers]:
        question, n = self.question, self.n
        out = np.zeros((self.batch, self.heads, n, self.d_v), self.dtype)
        norm = np.zeros((self.batch, self.heads, n if question.normalize else 0), self.dtype)
        after, total = self.state(question.state), self.log_decay(question.state)
        into = self.no_gradients()
        for at, rows in self.parts:
            found = self.factors(at, rows)
            made = found.rows(question.scale, self.store)
            part_out = self.store(normalized(made) if question.normalize else made[..., :-1])
            out[:, :, rows] = part_out.reshape(self.batch, self.heads, -1, self.d_v)
            if question.normalize:
                norm[:, :, rows] = made[..., -1].reshape(self.batch, self.heads, -1)
            after[at] = found.after()[:, :, 0]
            total[at] = total[at] + self.decays()[:, :, rows].sum(-1)
            if question.d_out is not None:
                d_out = self.by_key_head(self.numbers(question.d_out)[:, :, rows])
                found = replace(found, d_rows=d_rows(question, d_out, part_out, made[..., -1:]))
                # In a kernel's precision as kernels do it, or their errors could not be told from mistakes.
                differences = -1 if self.dtype == np.float32 else 0
                self.place(into, found.gradients(question.scale, self.store, differences), at, rows)
        state = dict(zip((f"state {x}" for x in STATE), (after[..., :-1], after[..., -1], total), strict=True))
        return {"out": out, "norm": norm, **state, **self.finished(into)}

    def no_gradients(self) -> dict[str, Numbers]:
        question = self.question
        shapes = {"d_q": question.q, "d_k": question.k, "d_v": question.v}
        made = {what: np.zeros(given.values.shape, self.dtype) for what, given in shapes.items()}
        made["d_decay"] = np.zeros((self.batch, self.heads_k, self.n), self.dtype)
        return made | {"d_before": self.state(question.d_state)}  # as it is, where a sequence is empty

    def place(self, into: dict[str, Numbers], found: dict[str, Numbers], at: slice, rows: slice) -> None:
        for what in ("d_q", "d_k", "d_v"):
            into[what][:, :, rows] = found[what].reshape(into[what][:, :, rows].shape)
        into["d_decay"][:, :, rows] = found["d_decay"][:, :, 0] + self.d_log_decay()[at][..., None]
        into["d_before"][at] = found["d_before"][:, :, 0]

    def finished(self, into: dict[str, Numbers]) -> dict[str, Numbers]:
        """The gradients that are asked for, by the names of results."""
        question = self.question
        if question.d_out is None:
            return {}
        made = {what: self.store(into[what]) for what in ("d_q", "d_k", "d_v")}
        if question.decay is not None:
            made["d_decay"] = into["d_decay"]
        if question.state is not None:
            before = into["d_before"]
            parts = before[..., :-1], before[..., -1], self.d_log_decay()
            made |= dict(zip((f"d_initial {x}" for x in STATE), parts, strict=True))
        return made


def normalized(rows: Numbers) -> Numbers:
    """By the sum of weights, which is the last number; 0 where that is 0."""
    norm = rows[..., -1:]
    return np.where(norm == 0, 0, rows[..., :-1] / np.where(norm == 0, 1, norm)).astype(rows.dtype)


def d_rows(question: LinearQuestion, d_out: Numbers, out: Numbers, norm: Numbers) -> Numbers:
    """The gradient of each row of weights @ (v, 1)."""
    if not question.normalize:
        return np.concatenate([d_out, np.zeros_like(d_out[..., :1])], axis=-1)
    share = np.where(norm == 0, 0, 1 / np.where(norm == 0, 1, norm)).astype(d_out.dtype)
    return np.concatenate([d_out * share, -share * np.sum(d_out * out, axis=-1, keepdims=True)], axis=-1)


# -- bounds -----------------------------------------------------------------------------------------------------------


class _Bounds(_Linear):
    """The magnitudes of the same sums, and how far rounding can take them."""

    def __init__(self, question: LinearQuestion, walk: Walk) -> None:
        super().__init__(question, walk, np.float64, unrounded)
        self.units = Units(question.dtype)

    def d_log_decay(self) -> Numbers:
        return self.units.unit * np.abs(super().d_log_decay())

    def share(self, n: int, level: Numbers) -> Numbers:
        """Of a sum's magnitudes: its roundings, those of its factors as they are stored, and of logs of decay."""
        units = self.units
        decay = units.sum_of(n) * np.abs(level).max(initial=0)
        return 2 * units.sum_of(n + self.d) + 2 * units.sum_of(self.d_v) + 6 * units.rounded + 4 * decay

    def pairs(self, x: Numbers) -> tuple[Any, Any]:
        """(value, error) of features, and of their slopes."""
        how = Bounded(self.units.wide)
        found = evaluate(self.walk, {"S": (x, 0.0)}, (), how)
        return found[-1], next(iter(slopes(self.walk, found, (), how).values()))

    def unfit(self) -> str | None:
        for at, rows in self.parts:
            values, most = self.magnitudes(at, rows)
            if not all(np.all(x < MOST_SCORE) for x in (most.f_q, most.f_k)):
                return "features NaN, infinite or huge"
            pulled = () if self.question.d_out is None else (most.slope_q, most.slope_k)
            if not all(np.all(x < MOST_SCORE) for x in pulled):
                return "slopes NaN, infinite or huge"
            if self.question.normalize and np.any(self.off_norm(values, most, at, rows) > MOST_MOVED):
                return "sums of weights that rounding changes"
        return None

    def magnitudes(self, at: slice, rows: slice) -> tuple[Factors, Factors]:
        """Factors as they are, and how large they may be at most."""
        values = self.factors(at, rows)
        q, k = (self.by_key_head(self.numbers(x)[:, :, rows]) for x in (self.question.q, self.question.k))
        (f_q, slope_q), (f_k, slope_k) = self.pairs(q), self.pairs(k)
        f_q, f_k, slope_q, slope_k = (np.abs(value) + error for value, error in (f_q, f_k, slope_q, slope_k))
        shapes = values.f_q.shape, values.f_k.shape
        most = replace(
            values, f_q=np.broadcast_to(f_q, shapes[0]), f_k=np.broadcast_to(f_k, shapes[1]),
            slope_q=np.broadcast_to(slope_q, shapes[0]), slope_k=np.broadcast_to(slope_k, shapes[1]),
            v=np.abs(values.v), before=np.abs(values.before), d_after=np.abs(values.d_after),
        )  # fmt: skip
        return values, most

    def least(self, values: Factors, most: Factors) -> Factors:
        """The same magnitudes without errors."""
        sizes = {x: np.abs(getattr(values, x)) for x in ("f_q", "f_k", "slope_q", "slope_k")}
        return replace(most, **sizes)

    def off_rows(self, values: Factors, most: Factors, share: Numbers) -> Numbers:
        scale = abs(self.question.scale)
        most_rows = most.rows(scale, unrounded)
        return most_rows - self.least(values, most).rows(scale, unrounded) + share * most_rows + self.units.least

    def part_share(self, rows: slice) -> Numbers:
        return self.share(rows.stop - rows.start, np.cumsum(self.decays()[:, :, rows], axis=-1))

    def off_norm(self, values: Factors, most: Factors, at: slice, rows: slice) -> Numbers:
        """As a share of each norm; none where there are no weights at all."""
        norm = np.abs(values.rows(self.question.scale, unrounded)[..., -1])
        none = most.rows(abs(self.question.scale), unrounded)[..., -1] == 0
        off = self.off_rows(values, most, self.part_share(rows))[..., -1]
        return np.where(none, 0, off / norm)

    def results_off(self, exact: dict[str, Numbers], types: dict[str, str]) -> dict[str, Numbers]:
        found = self.of_parts()
        return {what: found[what] + self.units.stored(x.astype(np.float64), types[what]) for what, x in exact.items()}

    def of_parts(self) -> dict[str, Numbers]:
        question, scale = self.question, abs(self.question.scale)
        out = np.zeros((self.batch, self.heads, self.n, self.d_v))
        norm = np.zeros((self.batch, self.heads, self.n if question.normalize else 0))
        after, total, into = self.state(None), self.log_decay(None), self.no_gradients()
        into["d_before"] = np.zeros_like(into["d_before"])
        for at, rows in self.parts:
            values, most = self.magnitudes(at, rows)
            share, least = self.part_share(rows), self.least(values, most)
            off, made = self.off_rows(values, most, share), values.rows(question.scale, unrounded)
            part_out = normalized(made) if question.normalize else made[..., :-1]
            off_out = off[..., :-1]
            if question.normalize:
                size = np.abs(made[..., -1:])
                off_out = np.where(size == 0, 0, (off_out + np.abs(part_out) * off[..., -1:]) / size)
                norm[:, :, rows] = off[..., -1].reshape(self.batch, self.heads, -1)
            out[:, :, rows] = off_out.reshape(self.batch, self.heads, -1, self.d_v)
            most_after = most.after()
            after[at] = (most_after - least.after() + share * most_after + self.units.least)[:, :, 0]
            total[at] = self.units.sum_of(rows.stop - rows.start) * np.abs(self.decays()[:, :, rows]).sum(-1)
            if question.d_out is not None:
                d_out = np.abs(self.by_key_head(self.numbers(question.d_out)[:, :, rows]))
                d_least = np.abs(d_rows(question, d_out, np.abs(part_out), np.abs(made[..., -1:])))
                d_most = d_least + self._off_d_rows(d_out, part_out, off_out, made, off, d_least)
                most, least = replace(most, d_rows=d_most), replace(least, d_rows=d_least)
                found, low = most.gradients(scale, unrounded), least.gradients(scale, unrounded)
                moved = {what: x - low[what] + share * x + self.units.least for what, x in found.items()}
                moved["d_decay"] += share * most.gradients(scale, unrounded, differences=1)["d_decay"]
                self.place(into, moved, at, rows)
        state = dict(zip((f"state {x}" for x in STATE), (after[..., :-1], after[..., -1], total), strict=True))
        return {"out": out, "norm": norm, **state, **self.finished(into)}

    def _off_d_rows(
        self, d_out: Numbers, out: Numbers, off_out: Numbers, rows: Numbers, off: Numbers, d_least: Numbers
    ) -> Numbers:
        """What a rounded norm and a rounded out do to the gradient of rows."""
        if not self.question.normalize:
            return np.zeros_like(d_least)
        norm, rounded = np.abs(rows[..., -1:]), self.units.rounded + self.units.sum_of(self.d_v)
        of_norm = d_least * np.where(norm == 0, 0, off[..., -1:] / norm + rounded)
        delta = np.sum(d_out * (off_out + self.units.stored(out)), axis=-1)
        of_norm[..., -1] += np.where(norm[..., 0] == 0, 0, delta / norm[..., 0])
        return of_norm


def linear_results(question: LinearQuestion) -> list[Exact] | str:
    walk = read_score(question.feature)
    if {step.payload for step in walk.steps if step.op == "var"} != {"S"}:
        raise ExpressionError(f"a feature is a number over S, got {question.feature!r}")
    bounds = _Bounds(question, walk)
    reason = bounds.unfit()
    if reason is not None:
        return reason
    dtype = question.dtype
    exact = _Linear(question, walk, exact_type(dtype), unrounded).results()
    dense = _Linear(question, walk, np.float32, STORED["float32" if dtype == "float64" else dtype]).results()
    types = {what: dtype if what in ("out", "d_q", "d_k", "d_v") else wide(dtype) for what in exact}
    if question.decay is not None and question.decay.values.ndim > 0 and "d_decay" in types:
        types["d_decay"] = question.decay.dtype
    found = remembered(lambda: bounds.results_off(exact, types))
    saved = (BAND if question.decay is None else BAND_OF_DECAY) * ROUNDING[wide(dtype)]
    return [Exact(what, t, coarser(dtype, t), exact[what], dense[what], saved, found) for what, t in types.items()]

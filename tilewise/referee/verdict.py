"""What is said of a contender's answer: right, inexact, documented otherwise or wrong, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.contract import ROUNDING, Expected
from tilewise.referee.truth import Truth

RIGHT, INEXACT, OTHERWISE, WRONG, REFUSED, CRASHED, NOT_ASKED = VERDICTS = (
    "right", "inexact", "documented otherwise", "wrong", "refused", "crashed", "not asked",
)  # fmt: skip
SEVERITY = {name: i for i, name in enumerate((RIGHT, OTHERWISE, INEXACT, WRONG))}
FAULTS = (WRONG, INEXACT, CRASHED)  # whose smallest call is looked for
# Beyond the contract's limit, yet no more off than this share of the largest number: an inexact sum, not a wrong mask.
SLIGHT = 0.02
NAN, MEAN = "NaN", "the mean of all values"
_TF32 = 2.0**-11


@dataclass(frozen=True)
class Finding:
    """What is said of one result, or of a whole call."""

    verdict: str
    what: str = ""
    error: float | None = None  # None: no number, as of a NaN
    limit: float | None = None
    reason: str = ""
    differs: tuple[str, ...] = field(default=())  # results that had other bits the second time

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}" if self.what and self.reason else self.reason


def judge(truth: Truth, answer: Mapping[str, Any], documented: str = "") -> Finding:
    """The worst finding of a call's results. documented: what the contender says that a row without keys gives."""
    found = [_like_tf32(truth, _judge(truth, truth.expected[what], got, documented)) for what, got in answer.items()]
    missing = [what for what in truth.expected if what not in answer and what != "lse"]
    if missing:
        return Finding(WRONG, missing[0], reason="is missing")
    return max(found, key=lambda x: (SEVERITY[x.verdict], x.what.startswith("d_"), _times(x)))  # out was judged alone


def _like_tf32(truth: Truth, found: Finding) -> Finding:
    """float32 that is off as products in TF32 are."""
    want = truth.expected[found.what]
    largest = float(np.abs(want.exact[np.isfinite(want.exact)]).max(initial=0))
    if not truth.ordinary or want.dtype != "float32" or found.error is None or found.verdict == RIGHT:
        return found
    alike = 64 * ROUNDING["float32"] * largest < found.error <= 8 * _TF32 * largest
    return replace(found, reason=f"{found.reason}; TF32 is as far off") if alike else found


def _times(found: Finding) -> float:
    return float("inf") if found.error is None or not found.limit else found.error / found.limit


def _judge(truth: Truth, want: Expected, got: Any, documented: str) -> Finding:
    with np.errstate(invalid="ignore"):  # a NaN's bits may be any
        values = arrays.widen(arrays.as_numpy(got), np.float64)
    if values.shape != want.exact.shape:
        return Finding(WRONG, want.what, reason=f"has shape {values.shape}, expected {want.exact.shape}")
    plain = _compared(want, values, want.exact)
    if plain.verdict == RIGHT or not truth.empty.any():
        return plain
    if want.what not in ("out", "lse"):
        return _gradient(truth, want, values, plain, documented)
    rows = _compared(want, np.where(_rows(truth, want), values, want.exact), want.exact)
    rest = _compared(want, np.where(_rows(truth, want), want.exact, values), want.exact)
    convention = _convention(truth, want.what, values)
    if rows.verdict == RIGHT or convention is None:
        return plain
    verdict = OTHERWISE if convention == documented else WRONG
    told = f"rows without keys are {convention}, expected {'0' if want.what == 'out' else '-inf'}"
    empty = Finding(verdict, want.what, plain.error, plain.limit, told)
    return max(empty, rest, key=lambda x: SEVERITY[x.verdict])


def _gradient(truth: Truth, want: Expected, values: Array, plain: Finding, documented: str) -> Finding:
    """Of a call with rows without keys: which NaNs are theirs. One that is documented for out spreads to gradients."""
    finite = np.isfinite(values)
    if finite.all():
        return plain
    if documented == NAN and _compared(want, np.where(finite, values, want.exact), want.exact).verdict == RIGHT:
        return replace(plain, verdict=OTHERWISE, reason=f"{plain.reason}, as rows without keys have")
    alone = want.what == "d_q" and finite[~truth.empty].all()
    where = "of rows without keys alone" if alone else "the call has rows without keys"
    return replace(plain, reason=f"{plain.reason} ({where})")


def _compared(want: Expected, values: Array, exact: Array) -> Finding:
    infinite = np.isinf(exact)
    if not np.array_equal(values[infinite], exact[infinite]):
        return Finding(WRONG, want.what, limit=want.limit, reason=f"should be -inf in {infinite.sum()} places")
    broken = ~np.isfinite(values[~infinite])
    if broken.any():
        kind = "NaN" if np.isnan(values[~infinite]).any() else "infinite"
        return Finding(
            WRONG, want.what, limit=want.limit, reason=f"{kind} in {broken.sum():,} of {broken.size:,} numbers"
        )
    error = float(np.abs(values[~infinite] - exact[~infinite]).max(initial=0))
    if error <= want.limit:
        return Finding(RIGHT, want.what, error, want.limit)
    largest = float(np.abs(exact[~infinite]).max(initial=0))
    verdict = INEXACT if error <= SLIGHT * largest else WRONG
    told = f"off by {error:.2g}, allowed {want.limit:.2g}; the largest number is {largest:.2g}"
    return Finding(verdict, want.what, error, want.limit, told)


def furthest(want: Expected, values: Array) -> tuple[tuple[int, ...], float]:
    """Where a result is furthest off, and by how much; a NaN is further than any number."""
    with np.errstate(invalid="ignore"):
        off = np.where(values == want.exact, 0, np.abs(values - want.exact))
    place = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off))), off.shape)
    at = tuple(int(i) for i in place)
    return at, float(off[at])


def _rows(truth: Truth, want: Expected) -> Array:
    return truth.empty if want.what == "lse" else truth.empty[..., None]


def _convention(truth: Truth, what: str, values: Array) -> str | None:
    """What rows without keys give, if it is something known."""
    at = values[truth.empty]
    if np.isnan(at).all():
        return NAN
    if what == "out" and np.isfinite(at).all():
        off = np.abs(at - truth.mean[truth.empty]).max(initial=0)
        if off <= 2.0**-6 * (np.abs(truth.mean).max(initial=0) + 1e-3):
            return MEAN
    if what == "lse" and (at == np.inf).all():
        return "+inf"
    return "other numbers" if np.isfinite(at).all() else None

"""What a call should give: dense attention and its gradients in float64, and how far from it a contender may be.

Nothing of the kernels is used, nor of tilewise's expressions and reference: arrays of booleans and floats, matrix
products and exp. The limit is the contract's: twice the error of the same computation done densely in the call's
precision, and a band. Gradients have one more: a few roundings of the terms that cancel, or a row with one key, whose
gradient is exactly 0, would have to be computed in our order of operations. The judge of the tests' random calls is
another text on purpose: it reads expressions, which other libraries do not have, and two can tell on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.contract import ROUNDING, Expected, expected
from tilewise.referee.calls import BOTTOM_RIGHT, Call, Inputs, inputs
from tilewise.referee.features import parse

Store = Callable[[Array], Array]
Results = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Truth:
    """What is expected of a call, by result; and which rows see no key, (batch, heads, n_q)."""

    expected: dict[str, Expected]
    empty: Array
    mean: Array  # of all values, for each row: what a finite -inf makes of a row without keys
    ordinary: bool  # numbers of size 1, so that errors tell which precision was computed with


@lru_cache(maxsize=16)
def truth(name: str) -> Truth:
    """Of the call with this id."""
    call = parse(name)
    given = inputs(call)
    wide = np.longdouble if call.dtype == "float64" else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        exact, empty, terms = _attention(call, given, wide, lambda x: x)
        dense, _, _ = _attention(call, given, *_same_precision(call.dtype))
    saved = _rounding_of_lse(call, exact["lse"]) if call.backward else 0.0
    made = {}
    for what, want in exact.items():
        limited = expected(what, call.dtype, call.dtype, want, dense[what], 0.0 if what in ("out", "lse") else saved)
        made[what] = replace(limited, limit=limited.limit + _of_terms(call, given, what, terms))
    values = np.repeat(arrays.widen(given.v, np.float64), call.heads // call.heads_k, axis=1)
    mean = values.mean(axis=2, keepdims=True) if call.n_k else np.zeros((call.batch, call.heads, 1, call.d_v))
    ordinary = call.magnified == 1 and call.inputs == "normal"
    return Truth(made, empty, np.broadcast_to(mean, exact["out"].shape), ordinary)


def _of_terms(call: Call, given: Inputs, what: str, terms: float) -> float:
    """Eight roundings of the largest term: p (d_out v - delta) is a difference, which may be 0."""
    if what not in ("d_q", "d_k", "d_bias"):
        return 0.0
    factor = {"d_q": given.k, "d_k": given.q}.get(what)
    largest = 1.0 if factor is None else abs(call.effective_scale) * _largest(arrays.widen(factor, np.float64))
    return 8 * ROUNDING[str(arrays.compute_dtype(call.dtype))] * largest * terms


def _largest(x: Array) -> float:
    return float(np.abs(x).max(initial=0))


def _same_precision(dtype: str) -> tuple[Any, Store]:
    """What is computed with, and how weights, outputs and gradients are stored; float64's error is scaled float32's."""
    name = "float32" if dtype == "float64" else dtype
    half = name in ("float16", "bfloat16")
    return np.float32, lambda x: arrays.widen(arrays.narrow(x, name), np.float32) if half else x


def _rounding_of_lse(call: Call, lse: Array) -> float:
    """A backward pass recomputes weights from an lse that was stored."""
    return ROUNDING[str(arrays.compute_dtype(call.dtype))] * float(np.abs(lse[np.isfinite(lse)]).max(initial=0))


def _attention(call: Call, given: Inputs, dtype: Any, store: Store) -> tuple[Results, Array, float]:
    """Results by name; the rows that see no key; the largest p (d_out v), of which gradients are differences."""
    q, k, v, d_out = (arrays.widen(x, dtype) for x in (given.q, given.k, given.v, given.d_out))
    group = call.heads // call.heads_k
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = dtype(call.effective_scale)
    s = np.asarray(scale * (q @ k.swapaxes(-1, -2)), dtype)
    slope = None
    if call.softcap is not None:
        bent = np.tanh(s / dtype(call.softcap))
        s, slope = dtype(call.softcap) * bent, 1 - bent * bent
    if given.slopes is not None:
        s = s - given.slopes.astype(dtype)[:, None, None] * np.abs(_distance(call)).astype(dtype)
    if given.bias is not None:
        s = s + arrays.widen(given.bias, dtype)
    s = np.where(visible(call, given), s, dtype(-np.inf))
    p, lse = _softmax(s)
    found, terms = {"out": store(store(p) @ v), "lse": lse}, 0.0
    if call.backward:
        if np.dtype(dtype).itemsize < 8:  # only out and lse are kept, so that weights come from a rounded lse
            p = np.exp(s - np.where(lse == -np.inf, 0, lse)[..., None]).astype(dtype)
        delta = np.sum(d_out * store(store(p) @ v), axis=-1, keepdims=True)
        d_p = d_out @ v.swapaxes(-1, -2)
        d_score, terms = p * (d_p - delta), _largest(p * d_p)
        d_s = store(d_score if slope is None else d_score * slope)
        found["d_q"] = store(scale * (d_s @ k))
        found["d_k"] = store(_per_key_head(scale * (d_s.swapaxes(-1, -2) @ q), group))
        found["d_v"] = store(_per_key_head(store(p).swapaxes(-1, -2) @ d_out, group))
        if call.bias_gradient and given.bias is not None:
            axes = tuple(i for i, n in enumerate(given.bias.shape) if n == 1)
            found["d_bias"] = store(d_score.sum(axis=axes, keepdims=True))
    return found, lse == -np.inf, terms


def visible(call: Call, given: Inputs) -> Array:
    """Which keys each query sees, as far as booleans say it."""
    seen = np.ones((call.batch, call.heads, call.n_q, call.n_k), bool)
    if call.causal:
        shift = call.n_k - call.n_q if call.causal == BOTTOM_RIGHT else 0
        seen &= np.arange(call.n_k) <= np.arange(call.n_q)[:, None] + shift
    if call.window is not None:
        seen &= (_distance(call) >= -call.window[0]) & (_distance(call) <= call.window[1])
    if given.ids is not None:
        seen &= given.ids[:, None] == given.ids
    if given.mask is not None:
        seen &= given.mask
    return seen


def _distance(call: Call) -> Array:
    """How far each key is behind its query, in square calls."""
    return np.arange(call.n_k) - np.arange(call.n_q)[:, None]


def _softmax(s: Array) -> tuple[Array, Array]:
    largest = s.max(axis=-1, initial=-np.inf)
    shift = np.where(largest == -np.inf, 0, largest).astype(s.dtype)
    p = np.exp(s - shift[..., None])
    total = p.sum(axis=-1)
    safe = np.where(total == 0, 1, total).astype(s.dtype)
    return p / safe[..., None], np.where(total == 0, -np.inf, shift + np.log(safe)).astype(s.dtype)


def _per_key_head(x: Array, group: int) -> Array:
    b, h, n, d = x.shape
    return x if group == 1 else x.reshape(b, h // group, group, n, d).sum(axis=2)

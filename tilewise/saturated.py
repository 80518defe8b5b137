"""What the contract promises in saturated rows, where one key or a few have nearly all of a row's weight, as code.

The general limit (contract.py) is of the largest number of a result, and so says little about such rows: their
gradients are small, being differences of two numbers that are almost equal. Here a row whose weight is all on one key
is held to that key's value, and calls whose queries are large to relative errors in the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise import arrays, reference
from tilewise.arrays import Array
from tilewise.cases import PLACES, Case
from tilewise.contract import (
    ROUNDING,
    ContractError,
    backward_results,
    forward_results,
    gradients_to_pull,
    on_device,
    on_host,
)
from tilewise.dispatch import Kernel
from tilewise.spec import Grads, Partial, Tile
from tilewise.validate import Call

# Relative errors in the norm, of bfloat16; float16's roundings are an eighth as large, and so are its errors.
OUT = {1.0: 2.5e-3, 4.0: 1.95e-3, 12.0: 1.75e-3, 40.0: 1.2e-3}  # by what normal queries are multiplied with
GRADIENTS = 3e-3  # d_q, d_k and d_v, whatever queries are multiplied with
SATURATED, OF_SATURATED = 0.99, 2e-2  # d_q of the rows whose largest weight is at least this
# What rounding a small number may be off by: half of float16's least one; elsewhere what exponentials may leave out.
_LEAST = {"float16": 2.0**-25, "bfloat16": 2.0**-126, "float32": 2.0**-126}


def share_of_bfloat16(dtype: str) -> float:
    """What errors in this type may be, as a share of those in bfloat16."""
    return ROUNDING[dtype] / ROUNDING["bfloat16"]


# -- rows with all their weight on one key ----------------------------------------------------------------------------


def check_one_hot_forward(kernel: Kernel, case: Case, tile: Tile | None = None, device: str = "cpu") -> None:
    """out is the key's v, in half precision to the last bit; lse is the key's score."""
    call = on_device(case.inputs().call(), device)
    want = _one_hot(case)
    got = _host(forward_results(kernel.forward(call.spec, call.q, call.k, call.v, tile)))
    for what in ("out", "lse"):
        _hold(case, what, got[what], *want.results[what])


def check_one_hot_backward(kernel: Kernel, case: Case, tile: Tile | None = None, device: str = "cpu") -> None:
    """What d_out brings to d_q and d_k is 0 but for roundings of the type computed with; d_v sums up d_out."""
    call = on_device(case.inputs().call(), device)
    want = _one_hot(case)
    got = _host(backward_results(_gradients(kernel, call, tile, device, want.d_out, want.d_lse)))
    for what in ("d_q", "d_k", "d_v"):
        _hold(case, what, got[what], *want.results[what])


@dataclass(frozen=True, eq=False)
class _OneHot:
    """What a one-hot call is given, and its exact results, each with how far from every number a kernel may be."""

    d_out: Array
    d_lse: Array
    results: dict[str, tuple[Array, Array]]


@lru_cache(maxsize=4)
def _one_hot(case: Case) -> _OneHot:
    call = case.inputs().call()
    d_out, d_lse = gradients_to_pull(call)
    inputs = call.spec, call.q, call.k, call.v
    done = reference.forward(*inputs)
    exact = forward_results(done) | backward_results(reference.backward(*inputs, d_out, d_lse))
    limits = _limits(call, done, d_out, d_lse)
    types = dict.fromkeys(limits, call.shape.dtype) | {"lse": str(arrays.compute_dtype(call.shape.dtype))}
    stored = {what: x + _one_rounding(np.abs(exact[what]) + x, types[what]) for what, x in limits.items()}
    return _OneHot(d_out, d_lse, {what: (exact[what], limit) for what, limit in stored.items()})


def _one_rounding(size: Array, dtype: str) -> Array:
    """Half of what lies between numbers of this size: less than what lies between two results."""
    found: Array = np.maximum(ROUNDING[dtype] * 2.0 ** np.floor(np.log2(np.maximum(size, 1e-300))), _LEAST[dtype])
    return found


def _limits(call: Call, done: Partial, d_out: Array, d_lse: Array) -> dict[str, Array]:
    """Error analysis of first order, with u one rounding of the type computed with, as the fuzz has it.

    A sum of n terms is off by (4 sqrt(n) + 8) u of their magnitudes, a weight by its score's and its row's lse's error.
    Half precision rounds weights, gradients of scores and what is stored; of the weight that is 1, nothing.
    """
    s, scale = call.shape, call.spec.scale
    u, u_out = ROUNDING[str(arrays.compute_dtype(s.dtype))], ROUNDING[s.dtype]
    half, least = u_out if u_out > u else 0.0, _LEAST[s.dtype]
    q, k, v, g = (arrays.widen(x, np.float64) for x in (call.q, call.k, call.v, d_out))
    k, v = (np.repeat(x, s.group, axis=1) for x in (k, v))
    p = reference.weights(call.spec, q, call.k, np.arange(s.n_q))
    lse, g_lse = done.lse[..., None], arrays.widen(d_lse, np.float64)[..., None]

    off_s = _sum_of(s.d) * u * scale * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    off_lse = np.sum(p * off_s, axis=-1, keepdims=True) + 4 * u * np.abs(lse)
    off_p = off_s + off_lse + 4 * u * (scale * np.abs(q @ k.swapaxes(-1, -2)) + np.abs(lse))  # as a share of it
    rounded = np.where(p > 0.5, 0, half)
    d_p, delta = g @ v.swapaxes(-1, -2), np.sum(g * done.out, axis=-1, keepdims=True) - g_lse
    size = np.abs(g) @ np.abs(v).swapaxes(-1, -2)
    off_delta = np.sum(p * size * (_sum_of(s.d_v) * u + rounded), axis=-1, keepdims=True) + 8 * u * np.abs(g_lse)
    off_d_s = p * (_sum_of(s.d_v) * u * size + off_delta) + np.abs(p * (d_p - delta)) * (off_p + half) + least
    off_weight = p * (off_p + half + _sum_of(s.n_q) * u) + least

    return {
        "out": (p * (8 * u + np.where(p > 0.5, 0, off_p + half)) + least) @ np.abs(v),
        "lse": off_lse[..., 0],
        "d_q": scale * off_d_s @ np.abs(k),
        "d_k": _per_key_head(scale * off_d_s.swapaxes(-1, -2) @ np.abs(q), call),
        "d_v": _per_key_head(off_weight.swapaxes(-1, -2) @ np.abs(g), call),
    }


def _sum_of(terms: int) -> float:
    return float(4 * np.sqrt(terms) + 8)


def _per_key_head(x: Array, call: Call) -> Array:
    """The sum over the query heads that share a key head."""
    s = call.shape
    total: Array = x.reshape(s.batch, s.heads_k, s.group, *x.shape[2:]).sum(axis=2)
    return total


def _hold(case: Case, what: str, got: Array, want: Array, limit: Array) -> None:
    if got.shape != want.shape:
        raise ContractError(f"{case.name}: {what} has shape {got.shape}, expected {want.shape}")
    excess = np.abs(got - want) - limit
    if not (excess <= 0).all():  # NaN is not
        at = np.unravel_index(int(np.argmax(np.where(np.isnan(excess), np.inf, excess))), excess.shape)
        raise ContractError(
            f"{case.name}: {what} is {got[at]:.8g} at {tuple(map(int, at))}, expected {want[at]:.8g}; "
            f"the contract allows {limit[at]:.3g}"
        )


# -- calls whose queries are large ------------------------------------------------------------------------------------


def check_scaled(
    kernel: Kernel, case: Case, tile: Tile | None = None, device: str = "cpu", *, backward: bool
) -> dict[str, float]:
    """The relative errors of out, or of the gradients, of a call in half precision; within what is promised for them.
    "d_q saturated" is of the rows whose largest weight is at least SATURATED."""
    call = on_device(case.inputs().call(), device)
    want = _scaled(case)
    if not backward:
        got = _host(forward_results(kernel.forward(call.spec, call.q, call.k, call.v, tile)))
        return _within(case, {"out": relative(got["out"], want.out)})
    grads = _host(backward_results(_gradients(kernel, call, tile, device, want.d_out, None)))
    errors = {what: relative(grads[what], exact) for what, exact in want.gradients.items()}
    errors["d_q saturated"] = relative(grads["d_q"][want.saturated], want.gradients["d_q"][want.saturated])
    return _within(case, errors)


def promised(case: Case) -> dict[str, float]:
    """How large each relative error of the case may be."""
    share = share_of_bfloat16(case.dtype)
    gradients = dict.fromkeys(("d_q", "d_k", "d_v"), GRADIENTS * share)
    return {"out": OUT[case.magnitude] * share, **gradients, "d_q saturated": OF_SATURATED * share}


def relative(got: Array, want: Array) -> float:
    """The norm of what is off over the norm of what is expected; 0 of nothing."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if want.size else 0.0


def _within(case: Case, errors: dict[str, float]) -> dict[str, float]:
    limits = promised(case)
    for what, error in errors.items():
        if not error <= limits[what]:  # NaN is not
            raise ContractError(
                f"{case.name}: {what} has a relative error of {error:.3g}; the contract allows {limits[what]:.3g}"
            )
    return errors


@dataclass(frozen=True, eq=False)
class _Scaled:
    """A call's exact results, and the rows where one key has nearly all of the weight, and not the only one."""

    out: Array
    d_out: Array
    gradients: dict[str, Array]
    saturated: Array


@lru_cache(maxsize=4)
def _scaled(case: Case) -> _Scaled:
    call = case.inputs().call()
    d_out, _ = gradients_to_pull(call)
    inputs = call.spec, call.q, call.k, call.v
    out, lse = reference.forward(*inputs)
    grads = backward_results(reference.backward(*inputs, d_out))
    return _Scaled(out, d_out, grads, _saturated(call, lse))


def _saturated(call: Call, lse: Array) -> Array:
    """Rows by their largest weight. One that sees one key alone has no gradient, whose error could be a part of it."""
    q, k = (arrays.widen(x, np.float64) for x in (call.q, call.k))
    weights = reference.weights(call.spec, q, k, np.arange(call.shape.n_q))
    largest = weights.max(axis=-1)
    found: Array = (largest >= SATURATED) & ((weights > 0).sum(axis=-1) > 1)
    return found


# -- both -------------------------------------------------------------------------------------------------------------


def _gradients(kernel: Kernel, call: Call, tile: Tile | None, device: str, d_out: Array, d_lse: Array | None) -> Grads:
    """As training computes them: the forward pass keeps what rounding took from out, where the system can."""
    spec = call.spec.before_backward(call.shape.dtype)
    saved: Partial = kernel.forward(spec, call.q, call.k, call.v, tile)
    g, g_lse = (x if x is None or device == "cpu" else arrays.as_tensor(x).to(device) for x in (d_out, d_lse))
    return kernel.backward(spec, call.q, call.k, call.v, saved, g, g_lse, tile)


def _host(results: dict[str, Any]) -> dict[str, Array]:
    return {what: arrays.widen(arrays.as_numpy(on_host(x)), np.float64) for what, x in results.items()}


def one_hot_cases() -> list[Case]:
    """Found first, in the middle and last, in every type that all systems know, over several tiles of keys. By a gap of
    20 the key's weight is not yet beyond what a softmax that guesses its maximum takes; by 128 float32's others are 0.
    """
    return [
        Case(variant, shape, dtype, one_hot=place, gap=gap)
        for shape in _SHAPES
        for dtype in ("bfloat16", "float16", "float32")
        for variant in ("causal", "full")
        for place in PLACES
        for gap in (20.0, 128.0)
    ]


def scaled_cases() -> list[Case]:
    """Each scale in both half precisions."""
    return [
        Case(variant, shape, dtype, magnitude=magnitude)
        for shape in _SHAPES
        for dtype in ("bfloat16", "float16")
        for variant in ("causal", "full")
        for magnitude in OUT
    ]


_SHAPES = ("several tiles", "head of 128")  # of as many keys as queries at least, so that each row sees one

"""What the contract promises in saturated rows, where one key or a few have nearly all of a row's weight, as code.

The general limit (contract.py) is of the largest number of a result, and so says little about such rows: their
gradients are small, being differences of two numbers that are almost equal. Here a row whose weight is all on one key is
held to that key's value, and calls whose queries are large to relative errors in the norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise import arrays, reference
from tilewise.arrays import Array
from tilewise.cases import SHAPES, Case, dominant
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
_SUBNORMAL = 2.0**-25  # half of float16's smallest number: what rounding to it is off by at least


def share_of_bfloat16(dtype: str) -> float:
    """What errors in this type may be, as a share of those in bfloat16."""
    return ROUNDING[dtype] / ROUNDING["bfloat16"]


# -- rows with all their weight on one key ----------------------------------------------------------------------------


def check_one_hot_forward(kernel: Kernel, case: Case, tile: Tile | None = None, device: str = "cpu") -> None:
    """out is the key's v, in half precision to the last bit; lse is the key's score."""
    call = on_device(case.inputs().call(), device)
    want = _one_hot(case)
    got = _host(forward_results(kernel.forward(call.spec, call.q, call.k, call.v, tile)))
    _hold(case, "out", got["out"], want.out, want.out_limit)
    _hold(case, "lse", got["lse"], want.lse, want.lse_limit)


def check_one_hot_backward(kernel: Kernel, case: Case, tile: Tile | None = None, device: str = "cpu") -> None:
    """What d_out brings to d_q and d_k is 0 but for roundings of the type computed with; d_v sums up d_out."""
    call = on_device(case.inputs().call(), device)
    want = _one_hot(case)
    got = _host(backward_results(_gradients(kernel, call, tile, device, want.d_out, want.d_lse)))
    for what, (exact, limit) in want.gradients.items():
        _hold(case, what, got[what], exact, limit)


@dataclass(frozen=True, eq=False)
class _OneHot:
    """A one-hot call's exact results, and how far from each number a kernel may be."""

    out: Array
    out_limit: Array
    lse: Array
    lse_limit: Array
    d_out: Array
    d_lse: Array
    gradients: dict[str, tuple[Array, Array]]


@lru_cache(maxsize=4)
def _one_hot(case: Case) -> _OneHot:
    """By error analysis of first order, as the fuzz has it: a sum of n terms is off by (4 sqrt(n) + 8) roundings of
    their magnitudes, an exponent by its score's and its lse's error."""
    call = case.inputs().call()
    s, scale = call.shape, call.spec.scale
    u, u_out = ROUNDING[str(arrays.compute_dtype(s.dtype))], ROUNDING[s.dtype]
    is_half = u_out > u
    keys = dominant(case.one_hot, s.n_q, s.n_k, case.variant == "causal")
    d_out, d_lse = gradients_to_pull(call)
    q, k, v, g, g_lse = (arrays.widen(x, np.float64) for x in (call.q, call.k, call.v, d_out, d_lse))
    k, v = (np.repeat(x, s.group, axis=1)[:, :, keys] for x in (k, v))  # each row's own
    score = scale * (q * k).sum(-1)
    off_score = (4 * np.sqrt(s.d) + 8) * u * scale * np.abs(q * k).sum(-1)
    off_weight = 2 * off_score + 8 * u * np.abs(score)  # as a share, where it is recomputed from lse
    off_score_gradient = 2 * (4 * np.sqrt(s.d_v) + 8) * u * (np.abs(g * v).sum(-1) + np.abs(g_lse))
    off_score_gradient += np.abs(g_lse) * (off_weight + is_half * u_out) + _SUBNORMAL * is_half
    rows = {
        "d_q": (scale * g_lse[..., None] * k, scale * off_score_gradient[..., None] * np.abs(k)),
        "d_k": (scale * g_lse[..., None] * q, scale * off_score_gradient[..., None] * np.abs(q)),
        "d_v": (g, (off_weight + is_half * u_out)[..., None] * np.abs(g)),
    }
    sums = {what: tuple(_by_key(x, keys, call) for x in pair) for what, pair in rows.items() if what != "d_q"}
    many = 4 * np.sqrt(s.n_q) + 8

    def stored(exact: Array, limit: Array, terms: Array) -> tuple[Array, Array]:
        return exact, limit + (u_out + 8 * u) * (np.abs(exact) + limit) + many * u * terms + _SUBNORMAL * is_half

    gradients = {"d_q": stored(*rows["d_q"], np.zeros_like(q))}
    for what, (exact, limit) in sums.items():
        gradients[what] = stored(exact, limit, _by_key(np.abs(rows[what][0]), keys, call))
    out_limit = np.zeros_like(v) if is_half else 8 * u * np.abs(v)
    return _OneHot(v, out_limit, score, off_score + 4 * u * np.abs(score), d_out, d_lse, gradients)


def _by_key(x: Array, keys: Array, call: Call) -> Array:
    """The sum of what each row brings to its key, over the query heads that share it."""
    s = call.shape
    total = np.zeros((s.batch, s.heads, s.n_k, x.shape[-1]))
    np.add.at(total, (slice(None), slice(None), keys), x)
    found: Array = total.reshape(s.batch, s.heads_k, s.group, s.n_k, -1).sum(axis=2)
    return found


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
    spec = replace(call.spec, keeps_remainder=True)
    saved: Partial = kernel.forward(spec, call.q, call.k, call.v, tile)
    pulled = (x if x is None or device == "cpu" else arrays.as_tensor(x).to(device) for x in (d_out, d_lse))
    return kernel.backward(spec, call.q, call.k, call.v, saved, *pulled, tile)


def _host(results: dict[str, Any]) -> dict[str, Array]:
    return {what: arrays.widen(arrays.as_numpy(on_host(x)), np.float64) for what, x in results.items()}


def one_hot_cases() -> list[Case]:
    """Found first, in the middle and last, in every type that all systems know, over several tiles of keys."""
    return [
        Case(variant, shape, dtype, one_hot=place)
        for shape in _SHAPES
        for dtype in ("bfloat16", "float16", "float32")
        for variant in ("causal", "full")
        for place in ("last", "first", "middle")
    ]


def scaled_cases() -> list[Case]:
    return [
        Case(variant, shape, dtype, magnitude=magnitude)
        for shape in _SHAPES
        for dtype in ("bfloat16", "float16")
        for variant in ("causal", "full")
        for magnitude in OUT
    ]


_SHAPES = ("several tiles", "head of 128")
assert all(SHAPES[shape].n_k >= SHAPES[shape].n_q for shape in _SHAPES)  # each row sees a key

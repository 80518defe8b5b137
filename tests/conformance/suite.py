"""What conformance means: one check for forward, one for backward, on any kernel and any case.

The tolerance is the contract's: an error against the float64 reference of at most twice that of the same computation
done densely in the same precision, plus a rounding band. It never comes from what a kernel happens to reach.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise import arrays, reference
from tilewise.cases import Case
from tilewise.dispatch import Kernel
from tilewise.spec import Tile
from tilewise.validate import Call

EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def check_forward(kernel: Kernel, case: Case, tile: Tile | None = None) -> None:
    """out and lse of one case are within the contract."""
    call = case.inputs().call()
    got = kernel.forward(call.spec, call.q, call.k, call.v, tile)
    want = reference.forward(call.spec, call.q, call.k, call.v)
    dense = reference.forward(call.spec, call.q, call.k, call.v, **_same_precision(call))
    assert arrays.dtype_name(got.out) == call.shape.dtype, "out has the type of q"
    assert arrays.as_numpy(got.lse).dtype == arrays.compute_dtype(call.shape.dtype), "lse has at least float32"
    _check(case, "out", got.out, want.out, dense.out, call.shape.dtype)
    _check(case, "lse", got.lse, want.lse, dense.lse, str(arrays.as_numpy(got.lse).dtype))


def check_backward(kernel: Kernel, case: Case, tile: Tile | None = None) -> None:
    """Every gradient of one case is within the contract, with a gradient of lse as well as of out."""
    call = case.inputs().call()
    rng = np.random.default_rng(1)
    saved = kernel.forward(call.spec, call.q, call.k, call.v, tile)
    d_out = arrays.narrow(rng.standard_normal(saved.out.shape), call.shape.dtype)
    d_lse = rng.standard_normal(saved.lse.shape).astype(saved.lse.dtype)
    options = {} if tile is None else {"tile": tile}
    got = kernel.backward(call.spec, call.q, call.k, call.v, saved, d_out, d_lse, **options)
    want = reference.backward(call.spec, call.q, call.k, call.v, d_out, d_lse)
    dense = reference.backward(call.spec, call.q, call.k, call.v, d_out, d_lse, **_same_precision(call))
    for name in ("q", "k", "v"):
        grads = (getattr(g, name) for g in (got, want, dense))
        _check(case, f"d_{name}", *grads, call.shape.dtype)
    assert (got.sinks is None) == (call.spec.sinks is None), "a gradient of sinks where there are sinks"
    if got.sinks is not None:
        _check(case, "d_sinks", got.sinks, want.sinks, dense.sinks, "float32")
    assert len(got.arrays) == len(call.spec.wanted), "a gradient for each array that wants one"
    for slot, *grads in zip(call.spec.wanted, got.arrays, want.arrays, dense.arrays, strict=True):
        assert arrays.dtype_name(grads[0]) == arrays.dtype_name(slot.array)
        # Sums over many scores: those scores carry the rounding of the inputs' type.
        _check(case, "d_array", *grads, call.shape.dtype if call.shape.dtype != "float64" else "float32")


def _same_precision(call: Call) -> dict[str, Any]:
    """Float64's own error cannot be measured with float64: float32's is, and `_check` scales it down."""
    dtype = "float32" if call.shape.dtype == "float64" else call.shape.dtype

    def store(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return arrays.widen(arrays.narrow(x, dtype), x.dtype)

    return {"dtype": arrays.compute_dtype(dtype), "store": store if dtype in ("float16", "bfloat16") else lambda x: x}


def _check(case: Case, what: str, got: Any, want: Any, dense: Any, dtype: str) -> None:
    got = arrays.widen(arrays.as_numpy(got), np.float64)
    assert got.shape == want.shape, f"{case.name}: {what} has shape {got.shape}, expected {want.shape}"
    assert not np.isnan(got).any(), f"{case.name}: {what} has NaN"
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{case.name}: {what} must be -inf in the same rows"
    assert np.isfinite(got[~infinite]).all(), f"{case.name}: {what} is infinite where it should not be"
    error, allowed = (np.abs(x[~infinite] - want[~infinite]).max(initial=0) for x in (got, dense.astype(np.float64)))
    if dtype == "float64":
        allowed *= EPS["float64"] / EPS["float32"]
    # The band: a rounding on storing, and a few in the type computed with.
    largest = np.abs(want[~infinite]).max(initial=0)
    limit = 2 * allowed + (EPS[dtype] + 8 * EPS[str(arrays.compute_dtype(dtype))]) * max(largest, 1e-30)
    assert error <= limit, f"{case.name}: {what} is off by {error:.3g}; the contract allows {limit:.3g}"

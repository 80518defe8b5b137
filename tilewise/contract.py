"""The numeric contract as code: how far a kernel's numbers may be from the float64 reference.

The error may be at most twice that of the same computation done densely in the same precision, plus a rounding band.
It never comes from what a kernel happens to reach. The conformance suite and the demo both judge by this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise import arrays, reference
from tilewise.cases import Case
from tilewise.dispatch import Kernel
from tilewise.spec import Tile
from tilewise.validate import Call

# Half the distance from 1 to the next number: the relative error of one rounding.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


class ContractError(AssertionError):
    """A kernel's result is outside the contract."""


def check_forward(kernel: Kernel, case: Case, tile: Tile | None = None) -> float:
    """out and lse of one case are within the contract; returns the maximum error of out."""
    call = case.inputs().call()
    got = kernel.forward(call.spec, call.q, call.k, call.v, tile)
    want = reference.forward(call.spec, call.q, call.k, call.v)
    dense = reference.forward(call.spec, call.q, call.k, call.v, **_same_precision(call))
    wide = str(arrays.compute_dtype(call.shape.dtype))
    _check_type(case, "out", got.out, call.shape.dtype)
    _check_type(case, "lse", got.lse, wide)
    _check(case, "lse", got.lse, want.lse, dense.lse, wide)
    return _check(case, "out", got.out, want.out, dense.out, call.shape.dtype)


def check_backward(kernel: Kernel, case: Case, tile: Tile | None = None) -> float:
    """Every gradient of one case is within the contract, for a gradient of lse as well as of out."""
    call = case.inputs().call()
    rng = np.random.default_rng(1)
    saved = kernel.forward(call.spec, call.q, call.k, call.v, tile)
    d_out = arrays.narrow(rng.standard_normal(saved.out.shape), call.shape.dtype)
    d_lse = rng.standard_normal(saved.lse.shape).astype(saved.lse.dtype)
    got = kernel.backward(call.spec, call.q, call.k, call.v, saved, d_out, d_lse, tile)
    want = reference.backward(call.spec, call.q, call.k, call.v, d_out, d_lse)
    dense = reference.backward(call.spec, call.q, call.k, call.v, d_out, d_lse, **_same_precision(call))
    error = 0.0
    for name in ("q", "k", "v"):
        _check_type(case, f"d_{name}", getattr(got, name), call.shape.dtype)
        exact, rough = getattr(want, name), getattr(dense, name)
        error = max(error, _check(case, f"d_{name}", getattr(got, name), exact, rough, call.shape.dtype))
    if (got.sinks is None) != (call.spec.sinks is None):
        raise ContractError(f"{case.name}: there must be a gradient of sinks if, and only if, there are sinks")
    if got.sinks is not None:
        error = max(error, _check(case, "d_sinks", got.sinks, want.sinks, dense.sinks, "float32"))
    if len(got.arrays) != len(call.spec.wanted):
        raise ContractError(f"{case.name}: {len(got.arrays)} array gradients, expected {len(call.spec.wanted)}")
    for slot, found, exact, rough in zip(call.spec.wanted, got.arrays, want.arrays, dense.arrays, strict=True):
        _check_type(case, "d_array", found, arrays.dtype_name(slot.array))
        # Sums over many scores: those carry the rounding of the inputs' type, the sum that of the array's.
        stored = max((call.shape.dtype, arrays.dtype_name(slot.array)), key=ROUNDING.__getitem__)
        error = max(error, _check(case, "d_array", found, exact, rough, stored))
    return error


def _same_precision(call: Call) -> dict[str, Any]:
    """Float64's own error cannot be measured with float64: float32's is, and `_check` scales it down."""
    dtype = "float32" if call.shape.dtype == "float64" else call.shape.dtype

    def store(x: arrays.Array) -> arrays.Array:
        return arrays.widen(arrays.narrow(x, dtype), x.dtype)

    return {"dtype": arrays.compute_dtype(dtype), "store": store if dtype in ("float16", "bfloat16") else lambda x: x}


def _check_type(case: Case, what: str, got: Any, expected: str) -> None:
    if arrays.dtype_name(got) != expected:
        raise ContractError(f"{case.name}: {what} has type {arrays.dtype_name(got)}, expected {expected}")


def _check(case: Case, what: str, got: Any, want: Any, dense: Any, dtype: str) -> float:
    """The maximum error of one result, if the contract allows it."""
    got = arrays.widen(arrays.as_numpy(got), np.float64)
    if got.shape != want.shape:
        raise ContractError(f"{case.name}: {what} has shape {got.shape}, expected {want.shape}")
    infinite = np.isinf(want)
    if not np.array_equal(got[infinite], want[infinite]) or not np.isfinite(got[~infinite]).all():
        raise ContractError(
            f"{case.name}: {what} is NaN or infinite where it should not be, or finite where it should be -inf"
        )
    error, allowed = (
        float(np.abs(x[~infinite] - want[~infinite]).max(initial=0)) for x in (got, dense.astype(np.float64))
    )
    if dtype == "float64":
        allowed *= ROUNDING["float64"] / ROUNDING["float32"]
    # The band: a rounding on storing, and a few in the type computed with.
    band = ROUNDING[dtype] + 8 * ROUNDING[str(arrays.compute_dtype(dtype))]
    limit = 2 * allowed + band * float(np.abs(want[~infinite]).max(initial=0))
    if error > limit:
        raise ContractError(f"{case.name}: {what} is off by {error:.3g}; the contract allows {limit:.3g}")
    return error

"""The numeric contract as code: how far a kernel's numbers may be from the float64 reference.

The error may be at most twice that of the same computation done densely in the same precision, plus a rounding band.
It never comes from what a kernel happens to reach. The conformance suite, the fuzz and the demo all judge by this.
Rows where one key has nearly all of the weight have limits of their own besides: saturated.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise import arrays, reference
from tilewise.arrays import Array
from tilewise.cases import Case
from tilewise.dispatch import Kernel
from tilewise.expr import Expr, with_arrays
from tilewise.rope import Rope
from tilewise.spec import Grads, Partial, Tile
from tilewise.validate import Call

# Half the distance from 1 to the next number: the relative error of one rounding.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


class ContractError(AssertionError):
    """A kernel's result is outside the contract."""


@dataclass(frozen=True, eq=False)
class Expected:
    """One result as it should be: its type, its exact values, and how far from them it may be."""

    what: str
    dtype: str
    exact: Array
    limit: float

    def errors(self, got: Any) -> Array:
        """How far each number is from the exact one (infinite ones: 0), if type, shape and infinities are right."""
        if got is None:
            raise ContractError(f"{self.what} is missing")
        if arrays.dtype_name(got) != self.dtype:
            raise ContractError(f"{self.what} has type {arrays.dtype_name(got)}, expected {self.dtype}")
        with np.errstate(invalid="ignore"):  # what was never written may be any bits
            got = arrays.widen(arrays.as_numpy(got), np.float64)
        if got.shape != self.exact.shape:
            raise ContractError(f"{self.what} has shape {got.shape}, expected {self.exact.shape}")
        infinite = np.isinf(self.exact)
        if not np.array_equal(got[infinite], self.exact[infinite]) or not np.isfinite(got[~infinite]).all():
            raise ContractError(
                f"{self.what} is NaN or infinite where it should not be, or finite where it should be -inf"
            )
        errors: Array = np.abs(np.where(infinite, 0, got) - np.where(infinite, 0, self.exact))
        return errors

    def check(self, got: Any) -> float:
        """The maximum error, if the contract allows it."""
        error = float(self.errors(got).max(initial=0))
        if error > self.limit:
            raise ContractError(f"{self.what} is off by {error:.3g}; the contract allows {self.limit:.3g}")
        return error


# -- what is expected of a call ---------------------------------------------------------------------------------------


def expected_forward(call: Call) -> list[Expected]:
    """out and lse of a call."""
    inputs = call.spec, call.q, call.k, call.v
    want = forward_results(reference.forward(*inputs, dtype=exact(call.shape.dtype)))
    dense = forward_results(reference.forward(*inputs, **same_precision(call.shape.dtype)))
    wide = str(arrays.compute_dtype(call.shape.dtype))
    types = {"out": call.shape.dtype, "lse": wide}
    return [expected(what, dtype, dtype, want[what], dense[what]) for what, dtype in types.items()]


def expected_backward(call: Call, d_out: Any, d_lse: Any) -> list[Expected]:
    """Every gradient of a call: of q, k, v, of sinks if there are any, and of each array that wants one.

    If the spec keeps the remainder of out, the limit is that of a backward pass which has it.
    """
    inputs = call.spec, call.q, call.k, call.v, d_out, d_lse
    want = backward_results(reference.backward(*inputs, dtype=exact(call.shape.dtype)))
    dense = backward_results(reference.backward(*inputs, **same_precision(call.shape.dtype)))
    types = dict.fromkeys(("d_q", "d_k", "d_v"), call.shape.dtype)
    if call.spec.sinks is not None:
        types["d_sinks"] = arrays.dtype_name(call.spec.sinks)
    types |= {f"d_array {i}": arrays.dtype_name(slot.array) for i, slot in enumerate(call.spec.wanted)}
    # Sums over many scores: those carry the rounding of the inputs' type, the sum that of the array's.
    coarser = {what: max((call.shape.dtype, dtype), key=ROUNDING.__getitem__) for what, dtype in types.items()}
    saved = _rounding_of_lse(call)
    return [expected(what, dtype, coarser[what], want[what], dense[what], saved) for what, dtype in types.items()]


def _rounding_of_lse(call: Call) -> float:
    """What weights may be off by, as a share of themselves: backward recomputes them from an lse that was stored."""
    lse = reference.forward(call.spec, call.q, call.k, call.v, dtype=exact(call.shape.dtype)).lse
    return ROUNDING[str(arrays.compute_dtype(call.shape.dtype))] * float(np.abs(lse[np.isfinite(lse)]).max(initial=0))


def forward_results(done: Partial) -> dict[str, Any]:
    return {"out": done.out, "lse": done.lse}


def backward_results(grads: Grads) -> dict[str, Any]:
    results = {"d_q": grads.q, "d_k": grads.k, "d_v": grads.v}
    if grads.sinks is not None:
        results["d_sinks"] = grads.sinks
    return results | {f"d_array {i}": grad for i, grad in enumerate(grads.arrays)}


def gradients_to_pull(call: Call, seed: int = 1) -> tuple[Array, Array]:
    """A random d_out and d_lse for a call."""
    rng, s = np.random.default_rng(seed), call.shape
    rows = (s.batch, s.heads, s.n_q)
    d_out = arrays.narrow(rng.standard_normal((*rows, s.d_v)), s.dtype)
    return d_out, rng.standard_normal(rows).astype(arrays.compute_dtype(s.dtype))


def exact(dtype: str) -> Any:
    """Wider than what a kernel computes with: float64's own sums are off as far as a kernel's may be."""
    return np.longdouble if dtype == "float64" else np.float64


def same_precision(dtype: str) -> dict[str, Any]:
    """Float64's own error cannot be measured with float64: float32's is, and `expected` scales it down."""
    dtype = "float32" if dtype == "float64" else dtype

    def store(x: Array) -> Array:
        return arrays.widen(arrays.narrow(x, dtype), x.dtype)

    return {"dtype": arrays.compute_dtype(dtype), "store": store if dtype in ("float16", "bfloat16") else lambda x: x}


def expected(what: str, dtype: str, rounded_as: str, want: Array, dense: Array, saved: float = 0.0) -> Expected:
    """The limit: twice the dense computation's error, and a band of a few roundings of the largest number. saved: what
    was rounded before, as a share of it."""
    finite = np.isfinite(want)
    allowed = float(np.abs(dense[finite].astype(np.float64) - want[finite]).max(initial=0))
    if rounded_as == "float64":
        allowed *= ROUNDING["float64"] / ROUNDING["float32"]
    # The band: a rounding on storing, and a few in the type computed with.
    band = ROUNDING[rounded_as] + 8 * ROUNDING[str(arrays.compute_dtype(rounded_as))] + saved
    return Expected(what, dtype, want, 2 * allowed + band * float(np.abs(want[finite]).max(initial=0)))


# -- judging a kernel -------------------------------------------------------------------------------------------------


def check_results(expected: list[Expected], got: dict[str, Any]) -> dict[str, float]:
    """The maximum error of every result, if all are within the contract and nothing is missing or too much."""
    surplus = got.keys() - {e.what for e in expected}
    if surplus:
        raise ContractError(f"{', '.join(sorted(surplus))}: nothing of the kind was asked for")
    return {e.what: e.check(got.get(e.what)) for e in expected}


def check_forward(kernel: Kernel, case: Case, tile: Tile | None = None, device: str = "cpu") -> float:
    """out and lse of one case are within the contract; returns the maximum error of out."""
    call = on_device(case.inputs().call(), device)
    got = forward_results(kernel.forward(call.spec, call.q, call.k, call.v, tile))
    return _check_case(case, _forward_of(case), {what: on_host(x) for what, x in got.items()})["out"]


def check_backward(
    kernel: Kernel, case: Case, tile: Tile | None = None, device: str = "cpu", keeps_remainder: bool = True
) -> float:
    """Every gradient of one case is within the contract, for a gradient of lse as well as of out.

    keeps_remainder: forward is asked for it, as before any backward pass, and a system that keeps it is held to it.
    """
    host = case.inputs().call()
    spec = host.spec.before_backward(host.shape.dtype) if keeps_remainder else host.spec
    call = on_device(replace(host, spec=spec), device)
    d_out, d_lse = (x if device == "cpu" else _copied(x, device) for x in gradients_to_pull(host))
    saved = kernel.forward(call.spec, call.q, call.k, call.v, tile)
    got = backward_results(kernel.backward(call.spec, call.q, call.k, call.v, saved, d_out, d_lse, tile))
    expected = _backward_of(case, saved.remainder is not None)
    return max(_check_case(case, expected, {what: on_host(x) for what, x in got.items()}).values())


def _copied(x: Array, device: str) -> Any:
    return arrays.as_tensor(x).to(device)


def on_device(call: Call, device: str, copy: Callable[[Array, str], Any] = _copied) -> Call:
    """The call with every array a PyTorch tensor on that device; on "cpu" as it is."""
    if device == "cpu":
        return call
    moved: dict[int, Any] = {}

    def move(x: Array) -> Any:  # one tensor for one array: kernels tell arrays by which object they are
        if id(x) not in moved:
            moved[id(x)] = copy(x, device)
        return moved[id(x)]

    def expression(expr: Expr | None) -> Expr | None:
        return None if expr is None else with_arrays(expr, lambda slot: move(slot.array))

    spec = replace(
        call.spec, mask=expression(call.spec.mask), score=expression(call.spec.score),
        sinks=None if call.spec.sinks is None else move(call.spec.sinks), rope=_moved(call.spec.rope, move),
    )  # fmt: skip
    return replace(call, spec=spec, q=move(call.q), k=move(call.k), v=move(call.v))


def _moved(rope: Rope | None, move: Callable[[Array], Any]) -> Rope | None:
    return None if rope is None else replace(rope, **{name: move(x) for name, x in rope.arrays.items()})


def on_host(x: Any) -> Any:
    """An array in main memory, where it may be already."""
    return x.cpu() if arrays.is_torch(x) else x


def _check_case(case: Case, expected: list[Expected], got: dict[str, Any]) -> dict[str, float]:
    try:
        return check_results(expected, got)
    except ContractError as error:
        raise ContractError(f"{case.name}: {error}") from None


# A case is checked on one system and tile after the other: what is expected of it is kept meanwhile, and only that,
# since a kernel that writes to its inputs must not spoil them for the next.
@lru_cache(maxsize=8)
def _forward_of(case: Case) -> list[Expected]:
    return expected_forward(case.inputs().call())


@lru_cache(maxsize=8)
def _backward_of(case: Case, keeps_remainder: bool) -> list[Expected]:
    call = case.inputs().call()
    spec = replace(call.spec, keeps_remainder=keeps_remainder)
    return expected_backward(replace(call, spec=spec), *gradients_to_pull(call))

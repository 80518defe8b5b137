"""Calls whose gradients suffer if delta is made from a rounded out, and how far they are from float64's."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise import arrays, dispatch, reference
from tilewise.arrays import Array
from tilewise.validate import prepare

HERE = [name for name in ("numpy", "cpu") if dispatch.kernel(name).unavailable() is None]
# All that keep a remainder where there is no GPU; Triton's kernels narrow weights, and their sums carry that error.
KEEPING = [*HERE, *(name for name in ("triton",) if dispatch.kernel(name).unavailable() is None)]
MOST = 3e-3  # of an error relative to the gradient; one rounding of it to bfloat16 takes 1.7e-3


def problem(scale: float, dtype: str = "bfloat16", n: int = 256, n_k: int = 256, seed: int = 0) -> list[Array]:
    """q, k, v and d_out; the larger q, the more of a row's weight is on one key."""
    rng = np.random.default_rng(seed)
    sizes = (n, scale), (n_k, 1), (n_k, 1), (n, 1)
    return [arrays.narrow(rng.standard_normal((1, 2, rows, 32)) * by, dtype) for rows, by in sizes]


def off(found: Any, want: Any) -> float:
    """The norm of the error, relative to the norm of what is wanted."""
    found, want = (arrays.widen(arrays.as_numpy(x), np.float64).ravel() for x in (found, want))
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def gradients(given: list[Array], **options: Any) -> Any:
    """The gradients, in float64."""
    call = prepare(*given[:3], **options)
    return reference.backward(call.spec, call.q, call.k, call.v, given[3])

"""What the lab is given, checked: every error names the argument, what came and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arrays import Array

_FLOATS = (np.float16, np.float32, np.float64)


def whole(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return int(value)


def check_floats(**arrays: Any) -> None:
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array, got {type(x).__name__}")
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name}: expected float16, float32 or float64, got {x.dtype}")


def check_inputs(Q: Any, K: Any, V: Any) -> None:
    check_floats(Q=Q, K=K, V=V)
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        if x.dtype != Q.dtype:
            raise TypeError(f"{name}: expected {Q.dtype} as Q has, got {x.dtype}")
        if x.ndim < 2:
            raise ValueError(f"{name}: expected (..., n, d), got shape {x.shape}")
        if x.shape[:-2] != Q.shape[:-2]:
            raise ValueError(f"{name}: expected leading dimensions {Q.shape[:-2]} as Q has, got shape {x.shape}")
    if Q.shape[-1] == 0:
        raise ValueError(f"Q: expected d of at least 1, got shape {Q.shape}")
    if K.shape[-1] != Q.shape[-1]:
        raise ValueError(f"K: expected d = {Q.shape[-1]} as Q has, got shape {K.shape}")
    if V.shape[-2] != K.shape[-2]:
        raise ValueError(f"V: expected n = {K.shape[-2]} as K has, got shape {V.shape}")


def check_mask(mask: Any, Q: Array, K: Array) -> Array:
    """The mask as a view of (..., n_q, n_k); broadcasting copies nothing."""
    shape = (*Q.shape[:-1], K.shape[-2])
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"mask: expected a boolean NumPy array, got {type(mask).__name__}")
    if mask.dtype != np.bool_:
        raise TypeError(f"mask: expected booleans (True: the query may attend), got {mask.dtype}")
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(f"mask: expected a shape that broadcasts to {shape}, got {mask.shape}") from None

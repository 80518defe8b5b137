"""What a cache is given, checked: every error names the argument, what came, what was expected and what to do."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import INT32_MAX
from tilewise.validate import check_head_dim


def check_like(name: str, x: Any, stored: Any) -> None:
    """Refuse an array of another library, type or device than the cache is of; and one whose gradient is wanted."""
    if not arrays.is_array(x) or arrays.is_torch(x) != arrays.is_torch(stored):
        expected = "a PyTorch tensor" if arrays.is_torch(stored) else "a NumPy array"
        raise TypeError(f"{name}: expected {expected} as the cache has, got {type(x).__name__}")
    for what, of in (("type", arrays.dtype_name), ("device", arrays.device_name)):
        if of(x) != of(stored):
            raise (TypeError if what == "type" else ValueError)(
                f"{name}: expected {what} {of(stored)} as the cache has, got {of(x)}; convert {name}, or make a cache "
                f"like it"
            )
    if arrays.is_torch(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(f"{name}: decoding has no gradients, and {name} requires one; call it under torch.no_grad()")


def named(k: Any, v: Any) -> Sequence[tuple[str, Any]]:
    for name, x in (("k", k), ("v", v)):
        if not arrays.is_array(x):
            advice = arrays.list_advice(x)
            raise TypeError(f"{name}: expected a NumPy array or a PyTorch tensor, got {type(x).__name__}{advice}")
    return ("k", k), ("v", v)


def check_storage(k: Any, v: Any, layout: str) -> None:
    """Refuse arrays that cannot be a cache. Lengths and tables are 32 bit, so no size may be beyond them."""
    for name, x in named(k, v):
        if arrays.dtype_name(x) not in arrays.FLOAT_DTYPES:
            raise TypeError(f"{name}: expected {', '.join(arrays.FLOAT_DTYPES)}, got {arrays.dtype_name(x)}")
        if len(x.shape) != 4 or 0 in x.shape:
            raise ValueError(f"{name}: expected {layout}, none of them 0, got shape {tuple(x.shape)}")
        if max(x.shape) > INT32_MAX:
            raise ValueError(f"{name}: expected sizes of at most {INT32_MAX}, got shape {tuple(x.shape)}")
        check_head_dim(name, x)
        check_like(name, x, k)
        _check_writable(name, x)
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected {tuple(k.shape[:3])} and a head dimension, got shape {tuple(v.shape)}")


def _check_writable(name: str, x: Any) -> None:
    """Each number has a place of its own, in which it may be written."""
    steps = x.stride() if arrays.is_torch(x) else [step / x.itemsize for step in x.strides]
    lies = x.shape[3] == 1 or steps[3] == 1
    if not lies or any(step < 1 or step % 1 for step, size in zip(steps, x.shape, strict=True) if size > 1):
        raise ValueError(f"{name}: expected rows side by side and positive strides, got {tuple(steps)}; copy it first")
    if not arrays.is_torch(x) and not x.flags.writeable:
        raise ValueError(f"{name}: new keys are written in place, and this array is read-only; copy it first")


def whole_numbers(name: str, given: Any, batch: int, most: int) -> Array:
    """One a sequence; a single one counts for all."""
    values = np.asarray(given.cpu() if arrays.is_torch(given) else given)
    is_right = values.dtype.kind in "iu" and values.shape in ((), (batch,))
    if not is_right or np.any(values < 0) or np.any(values > most):
        raise ValueError(
            f"{name}: expected whole numbers from 0 to {most}, one for each of {batch} sequences, got {given!r}"
        )
    return np.broadcast_to(values, (batch,)).astype(np.int32)


def positive(name: str, given: Any, most: int = INT32_MAX) -> int:
    """A whole number as an int. Lengths and tables of pages, which count keys and pages, are 32 bit."""
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
        raise ValueError(f"{name}: expected a positive whole number, got {given!r}")
    if int(given) > most:
        raise ValueError(f"{name}: expected at most {most}, got {given!r}")
    return int(given)


def zeros(name: str, x: Any, rows: int, first: int | None = None) -> Any:
    """Storage for arrays like x, (batch, heads, n, d), with as many rows, and pages in place of its batch if told."""
    if len(x.shape) != 4:
        raise ValueError(f"{name}: expected (batch, heads, n, d), got shape {tuple(x.shape)}")
    check_head_dim(name, x)  # before memory is taken
    size = int(x.shape[0]) if first is None else first, int(x.shape[1]), rows, int(x.shape[3])
    try:
        return x.new_zeros(size) if arrays.is_torch(x) else np.zeros(size, x.dtype)
    except (ValueError, MemoryError, RuntimeError) as error:  # more than there is, or than addresses can tell
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
            raise  # a GPU's memory has an error of its own, which callers may catch
        counts = "batch, capacity" if first is None else "pages, page_size"
        raise MemoryError(
            f"{counts}: a cache of shape {size} takes {math.prod(size) * x.itemsize / 2**30:.3g} GiB for {name} alone, "
            "which cannot be had; make a smaller one"
        ) from error

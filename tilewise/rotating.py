"""apply_rope(): the rotary embedding alone, where attention does not do it on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise import arrays
from tilewise.rope import Rope, Rotation, check, rotation
from tilewise.validate import expand, restore

_LAYOUTS = "(n, d), (batch, n, d) or (batch, heads, n, d)"


def apply_rope(x: Any, rope: Rope, *, positions: Any = None) -> Any:
    """x with its pairs of numbers turned by their positions, as attention(..., rope=rope) does it on the way.

    x: (n, d), (batch, n, d) or (batch, heads, n, d), a NumPy array or a PyTorch tensor, which it is differentiable in.
    positions: whole numbers, (n,) or (batch, n); else the rope's own, or counted from 0. Computed in at least float32.
    """
    if not arrays.is_array(x) or arrays.kind_of(x) != "float":
        found = arrays.dtype_name(x) if arrays.is_array(x) else type(x).__name__
        raise TypeError(f"x: expected an array of {', '.join(arrays.FLOAT_DTYPES)}, got {found}")
    rank = len(x.shape)
    if rank not in (2, 3, 4):
        raise ValueError(f"x: expected {_LAYOUTS}, got shape {tuple(x.shape)}")
    if positions is not None and isinstance(rope, Rope):
        rope = replace(rope, positions=positions, positions_k=None)
    wide = expand(x, rank)
    check(rope, wide.shape[0], {"positions": wide.shape[2]}, wide.shape[3])
    return restore(turned(wide, rotation_of(rope, wide.shape[2], wide.shape[3], like=x)), rank)


def rotation_of(rope: Rope, n: int, d: int, like: Any) -> Rotation:
    """What n rows of d numbers are turned by, in the library, on the device and in the precision of `like`."""
    where = (range(n),) if rope.positions is None else rope.positions
    if arrays.is_torch(like):
        from tilewise.pytorch.rope import rotation_on

        return rotation_on(like.device, rope, where, d, arrays.dtype_name(like) == "float64")
    return rotation(rope, where, d, arrays.compute_dtype(arrays.dtype_name(like)))


def turned_from(x: Any, rope: Rope, begins: Any) -> Any:
    """(batch, heads, n, d) numbers turned at the rope's own positions, or from these on, one a batch index. Queries
    before their sequence's beginning stand there: no key is before them."""
    if rope.positions is None:
        rows = arrays.library(x).arange(x.shape[2], **({"device": x.device} if arrays.is_torch(x) else {}))
        rope = replace(rope, positions=(begins[:, None] + rows).clip(0))
    return turned(x, rotation_of(rope, x.shape[2], x.shape[3], like=x))


def turned(x: Any, rotation: Rotation) -> Any:
    """Computed in the type of the angles, stored as x is."""
    if arrays.is_torch(x):
        if is_on_gpu(x):
            from tilewise.pytorch import turning  # which imports torch.compile, and so Triton

            if turning.is_served(x):
                return turning.turned(x, rotation)
        return rotation.turned(x.to(rotation.cos.dtype)).to(x.dtype)
    done = arrays.narrow(rotation.turned(arrays.widen(arrays.as_numpy(x), rotation.cos.dtype)), arrays.dtype_name(x))
    return arrays.like(done, x)


def is_on_gpu(x: Any) -> bool:
    return bool(x.is_cuda)

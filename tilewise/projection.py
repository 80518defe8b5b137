"""fused_qkv_projection(): from x to queries, keys and values in attention's layout, turned by their positions."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from tilewise import arrays, dispatch
from tilewise.rope import Rope, check
from tilewise.rotating import rotation_of, turned
from tilewise.variants.alibi import MAX_HEADS

MAX_HEAD_DIM = 512
_KERNELS = ("auto", "matmul", "triton")


def fused_qkv_projection(
    x: Any,
    w_qkv: Any,
    b_qkv: Any = None,
    *,
    heads: int,
    heads_k: int | None = None,
    d: int | None = None,
    rope: Rope | None = None,
    kernel: str = "auto",
) -> tuple[Any, Any, Any]:
    """q, k and v, each (batch, heads, n, d): x @ w_qkv + b_qkv, with q and k turned by a rotary embedding, if any.

    x: (batch, n, features).  w_qkv: (features, columns), whose columns are all heads of q, then of k, then of v, d
    numbers each; a torch.nn.Linear's is its weight.T.  b_qkv: (columns,).  heads_k: of k and v, heads unless given.
    kernel: "triton", one kernel from x to q, k and v, on GPUs; "matmul", the library's product, then the embedding,
    anywhere; "auto" takes the first for half precision, on a GPU where Triton is there. Tensors have gradients of x,
    w_qkv and b_qkv.
    """
    heads_k = heads if heads_k is None else heads_k
    if arrays.is_torch(x):
        from tilewise.pytorch.front import autocast

        x, w_qkv, b_qkv = autocast(x, w_qkv, b_qkv)
    heads, heads_k = check_heads(heads, heads_k)
    d = _head_dim(x, w_qkv, b_qkv, heads, heads_k, d)
    if rope is not None:
        check(rope, x.shape[0], {"positions": x.shape[1]}, d)
        if rope.positions_k is not None:
            raise ValueError("rope: positions_k were given, and queries and keys of one x stand at the same places")
    turn = None if rope is None else rotation_of(rope, x.shape[1], d, like=x)
    if _chosen(kernel, x) == "triton":
        from tilewise.pytorch.projection import project

        return _split(project(x, w_qkv, b_qkv, turn, heads, heads_k), heads, heads_k, axis=1)
    y = _multiplied(x, w_qkv, b_qkv).reshape((*x.shape[:2], heads + 2 * heads_k, d))
    q, k, v = (part.swapaxes(1, 2) for part in _split(y, heads, heads_k, axis=2))
    if turn is not None:
        q, k = turned(q, turn), turned(k, turn)
    return (q, k, v) if arrays.is_torch(x) else (_stored(q, x), _stored(k, x), _stored(v, x))


def _split(y: Any, heads: int, heads_k: int, axis: int) -> tuple[Any, Any, Any]:
    """q, k and v of all heads. PyTorch joins the gradients of such parts by one copy; those of slices it adds up."""
    if arrays.is_torch(y):
        q, k, v = y.split((heads, heads_k, heads_k), axis)
    else:
        q, k, v = np.split(y, (heads, heads + heads_k), axis)
    return q, k, v


def check_heads(heads: Any, heads_k: Any) -> tuple[int, int]:
    for name, count in (("heads", heads), ("heads_k", heads_k)):
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name}: expected a positive whole number, got {count!r}")
        if int(count) > MAX_HEADS:
            raise ValueError(f"{name}: expected at most {MAX_HEADS}, got {count!r}")
    if heads % heads_k:
        raise ValueError(
            f"heads_k: expected a number that divides heads, which is {heads}, got {heads_k}; each key head serves "
            "as many query heads as every other"
        )
    return int(heads), int(heads_k)


def _head_dim(x: Any, w: Any, b: Any, heads: int, heads_k: int, d: Any) -> int:
    """Check sizes and types; the head dimension they tell."""
    if d is not None and (isinstance(d, bool) or not isinstance(d, Integral)):
        raise TypeError(f"d: expected a whole number, the head dimension, got {d!r}")
    given = {"x": (x, "(batch, n, features)", 3), "w_qkv": (w, "(features, columns)", 2), "b_qkv": (b, "(columns,)", 1)}
    for name, (array, layout, rank) in given.items():
        if array is None and name == "b_qkv":
            continue
        if not arrays.is_array(array) or arrays.kind_of(array) != "float":
            found = arrays.dtype_name(array) if arrays.is_array(array) else type(array).__name__
            raise TypeError(f"{name}: expected an array of {', '.join(arrays.FLOAT_DTYPES)}, got {found}")
        if len(array.shape) != rank:
            raise ValueError(f"{name}: expected {layout}, got shape {tuple(array.shape)}")
        found, wanted = _said(array), _said(x)
        if found != wanted:
            raise TypeError(f"{name}: expected {wanted} as x is, got {found}; convert one of the two")
    if w.shape[0] != x.shape[2]:
        raise ValueError(
            f"w_qkv: expected (features, columns) with x's {x.shape[2]} features, got shape {tuple(w.shape)}; "
            "of a torch.nn.Linear pass weight.T"
        )
    every = heads + 2 * heads_k
    size = int(w.shape[1] // every if d is None else d)
    if w.shape[1] != every * size or not 1 <= size <= MAX_HEAD_DIM:
        raise ValueError(
            f"w_qkv: expected (heads + 2 * heads_k) * d columns, {every} * d with d from 1 to {MAX_HEAD_DIM}, "
            f"got {w.shape[1]} and d {size}"
        )
    if b is not None and b.shape[0] != w.shape[1]:
        raise ValueError(f"b_qkv: expected {w.shape[1]} numbers, as w_qkv has columns, got {b.shape[0]}")
    return size


def _said(array: Any) -> str:
    library = "a PyTorch tensor" if arrays.is_torch(array) else "a NumPy array"
    return f"{library} of {arrays.dtype_name(array)} on {arrays.device_name(array)}"


def _chosen(kernel: Any, x: Any) -> str:
    if kernel not in _KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(_KERNELS)}, got {kernel!r}")
    if kernel == "matmul" or (kernel == "auto" and not _is_for_tensor_cores(x)):
        return "matmul"
    reason = _not_triton(x)
    if reason is not None and kernel == "triton":
        raise dispatch.Unsupported(f"kernel 'triton' cannot compute this projection: {reason}; take kernel='matmul'")
    return "triton" if reason is None else "matmul"


def _is_for_tensor_cores(x: Any) -> bool:
    """Half precision on a GPU, unless torch.func looks on, which needs PyTorch's own operations."""
    if not arrays.is_torch(x) or arrays.device_name(x) == "cpu" or arrays.dtype_name(x) not in ("float16", "bfloat16"):
        return False
    from tilewise.pytorch.turning import is_followed

    return not is_followed()


def _not_triton(x: Any) -> str | None:
    if not arrays.is_torch(x):
        return "it takes tensors of PyTorch, and x is a NumPy array"
    from tilewise.pytorch.projection import unsupported

    reason: str | None = unsupported(arrays.device_name(x), arrays.dtype_name(x))
    return reason


def _multiplied(x: Any, w: Any, b: Any) -> Any:
    """x @ w + b; NumPy's in at least float32, where it stays until the rest is done."""
    if not arrays.is_torch(x):
        dtype = arrays.compute_dtype(arrays.dtype_name(x))
        x, w, b = (None if a is None else arrays.widen(arrays.as_numpy(a), dtype) for a in (x, w, b))
    y = x @ w
    return y if b is None else y + b


def _stored(part: Any, x: Any) -> Any:
    """Numbers computed with, as x is stored."""
    return arrays.like(np.ascontiguousarray(arrays.narrow(part, arrays.dtype_name(x))), x)

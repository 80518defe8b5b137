"""Arrays of either library, seen as NumPy arrays without a copy. PyTorch is never imported here, only recognised.

NumPy has no bfloat16. Here it is a one-field structured dtype over the same 16 bits, so that a view carries its type.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
HALF_DTYPES = ("float16", "bfloat16")  # computed with in float32, and rounded where stored
INT_DTYPES = ("int8", "int16", "int32", "int64", "uint8")

Array = npt.NDArray[Any]


def is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def compiling() -> bool:
    """Whether torch.compile is reading this code, rather than Python running it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_torch(x)


def list_advice(x: Any) -> str:
    """For errors: what to do with a list, where an array is expected."""
    return "; make an array of it: np.array(...) or torch.tensor(...)" if isinstance(x, (list, tuple)) else ""


def library(x: Any) -> Any:
    """NumPy or PyTorch, whose functions of one name mean the same."""
    return sys.modules["torch"] if is_torch(x) else np


def dtype_name(x: Any) -> str:
    """'float32', 'bfloat16', 'bool' ... whichever library the array comes from."""
    if compiling():  # which sees NumPy arrays as tensors, and knows no NumPy types
        return _dtype_name((x if is_torch(x) else as_tensor(x)).dtype)
    name = _names.get(x.dtype)
    if name is None:
        name = _names[x.dtype] = _dtype_name(x.dtype)
    return name


_names: dict[Any, str] = {}  # str(dtype) takes microseconds


def _dtype_name(dtype: Any) -> str:
    return "bfloat16" if dtype == BFLOAT16 else str(dtype).removeprefix("torch.")


def device_name(x: Any) -> str:
    return str(x.device) if is_torch(x) else "cpu"


def is_elsewhere(x: Any) -> bool:
    """Whether it is not in main memory, so that the host would have to wait before it looks at it."""
    return device_name(x) != "cpu"


def kind_of(x: Any) -> str | None:
    """bool, int, float, or None for any other type."""
    name = dtype_name(x)
    return "bool" if name == "bool" else "int" if name in INT_DTYPES else "float" if name in FLOAT_DTYPES else None


def value_kind(x: Any) -> str:
    """The type an expression reads from this array: bool, int or float."""
    kind, name = kind_of(x), dtype_name(x)
    if kind is not None:
        return kind
    known = ", ".join(("bool", *INT_DTYPES, *FLOAT_DTYPES))
    raise TypeError(f"an array of type {name} cannot be loaded; expected one of {known}")


def as_numpy(x: Any) -> Array:
    """The same memory as a NumPy array; bfloat16 of either library as BFLOAT16."""
    if is_torch(x):
        torch = sys.modules["torch"]
        x = x.detach()
        return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()  # type: ignore[no-any-return]
    if dtype_name(x) == "bfloat16" and x.dtype != BFLOAT16:
        return x.view(BFLOAT16)  # type: ignore[no-any-return]
    return np.asarray(x)


def as_tensor(x: Array) -> Any:
    """The same memory as a PyTorch tensor, copied only if it has no such strides: negative, or between two numbers."""
    if compiling():
        return sys.modules["torch"].from_numpy(x)
    x = as_numpy(x)
    if any(step < 0 or step % x.itemsize for step in x.strides):
        x = x.copy()
    return _share(x if x.flags.writeable else _as_writable(x))


def _share(x: Array) -> Any:
    torch = sys.modules["torch"]
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)


def _as_writable(x: Array) -> Array:
    """The same memory, without the note that it is not to be written: PyTorch has none, and warns. Nothing writes."""
    interface = {**x.__array_interface__, "data": (x.ctypes.data, False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=x))


def like(result: Array, template: Any) -> Any:
    """A result of ours in the library of the caller's array, without a copy."""
    if is_torch(template):
        return _share(result)
    return result.view(template.dtype) if result.dtype == BFLOAT16 else result


def is_foreign(x: Any) -> bool:
    """Whether it is an array of another library (CuPy, JAX ...), which can hand over its memory by DLPack."""
    return not is_array(x) and hasattr(x, "__dlpack__")


def from_foreign(name: str, x: Any) -> Any:
    """Another library's array as a tensor in the same memory; anything else as it is. `name`: of the argument."""
    if not is_foreign(x):
        return x
    try:
        import torch
    except ImportError:
        raise TypeError(
            f"{name}: expected a NumPy array or a PyTorch tensor, got {type(x).__name__}; arrays of other libraries "
            "are passed on by PyTorch, which is not installed: pip install torch"
        ) from None
    return torch.from_dlpack(x)


def to_foreign(result: Any, template: Any) -> Any:
    """A tensor in the library of another array, in the same memory; as it is if that library cannot take it."""
    find = getattr(template, "__array_namespace__", None)
    library = sys.modules.get(type(template).__module__.partition(".")[0]) if find is None else find()
    take = getattr(library, "from_dlpack", None)
    return result if take is None else take(result.detach())


def widen(x: Array, dtype: npt.DTypeLike) -> Array:
    """Stored values as numbers to compute with."""
    if x.dtype == BFLOAT16:
        x = (x["bfloat16"].astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(dtype, copy=False)


def narrow(x: Array, name: str) -> Array:
    """Computed values as stored in the named type, rounded to nearest even."""
    if name != "bfloat16":
        with np.errstate(over="ignore"):  # beyond float16's range is inf, as IEEE says
            return x.astype(name, copy=False)
    bits = np.asarray(x, dtype=np.float32, order="C").view(np.uint32)
    with np.errstate(over="ignore"):  # a NaN of no dimensions; it is replaced
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).view(BFLOAT16)


def remainder(x: Array, stored: Array) -> Array:
    """What narrowing took from computed values, in the type of what is stored; 0 where that is not finite."""
    with np.errstate(invalid="ignore"):
        lost = x - widen(stored, x.dtype)
    return narrow(np.where(np.isfinite(lost), lost, 0), dtype_name(stored))


def compute_dtype(name: str) -> np.dtype[Any]:
    """What scores and sums are kept in: at least float32."""
    return np.dtype(np.float64 if name == "float64" else np.float32)


def strides_as(q: Any, v: Any) -> tuple[int, ...]:
    """How the result for tensors is stored: as q is, heads side by side, as a projection leaves them, or one by one."""
    (_, heads, n, _), d = q.shape, v.shape[3]
    return (n * heads * d, d, heads * d, 1) if q.stride(1) < q.stride(2) else (heads * n * d, n * d, d, 1)


def stored_as(q: Any, v: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and steps of the result for tensors."""
    return (*q.shape[:3], v.shape[3]), strides_as(q, v)


def place_of(array: Any, known: list[Any]) -> int:
    """Where an array is among those that are known, told by identity; a new one joins them."""
    for i, x in enumerate(known):
        if x is array:
            return i
    known.append(array)
    return len(known) - 1

"""Habits from elsewhere: FlexAttention's mask_mod and score_mod, and NumPy's and PyTorch's functions on expressions."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tilewise import expr as ex
from tilewise.expr import BOOL, B, Expr, H, K, Q, S, as_float, lift


def from_mask_mod(function: Callable[..., Any]) -> Expr:
    """The mask that `function(b, h, q_idx, kv_idx)` describes. It is called once, with tw.B, tw.H, tw.Q, tw.K.

    Tensors it indexes (ids[q_idx]) become loads; write tw.load(array, q_idx) for NumPy arrays.
    """
    mask = _call("from_mask_mod", function, (B, H, Q, K))
    if mask.kind != BOOL:
        raise TypeError(f"from_mask_mod: the function must return a condition, got the number {mask!r}")
    return mask


def from_score_mod(function: Callable[..., Any]) -> Expr:
    """The score that `function(score, b, h, q_idx, kv_idx)` describes. It is called once, with tw.S, tw.B ... tw.K."""
    score = _call("from_score_mod", function, (S, B, H, Q, K))
    if score.kind == BOOL:
        raise TypeError(f"from_score_mod: the function must return a number, got the condition {score!r}")
    return as_float(score)


def _call(name: str, function: Any, variables: tuple[Expr, ...]) -> Expr:
    if not callable(function):
        raise TypeError(f"{name}: expected a function of {len(variables)} arguments, got {type(function).__name__}")
    with _indexing_loads():
        return lift(function(*variables))


def _indexing_loads() -> AbstractContextManager[Any]:
    """While it is open, a tensor indexed by expressions is a load. Without PyTorch there are no tensors to index."""
    if "torch" not in sys.modules:
        return nullcontext()
    from tilewise.pytorch.indexing import IndexingLoads

    return IndexingLoads()


def foreign(name: str, args: Sequence[Any]) -> Expr:
    """np.tanh(expr), torch.where(expr, ...), tensor * expr and the like."""
    if name == "__getitem__":
        raise TypeError(ex.INDEX_ADVICE)
    if name not in _FOREIGN:
        known = "abs, minimum, maximum, where, exp, log, tanh and Python's operators"
        raise TypeError(f"expressions know {known}, not the function {name!r} of NumPy or PyTorch")
    return _FOREIGN[name](*args)


def torch_name(function: Any) -> str:
    """The name of a function of PyTorch's; torch.compile of 2.15 sees a reflected operator by its wrapper's name."""
    if function.__name__ == "wrapped":
        tensor = sys.modules["torch"].Tensor
        return next((name for name in _REFLECTED if getattr(tensor, name, None) is function), "wrapped")
    return str(function.__name__)


_REFLECTED = {
    "__radd__": "add", "__rsub__": "sub", "__rmul__": "mul", "__rtruediv__": "div", "__rdiv__": "div",
    "__rfloordiv__": "floordiv", "__rmod__": "mod",
}  # fmt: skip


def _table() -> dict[str, Callable[..., Expr]]:
    """Functions by the names that NumPy's ufuncs and PyTorch's functions and methods have."""
    table: dict[str, Callable[..., Expr]] = {
        "where": ex.where, "minimum": ex.minimum, "maximum": ex.maximum, "exp": ex.exp, "log": ex.log, "tanh": ex.tanh,
        "abs": abs, "absolute": abs, "negative": operator.neg, "neg": operator.neg,
        "logical_not": Expr.__invert__, "invert": Expr.__invert__, "bitwise_not": Expr.__invert__,
    }  # fmt: skip
    binary = {
        "add": ("add", "__add__"), "sub": ("subtract", "sub", "__sub__"), "mul": ("multiply", "mul", "__mul__"),
        "div": ("divide", "div", "true_divide", "__truediv__"), "floordiv": ("floor_divide", "__floordiv__"),
        "mod": ("remainder", "__mod__"),
        "lt": ("less", "lt", "__lt__"), "le": ("less_equal", "le", "__le__"), "gt": ("greater", "gt", "__gt__"),
        "ge": ("greater_equal", "ge", "__ge__"), "eq": ("equal", "eq", "__eq__"), "ne": ("not_equal", "ne", "__ne__"),
        "and": ("logical_and", "bitwise_and", "__and__"), "or": ("logical_or", "bitwise_or", "__or__"),
    }  # fmt: skip
    for op, names in binary.items():
        build = ex.arithmetic if op in ex.ARITHMETIC else ex.comparison if op in ex.COMPARISONS else ex.logic
        table.update((name, partial(build, op)) for name in names)
    for name, op in _REFLECTED.items():
        table[name] = lambda a, b, op=op: ex.arithmetic(op, b, a)
    return table


_FOREIGN = _table()

"""FlexAttention's habits: its mask_mod and score_mod functions as expressions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tilewise.expr import BOOL, B, Expr, H, K, Q, S, as_float, lift, load


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
    torch = sys.modules.get("torch")
    if torch is None:
        return nullcontext()
    from torch.overrides import TorchFunctionMode

    class IndexingLoads(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.__getitem__:
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                if any(isinstance(i, Expr) for i in index):
                    return load(args[0], *index)
            return func(*args, **(kwargs or {}))

    return IndexingLoads()

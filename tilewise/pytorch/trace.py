"""torch.compile: a call of attention as the compiler can follow it, with expressions as plain data.

The compiler reads Python step by step, but no locks, weak references or NumPy. So expressions are taken apart into
words, numbers and tensors where it reads, and put together again behind `allow_in_graph`, where Python simply runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewise.arrays import place_of
from tilewise.expr import Expr, Loaded, from_records, records
from tilewise.pytorch import front
from tilewise.rope import PLAIN, Rope


def attention(q: Any, k: Any, v: Any, lengths: tuple[Any, Any] | None, kernel: str, options: dict[str, Any]) -> Any:
    """Read by the compiler: nothing here may leave what it knows."""
    arrays: list[Any] = []
    plain = {name: take_apart(name, value, arrays) for name, value in options.items() if value is not None}
    return _run(q, k, v, [_tensor(x) for x in lengths or ()], kernel, plain, [_tensor(x) for x in arrays])


def take_apart(name: str, value: Any, arrays: list[Any]) -> Any:
    """An expression as records, a Rope as a dictionary, arrays by their place in `arrays`; anything else as it is."""
    if callable(value):
        advice = "call it, or wrap a FlexAttention function in tw.from_mask_mod or tw.from_score_mod"
        raise TypeError(f"{name}: expected an expression or a tensor, got a function; {advice}")
    if isinstance(value, Rope):
        given = {name: place_of(x, arrays) for name, x in value.arrays.items()}
        return {"plain": {name: getattr(value, name) for name in PLAIN}, "arrays": given}
    if not isinstance(value, Expr):
        return _tensor(value)
    return tuple(
        (op, args, kind, (place_of(payload.array, arrays), payload.label) if op == "load" else payload)
        for op, args, kind, payload in records(value)
    )


def _tensor(x: Any) -> Any:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _run(
    q: Any, k: Any, v: Any, lengths: list[Any], kernel: str, plain: dict[str, Any], arrays: list[Any]
) -> tuple[Any, Any]:
    """Run by Python, on fake tensors."""
    options = {name: put_together(value, arrays) for name, value in plain.items()}
    out, lse = front.run(q, k, v, (lengths[0], lengths[1]) if lengths else None, kernel, options)
    return out, lse


def put_together(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, dict):
        plain = {name: _settled(x) for name, x in value["plain"].items()}
        return Rope(**plain, **{name: arrays[place] for name, place in value["arrays"].items()})
    if not isinstance(value, tuple):
        return _settled(value)
    return from_records((op, args, kind, _payload(op, payload, arrays)) for op, args, kind, payload in value)


def _payload(op: str, payload: Any, arrays: list[Any]) -> Any:
    if op != "load":
        return _settled(payload)
    place, label = payload
    return Loaded(arrays[place], label=label)


def _settled(value: Any) -> Any:
    """A number that the compiler holds open, since it differed between two calls, becomes part of the graph."""
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, torch.SymInt) else value

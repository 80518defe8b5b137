"""Variants as modules of functions that CuTe's compiler follows."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

from tilewise.derivative import ONE, score_slopes
from tilewise.expr import Expr, Loaded, S
from tilewise.kernels import written
from tilewise.kernels.cute.near import Table
from tilewise.kernels.cute.ops import function
from tilewise.spec import Attention
from tilewise.walking import loads, remembered

_OPERATIONS = Path(__file__).with_name("source") / "operations.py"


def text(spec: Attention, has_slope: bool = False, table: Table | None = None) -> str:
    """The functions of a variant, `score` and `mask` where it has them, as Python; "" if it has neither.

    has_slope: and `slope`, the derivative of the score by S, unless it is 1. table: whose cell `score` is given.
    """
    named, slots = {"score": spec.score, "mask": spec.mask}, spec.loaded
    slope = score_slopes(spec)[S] if has_slope else ONE
    if slope is not ONE:
        named["slope"] = slope
    tables = {"score": table}
    made = (_function(name, expr, slots, tables.get(name)) for name, expr in named.items() if expr is not None)
    return "\n\n".join(made)


def _function(name: str, expr: Expr, slots: list[Loaded], table: Table | None) -> str:
    """Written once for an expression whose arrays have these places among all."""
    places = {id(slot.array): i for i, slot in enumerate(slots)}
    own = tuple(places[id(slot.array)] for slot in loads(expr))
    return remembered(expr, ("cute", name, own, table), lambda expr: function(name, expr, slots, table))


@cache
def operations() -> str:
    return _OPERATIONS.read_text()


def module(functions: str) -> ModuleType | None:
    """What `text` gave, with the operations that it calls, as a module."""
    return written.module("cute", f"{operations()}\n\n{functions}") if functions else None

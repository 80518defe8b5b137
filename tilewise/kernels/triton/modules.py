"""Variants as modules of Triton functions."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from tilewise.expr import Expr, Loaded
from tilewise.kernels import written
from tilewise.kernels.triton.ops import function
from tilewise.sharing import Kept
from tilewise.spec import Attention
from tilewise.walking import loads, remembered

_OPERATIONS = Path(__file__).with_name("source") / "operations.py"
_modules = Kept[ModuleType](written.MOST)


def is_interpreted() -> bool:
    """Whether this process runs Triton's functions by its interpreter, on a CPU: TRITON_INTERPRET=1 says so."""
    if "triton" in sys.modules:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def variant(spec: Attention, n_k: int, extra: dict[str, Expr] | None = None) -> ModuleType | None:
    """The functions of a variant: `mask` and `score` where it has them, and what `extra` names. n_k: keys at most."""
    named = {"score": spec.score, "mask": spec.mask, **(extra or {})}
    slots = spec.loaded
    complete = tuple(i for i, slot in enumerate(slots) if slot.array.shape and slot.array.shape[-1] >= n_k)
    texts = tuple(_function(name, expr, slots, complete) for name, expr in named.items() if expr is not None)
    return module(texts) if texts else None


def _function(name: str, expr: Expr, slots: list[Loaded], complete: tuple[int, ...]) -> str:
    """Written once for an expression whose arrays have these places among all."""
    places = {id(slot.array): i for i, slot in enumerate(slots)}
    own = tuple(places[id(slot.array)] for slot in loads(expr))
    key = "triton", name, own, tuple(i for i in own if i in complete)
    return remembered(expr, key, lambda expr: function(name, expr, slots, complete))


@cache
def _operations() -> str:
    return _OPERATIONS.read_text()


def module(texts: tuple[str, ...]) -> ModuleType:
    """Functions in a module of their own, with the operations that they call."""
    return _modules.found(texts, lambda: written.module("triton", "\n\n".join([_operations(), *texts])))

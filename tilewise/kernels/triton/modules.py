"""Variants as modules of Triton functions: written for people and Python to read, kept, and imported once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from tilewise.expr import Expr
from tilewise.kernels import disk
from tilewise.kernels.triton.ops import function
from tilewise.sharing import Lock
from tilewise.spec import Attention

_OPERATIONS = Path(__file__).with_name("source") / "operations.py"
_lock = Lock()


def is_interpreted() -> bool:
    """Whether this process runs Triton's functions by its interpreter, on a CPU: TRITON_INTERPRET=1 says so."""
    if "triton" in sys.modules:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def variant(spec: Attention, extra: dict[str, Expr] | None = None) -> ModuleType | None:
    """The functions of a variant: `mask` and `score` where it has them, and what `extra` names."""
    named = {"score": spec.score, "mask": spec.mask, **(extra or {})}
    texts = [function(name, expr, spec.loaded) for name, expr in named.items() if expr is not None]
    return _module("\n\n".join([_operations(), *texts])) if texts else None


@cache
def _operations() -> str:
    return _OPERATIONS.read_text()


@cache
def _module(text: str) -> ModuleType:
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    path, name = disk.user_cache("triton").text(f"{digest}.py", text), f"{__package__}.variant_{digest}"
    with _lock:
        if name not in sys.modules:
            made = importlib.util.spec_from_file_location(name, path)
            assert made is not None and made.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(made)
            made.loader.exec_module(sys.modules[name])
        return sys.modules[name]

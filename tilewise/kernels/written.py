"""Variants that a system wrote as Python: kept for people and compilers to read, and imported once."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from types import ModuleType

from tilewise.kernels import disk
from tilewise.sharing import Lock

_lock = Lock()


def module(system: str, text: str) -> ModuleType:
    """The text as a module, of a file in that system's part of the user's cache folder."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    path, name = disk.user_cache(system).text(f"{digest}.py", text), f"{__package__}.{system}.variant_{digest}"
    with _lock:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            made = sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(made)
            except BaseException:
                del sys.modules[name]  # or the next call would find what is half there
                raise
        return sys.modules[name]

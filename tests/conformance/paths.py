"""The paths of a kernel system: the native engine has one for each instruction set, and each must be right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tilewise import dispatch

LIBRARIES = {"cpu": "tilewise.kernels.cpu.library"}


def _library(system: str) -> Any:
    """The module that lists and forces the system's paths, or None where there is only one or it cannot run here."""
    if system not in LIBRARIES or dispatch.kernel(system).unavailable() is not None:
        return None
    return import_module(LIBRARIES[system])


def paths(system: str) -> tuple[str | None, ...]:
    """The names of the paths that this machine can run; (None,) for a system without any."""
    library = _library(system)
    return (None,) if library is None else tuple(library.isas())


@contextmanager
def forced(system: str, path: str | None) -> Iterator[None]:
    """Everything inside runs on this path of the system."""
    if path is None:
        yield
        return
    library = _library(system)
    before = library.isa()
    library.use_isa(path)
    try:
        assert library.isa() == path
        yield
    finally:
        library.use_isa(before)

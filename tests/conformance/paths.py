"""How a kernel system computes: the native engine by one of its instruction sets, and with as many threads as told."""

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


@contextmanager
def threads(system: str, count: int) -> Iterator[None]:
    """Everything inside runs in this many threads; nothing changes for a system that has none of its own."""
    library = _library(system)
    if library is None:
        yield
        return
    before = library.get_num_threads()
    library.set_num_threads(count)
    try:
        yield
    finally:
        library.set_num_threads(before)

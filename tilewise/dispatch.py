"""The kernel systems, in the order `auto` tries them, and how one is chosen. Each is imported when first asked for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from tilewise.spec import Attention, Grads, Partial, Shape, Tile


class Unsupported(RuntimeError):  # noqa: N818 - it names a state, as Python's StopIteration does
    """No kernel system, or not the one named, can compute this call. The message says why and what would."""


class Kernel(Protocol):
    """What a kernel system offers. Arrays are (batch, heads, n, d); packed sequences are a batch of one."""

    name: str
    summary: str

    def unavailable(self) -> str | None:
        """Why this machine cannot run it and what to install, or None."""

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        """Why it cannot compute this call, or None."""

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        """The tile it takes unless told."""

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial: ...

    def backward(
        self,
        spec: Attention,
        q: Any,
        k: Any,
        v: Any,
        saved: Partial,
        d_out: Any,
        d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads: ...


@dataclass(frozen=True)
class System:
    """A line of the table: a name, and where its kernel is."""

    name: str
    module: str
    attribute: str


SYSTEMS = (
    System("cpu", "tilewise.kernels.cpu", "CpuKernel"),
    System("numpy", "tilewise.kernels.numpy", "NumpyKernel"),
)
NAMES = tuple(system.name for system in SYSTEMS)


@cache
def kernel(name: str) -> Kernel:
    """The kernel system of this name."""
    check_name(name)
    system = next(system for system in SYSTEMS if system.name == name)
    made: Kernel = getattr(import_module(system.module), system.attribute)()
    return made


def reasons(spec: Attention, shape: Shape) -> dict[str, str | None]:
    """For each kernel system in order: why it cannot compute this call, or None if it can."""
    return {name: _reason(name, spec, shape) for name in NAMES}


def _reason(name: str, spec: Attention, shape: Shape) -> str | None:
    return kernel(name).unavailable() or kernel(name).unsupported(spec, shape)


def check_name(name: Any) -> None:
    """Refuse what is not the name of a kernel system."""
    if name not in ("auto", *NAMES):
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"kernel: expected one of {', '.join(('auto', *NAMES))}, got {name!r}")


def resolve(name: str, spec: Attention, shape: Shape) -> Kernel:
    """The first system that supports the call, or the one named; a named one is never swapped for another."""
    check_name(name)
    if name != "auto":
        reason = _reason(name, spec, shape)
        if reason is not None:
            raise Unsupported(f"kernel {name!r} cannot compute this call: {reason}")
        return kernel(name)
    for candidate in NAMES:
        if _reason(candidate, spec, shape) is None:
            if candidate == "numpy":
                _say_that_it_is_slow(kernel("cpu").unavailable())
            return kernel(candidate)
    told = "".join(f"\n  {candidate}: {reason}" for candidate, reason in reasons(spec, shape).items())
    raise Unsupported(f"no kernel system can compute this call:{told}")


@cache
def _say_that_it_is_slow(reason: str | None) -> None:
    """Once: NumPy serves in the engine's place."""
    if reason is not None:
        told = f"Tilewise computes with NumPy, far slower than its native engine could: {reason}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)

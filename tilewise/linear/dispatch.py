"""The kernel systems of linear attention, in the order `auto` tries them. Each is imported when first asked for."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Protocol

from tilewise.dispatch import Unsupported, say_that_it_is_slow
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.spec import Shape


class Kernel(Protocol):
    """What a kernel system offers. chunk: how many rows are worked on at a time, unless it is to choose."""

    name: str

    def unavailable(self) -> str | None:
        """Why this machine cannot run it and what to install, or None."""

    def unsupported(self, shape: Shape) -> str | None:
        """Why it cannot compute this call, or None."""

    def forward(self, problem: Problem, chunk: int | None = None) -> Done: ...

    def backward(
        self, problem: Problem, done: Done, d_out: Any, d_state: LinearState | None = None, chunk: int | None = None
    ) -> LinearGrads: ...


SYSTEMS = {
    "cpu": "tilewise.linear.kernels.cpu",
    "numpy": "tilewise.linear.kernels.numpy",
    "triton": "tilewise.linear.kernels.triton",
    "tilelang": "tilewise.linear.kernels.tilelang",
    "tilelang-c": "tilewise.linear.kernels.tilelang.c",
}
# `auto` never takes them: the one is mostly slower than Triton (docs/performance.md), the other stands in for it.
ONLY_IF_NAMED = ("tilelang", "tilelang-c")
NAMES = tuple(name for name in SYSTEMS if name not in ONLY_IF_NAMED)


@cache
def kernel(name: str) -> Kernel:
    made: Kernel = import_module(SYSTEMS[name]).Kernel()
    return made


def reasons(shape: Shape) -> dict[str, str | None]:
    """For each kernel system that `auto` tries, in order: why it cannot compute this call, or None if it can."""
    return {name: reason(name, shape) for name in NAMES}


def reason(name: str, shape: Shape) -> str | None:
    return kernel(name).unavailable() or kernel(name).unsupported(shape)


def check_name(name: Any) -> None:
    """Refuse what is not the name of a kernel system."""
    is_text = isinstance(name, str)
    if not is_text or name not in ("auto", *SYSTEMS):
        error = ValueError if is_text else TypeError
        raise error(f"kernel: expected one of {', '.join(('auto', *SYSTEMS))} for linear attention, got {name!r}")


def resolve(name: str, shape: Shape) -> Kernel:
    """The first system that supports the call, or the one named, which is never swapped for another."""
    check_name(name)
    if name != "auto":
        told = reason(name, shape)
        if told is not None:
            raise Unsupported(f"kernel {name!r} cannot compute this linear attention: {told}")
        return kernel(name)
    for candidate in NAMES:
        if reason(candidate, shape) is None:
            if candidate == "numpy":
                say_that_it_is_slow(kernel("cpu").unavailable())
            return kernel(candidate)
    every = "".join(f"\n  {candidate}: {told}" for candidate, told in reasons(shape).items())
    raise Unsupported(f"no kernel system can compute this linear attention:{every}")

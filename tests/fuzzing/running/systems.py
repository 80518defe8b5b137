"""What the fuzz puts questions to: every kernel system and rung that can run here, and how many calls each is to pass.

A name is a kernel system's or a rung's; the simulator's fourth rung, "cuda-sim/unordered", is one here alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from tests.conformance.paths import paths
from tests.fuzzing.drawing.draw import Wanted
from tilewise import dispatch
from tilewise.dispatch import Kernel
from tilewise.linear import dispatch as linear_dispatch

UNORDERED_SIMULATED = "cuda-sim/unordered"
IN_ANY_ORDER = ("cuda/unordered", UNORDERED_SIMULATED)  # whose gradients of q have other bits each time
HALF = ("float16", "bfloat16")
SHAPES, SHAPES_COMPILED, SHAPES_COMPILED_LONG = 3, 20, 50  # calls that share a variant; where that is compiled, in
LONG_COMPILED = ("cute", "tilelang")  # seconds, or by these in many

# How many calls of each are on record to pass before a release, right every one; `tests/fuzz.py --left` counts.
TARGETS = {
    "cpu": 1_000_000,  # its instruction sets together
    "numpy": 100_000,
    "cuda-sim/naive": 20_000,
    "cuda-sim/tiled": 20_000,
    "cuda-sim/forward_sm90": 20_000,
    UNORDERED_SIMULATED: 20_000,
    "triton (interpreted)": 5_000,
    "tilelang-c": 300,
    "cuda": 20_000,
    "cuda/unordered": 20_000,
    "cuda/tiled": 5_000,
    "triton": 5_000,
    "tilelang": 5_000,
    "cute": 1_000,
}


@dataclass(frozen=True)
class System:
    """A kernel system, with what a trial must know of it."""

    name: str
    kernel: Kernel
    linear: Any = None  # its kernels of linear attention, if it has any
    again: Kernel | None = None  # computes the same in another order, to the same bits
    device: str = "cpu"

    @property
    def in_any_order(self) -> bool:
        return self.name in IN_ANY_ORDER

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def system(name: str) -> System:
    """The system of that name. Nothing is computed yet."""
    kind, _, rung = name.partition("/")
    linear = linear_dispatch.kernel(kind) if not rung and kind in linear_dispatch.SYSTEMS else None
    if kind == "cuda-sim":
        from tilewise.kernels.cuda.simulator import Order
        from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel

        return System(name, CudaSimKernel(rung or None), linear, CudaSimKernel(rung or None, Order.RANDOM, 7))
    return System(name, dispatch.kernel(name), linear, device=device(name))


def device(name: str) -> str:
    return "cuda" if _on_a_gpu(name.partition("/")[0]) else "cpu"


def compiles(name: str) -> bool:
    """Whether a new variant takes seconds."""
    return name.partition("/")[0] in ("cuda-sim", "tilelang-c") or device(name) != "cpu"


def recorded(name: str) -> str:
    """The name that its long runs are kept under."""
    return "triton (interpreted)" if name == "triton" and device(name) == "cpu" else name


def wanted(name: str) -> Wanted:
    """Which calls say most about it: those that it computes, of several tiles. A few that it refuses are drawn too."""
    kind, _, rung = name.partition("/")
    compiled = SHAPES_COMPILED_LONG if kind in LONG_COMPILED else SHAPES_COMPILED
    made = Wanted(shapes=compiled if compiles(name) else SHAPES)
    if not rung and kind in linear_dispatch.SYSTEMS:
        made = replace(made, linear_share=0.1)
    if kind == "numpy":
        return replace(made, key_tile=512)
    if kind == "cpu":
        return made
    made = replace(made, dtypes=(*HALF, "float32"))
    if device(name) != "cpu" or kind == "cuda-sim":  # they have tensor cores, or a model of them
        made = replace(made, half_share={"forward_sm90": 1.0, "unordered": 1.0, "": 0.5}.get(rung, 0.0))
    if rung == "naive":
        return replace(made, backward_share=0.0)
    if kind == "cuda-sim":  # where a score costs microseconds
        return replace(made, most_scores=100_000 if made.half_share else 20_000)
    return replace(made, most_scores=20_000) if kind in ("triton", "tilelang-c") and device(name) == "cpu" else made


def check_name(name: str) -> None:
    if name != UNORDERED_SIMULATED:
        dispatch.check_name(name)
    if name == "auto":
        raise ValueError("expected the name of one kernel system, got 'auto'")


def unavailable(name: str) -> str | None:
    """Why it cannot run here, or None."""
    return dispatch.kernel("cuda-sim" if name == UNORDERED_SIMULATED else name).unavailable()


def can_run(recorded: str) -> bool:
    """Whether this machine can run what goes by this name in TARGETS."""
    name, _, interpreted = recorded.partition(" ")
    if interpreted:
        return find_spec("triton") is not None and find_spec("torch") is not None
    return unavailable(name) is None and not (name == "triton" and _is_interpreted())


def isas(name: str) -> tuple[str | None, ...]:
    """The engine's instruction sets that this machine has, the widest last; (None,) for other systems."""
    return paths(name)


def ready(name: str) -> None:
    """What a process must do before its first call."""
    if name.startswith("triton") and not _on_a_gpu("triton"):
        from tests.triton import quick_interpreter

        quick_interpreter.install()


def before_processes(name: str) -> None:
    """PyTorch finds the GPU without a word to the driver: no process that has begun CUDA may fork."""
    if _on_a_gpu(name.partition("/")[0]):
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        with suppress(ImportError):  # the kernel will tell
            import torch  # noqa: F401


def _on_a_gpu(kind: str) -> bool:
    return kind in ("cuda", "cute", "tilelang") or (kind == "triton" and not _is_interpreted())


def _is_interpreted() -> bool:
    from tilewise.kernels.triton.modules import is_interpreted

    return is_interpreted()

"""The kernel systems, in the order `auto` tries them, and how one is chosen. Each is imported when first asked for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from tilewise.spec import Attention, Grads, Partial, Shape, Tile

if TYPE_CHECKING:
    from tilewise.cache import Cache
    from tilewise.rope import Rope


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


class Launch(Protocol):
    def launch(self, addresses: Sequence[int]) -> None:
        """Compute; the addresses of q, k, v, out, lse, the loaded arrays in their order, and of sinks, if any."""


@runtime_checkable
class Prepares(Protocol):
    """A kernel system that makes a call ready once, for all arrays that lie the same."""

    def prepared(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Launch | None:
        """None if there is nothing to compute."""


class LaunchBackward(Protocol):
    def run(
        self, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any, loaded: Sequence[Any], sinks: Any
    ) -> Grads: ...


@runtime_checkable
class PreparesBackward(Protocol):
    """The same for a backward pass."""

    def prepared_backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None
    ) -> LaunchBackward: ...


@runtime_checkable
class Chooses(Protocol):
    """A kernel system with more to choose than a tile, which explain tells."""

    def choice(self, spec: Attention, shape: Shape) -> str: ...


@runtime_checkable
class Decodes(Protocol):
    """A kernel system with kernels of its own for few queries over a cache, which they read where it is."""

    def decode(self, spec: Attention, q: Any, cache: Cache, rope: Rope | None = None) -> Partial:
        """rope: q is turned; the keys of the cache were when they came."""

    def append(self, cache: Cache, k: Any, v: Any, counts: Any, rope: Rope | None = None) -> None:
        """Write new keys, turned, and values behind those of each sequence; cache.lengths are those from before."""


@dataclass(frozen=True)
class System:
    """A line of the table: a name, where its kernel is, and the rungs that can be named one by one ("cuda/tiled")."""

    name: str
    module: str
    attribute: str
    rungs: tuple[str, ...] = ()
    only_if_named: bool = False  # `auto` never takes it: it stands in for another, or another is faster


_CUDA_RUNGS = ("naive", "tiled", "forward_sm90")
_CUTE_RUNGS = ("basic", "forward_sm90", "scaled_q", "scaled_k")
SYSTEMS = (
    System("cpu", "tilewise.kernels.cpu", "CpuKernel"),
    System("numpy", "tilewise.kernels.numpy", "NumpyKernel"),
    System("cuda", "tilewise.kernels.cuda", "CudaKernel", (*_CUDA_RUNGS, "unordered")),
    System("triton", "tilewise.kernels.triton", "TritonKernel", ("basic",)),
    System("cute", "tilewise.kernels.cute", "CuteKernel", _CUTE_RUNGS),
    System("tilelang", "tilewise.kernels.tilelang", "TileLangKernel", ("simple",), only_if_named=True),
    System("tilelang-c", "tilewise.kernels.tilelang", "TileLangCKernel", ("simple",), only_if_named=True),
    System("cuda-sim", "tilewise.kernels.cuda.simulator.kernel", "CudaSimKernel", _CUDA_RUNGS, only_if_named=True),
)
NAMES = tuple(system.name for system in SYSTEMS if not system.only_if_named)
ONLY_IF_NAMED = tuple(system.name for system in SYSTEMS if system.only_if_named)
# The same for decoding: a forward pass has too few queries to fill a GPU with, a kernel that splits the keys fills it.
DECODING = ("cpu", "numpy", "triton", "cuda", "cute")
# And for gradients: Hopper's kernels, then those that are fast on any GPU, then those that need but CUDA's compiler,
# and what was built ahead of time.
TRAINING = ("cpu", "numpy", "cuda/forward_sm90", "triton", "cuda/tiled", "cute")
_RUNGS = {f"{system.name}/{rung}": system for system in SYSTEMS for rung in system.rungs}
NAMED = (*NAMES, *ONLY_IF_NAMED, *_RUNGS)  # what a caller may name


def simulated_rungs() -> tuple[str, ...]:
    """Every rung that a simulator can run."""
    return tuple(name for name, system in _RUNGS.items() if system.name == "cuda-sim")


@cache
def kernel(name: str) -> Kernel:
    """The kernel system of this name; "cuda/tiled" is that rung of it."""
    check_name(name)
    rung = name.split("/")[1:]
    system = _RUNGS[name] if rung else next(system for system in SYSTEMS if system.name == name)
    made: Kernel = getattr(import_module(system.module), system.attribute)(*rung)
    return made


def decoder(system: Kernel) -> Decodes | None:
    """The system, if it has kernels for decoding; a rung is one kernel, and computes by that."""
    return cast(Decodes, system) if "/" not in system.name and _decodes(type(system)) else None


@cache  # to ask takes longer than a launch
def _decodes(kind: type) -> bool:
    return issubclass(kind, Decodes)


def reasons(spec: Attention, shape: Shape, names: Sequence[str] | None = None) -> dict[str, str | None]:
    """For each kernel system in order, or each of these: why it cannot compute this call, or None if it can."""
    return {name: reason(name, spec, shape) for name in names or _in_order(shape)}


def _in_order(shape: Shape) -> Sequence[str]:
    return TRAINING if shape.backward else NAMES


def reason(name: str, spec: Attention, shape: Shape) -> str | None:
    """Why this one cannot compute this call, or None."""
    return kernel(name).unavailable() or kernel(name).unsupported(spec, shape)


def check_name(name: Any) -> None:
    """Refuse what is not the name of a kernel system."""
    is_text = isinstance(name, str)
    if not is_text or name not in ("auto", *NAMED):
        error = ValueError if is_text else TypeError
        raise error(f"kernel: expected one of {', '.join(('auto', *NAMED))}, got {name!r}")


def resolve(name: str, spec: Attention, shape: Shape, names: Sequence[str] | None = None) -> Kernel:
    """The first system, or the first of these, that supports the call, or the one named, which is never swapped for
    another."""
    check_name(name)
    if name != "auto":
        told = reason(name, spec, shape)
        if told is not None:
            raise Unsupported(f"kernel {name!r} cannot compute this call: {told}")
        return kernel(name)
    for candidate in names or _in_order(shape):
        if reason(candidate, spec, shape) is None:
            if candidate == "numpy":
                say_that_it_is_slow(kernel("cpu").unavailable())
            return kernel(candidate)
    every = "".join(f"\n  {candidate}: {told}" for candidate, told in reasons(spec, shape, names).items())
    raise Unsupported(f"no kernel system can compute this call:{every}")


@cache
def say_that_it_is_slow(why: str | None) -> None:
    """Once: NumPy serves in the engine's place."""
    if why is not None:
        told = f"Tilewise computes with NumPy, far slower than its native engine could: {why}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)

"""The kernel systems, and which of them serves a call, by choosing.py. Each is imported when first asked for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from tilewise.choosing import Purpose, Row, everywhere, order, row_of, slowness
from tilewise.kernels import gpus
from tilewise.spec import Attention, Grads, Partial, Shape, Tile

if TYPE_CHECKING:
    from tilewise.cache import Cache
    from tilewise.rope import Rope


class Unsupported(RuntimeError):  # noqa: N818 - it names a state, as Python's StopIteration does
    """No kernel system, or not the one named, can compute this call. The message says why and what would."""


class Kernel(Protocol):
    """What a kernel system offers. Arrays are (batch, heads, n, d); packed sequences are a batch of one.

    spec.keeps_remainder is a wish: forward may leave Partial.remainder None, and backward takes what any system saved.
    """

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
    keeps_remainder: bool  # whether it stores what rounding takes from out; only if the spec asks for it

    def launch(self, addresses: Sequence[int]) -> None:
        """Compute; the addresses of q, k, v, out, lse, the loaded arrays in their order, of sinks, if any, and of the
        remainder, if it keeps one."""


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


_CUDA_RUNGS = ("naive", "tiled", "forward_sm90")
_CUTE_RUNGS = ("basic", "forward_sm90", "scaled_q", "scaled_k")
SYSTEMS = (
    System("cpu", "tilewise.kernels.cpu", "CpuKernel"),
    System("numpy", "tilewise.kernels.numpy", "NumpyKernel"),
    System("cuda", "tilewise.kernels.cuda", "CudaKernel", (*_CUDA_RUNGS, "unordered")),
    System("triton", "tilewise.kernels.triton", "TritonKernel", ("basic",)),
    System("cute", "tilewise.kernels.cute", "CuteKernel", _CUTE_RUNGS),
    System("tilelang", "tilewise.kernels.tilelang", "TileLangKernel", ("simple",)),
    System("tilelang-c", "tilewise.kernels.tilelang", "TileLangCKernel", ("simple",)),
    System("cuda-sim", "tilewise.kernels.cuda.simulator.kernel", "CudaSimKernel", _CUDA_RUNGS),
)
_TAKEN = {name.split("/")[0] for purpose in Purpose for name in everywhere(purpose)}
NAMES = tuple(system.name for system in SYSTEMS if system.name in _TAKEN)  # by `auto`, for some calls
ONLY_IF_NAMED = tuple(system.name for system in SYSTEMS if system.name not in _TAKEN)
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


@dataclass(frozen=True)
class Choice:
    """What `auto` or a name comes to, and why. reasons: of each kernel that there is, those to be tried first: why it
    cannot compute the call, or None if it can."""

    taken: str | None
    reasons: dict[str, str | None]
    tried: tuple[str, ...]  # in this order; of a name that was given, that one
    architecture: str
    dtype: str
    purpose: Purpose
    row: Row | None  # of the table, if `auto` was asked

    @property
    def slowness(self) -> str | None:
        """Why what was taken is slow, and what would be faster; None if nothing is known to be."""
        told = None if self.taken is None else self._slowness_of(self.taken)
        if told is None:
            return None
        before = self.tried[: self.tried.index(cast(str, self.taken))]
        faster = [f"{name}: {self.reasons[name]}" for name in before if self._slowness_of(name) is None]
        return f"{told}. {'Faster, if it could: ' + '; '.join(faster) if faster else 'No kernel here is faster for it'}"

    def _slowness_of(self, name: str) -> str | None:
        return slowness(name, self.architecture, self.dtype, self.purpose)


def choice(name: str, spec: Attention, shape: Shape, purpose: Purpose | None = None) -> Choice:
    """What resolve would take, without raising."""
    check_name(name)
    purpose = purpose or purpose_of(shape)
    architecture = _architecture_of(shape.device)
    row = row_of(architecture, shape.dtype) if name == "auto" else None
    tried = (name,) if name != "auto" else () if row is None else row.order(purpose)
    every = {x: reason(x, spec, shape) for x in dict.fromkeys((*tried, *everywhere(purpose)))}
    taken = next((x for x in tried if every[x] is None), None)
    return Choice(taken, every, tried, architecture, shape.dtype, purpose, row)


def purpose_of(shape: Shape) -> Purpose:
    return Purpose.BACKWARD if shape.backward else Purpose.FORWARD


_architectures: dict[str, str] = {}  # by device: to ask PyTorch takes longer than to choose


def _architecture_of(device: str) -> str:
    """As the table has it; the device's own name if it is no GPU that anybody could compute on."""
    found = _architectures.get(device)
    if found is None:
        is_gpu = device.startswith("cuda") and (gpus.is_imagined(device) or gpus.none_here() is None)
        if not is_gpu:
            return device
        found = _architectures[device] = gpus.architecture(device)
    return found


def reason(name: str, spec: Attention, shape: Shape) -> str | None:
    """Why this one cannot compute this call, or None. On a GPU that is imagined everything is installed."""
    system = kernel(name)
    unavailable = None if gpus.is_imagined(shape.device) else system.unavailable()
    return unavailable or system.unsupported(spec, shape)


def check_name(name: Any) -> None:
    """Refuse what is not the name of a kernel system."""
    is_text = isinstance(name, str)
    if not is_text or name not in ("auto", *NAMED):
        error = ValueError if is_text else TypeError
        alike = get_close_matches(name.lower(), ("auto", *NAMED), n=1) if is_text else []
        advice = f"; did you mean {alike[0]!r}?" if alike else ""
        raise error(f"kernel: expected one of {', '.join(('auto', *NAMED))}, got {name!r}{advice}")


def resolve(name: str, spec: Attention, shape: Shape, purpose: Purpose | None = None) -> Kernel:
    """The fastest kernel that supports the call, or the one named, which is never swapped for another. purpose: what
    the shape says, unless it is to decode."""
    check_name(name)
    if name != "auto":
        told = reason(name, spec, shape)
        if told is not None:
            raise Unsupported(f"kernel {name!r} cannot compute this call: {told}")
        return kernel(name)
    for candidate in order(_architecture_of(shape.device), shape.dtype, purpose or purpose_of(shape)):
        if reason(candidate, spec, shape) is None:
            if candidate == "numpy":
                say_that_it_is_slow(kernel("cpu").unavailable())
            return kernel(candidate)
    told_by = by_reason(choice(name, spec, shape, purpose).reasons)
    every = "".join(f"\n  {', '.join(names)}: {told}" for told, names in told_by.items())
    raise Unsupported(f"no kernel system can compute this call:{every}")


def by_reason(reasons: dict[str, str | None]) -> dict[str | None, list[str]]:
    """Kernels that say the same, together."""
    found: dict[str | None, list[str]] = {}
    for name, told in reasons.items():
        found.setdefault(told, []).append(name)
    return found


@cache
def say_that_it_is_slow(why: str | None) -> None:
    """Once: NumPy serves in the engine's place."""
    if why is not None:
        told = f"Tilewise computes with NumPy, far slower than its native engine could: {why}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)

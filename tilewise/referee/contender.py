"""Who can be judged: what a contender is, what it says of itself, and how one is found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tilewise import arrays
from tilewise.arrays import FLOAT_DTYPES
from tilewise.bench.refusal import RefusedError
from tilewise.referee.calls import Call, Inputs

Answer = dict[str, Any]  # out, lse, d_q, d_k, d_v, d_bias: NumPy arrays
HALF = ("float16", "bfloat16")
NO_RESULT = "no result"  # the status of a call that returned something else
CAUSAL = "causal"
TOP_LEFT, BOTTOM_RIGHT = "causal, top left", "causal, bottom right"


@dataclass(frozen=True)
class Says:
    """What a contender can be asked, by its own documentation."""

    arguments: frozenset[str]  # of Call.needs
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    without_keys: str = ""  # what a row without keys gives, where that is not 0
    unordered: bool = False  # its documentation promises no determinism of gradients
    notes: tuple[str, ...] = ()  # for a reader of its results


class Contender(ABC):
    """An attention. Libraries are imported by its methods alone."""

    name: str
    ours = False

    @property
    @abstractmethod
    def about(self) -> str:
        """What is called."""

    @abstractmethod
    def missing(self, device: str) -> str | None:
        """Why it cannot be judged here, with what to install."""

    @abstractmethod
    def says(self, device: str) -> Says: ...

    @abstractmethod
    def prepare(self, call: Call, given: Inputs, device: str) -> Callable[[], Answer]:
        """The call made ready. What it raises, then or when it is run, is a refusal."""

    def packages(self) -> tuple[str, ...]:
        """Whose versions tell what was judged."""
        return ()

    def code(self, call: Call) -> list[str]:
        """Lines of PyTorch that make `out` of q, k, v, mask and bias; none if there are no short ones."""
        return []

    def inputs_changed(self) -> str:
        """Which input of the call that was prepared last was written to."""
        return ""

    def versions(self) -> dict[str, str]:
        return {name: found for name in self.packages() if (found := _version(name)) is not None}


def results_of(returned: Any, kind: type) -> tuple[Any, Any]:
    """out and lse, or None for that, of what a call returned: arrays of this type."""
    pair = returned if isinstance(returned, tuple) else (returned, None)
    wanted = len(pair) == 2 and (_is_floats(pair[1], kind) or pair[1] is None)
    if not wanted or not _is_floats(pair[0], kind):
        told = f"({', '.join(map(_told, pair))})" if isinstance(returned, tuple) else _told(returned)
        expected = f"out or (out, lse), each of them a {kind.__module__}.{kind.__name__} of floats"
        raise RefusedError(NO_RESULT, f"returned {told}, expected {expected}")
    return pair[0], pair[1]


def _is_floats(x: Any, kind: type) -> bool:
    return isinstance(x, kind) and arrays.kind_of(x) == "float"


def _told(x: Any) -> str:
    return f"{type(x).__name__} of {arrays.dtype_name(x)}" if arrays.is_array(x) else type(x).__name__


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class UnknownContenderError(ValueError):
    """No contender has this name."""


def known() -> dict[str, str]:
    """The names that can be judged, and what each is; besides them, any module:function."""
    return {c.name: c.about for c in _all()}


def find(name: str, causal: str = "bottom right", dtypes: tuple[str, ...] = ()) -> Contender:
    """The contender of this name. causal and dtypes: what a module:function says of itself."""
    if ":" in name:
        from tilewise.referee.given import Given

        return Given(name, causal, dtypes)
    from tilewise.referee import ours

    own = ours.find(name)
    found = own or next((c for c in _all() if c.name == name), None)
    if found is None:
        raise UnknownContenderError(
            f"expected one of {', '.join(known())}, a kernel such as cuda/tiled, or MODULE:FUNCTION of your own, "
            f"got {name!r}"
        )
    return found


def _all() -> list[Contender]:
    modules = ("ours", "from_torch", "flash", "exchange", "from_jax")
    return [c for name in modules for c in import_module(f"tilewise.referee.{name}").CONTENDERS]


def absent(package: str, install: str) -> str | None:
    """Why a package cannot be imported, with what to install; None if it can be."""
    try:
        import_module(package)
    except ModuleNotFoundError:
        return f"{package} is not installed; {install}"
    except Exception as error:  # a compiled library may fail to load in ways of its own
        first = (str(error).splitlines() or [""])[0]
        return f"{package} does not load ({type(error).__name__}: {first}); {install}"
    return None

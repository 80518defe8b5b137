"""The native library: found beside this file, loaded when first asked for. It knows nothing of Python's versions."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.arrays import Array
from tilewise.kernels.cpu import structs

NAME = "libtilewise.dylib" if sys.platform == "darwin" else "libtilewise.so"
MOST_THREADS = 1024
_DONE, _NO_MEMORY, _NOT_ROWS = 0, 1, 3  # as in engine.h
_READ_BYTES = 256 << 20  # beyond any cache


def path() -> Path:
    """Where the library is; the variable TILEWISE_LIBRARY names another build of it."""
    return Path(os.environ.get("TILEWISE_LIBRARY") or Path(__file__).with_name(NAME))


def unavailable() -> str | None:
    """Why the library cannot be used here and what to do, or None."""
    if _library.cache_info().currsize:  # it is in use
        return None
    if not path().exists():
        told = Path(__file__).with_name("build.txt")  # what the build leaves in the library's place
        return told.read_text().strip() if told.exists() else "its library was never built here; run `make engine`"
    try:
        _library()
    except (OSError, AttributeError) as error:
        return f"its library does not load ({error}); install Tilewise again"
    except ValueError as error:
        return str(error)
    return None


@cache
def _library() -> Any:
    # PyDLL: an exception that the engine leaves (Ctrl-C) is raised. The engine lets go of the interpreter itself.
    library = ctypes.PyDLL(str(path()))
    library.tilewise_isa.restype = ctypes.c_char_p
    library.tilewise_peak_flops.restype = library.tilewise_read_rate.restype = ctypes.c_double

    api = ctypes.pythonapi
    library.tilewise_set_python(api.PyEval_SaveThread, api.PyEval_RestoreThread, api.PyErr_CheckSignals)
    library.tilewise_set_threads(_default_threads())
    wanted = os.environ.get("TILEWISE_CPU_ISA")
    if wanted and not library.tilewise_use_isa(wanted.lower().encode()):
        raise ValueError(
            f"TILEWISE_CPU_ISA={wanted}: expected one of {', '.join(_isas(library))}; set it to that or unset it"
        )
    return library


def call(name: str, *args: Any) -> None:
    """Run one of the engine's long functions, which looks for signals if this is the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    status = getattr(_library(), name)(*args, is_main)
    if status == _NO_MEMORY:
        raise MemoryError("the cpu kernel could not get the memory it works in")
    if status == _NOT_ROWS:
        raise ValueError("lengths: expected sequences within the arrays, got one that begins or ends outside them")
    if status != _DONE:
        raise KeyboardInterrupt  # a handler of the signal that raised nothing itself


# -- instruction sets -------------------------------------------------------------------------------------------------


def _isas(library: Any) -> list[str]:
    names: list[str] = []
    while (name := library.tilewise_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def isas() -> list[str]:
    """The instruction-set paths that this machine can run, best first."""
    return _isas(_library())


def isa() -> str:
    """The path in use."""
    name: bytes = _library().tilewise_isa(-1)
    return name.decode()


def use_isa(name: str) -> None:
    """Take another path than the best one, to test or compare it."""
    if not _library().tilewise_use_isa(name.encode()):
        raise ValueError(f"name: this machine runs {', '.join(isas())}, got {name!r}")


# -- threads ----------------------------------------------------------------------------------------------------------


def set_num_threads(n: int) -> None:
    """How many threads the native CPU engine works with, the caller's included. The results do not depend on it."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n: expected a whole number of threads, got {n!r}")
    if not 1 <= n <= MOST_THREADS:
        raise ValueError(f"n: expected 1 to {MOST_THREADS} threads, got {n}")
    _usable().tilewise_set_threads(n)


def get_num_threads() -> int:
    """How many threads the native CPU engine works with."""
    return int(_usable().tilewise_threads())


def _usable() -> Any:
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(f"the native CPU engine is not here: {reason}")
    return _library()


def _default_threads() -> int:
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if told.isdigit() and int(told) > 0:
        return min(int(told), MOST_THREADS)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- the machine's limits ---------------------------------------------------------------------------------------------


def peak_flops(dtype: str = "float32") -> float:
    """Measured: multiplications and additions a second, by fused operations on registers in all threads."""
    return float(_usable().tilewise_peak_flops(int(dtype == "float64")))


def read_rate(*read: Array) -> float:
    """Measured: bytes a second at which all threads together read these arrays; without any, 256 MiB of their own.

    How fast memory is depends on where it lies (on large pages or small ones), so a kernel is best compared with a
    plain read of its own arrays.
    """
    library = _usable()
    read = read or (np.ones(_READ_BYTES, np.uint8),)
    for x in read:
        if not x.flags.forc:
            raise ValueError(f"read: expected arrays without gaps, got strides {x.strides}; copy it first")
    spans = (structs.Span * len(read))(*(structs.Span(x.ctypes.data, x.nbytes) for x in read))
    return float(library.tilewise_read_rate(spans, len(read)))

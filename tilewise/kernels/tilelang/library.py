"""Compiled kernels: found in the user's cache, or compiled and kept there; and how one is called."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tilewise.dispatch import Unsupported
from tilewise.kernels import disk, toolchain
from tilewise.kernels.tilelang import compiler
from tilewise.sharing import Lock

_logger = logging.getLogger("tilewise")
_PART = "tilelang"  # of the user's cache
_lock = Lock()
_loaded: dict[Any, Library] = {}  # by build

_TYPES: dict[str, Any] = {
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}


class Build(Protocol):
    """What a kernel's code depends on; builds that are equal are one."""

    @property
    def name(self) -> str: ...  # of its library

    @property
    def target(self) -> str: ...


class Library:
    """One kernel, ready to be called."""

    def __init__(self, path: Any) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.get_last_error.restype = self._library.tilewise_signature.restype = ctypes.c_char_p
        told = self._library.tilewise_signature().decode().split(", ")
        arguments = [argument.partition("=")[0].rsplit(" ", 1) for argument in told]
        self._names = [name for _, name in arguments]
        self._library.call.argtypes = [_TYPES.get(kind, ctypes.c_void_p) for kind, _ in arguments]
        self._ready: set[Any] = set()

    def launch(self, values: Mapping[str, Any], device: Any = None) -> None:
        """By their names: addresses of arrays, their sizes and steps, numbers, and the stream of a GPU.

        device: the one that is current, which the kernel is made ready for once.
        """
        if device not in self._ready:
            self._check(self._library.init())
            self._ready.add(device)
        self._check(self._library.call(*[values[name] for name in self._names]))

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"a kernel in TileLang could not be launched: {self._library.get_last_error().decode()}")


def kernel(build: Build, write: Callable[[], Any]) -> Library:
    """The kernel of a build; `write` gives its text, if it has to be compiled."""
    with _lock:
        if build not in _loaded:
            _loaded[build] = _kept(build) or _made(build, write)
        return _loaded[build]


def keep(build: Build, write: Callable[[], Any]) -> bool:
    """Compile a kernel for later, unless it was compiled before: whether it was to be compiled."""
    if is_kept(build):
        return False
    files = _files(build.target)
    files.keep(build.name, _compiled(build, write, files))
    return True


def is_kept(build: Build) -> bool:
    """Whether it was compiled before, here or for the folder that TILEWISE_CACHE names."""
    return build in _loaded or any(files.path(build.name) is not None for files in _folders(build.target))


def any_is_kept(prefix: str, target: str) -> bool:
    """Whether a kernel whose name begins so was compiled before."""
    names = (name for files in _folders(target) for name in files.names())
    return any(name.startswith(prefix) and name.endswith(".so") for name in names)


def _files(target: str) -> disk.Files:
    """What was compiled by the TileLang, the compilers and on the kind of machine that are here."""
    return disk.user_cache(f"{_PART}/{compiler.made_by(target)}")


def _folders(target: str) -> list[disk.Files]:
    """Where a kernel may be. Where nothing can be compiled, one of any compiler is better than none."""
    if compiler.not_installed(target) is None:
        return [_files(target)]
    made_here = f"{toolchain.ARCHITECTURE}-"
    names = sorted(disk.user_cache(_PART).names(), reverse=True)
    return [disk.user_cache(f"{_PART}/{name}") for name in names if name.startswith(made_here)]


def _kept(build: Build) -> Library | None:
    can_make = compiler.not_installed(build.target) is None
    found = (files.loaded(build.name, Library, can_make) for files in _folders(build.target))
    return next((library for library in found if library is not None), None)


def _made(build: Build, write: Callable[[], Any]) -> Library:
    files = _files(build.target)
    return Library(files.keep(build.name, _compiled(build, write, files)))


def _compiled(build: Build, write: Callable[[], Any], files: disk.Files) -> bytes:
    reason = compiler.not_installed(build.target)
    if reason is not None:
        raise Unsupported(f"no kernel for this call was compiled before ({build}), and to compile one {reason}")
    _logger.info("compiling the TileLang kernel %r; later calls find it in %s", str(build), files)
    started = time.perf_counter()
    with compiler.as_target(build.target):
        text = write()
    made = compiler.library(text, build.target)
    _logger.info("compiled it in %.1f s", time.perf_counter() - started)
    return made.content

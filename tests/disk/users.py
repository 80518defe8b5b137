"""Those who have a cache: each compiles something, keeps it, and finds it again."""

from __future__ import annotations

import ctypes
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.faults import failing
from tilewise.kernels import disk
from tilewise.kernels.cuda import compiler, simulator
from tilewise.kernels.cuda.source import Source

ERRORS = [errno.ENOSPC, errno.EROFS, errno.EACCES]
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_cc = pytest.mark.skipif(COMPILER is None, reason="it loads a library, and there is no C compiler to make one")
# What loaders of the simulator, of TileLang's and of CuTe's libraries look for.
LIBRARY = """
const char* get_last_error(void) { return ""; }
const char* tilewise_signature(void) { return "int* x"; }
int init(void) { return 0; }
int call(int* x) { *x = 42; return 0; }
void* tilewise_simulate(void) { return 0; }
void* tilewise_events(void) { return 0; }
void tilewise_kernel(void) {}
"""


def forget_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would know nothing."""
    monkeypatch.setattr(disk, "_own", disk._Own())
    monkeypatch.setattr(disk, "_told", set())
    monkeypatch.setattr(compiler, "_compiled", set())
    simulator.compile_source.cache_clear()


class User:
    """Someone who compiles something, keeps it, and finds it again: act() gives 42. `made` counts compilations."""

    made = 0
    part = ""
    name = "kernel.so"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: bytes) -> None:
        self.monkeypatch, self.library = monkeypatch, library
        self.prepare()

    def prepare(self) -> None:
        raise NotImplementedError

    def act(self) -> int:
        raise NotImplementedError

    def again(self) -> int:
        """In a new process."""
        forget_all(self.monkeypatch)
        return self.act()

    def compiled(self, *_: Any) -> bytes:
        self.made += 1
        return self.library


class Cubins(User):
    part = "cuda"

    def prepare(self) -> None:
        self.monkeypatch.setattr(compiler, "by_nvrtc", self.compiled)
        self.monkeypatch.setattr(compiler, "version", lambda: "nvrtc 13.0")

    def act(self) -> int:
        code = compiler.machine_code(Source("kernel", "tiled", 128, 0), "sm_90a")
        return 42 if code == self.library else 0


class Simulator(User):
    part = "simulator"

    def prepare(self) -> None:
        def run(command: list[str], folder: Path, result: str) -> Path:
            (folder / result).write_bytes(self.compiled())
            return folder / result

        self.monkeypatch.setattr(simulator, "_run", run)

    def act(self) -> int:
        return _answer(simulator.compile_source("a kernel")._library)


class TileLang(User):
    part = "tilelang"

    def prepare(self) -> None:
        from tilewise.kernels.tilelang import compiler

        self.monkeypatch.setattr(compiler, "not_installed", lambda target: None)
        self.monkeypatch.setattr(compiler, "as_target", lambda target: failing(Path("/nowhere"), 0, 0))
        self.monkeypatch.setattr(compiler, "library", lambda *_: compiler.Compiled(self.compiled()))

    def act(self) -> int:
        from tilewise.kernels.tilelang import library

        self.monkeypatch.setattr(library, "_loaded", {})
        x = ctypes.c_int()
        library.kernel(_Build(self.name), lambda: None).launch({"x": ctypes.addressof(x)})
        return x.value


class _Build(NamedTuple):
    name: str
    target: str = "c"


class Cute(User):
    part = "cute"

    def prepare(self) -> None:
        from tilewise.kernels.cute import compiler, library

        made = SimpleNamespace(library=lambda runtime: self.compiled(), call=lambda: 42)
        self.monkeypatch.setattr(compiler, "not_installed", lambda: None)
        self.monkeypatch.setattr(compiler, "compile", lambda wanted, arch: made)
        self.monkeypatch.setattr(library, "load", lambda path: _answering(ctypes.CDLL(str(path))))
        self.find = library._find

    def act(self) -> int:
        wanted: Any = SimpleNamespace(name=lambda arch, runtime: self.name)
        return int(self.find(wanted, "sm_90a")())  # type: ignore[call-arg, func-returns-value]


def _answering(library: Any) -> Callable[[], int]:
    library.tilewise_signature  # noqa: B018 - which is looked up, and is not there in what is no library
    return lambda: _answer(library)


def _answer(library: Any) -> int:
    x = ctypes.c_int()
    library.call(ctypes.byref(x))
    return x.value


USERS = [Cubins, Simulator, TileLang, Cute]

"""CUDA sources on the CPU: compiled by a C++ compiler, a fiber a thread, with mistakes told by block, thread and line.

program = compile_source(text)            # text: a kernel `attention(const Params)`, assembled with DEVICE
program.launch(params, grid=4, threads=128, shared_bytes=0, order=Order.RANDOM, seed=1)
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tilewise.kernels import disk, toolchain
from tilewise.kernels.cuda.source import ENTRY

T = TypeVar("T")

FOLDER = Path(__file__).parent
_ALIGNMENT = 64  # of parameters: tensor maps need it
COMPILERS = ("c++", "g++", "clang++")
_RUNTIME = ("runtime.cpp", "races.cpp", "hopper.cpp", "products.cpp")
_HEADERS = ("runtime.h", "async.h", "fiber.h")
_RUNTIME_FLAGS = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden"]
# Line tables, for faults; the compiler's checks of alignment and of arrays' bounds, which call runtime.cpp.
_KERNEL_FLAGS = [
    "-x", "c++", "-g1", "-gdwarf-4", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions",
    "-fno-math-errno", "-ffp-contract=off", "-fsanitize=alignment,bounds", "-fno-sanitize-recover=all", "-w",
]  # fmt: skip
# What the simulator calls: the kernel, with its one parameter taken by value.
_WRAPPER = f"""
template <class Params> void call(void (*kernel)(Params), const void* params) {{
    kernel(*static_cast<const Params*>(params));
}}
extern "C" __attribute__((visibility("default"))) void tilewise_kernel(const void* params) {{ call({ENTRY}, params); }}
"""


class Order(IntEnum):
    """In which order the threads of a block take their turns."""

    FORWARD = 0
    BACKWARD = 1
    RANDOM = 2


class Did(IntEnum):
    """What a warp did, as a trace tells it."""

    WAITS = 0
    GOES_ON = 1
    COPY_ISSUED = 2
    COPY_LANDED = 3
    PRODUCT_ISSUED = 4
    PRODUCT_TAKEN = 5
    ENDED = 6


class Event(NamedTuple):
    """A line of a trace. Time is counted in rounds, in which every thread that can go on has a turn."""

    did: Did
    round: int
    block: int
    warp: int
    line: int
    number: int  # of what is waited for; of copies the byte of their mbarrier
    file: str
    what: str  # is waited for


class SimulationError(RuntimeError):
    """What a kernel did wrong, with the block, the thread and the line."""


class CompileError(RuntimeError):
    """What the C++ compiler says of a source."""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint), ("threads", ctypes.c_uint), ("shared_bytes", ctypes.c_uint),
        ("order", ctypes.c_int), ("traced", ctypes.c_int), ("seed", ctypes.c_uint64),
    ]  # fmt: skip


class _Event(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("did", "round", "block", "warp", "line", "number")),
        ("file", ctypes.c_char_p), ("what", ctypes.c_char_p),
    ]  # fmt: skip


class Program:
    """A compiled kernel. Launches of one program take turns: the simulator's state is the library's own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._library = ctypes.CDLL(str(path))
        self._library.tilewise_simulate.restype = ctypes.c_char_p
        self._library.tilewise_events.restype = ctypes.POINTER(_Event)
        weakref.finalize(self, _ctypes.dlclose, self._library._handle)
        self._lock = threading.Lock()

    def launch(
        self,
        params: ctypes.Structure,
        *,
        grid: int,
        threads: int,
        shared_bytes: int = 0,
        order: Order = Order.FORWARD,
        seed: int = 1,
        trace: list[Event] | None = None,
    ) -> None:
        """Run all blocks; SimulationError if the kernel made a mistake that the simulator sees.

        trace: where to append what warps did, waits, copies and products, in order; nothing is noted without it.
        """
        asked = _Launch(grid, threads, -(-shared_bytes // 16) * 16, order, trace is not None, seed)
        size = ctypes.sizeof(params)
        room = ctypes.create_string_buffer(size + _ALIGNMENT)
        at = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
        ctypes.memmove(at, ctypes.addressof(params), size)
        library = self._library
        with self._lock:
            told = library.tilewise_simulate(library.tilewise_kernel, ctypes.c_void_p(at), ctypes.byref(asked))
            if trace is not None:
                trace += self._events()
        if told is not None:
            raise SimulationError(self._with_line(told.decode()))

    def _events(self) -> list[Event]:
        count = ctypes.c_int()
        noted = self._library.tilewise_events(ctypes.byref(count))
        return [
            Event(Did(x.did), x.round, x.block, x.warp, x.line, x.number, x.file.decode(), x.what.decode())
            for x in noted[: count.value]
        ]

    def _with_line(self, report: str) -> str:
        """A fault is told by its address in the library, which binutils can turn into a line."""
        found = re.match(r"@([0-9a-f]+)", report)
        tool = shutil.which("addr2line")
        if found is None:
            return report
        line = "somewhere"
        if tool is not None:
            command = [tool, "-e", str(self._path), found[1]]
            line = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split(" ")[0].strip()
        return f"{Path(line).name}{report[found.end() :]}"


# -- compiling --------------------------------------------------------------------------------------------------------


def unavailable() -> str | None:
    """Why kernels cannot be compiled here, and what to do."""
    if sys.platform == "win32":
        return "the simulator runs on Linux and macOS only"
    if not _compiler():
        return (
            f"it compiles CUDA sources with a C++ compiler and finds none (CXX, {', '.join(COMPILERS)}); "
            "install one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)"
        )
    return None


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    for candidate in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(candidate[0]):
            return candidate
    return []


@cache
def headers() -> dict[str, str]:
    """What stands for the headers of GPUs here."""
    return {"device.h": (FOLDER / "device.h").read_text(), "hopper.h": (FOLDER / "hopper.h").read_text(), "wgmma.h": ""}


@lru_cache(maxsize=256)
def compile_source(text: str) -> Program:
    """The program of an assembled source, from the cache if it was ever compiled."""
    compiler = _compiler()
    runtime = _runtime(tuple(compiler))
    flags = [*_KERNEL_FLAGS, _optimization(text)]
    key = _key(text, runtime.name, *flags)

    def make(folder: Path) -> Path:
        (folder / "kernel.cu").write_text(text + _WRAPPER)
        try:
            return linked(folder, runtime)
        except CompileError as error:
            if _links(compiler, folder, runtime):
                raise  # the source's own mistake
            _files().forget(runtime.name, error)
            return linked(folder, _runtime(tuple(compiler)))

    def linked(folder: Path, runtime: Path) -> Path:
        command = [*compiler, *flags, "-shared", "kernel.cu", "-x", "none", str(runtime), "-o", "kernel.so"]
        return _run(command, folder, "kernel.so")

    return _made(f"{key}.so", make, Program)


def _optimization(text: str) -> str:
    """What multiplies by wgmma is much code that computes little: to optimise it takes longer than it saves."""
    return "-O0" if "hw::wgmma" in text else "-O1"


@cache
def _runtime_key(compiler: tuple[str, ...]) -> str:
    texts = [(FOLDER / name).read_text() for name in (*_RUNTIME, *_HEADERS)]
    return _key(*texts, *compiler, toolchain.version(compiler), toolchain.machine(), *_RUNTIME_FLAGS)


def _runtime(compiler: tuple[str, ...]) -> Path:
    """The simulator itself, which every program is linked with; made again if the cache has forgotten it."""

    def make(folder: Path) -> Path:
        (folder / "all.cpp").write_text("".join(f'#include "{name}"\n' for name in _RUNTIME))
        command = [*compiler, *_RUNTIME_FLAGS, "-I", str(FOLDER), "-c", "all.cpp", "-o", "runtime.o"]
        return _run(command, folder, "runtime.o")

    return _made(f"{_runtime_key(compiler)}.o", make, Path)


def _links(compiler: list[str], folder: Path, runtime: Path) -> bool:
    """Whether the compiler takes what the cache has as the simulator."""
    try:
        _run([*compiler, "-shared", str(runtime), "-o", "runtime.so"], folder, "runtime.so")
    except CompileError:
        return False
    return True


def _key(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _files() -> disk.Files:
    return disk.user_cache("simulator")


def _made(name: str, make: Callable[[Path], Path], load: Callable[[Path], T]) -> T:
    """What is loaded from the file of that name, which is made if it is not there or does not load."""
    files = _files()
    found = files.loaded(name, load)
    if found is None:
        with disk.workplace() as folder:
            content = make(folder).read_bytes()
        found = load(files.keep(name, content))
    return found


def _run(command: list[str], folder: Path, result: str) -> Path:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise CompileError(f"the C++ compiler failed on a CUDA source:\n{done.stderr.strip()[:4000]}")
    return folder / result

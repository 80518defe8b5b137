"""Builds the native library from this folder. It needs a C++17 compiler and Python alone: it never imports tilewise.

    python tilewise/kernels/cpu/engine/build.py    puts it beside library.py, as `make engine` does

Each *.cpp is compiled once, and isa.cpp once for each instruction set; one library has them all and chooses when it is
loaded. What has not changed is not compiled again. CXX, CXXFLAGS and LDFLAGS mean what they always mean.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ENGINE = Path(__file__).resolve().parent
BUILD = ENGINE.parents[3] / "build"
OBJECTS = BUILD / "engine"
ON_MACOS = sys.platform == "darwin"
LIBRARY = "libtilewise.dylib" if ON_MACOS else "libtilewise.so"
REASON = "build.txt"  # stands where the library would, and says why it does not
MACOS_TARGET = "11.0"

COMPILERS = ("c++", "g++", "clang++")
FLAGS = [
    "-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread",
]  # fmt: skip
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
INSTRUCTION_SETS = {"x86_64": {"portable": [], "avx2": AVX2, "avx512": [*AVX512, *AVX2]}}
ANYWHERE: dict[str, list[str]] = {"portable": []}
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]

AGAIN = "then repeat your pip install with --force-reinstall --no-cache-dir, or run `make engine` in a checkout"


class BuildError(RuntimeError):
    """Why there is no library, and what to do about it: a text for the user."""


def find_compiler() -> list[str]:
    """$CXX, which may have options, or the first compiler on the PATH."""
    if sys.platform == "win32":
        raise BuildError("the native engine is built on Linux and macOS only")
    given = shlex.split(os.environ.get("CXX", ""))
    for candidate in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(candidate[0]):
            return candidate
    looked_for = f"CXX, which says {given[0]!r}" if given else f"CXX, {', '.join(COMPILERS)}"
    raise BuildError(
        f"no C++ compiler was there when Tilewise was installed (looked for {looked_for}). Install one "
        f"(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install), {AGAIN}"
    )


def instruction_sets(compiler: list[str]) -> dict[str, list[str]]:
    """The instruction sets to compile isa.cpp for, with their flags; one that the compiler refuses is left out."""
    known = INSTRUCTION_SETS.get(platform.machine(), ANYWHERE)
    return {name: flags for name, flags in known.items() if not flags or _accepts(compiler, flags)}


def compile_objects(sources: Path = ENGINE, objects: Path = OBJECTS, sanitize: str = "") -> dict[str, Path]:
    """Compiles what changed. The objects by name: one for each source, and isa-NAME for each instruction set."""
    compiler = [*find_compiler(), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    sets = instruction_sets(compiler)
    flags = [*FLAGS, *_platform_flags(), *(f"-DTILEWISE_HAVE_{name.upper()}" for name in sets if name != "portable")]
    if sanitize:
        flags += [*SANITIZE, f"-fsanitize={sanitize}"]
    # The instruction sets come first, the widest before all: they take the longest.
    units = {f"isa-{name}": ("isa.cpp", [*more, f"-DTILEWISE_ISA={name}"]) for name, more in reversed(sets.items())}
    units |= {path.stem: (path.name, []) for path in sorted(sources.glob("*.cpp")) if path.name != "isa.cpp"}

    def make_object(unit: str) -> Path:
        source, more = units[unit]
        path = os.path.relpath(sources / source, objects)  # a build folder that is moved with its sources stays fresh
        command = [*compiler, *flags, *more, "-MMD", "-MF", f"{unit}.d", "-c", path, "-o", f"{unit}.o"]
        if not _is_fresh(objects / f"{unit}.o", command, _read_by_compiler(objects / f"{unit}.d")):
            _make(objects / f"{unit}.o", command)
        return objects / f"{unit}.o"

    with alone_in(objects), ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(units, pool.map(make_object, units), strict=True))


def link(made: dict[str, Path], sources: Path = ENGINE, objects: Path = OBJECTS, sanitize: str = "") -> Path:
    """One library out of the objects, beside them, that shows the names of exports.map and no other."""
    compiler = [*find_compiler(), *shlex.split(os.environ.get("LDFLAGS", ""))]
    exports = os.path.relpath(sources / "exports.map", objects)
    flags = ["-shared", "-pthread", *_platform_flags()]
    flags += ["-Wl,-exported_symbol,_tilewise_*"] if ON_MACOS else [f"-Wl,--version-script={exports}"]
    static = ["-static-libstdc++", "-static-libgcc"]
    if sanitize:
        flags.append(f"-fsanitize={sanitize}")
    elif not ON_MACOS and _accepts(compiler, static):
        flags += static  # so that the library runs on distributions with an older libstdc++
    parts = [path.name for path in made.values()]
    command = [*compiler, *flags, *parts, "-o", LIBRARY]
    with alone_in(objects):
        if not _is_fresh(objects / LIBRARY, command, [*parts, exports]):
            _make(objects / LIBRARY, command)
    return objects / LIBRARY


def install(folder: Path) -> None:
    """The library in `folder`; or, in its place, a text that says why there is none."""
    library, reason = folder / LIBRARY, folder / REASON
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if is_set("TILEWISE_NO_ENGINE"):
            raise BuildError(f"TILEWISE_NO_ENGINE was set when Tilewise was installed. Unset it, {AGAIN}")
        _copy(link(compile_objects()), library)
        reason.unlink(missing_ok=True)
    except BuildError as failure:
        library.unlink(missing_ok=True)
        reason.write_text(f"{failure}\n")
        if is_set("TILEWISE_REQUIRE_ENGINE"):
            raise
        print(f"Tilewise goes without its native engine: {failure}", file=sys.stderr)


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _platform_flags() -> list[str]:
    """On macOS the library is for the machine that Python runs on, whatever the compiler would take by itself.

    On Linux a thread's own variables are there from its start: made when first asked for, they would end the process
    where memory is short.
    """
    if ON_MACOS:
        return ["-arch", platform.machine(), f"-mmacosx-version-min={MACOS_TARGET}"]
    return ["-ftls-model=initial-exec"] if sys.platform == "linux" else []


def _accepts(compiler: list[str], flags: list[str]) -> bool:
    """Whether a library can be made with these flags at all."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("int probe;\n")
        command = [*compiler, *flags, "-fPIC", "-shared", source.name, "-o", "probe.so"]
        return _run(command, source.parent).returncode == 0


def _read_by_compiler(rule: Path) -> list[str]:
    """The files that a make rule, as the compiler writes it, names: a source and its headers."""
    if not rule.exists():
        return []
    return shlex.split(rule.read_text().replace("\\\n", " ").partition(":")[2])


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.command")


def _is_fresh(target: Path, command: list[str], inputs: list[str]) -> bool:
    """Whether this very command made the target, and nothing that it read has changed since."""
    try:
        newest = max((target.parent / name).stat().st_mtime_ns for name in inputs)
        return _record(target).read_text() == shlex.join(command) and newest <= target.stat().st_mtime_ns
    except (OSError, ValueError):  # a file is gone, or nothing was ever made
        return False


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:  # a compiler that cannot be started is one that fails
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _make(target: Path, command: list[str]) -> None:
    start = time.time_ns()
    done = _run(command, target.parent)
    if done.returncode != 0:
        raise BuildError(
            f"the C++ compiler ({command[0]}) failed when Tilewise was installed:\n{_shortened(done.stderr)}\n"
            f"Set CXX to one that knows C++17, {AGAIN}"
        )
    os.utime(target, ns=(start, start))  # a source that is saved while it compiles is newer
    _record(target).write_text(shlex.join(command))


def _shortened(words: str) -> str:
    """The compiler's own words: the first lines that speak of an error, or the first lines."""
    lines = words.strip().splitlines() or ["(it said nothing)"]
    told = [line for line in lines if "error" in line.lower()] or lines
    return "\n".join(f"  {line[:200]}" for line in told[:5])


def _copy(source: Path, target: Path) -> None:
    """In one step: a process that has the old file open keeps it, and none ever sees half of the new one."""
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copy2(source, partial)
    partial.replace(target)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One build at a time in a folder: an install and a test may meet there."""
    import fcntl  # not on Windows, where nothing is built

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        install(ENGINE.parent)
    except BuildError as failure:
        sys.exit(f"Tilewise's native engine could not be built: {failure}")

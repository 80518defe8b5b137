"""From source to machine code: prebuilt, or by NVRTC, once for each source, architecture and compiler version."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import time
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tilewise.kernels import disk
from tilewise.kernels.cuda.source import Source

OPTIONS: dict[str, Any] = {"std": "c++17"}
PREBUILT = disk.Files(Path(__file__).with_name("prebuilt"), guarded=False)  # by `make kernels`, shipped in wheels

_logger = logging.getLogger("tilewise")
_compiled: set[str] = set()  # by this process


class CompileError(RuntimeError):
    """NVRTC refuses a source, in its own words."""


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for; 9.0 has instructions of its own."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def prebuilt(source: Source, arch: str) -> bytes | None:
    """The cubin of a common source, if it was shipped. Whichever compiler made it, it is of this text."""
    return PREBUILT.read(f"{key(source.text, arch)}.cubin")


def machine_code(source: Source, arch: str) -> bytes:
    """The cubin of a source for an architecture such as sm_90a; from the user's cache if it was ever compiled."""
    found = kept(source, arch)
    if found is None:
        files = disk.user_cache("cuda")
        _logger.info("compiling the CUDA kernel %r for %s; later calls find it in %s", source.rung, arch, files)
        started = time.perf_counter()
        found = by_nvrtc(source, arch)
        _compiled.add(_name(source, arch))
        _keep(files, _name(source, arch), found)
        _logger.info("compiled it in %.1f s", time.perf_counter() - started)
    return found


def kept(source: Source, arch: str) -> bytes | None:
    """What was compiled before, and kept."""
    return disk.user_cache("cuda").read(_name(source, arch))


def forget(source: Source, arch: str, error: Exception) -> bool:
    """Throw away what the driver does not load; False if this process compiled it, as it would be no other."""
    name = _name(source, arch)
    if name in _compiled:
        return False
    disk.user_cache("cuda").forget(name, error)
    return True


def _name(source: Source, arch: str) -> str:
    return f"{key(source.text, arch, version())}.cubin"


def key(text: str, arch: str, compiler: str = "") -> str:
    """All that machine code depends on; prebuilt code is kept whatever the compiler was."""
    parts = (text, repr(sorted(OPTIONS.items())), arch, compiler)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _keep(files: disk.Files, name: str, content: bytes) -> None:
    try:
        files.add(name, content)
    except OSError as error:  # a full disk, a home that is read-only: the kernel runs all the same
        files.tell_why_not(error)


@cache
def version() -> str:
    """Of NVRTC, by its package: the library would first be loaded, and tells less."""
    with suppress(metadata.PackageNotFoundError):
        return f"nvrtc {metadata.version('nvidia-cuda-nvrtc')}"
    return f"nvrtc {loaded_version()}"


def loaded_version() -> str:
    """What the library itself says."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC does not tell its version: {error.name}")
    return f"{major}.{minor}"


def by_nvrtc(source: Source, arch: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, name=f"{source.rung}.cu", **OPTIONS)
    try:
        program = Program(source.text, "c++", options)
        made = program.compile("cubin")
    except Exception as error:  # cuda-core's own kinds of errors differ between versions; the words are what counts
        raise CompileError(f"NVRTC cannot compile the kernel {source.rung!r} for {arch}:\n{error}") from error
    return bytes(made.code)


def without_nvrtc() -> str | None:
    """Why NVRTC cannot be used here and what to install, or None."""
    try:
        import cuda.core  # noqa: F401

        loaded_version()
    except Exception as error:  # packages that are missing, a library that does not load
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"NVRTC cannot be used ({told}); pip install 'tilewise[cuda]' nvidia-cuda-nvrtc"
    return None


def by_nvcc(source: Source, arch: str) -> bytes:
    """For those who have the CUDA toolkit, and need no PyTorch."""
    options = [f"-{name}={value}" for name, value in OPTIONS.items()]
    with disk.workplace() as folder:
        made = folder / "kernel.cubin"
        (folder / f"{source.rung}.cu").write_text(source.text)
        command = ["nvcc", "-cubin", f"-arch={arch}", *options, "-o", made.name, f"{source.rung}.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"nvcc cannot compile the kernel {source.rung!r} for {arch}:\n{done.stderr.strip()}")
        return made.read_bytes()

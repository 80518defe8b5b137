"""From source to machine code: NVRTC through cuda-core, once for each source, architecture and compiler version."""

from __future__ import annotations

import hashlib
import logging
import time
from functools import cache
from typing import Any

from tilewise.kernels.cuda import disk
from tilewise.kernels.cuda.source import Source

OPTIONS: dict[str, Any] = {"std": "c++17"}

_logger = logging.getLogger("tilewise")


class CompileError(RuntimeError):
    """NVRTC refuses a source, in its own words."""


def machine_code(source: Source, arch: str) -> bytes:
    """The cubin of a source for an architecture such as sm_90a; from the user's cache if it was ever compiled."""
    files = disk.user_cache("cuda")
    name = f"{key(source.text, arch, version())}.cubin"
    found = files.read(name)
    if found is None:
        _logger.info("compiling the CUDA kernel %r for %s; later calls find it in %s", source.rung, arch, files.folder)
        started = time.perf_counter()
        found = _compile(source, arch)
        _keep(files, name, found)
        _logger.info("compiled it in %.1f s", time.perf_counter() - started)
    return found


def key(text: str, arch: str, compiler: str) -> str:
    """All that machine code depends on."""
    parts = (text, repr(sorted(OPTIONS.items())), arch, compiler)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _keep(files: disk.Files, name: str, content: bytes) -> None:
    try:
        files.add(name, content)
    except OSError as error:  # a full disk, a home that is read-only: the kernel runs all the same
        _logger.warning("the compiled kernel is not kept: %s cannot be written (%s)", files.folder, error)


@cache
def version() -> str:
    """Of NVRTC."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC does not tell its version: {error.name}")
    return f"nvrtc {major}.{minor}"


def _compile(source: Source, arch: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, name=f"{source.rung}.cu", **OPTIONS)
    try:
        program = Program(source.text, "c++", options)
        made = program.compile("cubin")
    except Exception as error:  # cuda-core's own kinds of errors differ between versions; the words are what counts
        raise CompileError(f"NVRTC cannot compile the kernel {source.rung!r} for {arch}:\n{error}") from error
    return bytes(made.code)

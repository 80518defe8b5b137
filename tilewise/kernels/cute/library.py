"""Kernels as this process calls them: built ahead of time, kept from another time, or compiled now."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tilewise.dispatch import Unsupported
from tilewise.kernels import disk
from tilewise.kernels.cute import compiler
from tilewise.kernels.cute.wanted import Wanted
from tilewise.sharing import Kept

FOLDER = "TILEWISE_CUTE_KERNELS"  # the variable that names a folder which `tilewise build cute` filled

_logger = logging.getLogger("tilewise")
_loaded = Kept[Callable[..., None]](1024)


def kernel(wanted: Wanted, arch: str) -> Callable[..., None]:
    """The function that launches a kernel, on the current stream."""
    return _loaded.found((wanted, arch), lambda: _find(wanted, arch))


def is_built(wanted: Wanted, arch: str) -> bool:
    """Whether it need not be compiled."""
    return _built(wanted.name(arch, runtime())) is not None


def not_built(wanted: Wanted, arch: str) -> str | None:
    """Why there is no kernel for a call that could be computed: none was built, and there is no compiler."""
    reason = compiler.not_installed()
    if reason is None or is_built(wanted, arch):
        return None
    return _none_built(wanted, reason)


def granted(wanted: Wanted, arch: str) -> Wanted:
    """The kernel that a call gets. A remainder is a wish: where none is built or compiled that stores it, it is left
    out."""
    return replace(wanted, remainder=False) if wanted.remainder and not_built(wanted, arch) else wanted


def _none_built(wanted: Wanted, reason: str) -> str:
    return f"no kernel for it was built ahead of time ({wanted}), and to compile one {reason}"


def built_ahead() -> disk.Files | None:
    """The folder that was built ahead of time, if one is named."""
    named = os.environ.get(FOLDER)
    return disk.Files(Path(named)) if named else None


def _compiled() -> disk.Files:
    """What was compiled here, by the compiler that is here: another version may compile otherwise."""
    return disk.user_cache(f"cute/{compiler.version()}")


def _folders() -> list[disk.Files]:
    """Where a kernel may be, in the order in which they are asked."""
    return [folder for folder in (built_ahead(), _compiled()) if folder is not None]


def _built(name: str) -> Path | None:
    return next((path for folder in _folders() if (path := folder.path(name)) is not None), None)


def _find(wanted: Wanted, arch: str) -> Callable[..., None]:
    name = wanted.name(arch, runtime())
    reason = compiler.not_installed()
    for folder in _folders():
        found = folder.loaded(name, load, can_make=reason is None and folder != built_ahead())
        if found is not None:
            return found
    if reason is not None:
        raise Unsupported(f"the kernel 'cute' cannot compute this call: {_none_built(wanted, reason)}")
    files = _compiled()
    _logger.info("compiling the CuTe kernel %s for %s; later calls find it in %s", wanted, arch, files)
    started = time.perf_counter()
    made = compiler.compile(wanted, arch)
    _logger.info("compiled it in %.1f s", time.perf_counter() - started)
    try:
        return load(files.keep(name, made.library(runtime())))
    except (OSError, compiler.CompileError) as error:  # no room anywhere, no linker: the kernel runs all the same
        _logger.warning("the compiled kernel is not kept: %s", error)
        call: Callable[..., None] = made.call
        return call


def load(path: Path) -> Callable[..., None]:
    """The function of a library that was built."""
    import tvm_ffi

    _cuda_runtime()
    function: Callable[..., None] = getattr(tvm_ffi.load_module(str(path)), compiler.ENTRY)
    return function


def runtime() -> str:
    """Which CUDA this process has, as the DSL's packages name it."""
    torch = sys.modules.get("torch")
    version = getattr(torch.version, "cuda", None) if torch is not None else None
    return f"cu{version.split('.')[0]}" if version else "cu13"


@cache
def _cuda_runtime() -> None:
    """CUDA's runtime library, which PyTorch has loaded for itself, for the kernels' libraries to find."""
    with suppress(OSError):  # they tell themselves what they do not find
        ctypes.CDLL(f"libcudart.so.{runtime().removeprefix('cu')}", mode=ctypes.RTLD_GLOBAL)


def not_installed() -> str | None:
    """Why no kernel could run here, compiled or built ahead of time."""
    if built_ahead() is None:
        return compiler.not_installed()
    missing = [name for name in ("torch", "tvm_ffi") if find_spec(name) is None]
    return f"it needs {', '.join(missing)}; pip install torch apache-tvm-ffi" if missing else None

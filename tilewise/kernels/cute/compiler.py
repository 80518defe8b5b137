"""From a kernel's Python to a small library: by CuTe's compiler, which needs no GPU, and the system's linker."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tilewise.kernels import disk
from tilewise.kernels.cute import modules
from tilewise.kernels.cute.cubin import Resources, resources
from tilewise.kernels.cute.near import CELL_BYTES
from tilewise.kernels.cute.wanted import Wanted

ENTRY = "attention"  # the function of every library
_SHIM = Path(__file__).with_name("shim.c")


class CompileError(RuntimeError):
    """CuTe's compiler, or the linker, refuses a kernel, in its own words."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """In memory: `call` runs it in this process, where there is a GPU."""

    call: Any
    exported: bytes  # the same, for a linker

    @property
    def resources(self) -> Resources:
        return resources(self.exported)

    def library(self, runtime: str) -> bytes:
        """As a library that needs apache-tvm-ffi and CUDA's runtime, and nothing of the compiler.

        runtime: of which CUDA; the packages of the DSL have an archive for each.
        """
        linker = c_compiler()
        if linker is None:
            raise CompileError("no C compiler to link with: expected cc, gcc or clang, or the variable CC to name one")
        with disk.workplace() as folder:
            made = folder / "kernel.so"
            (folder / "kernel.o").write_bytes(self.exported)
            options, parts = (
                ["-shared", "-fPIC", "-O2", "-o", made.name],
                ["kernel.o", str(_SHIM), str(_archive(runtime))],
            )
            done = subprocess.run([linker, *options, *parts], cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CompileError(f"{linker} cannot link the kernel:\n{done.stderr.strip()}")
            return made.read_bytes()


@cache
def version() -> str:
    """Of CuTe's DSL, or "none" where there is none."""
    try:
        return metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return "none"


@cache
def not_installed() -> str | None:
    """Why there is no compiler here and what to install, or None."""
    missing = [name for name in ("torch", "cutlass", "tvm_ffi") if find_spec(name) is None]
    return f"it needs {', '.join(missing)}; pip install 'tilewise[cute]'" if missing else None


def compile(kernel: Wanted, arch: str) -> Compiled:
    """For an architecture such as sm_90a, whatever GPU is here."""
    os.environ.setdefault("CUTE_DSL_ARCH", arch)  # or the DSL looks for a GPU when it is imported
    import cutlass.cute as cute
    from cutlass import Float32
    from cutlass.cute.runtime import make_fake_stream

    source: ModuleType = import_module(f"{__package__}.source.{kernel.source}")
    build = SimpleNamespace(**vars(kernel), variant=modules.module(kernel.functions))
    loaded = tuple(_fake(dtype, rank, last=None) for dtype, rank in kernel.loaded) or (_fake("float32", 1),)
    if kernel.table:
        loaded = (*loaded, _fake(kernel.table.dtype, 4, 16 // CELL_BYTES[kernel.table.dtype]))
    more = _of_items(kernel) if kernel.persistent else [_fake(kernel.dtype, 2, kernel.vector)] if kernel.heads else []
    given = _GIVEN.get(kernel.source, _of_forward)(kernel)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch={arch}"
    try:
        made = cute.compile(source.launch, *given, loaded, Float32(1.0), *more, build, stream, options=options)
    except Exception as error:  # of the DSL there are many kinds; the words are what counts
        raise CompileError(f"CuTe's compiler cannot compile {kernel} for {arch}:\n{error}") from error
    with disk.workplace() as folder:
        made.export_to_c(str(folder / "kernel.o"), function_name=ENTRY)
        return Compiled(made, (folder / "kernel.o").read_bytes())


def _of_forward(kernel: Wanted) -> list[Any]:
    """q, k, v and the output; lse; the plan; sinks."""
    rows = [_fake(kernel.dtype, 4, kernel.vector) for _ in range(4)]
    return [*rows, _fake("float32", 3), *_fake_plan(), _fake("float32", 1)]


def _of_backward(kernel: Wanted) -> list[Any]:
    """q, k, v, the output, its remainder and its gradient, theirs; lse, its gradient and delta; each query's numbers,
    sums of d_q and whose turn it is; the plan, both ways round; heads that take turns, and blocks that run."""
    import cutlass

    rows = [_fake(kernel.dtype, 4, kernel.vector) for _ in range(9)]
    numbers = [_fake("float32", 3, last=None if is_given else 1) for is_given in (False, True, False)]
    room = [_fake("float32", 3, 4), _fake("float32", 3, 4), _fake("int32", 1)]
    return [*rows, *numbers, *room, _fake("int32", 4), *_fake_plan(), cutlass.Int32(1), cutlass.Int32(1)]


def _of_backward_twice(kernel: Wanted) -> list[Any]:
    """q, k, v, the output, its remainder and its gradient, theirs; lse, its gradient, shift and delta; the plan, both
    ways round."""
    rows = [_fake(kernel.dtype, 4, kernel.vector) for _ in range(9)]
    numbers = [_fake("float32", 3, last=None if is_given else 1) for is_given in (False, True, False, False)]
    return [*rows, *numbers, *_fake_plan(), *_fake_plan()]


_GIVEN = {"backward_sm90": _of_backward, "backward_sm90_twice": _of_backward_twice}  # to others, as to forward


def _of_items(kernel: Wanted) -> list[Any]:
    """Which is next, how many blocks there are, the order, and the output's remainder."""
    from cutlass import Int32

    return [_fake("int32", 1), *(Int32(1) for _ in range(3)), _fake(kernel.dtype, 4, kernel.vector)]


def _fake_plan() -> list[Any]:
    """Records and runs."""
    return [_fake("int32", 4), _fake("int32", 2)]


def _fake(dtype: str, rank: int, divisible: int = 1, last: int | None = 1) -> Any:
    """A tensor of any sizes and steps, the latter multiples of a number. last: the step of the last dimension."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    names = {"bool": "Uint8", "bfloat16": "BFloat16"}
    element = getattr(cutlass, names.get(dtype, dtype.capitalize()))
    steps = [cute.sym_int64(divisibility=divisible) for _ in range(rank - 1)]
    steps.append(cute.sym_int64() if last is None else last)
    sizes = [cute.sym_int32() for _ in range(rank)]
    return make_fake_tensor(element, tuple(sizes), tuple(steps), assumed_align=divisible * element.width // 8)


@cache
def c_compiler() -> str | None:
    named = os.environ.get("CC")
    return next((found for name in (named, "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)


def _archive(runtime: str) -> Path:
    """52 KB that stand for the DSL's own 43 MB at run time."""
    package = find_spec("nvidia_cutlass_dsl")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    found = [path for folder in folders for path in Path(folder).glob("cu*/lib/libcuda_dialect_runtime_static.a")]
    if not found:
        raise CompileError("the DSL's package has no archive to link with; pip install nvidia-cutlass-dsl-libs-cu13")
    return max(found, key=lambda path: (path.parts[-3] == runtime, path.parts[-3]))  # of this CUDA, or the newest

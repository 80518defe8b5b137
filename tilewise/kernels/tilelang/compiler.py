"""From a kernel in TileLang to a library that needs neither TileLang nor a compiler to be loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.kernels import disk, toolchain

C = "c"  # the target that is main memory and a C++ compiler; others are architectures such as sm_90a

# A weight takes one instruction if numbers too small for a full mantissa may be 0. Nothing else is approximate.
_CUDA_FLAGS = ["-ftz=true"]
# As a GPU has it, but for products, which are rounded before they are added.
_C_FLAGS = ["-O2", "-ffp-contract=off", "-fno-math-errno"]
_C_COMPILERS = ("c++", "g++", "clang++")
_NVCC_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")

# What a library tells of the arguments of `call`, in their order.
_SIGNATURE = 'extern "C" const char* tilewise_signature() {{ return "{}"; }}\n'

# Quotients and remainders of whole numbers as NumPy has them: floored, and 0 if divided by 0 (ops.py). Those of 32 bits
# come in 64, too, and are divided in 32.
WHOLE_NUMBERS = "tilewise_floor"
_WHOLE_NUMBERS = """\
#include <stdint.h>
{kind} int64_t tilewise_floor_quotient{bits}(int64_t dividend, int64_t divisor) {{
  const int{bits}_t a = (int{bits}_t)dividend, b = (int{bits}_t)divisor;
  if (b == 0) return 0;
  if (b == -1) return (int{bits}_t)(0 - (uint{bits}_t)a);  // of the least number a quotient would not fit
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}}
{kind} int64_t tilewise_floor_remainder{bits}(int64_t dividend, int64_t divisor) {{
  const int{bits}_t a = (int{bits}_t)dividend, b = (int{bits}_t)divisor;
  if (b == 0 || b == -1) return 0;
  const int{bits}_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}}
"""


class CompileError(RuntimeError):
    """TileLang or a compiler refuses a kernel, in its own words."""


class Compiled(NamedTuple):
    """A library, and what its kernel takes of a GPU: registers of a thread, bytes of it that do not fit them."""

    content: bytes
    registers: int = 0
    spilled: int = 0


def not_installed(target: str) -> str | None:
    """Why nothing can be compiled here, or None."""
    missing = [name for name in ("torch", "tilelang") if find_spec(name) is None]
    if missing:
        return f"it needs {', '.join(missing)}; pip install 'tilewise[tilelang]'"
    tools = _C_COMPILERS if target == C else ("nvcc",)
    if not any(map(shutil.which, tools)):
        return f"TileLang needs a compiler, {' or '.join(tools)}, and there is none on PATH"
    return None


def made_by(target: str) -> str:
    """All that makes a library of a kernel's text, as the name of a folder."""
    return _made_by(target, toolchain.host(_NVCC_ENVIRONMENT), os.environ.get("PATH"))


@cache
def _made_by(target: str, host: str, path: str | None) -> str:
    """path: where compilers are looked for."""
    command, tilelang = _command(target), _version("tilelang")
    machine = toolchain.machine() if target == C else host
    told = toolchain.digest(tilelang, _version("apache-tvm-ffi"), toolchain.version((command[0],)), machine, *command)
    return f"{toolchain.ARCHITECTURE}-{tilelang}-{told[:16]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def library(kernel: Any, target: str) -> Compiled:
    """The library of a kernel (a PrimFunc): init(), call(...) and tilewise_signature()."""
    text = source(kernel, target)
    arguments = re.findall(r"\bcall\((.*?)\) \{", text)[-1]
    with disk.workplace() as folder:
        return _compiled(text + _SIGNATURE.format(arguments), target, folder)


def source(kernel: Any, target: str) -> str:
    """What TileLang makes of a kernel: CUDA C++ or C++, with the function of the host that launches it."""
    import tilelang
    from tilelang import tvm
    from tilelang.jit.adapter.wrapper import TLWrapper

    options = {"tirx.disable_vectorize": True} if target == C else {}
    goal = as_target(target)
    with tvm.transform.PassContext(config=options), goal:
        lowered = tilelang.lower(kernel, target=goal)
    wrapper = TLWrapper(goal)
    wrapper.assign_optimized_module(tvm.IRModule({kernel.attrs["global_symbol"]: kernel}))
    wrapper.assign_pass_configs(options)
    wrapper.assign_host_module(lowered.host_mod)
    wrapper.assign_device_module(lowered.device_mod)
    text: str = wrapper.wrap(lowered.kernel_source)
    return _whole_numbers(target) + text


def _whole_numbers(target: str) -> str:
    """TileLang's C target declares what it calls, as C's."""
    kind = 'extern "C" inline' if target == C else "static __device__ __forceinline__"
    return "".join(_WHOLE_NUMBERS.format(kind=kind, bits=bits) for bits in (32, 64))


def as_target(target: str) -> Any:
    from tilelang import tvm

    return tvm.target.Target(C if target == C else {"kind": "cuda", "arch": target})


def _compiled(text: str, target: str, folder: Path) -> Compiled:
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    made, given = folder / "kernel.so", folder / ("kernel.cpp" if target == C else "kernel.cu")
    given.write_text(text)
    command = [
        *_command(target),
        f"-I{TILELANG_TEMPLATE_PATH}",
        f"-I{CUTLASS_INCLUDE_DIR}",
        "-o",
        str(made),
        str(given),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"a kernel in TileLang does not compile for {target}:\n{done.stderr[-4000:]}")
    told = done.stdout + done.stderr
    spilled, registers = (sum(map(int, re.findall(x, told))) for x in (r"(\d+) bytes spill", r"Used (\d+) registers"))
    return Compiled(made.read_bytes(), registers, spilled)


def _c_compiler() -> str | None:
    return next(filter(None, map(shutil.which, _C_COMPILERS)), None)


def _command(target: str) -> list[str]:
    if target == C:
        return [_c_compiler() or "c++", "-std=c++17", "-fPIC", "-shared", "-w", *_C_FLAGS]
    code = f"arch=compute_{target.removeprefix('sm_')},code={target}"
    return [
        "nvcc",
        "-std=c++20",
        "-w",
        "--shared",
        "-Xcompiler",
        "-fPIC",
        "-Xptxas",
        "-v",
        "-gencode",
        code,
        *_CUDA_FLAGS,
    ]

"""The same kernels on arrays in main memory, by TileLang's C target: one thread, slow. For tests."""

from __future__ import annotations

import sys
from typing import Any

from tilewise.kernels import host
from tilewise.kernels.tilelang import compiler
from tilewise.kernels.tilelang.compiler import C
from tilewise.linear.kernels import tilelang
from tilewise.linear.spec import Problem
from tilewise.spec import Shape

DTYPES = ("float16", "float32")


class Kernel(tilelang.Kernel):
    name = "tilelang-c"

    def unavailable(self) -> str | None:
        return compiler.not_installed(C)

    def unsupported(self, shape: Shape) -> str | None:
        if shape.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            return f"TileLang's C target has {known}, and the arrays are {shape.dtype}; kernel='numpy' takes them"
        return host.unsupported(shape)

    def _computed_with(self, d_out: Any, q: Any) -> Any:
        torch = sys.modules["torch"]
        return q.dtype if d_out.dtype == q.dtype else torch.float32

    def _target(self, problem: Problem) -> str:
        return C

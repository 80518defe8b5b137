"""Linear attention in TileLang, on NVIDIA GPUs; its kernels are compiled when first called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise import arrays
from tilewise.dispatch import Unsupported
from tilewise.kernels import gpus
from tilewise.kernels.tensors import as_tensor, device_of
from tilewise.kernels.tilelang import STANDS_IN, architecture, compiler, library, support
from tilewise.linear.kernels.operands import done_like, grads_like, tensors_of
from tilewise.linear.kernels.tilelang.build import PREFIX
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.spec import Shape

MOST_D = 128


class Kernel:
    name = "tilelang"

    def unavailable(self) -> str | None:
        reason = gpus.for_amd() or gpus.none_here()
        return None if reason is None else f"{reason}; {STANDS_IN}"

    def unsupported(self, shape: Shape) -> str | None:
        away = gpus.elsewhere(shape)
        if away is not None:
            return f"{away}; {STANDS_IN}"
        capability = gpus.capability(shape.device)
        if capability != support.CAPABILITY:
            return f"it is made for compute capability 9.0, and {shape.device} has {capability[0]}.{capability[1]}"
        return refused(shape) or not_compiled(architecture(capability))

    def forward(self, problem: Problem, chunk: int | None = None) -> Done:
        """chunk: a GPU's are of 64 rows, whatever is asked for."""
        from tilewise.linear.kernels.tilelang.launch import forward

        with device_of(problem.q):
            done = forward(tensors_of(problem, _rows), chunk, self._target(problem))
        return done_like(done, problem)

    def backward(
        self, problem: Problem, done: Done, d_out: Any, d_state: LinearState | None = None, chunk: int | None = None
    ) -> LinearGrads:
        from tilewise.linear.kernels.tilelang.launch import backward

        given, d_out = tensors_of(problem, _rows), _rows(as_tensor(d_out))
        dtype = self._computed_with(d_out, given.q)
        given = replace(given, q=given.q.to(dtype), k=given.k.to(dtype), v=given.v.to(dtype))
        held = Done(_rows(as_tensor(done.out)).to(dtype), as_tensor(done.norm), done.state.map(as_tensor))
        with device_of(problem.q):
            d_state = None if d_state is None else d_state.map(as_tensor)
            grads = backward(given, held, d_out.to(dtype), d_state, chunk, self._target(problem))
        return grads_like(grads, problem)

    def _computed_with(self, d_out: Any, q: Any) -> Any:
        """The type of q: a gradient of the output that is wider would be rounded to it."""
        if d_out.dtype != q.dtype:
            raise Unsupported(
                f"kernel {self.name!r} cannot compute this linear attention: the gradient of the output is "
                f"{d_out.dtype} and q is {q.dtype}; convert it with .to(q.dtype), or take kernel='triton'"
            )
        return q.dtype

    def _target(self, problem: Problem) -> str:
        return architecture(gpus.capability(arrays.device_name(problem.q)))


def not_compiled(target: str) -> str | None:
    """Why no kernel can be had: none was compiled before, and none can be now. Which a call takes is seen when it is
    launched."""
    return None if library.any_is_kept(PREFIX, target) else compiler.not_installed(target)


def refused(shape: Shape) -> str | None:
    """What it cannot compute on any GPU."""
    if shape.dtype == "float16":
        return "sums over a sequence leave the range of float16, which it multiplies; kernel='triton' takes them"
    if shape.dtype != "bfloat16":
        return f"it multiplies bfloat16, and the arrays are {shape.dtype}; kernel='triton' takes float32"
    if max(shape.d, shape.d_v) > MOST_D:
        return (
            f"it keeps a state of d x d_v in registers, with room for {MOST_D} x {MOST_D}, and they are "
            f"{shape.d} and {shape.d_v}"
        )
    return gpus.too_long(shape) or gpus.too_many(shape)


def _rows(x: Any) -> Any:
    """Numbers of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()

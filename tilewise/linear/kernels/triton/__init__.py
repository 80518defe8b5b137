"""Linear attention in Triton, on the GPUs that it serves; on CPUs by Triton's interpreter."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from tilewise.kernels import gpus, host
from tilewise.kernels.tensors import as_tensor, device_of
from tilewise.kernels.triton import DTYPES, TritonKernel
from tilewise.kernels.triton.modules import is_interpreted
from tilewise.linear.kernels.operands import done_like, grads_like, tensors_of
from tilewise.linear.spec import Done, LinearGrads, Problem
from tilewise.linear.state import LinearState
from tilewise.spec import Shape

MOST_D = 128
MOST_APART = 1 << 22  # numbers between a row and the next


class Kernel:
    name = "triton"

    def unavailable(self) -> str | None:
        return TritonKernel().unavailable()

    def unsupported(self, shape: Shape) -> str | None:
        if is_interpreted() and host.unsupported(shape):
            return host.unsupported(shape)
        if not is_interpreted() and not shape.device.startswith("cuda"):
            return f"it computes on GPUs and the arrays are on {shape.device}; move them with .cuda()"
        if shape.dtype not in DTYPES:
            return f"it computes {', '.join(DTYPES)}, and the arrays are {shape.dtype}; kernel='numpy' takes them"
        if max(shape.d, shape.d_v) > MOST_D:
            return (
                f"it keeps a state of d x d_v in registers, with room for {MOST_D} x {MOST_D}, and they are "
                f"{shape.d} and {shape.d_v}; kernel='numpy' takes them, in main memory"
            )
        return gpus.too_long(shape)

    def forward(self, problem: Problem, chunk: int | None = None) -> Done:
        from tilewise.linear.kernels.triton.launch import forward

        with device_of(problem.q):
            done = forward(tensors_of(problem, _rows), chunk)
        return done_like(done, problem)

    def backward(
        self, problem: Problem, done: Done, d_out: Any, d_state: LinearState | None = None, chunk: int | None = None
    ) -> LinearGrads:
        from tilewise.linear.kernels.triton.launch import backward

        given = tensors_of(problem, _rows)
        torch = sys.modules["torch"]
        d_out = as_tensor(d_out)
        # The gradients are computed in a type that holds what q and d_out have.
        wider = torch.promote_types(d_out.dtype, given.q.dtype)
        wider = torch.float32 if wider == torch.float64 else wider
        given = replace(given, q=given.q.to(wider), k=given.k.to(wider), v=given.v.to(wider))
        held = Done(_rows(as_tensor(done.out)), as_tensor(done.norm).contiguous(), done.state.map(as_tensor))
        with device_of(problem.q):
            d_state = None if d_state is None else d_state.map(as_tensor)
            grads = backward(given, held, _rows(d_out.to(wider)), d_state, chunk)
        return grads_like(grads, problem)


def _rows(x: Any) -> Any:
    """Numbers of a row side by side, and rows of a chunk not farther apart than 32 bits tell."""
    return x if lies_well(x) else x.contiguous()


def lies_well(x: Any) -> bool:
    return bool(x.stride(-1) == 1 and x.stride(-2) < MOST_APART)

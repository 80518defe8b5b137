"""The CuTe kernel system: kernels in NVIDIA's CuTe DSL, compiled when first called, or ahead of time."""

from __future__ import annotations

import sys
from typing import Any

from tilewise.kernels.cute import compiler, library, support
from tilewise.kernels.cute.rungs import BACKWARD, RUNGS, Rung
from tilewise.kernels.cute.wanted import kernel_of
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


class CuteKernel:
    """On CUDA tensors of PyTorch; `rung` names one of its kernels."""

    summary = "CuTe DSL on NVIDIA GPUs"

    def __init__(self, rung: str | None = None) -> None:
        self.name = "cute" if rung is None else f"cute/{rung}"
        self.rung = None if rung is None else RUNGS[rung]

    def unavailable(self) -> str | None:
        return library.not_installed() or _no_gpu()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        if not shape.device.startswith("cuda"):
            return f"it computes on NVIDIA GPUs and the arrays are on {shape.device}; move them with .cuda()"
        capability = _capability(shape)
        return support.unsupported(spec, shape, self.rung, capability) or self._not_built(spec, shape, capability)

    def _not_built(self, spec: Attention, shape: Shape, capability: tuple[int, int]) -> str | None:
        """Why there is no kernel for a call that could be computed: none was built, and there is no compiler."""
        reason = compiler.not_installed()
        kernel = kernel_of(self._taken(shape, capability), spec, shape)
        if reason is None or library.is_built(kernel, architecture(capability)):
            return None
        return f"no kernel for it was built ahead of time ({kernel}), and to compile one {reason}"

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return self._taken(shape, _capability(shape)).tile(spec, shape)

    def _taken(self, shape: Shape, capability: tuple[int, int]) -> Rung:
        return BACKWARD if shape.backward else self.rung or support.suited(shape, capability)

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        """tile: taken as a wish; a kernel has those that its layouts are made for."""
        from tilewise.kernels.cute.launch import chosen, forward

        shape = Shape.of(spec, q, k, v)
        capability = _capability(shape)
        rung = chosen(self.rung or support.suited(shape, capability), self.rung is not None, q, k, v)
        with sys.modules["torch"].cuda.device_of(q):
            return forward(rung, spec, q, k, v, architecture(capability))

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        """tile: taken as a wish, as forward does."""
        from tilewise.kernels.cute.launch_backward import backward

        shape = Shape.of(spec, q, k, v, backward=True)
        with sys.modules["torch"].cuda.device_of(q):
            return backward(spec, q, k, v, saved, d_out, d_lse, architecture(_capability(shape)))


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for; from Hopper on GPUs have instructions of their own."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _capability(shape: Shape) -> tuple[int, int]:
    found: tuple[int, int] = sys.modules["torch"].cuda.get_device_capability(shape.device)
    return found


def _no_gpu() -> str | None:
    """PyTorch is asked, but never imported for it: who has tensors on a GPU has imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "nothing is on a GPU: PyTorch is not imported in this process"
    return None if torch.cuda.is_available() else "PyTorch finds no NVIDIA GPU, or was built without CUDA"

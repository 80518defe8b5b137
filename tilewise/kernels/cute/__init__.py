"""The CuTe kernel system: kernels in NVIDIA's CuTe DSL, compiled when first called, or ahead of time."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from tilewise.kernels import gpus
from tilewise.kernels.cute import library, support
from tilewise.kernels.cute.rungs import RUNGS, Rung, backward_rung
from tilewise.kernels.cute.wanted import kernel_of
from tilewise.spec import Attention, Grads, Partial, Shape, Tile


class CuteKernel:
    """On CUDA tensors of PyTorch; `rung` names one of its kernels."""

    summary = "CuTe DSL on NVIDIA GPUs"

    def __init__(self, rung: str | None = None) -> None:
        self.name = "cute" if rung is None else f"cute/{rung}"
        self.rung = None if rung is None else RUNGS[rung]

    def unavailable(self) -> str | None:
        return gpus.for_amd() or library.not_installed() or gpus.none_here()

    def unsupported(self, spec: Attention, shape: Shape) -> str | None:
        away = gpus.elsewhere(shape)
        if away is not None:
            return away
        capability = gpus.capability(shape.device)
        reason = support.unsupported(spec, shape, self.rung, capability)
        if reason is not None or gpus.is_imagined(shape.device):
            return reason
        arch = architecture(capability)
        return library.not_built(
            library.granted(kernel_of(self._taken(spec, shape, capability), spec, shape), arch), arch
        )

    def default_tile(self, spec: Attention, shape: Shape) -> Tile:
        return self._taken(spec, shape, gpus.capability(shape.device)).tile(spec, shape)

    def choice(self, spec: Attention, shape: Shape) -> str:
        """Which of its kernels, and whose gradients."""
        rung, differentiated = self._taken(spec, shape, gpus.capability(shape.device)), replace(shape, backward=True)
        if self.unsupported(spec, differentiated) is not None:
            return f"{rung.name}, without gradients"
        gradients = backward_rung(spec, differentiated)
        return f"{rung.name}; gradients by {gradients.name}: {gradients.about}"

    def _taken(self, spec: Attention, shape: Shape, capability: tuple[int, int]) -> Rung:
        return backward_rung(spec, shape) if shape.backward else self.rung or support.suited(shape, capability)

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        """tile: taken as a wish; a kernel has those that its layouts are made for."""
        from tilewise.kernels.cute.launch import chosen, forward

        shape = Shape.of(spec, q, k, v)
        capability = gpus.capability(shape.device)
        rung = chosen(self.rung, spec, shape, capability, q, k, v)
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
            return backward(spec, q, k, v, saved, d_out, d_lse, architecture(gpus.capability(shape.device)))


def architecture(capability: tuple[int, int]) -> str:
    """What to compile for; from Hopper on GPUs have instructions of their own."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

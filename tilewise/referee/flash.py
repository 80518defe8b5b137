"""Attention on tensors (batch, n, heads, d): FlashAttention 2, 3 and 4, and xFormers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from tilewise.referee.calls import Call
from tilewise.referee.contender import BOTTOM_RIGHT, CAUSAL, HALF, TOP_LEFT, Says, absent
from tilewise.referee.tensors import Tensors, TorchContender

_FLASH = frozenset(("gradients", CAUSAL, BOTTOM_RIGHT, "scale", "grouped heads", "window", "softcap", "strides"))


class Flash(TorchContender):
    """Its causal masks and windows are aligned bottom right, and rows without keys are 0, as its README says."""

    def __init__(self, generation: int, module: str, install: str) -> None:
        self.generation, self.module, self.install = generation, module, install
        self.name = f"flash-attn/{generation}"

    @property
    def about(self) -> str:
        return f"{self.module}.flash_attn_func"

    def missing(self, device: str) -> str | None:
        if device == "cpu":
            return "FlashAttention runs on GPUs; --device cuda judges it there"
        return super().missing(device) or absent(self.module, self.install)

    def packages(self) -> tuple[str, ...]:
        return "torch", "flash-attn", "flash-attn-4", "flash-attn-3"

    def says(self, device: str) -> Says:
        return Says(_FLASH | ({"alibi"} if self.generation == 2 else set()), HALF, unordered=True)

    def attend(self, call: Call, x: Tensors) -> Callable[[], Any]:
        function = import_module(self.module).flash_attn_func
        options: dict[str, Any] = {"softmax_scale": call.scale, "causal": bool(call.causal)}
        if call.window is not None:
            options["window_size"] = call.window
        if call.softcap is not None:
            options["softcap"] = call.softcap
        if x.slopes is not None:
            options["alibi_slopes"] = x.slopes

        def run() -> Any:
            done = function(*(y.transpose(1, 2) for y in (x.q, x.k, x.v)), **options)
            return (done[0] if isinstance(done, tuple) else done).transpose(1, 2)

        return run


class Xformers(TorchContender):
    name = "xformers"

    @property
    def about(self) -> str:
        return "xformers.ops.memory_efficient_attention"

    def missing(self, device: str) -> str | None:
        return super().missing(device) or absent("xformers.ops", "pip install xformers")

    def packages(self) -> tuple[str, ...]:
        return "torch", "xformers"

    def says(self, device: str) -> Says:
        arguments = ("gradients", CAUSAL, TOP_LEFT, BOTTOM_RIGHT, "bias", "scale", "strides", "gradients of the bias")
        return Says(frozenset(arguments), (*HALF, "float32"), unordered=True)

    def attend(self, call: Call, x: Tensors) -> Callable[[], Any]:
        from xformers import ops

        bias = x.bias
        if bias is not None:
            bias = bias.expand(call.batch, call.heads, call.n_q, call.n_k)
        elif call.causal:
            bottom_right = call.causal == "bottom right" and not call.square
            bias = (
                ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if bottom_right else ops.LowerTriangularMask()
            )

        def run() -> Any:
            q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
            return ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=call.scale).transpose(1, 2)

        return run


CONTENDERS = [
    Flash(2, "flash_attn", "pip install flash-attn"),
    Flash(3, "flash_attn_interface", "build it from FlashAttention's folder hopper/"),
    Flash(4, "flash_attn.cute.interface", "pip install --pre flash-attn-4"),
    Xformers(),
]

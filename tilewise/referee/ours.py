"""Our own kernel systems, judged as anybody else: by name, cpu or cuda/tiled."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from tilewise import api, arrays, dispatch
from tilewise.arrays import FLOAT_DTYPES
from tilewise.expr import Expr, K, Q
from tilewise.referee import layouts
from tilewise.referee.calls import TOP_LEFT, Call, Inputs
from tilewise.referee.contender import Answer, Says
from tilewise.referee.contender import Contender as Base
from tilewise.referee.tensors import Tensors, TorchContender
from tilewise.variants.alibi import alibi
from tilewise.variants.bias import bias
from tilewise.variants.causal import causal
from tilewise.variants.dense import dense
from tilewise.variants.document import document
from tilewise.variants.softcap import softcap
from tilewise.variants.window import window

_EVERYTHING = frozenset(
    ("gradients", "causal", "causal, top left", "causal, bottom right", "mask", "bias", "mask beside causal", "window",
     "gradients of the bias", "scale", "alibi", "softcap", "documents", "grouped heads", "strides")
)  # fmt: skip


def options(call: Call, x: Tensors | Inputs, kernel: str) -> dict[str, Any]:
    """The arguments of tw.attention; softcap, then ALiBi, then the bias."""
    masks, scores = _masks(call, x), _scores(call, x)
    mask, score = None, None
    for part in masks:
        mask = part if mask is None else mask & part
    for part in scores:
        score = part if score is None else score >> part
    return {"mask": mask, "score": score, "scale": call.scale, "kernel": kernel}


def _masks(call: Call, x: Tensors | Inputs) -> list[Expr]:
    found = []
    if call.causal:
        found.append(K <= Q if call.causal == TOP_LEFT else causal())
    if call.window is not None:
        found.append(window(*call.window))
    if x.ids is not None:
        found.append(document(x.ids))
    if x.mask is not None:
        found.append(dense(x.mask))
    return found


def _scores(call: Call, x: Tensors | Inputs) -> list[Expr]:
    found = [] if call.softcap is None else [softcap(call.softcap)]
    if x.slopes is not None:
        found.append(alibi(x.slopes))
    if x.bias is not None:
        found.append(bias(x.bias) if arrays.is_torch(x.bias) else bias(x.bias, grad=call.bias_gradient))
    return found


class _Ours:
    """What both of our kinds say of themselves."""

    ours = True

    def __init__(self, kernel: str) -> None:
        self.name = self.kernel = kernel

    @property
    def about(self) -> str:
        return f"tilewise.attention(kernel={self.kernel!r})"

    def says(self, device: str) -> Says:
        return Says(_EVERYTHING, FLOAT_DTYPES if device == "cpu" else FLOAT_DTYPES[:3])


class OnTensors(_Ours, TorchContender):
    """On PyTorch tensors."""

    def missing(self, device: str) -> str | None:
        return super().missing(device) or dispatch.kernel(self.kernel).unavailable()

    def attend(self, call: Call, x: Tensors) -> Callable[[], Any]:
        given = options(call, x, self.kernel)
        return lambda: api.attention(x.q, x.k, x.v, return_lse=True, **given)


class OnArrays(_Ours, Base):
    """On NumPy arrays, where PyTorch is not installed."""

    def missing(self, device: str) -> str | None:
        if device != "cpu":
            return "arrays on a GPU are PyTorch's: pip install torch"
        return dispatch.kernel(self.kernel).unavailable()

    def prepare(self, call: Call, given: Inputs, device: str) -> Callable[[], Answer]:
        q, k, v, d_out = (layouts.as_array(x, call.layout) for x in (given.q, given.k, given.v, given.d_out))
        chosen = options(call, given, self.kernel)

        def forward() -> Answer:
            out, lse = api.attention(q, k, v, return_lse=True, **chosen)
            return {"out": out, "lse": lse}

        def both() -> Answer:
            out, pullback = api.attention_vjp(q, k, v, **chosen)
            grads = pullback(d_out)
            found = {"out": out, "d_q": grads.q, "d_k": grads.k, "d_v": grads.v}
            return {**found, **({"d_bias": grads.arrays[0]} if call.bias_gradient else {})}

        return both if call.backward else forward


def _made(kernel: str) -> Base:
    return OnArrays(kernel) if find_spec("torch") is None else OnTensors(kernel)


def find(name: str) -> Base | None:
    """One of our kernels by any of its names, or None."""
    return _made(name) if name in dispatch.NAMED else None


CONTENDERS = [_made(name) for name in (*dispatch.NAMES, *dispatch.ONLY_IF_NAMED)]

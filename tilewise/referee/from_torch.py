"""PyTorch's own attention: scaled_dot_product_attention by backend, and FlexAttention, compiled and not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tilewise.arrays import FLOAT_DTYPES
from tilewise.bench.refusal import RefusedError
from tilewise.referee.calls import Call
from tilewise.referee.contender import CAUSAL, HALF, TOP_LEFT, Says
from tilewise.referee.tensors import Tensors, TorchContender
from tilewise.referee.verdict import NAN

_SDPA = frozenset(
    ("gradients", CAUSAL, TOP_LEFT, "mask", "bias", "gradients of the bias", "scale", "grouped heads", "strides")
)
_FLEX = frozenset(
    ("gradients", CAUSAL, TOP_LEFT, "causal, bottom right", "mask", "bias", "mask beside causal", "window", "softcap",
     "alibi", "documents", "scale", "grouped heads", "gradients of the bias", "strides")
)  # fmt: skip
_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


class Sdpa(TorchContender):
    """One backend, or PyTorch's choice."""

    def __init__(self, backend: str = "") -> None:
        self.backend = backend
        self.name = f"sdpa/{backend}" if backend else "sdpa"

    @property
    def about(self) -> str:
        chosen = f", {self.backend} backend alone" if self.backend else ""
        return f"torch.nn.functional.scaled_dot_product_attention{chosen}"

    def missing(self, device: str) -> str | None:
        if device == "cpu" and self.backend in ("efficient", "cudnn"):
            return f"PyTorch's {self.backend} backend runs on NVIDIA GPUs; --device cuda judges it there"
        return super().missing(device)

    def says(self, device: str) -> Says:
        # The softmax of its documentation's reference code is NaN where every score is -inf.
        if device != "cpu" and self.backend in ("flash", "cudnn"):
            dtypes: tuple[str, ...] = HALF
        else:
            dtypes = (*HALF, "float32") if self.backend == "efficient" else FLOAT_DTYPES
        return Says(_SDPA, dtypes, without_keys=NAN, unordered=device != "cpu")

    def code(self, call: Call) -> list[str]:
        mask = "mask" if call.mask else "bias" if call.bias else "None"
        given = [f"attn_mask={mask}", f"is_causal={bool(call.causal)}", f"scale={call.scale}"]
        given += ["enable_gqa=True"] if call.heads != call.heads_k else []
        line = f"out = torch.nn.functional.scaled_dot_product_attention(q, k, v, {', '.join(given)})"
        if not self.backend:
            return [line]
        chosen = f"torch.nn.attention.SDPBackend.{_BACKENDS[self.backend]}"
        return ["import torch.nn.attention", f"with torch.nn.attention.sdpa_kernel({chosen}):", f"    {line}"]

    def attend(self, call: Call, x: Tensors) -> Callable[[], Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        options: dict[str, Any] = {"scale": call.scale, "is_causal": bool(call.causal)}
        options["attn_mask"] = x.bias if x.mask is None else x.mask
        if call.heads != call.heads_k:
            options["enable_gqa"] = True

        def run() -> Any:
            around = sdpa_kernel(getattr(SDPBackend, _BACKENDS[self.backend])) if self.backend else nullcontext()
            with warnings.catch_warnings(record=True) as told, around:
                warnings.simplefilter("always")
                try:
                    return sdpa(x.q, x.k, x.v, **options)
                except RuntimeError as error:
                    raise RefusedError(REFUSES, _reason(str(error), [str(w.message) for w in told])) from None

        return run


REFUSES = "failed"


def _reason(error: str, told: list[str]) -> str:
    """A backend that is asked alone says in warnings why it does not run."""
    of_backend = [line for line in told if "was not used because" not in line and "not supported" not in line.lower()]
    first = (of_backend or told or [""])[0]
    return " ".join(f"{error.splitlines()[0]} {first.split(' (Triggered')[0]}".split())


class Flex(TorchContender):
    """With functions of scores and positions, and arrays that they read."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.name = "flex" if compiled else "flex/eager"

    @property
    def about(self) -> str:
        return "torch.nn.attention.flex_attention, " + (
            "under torch.compile" if self.compiled else "without a compiler"
        )

    def says(self, device: str) -> Says:
        dtypes = (*HALF, "float32") if self.compiled else (*HALF, "float32", "float64")
        arguments = _FLEX - {"gradients", "gradients of the bias"} if device == "cpu" else _FLEX
        return Says(arguments, dtypes)

    def attend(self, call: Call, x: Tensors) -> Callable[[], Any]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        seen, score = _mask_mod(call, x), _score_mod(call, x)
        sizes = (call.batch, call.heads, call.n_q, call.n_k)
        blocks = None if seen is None else create_block_mask(seen, *sizes, device=str(x.q.device))
        options = {
            "scale": call.scale,
            "score_mod": score,
            "block_mask": blocks,
            "enable_gqa": call.heads != call.heads_k,
        }
        function = flex_attention
        if self.compiled:
            torch.compiler.reset()  # or the shapes of other calls would count against the limit of compilations
            function = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        has_lse = not call.backward and not (self.compiled and x.q.device.type == "cpu")  # which has none there

        def run() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return function(x.q, x.k, x.v, return_lse=has_lse, **options)

        return run


def _at(array: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """An element of an array that broadcasts to (batch, heads, n_q, n_k)."""
    index = (at if size > 1 else 0 for at, size in zip((b, h, i, j), array.shape, strict=True))
    return array[tuple(index)]


def _mask_mod(call: Call, x: Tensors) -> Callable[..., Any] | None:
    parts: list[Callable[..., Any]] = []
    if call.causal:
        shift = call.n_k - call.n_q if call.causal == "bottom right" else 0
        parts.append(lambda b, h, i, j: j <= i + shift)
    if call.window is not None:
        left, right = call.window
        parts.append(lambda b, h, i, j: (i - j <= left) & (j - i <= right))
    if x.ids is not None:
        parts.append(lambda b, h, i, j: x.ids[i] == x.ids[j])
    if x.mask is not None:
        parts.append(lambda b, h, i, j: _at(x.mask, b, h, i, j))
    if not parts:
        return None

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        found = parts[0](b, h, i, j)
        for part in parts[1:]:
            found = found & part(b, h, i, j)
        return found

    return seen


def _score_mod(call: Call, x: Tensors) -> Callable[..., Any] | None:
    import torch

    if call.softcap is None and x.slopes is None and x.bias is None:
        return None

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if call.softcap is not None:
            s = call.softcap * torch.tanh(s / call.softcap)
        if x.slopes is not None:
            s = s - x.slopes[h] * torch.abs(i - j)
        return s if x.bias is None else s + _at(x.bias, b, h, i, j)

    return score


CONTENDERS = [*(Sdpa(name) for name in ("", "math", "flash", "efficient", "cudnn")), Flex(True), Flex(False)]

"""Anybody's own attention, as MODULE:FUNCTION: f(q, k, v, *, mask, bias, causal, scale ...) -> out, or (out, lse)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from tilewise.arrays import FLOAT_DTYPES
from tilewise.bench.process import load
from tilewise.referee.calls import Call, Inputs
from tilewise.referee.contender import CAUSAL, Answer, Says, results_of
from tilewise.referee.layouts import as_array
from tilewise.referee.tensors import Tensors, TorchContender

# Its parameters, and what their presence says that it can be asked.
PARAMETERS = {
    "mask": ("mask",), "bias": ("bias", "gradients of the bias"), "causal": (CAUSAL,), "scale": ("scale",),
    "window": ("window",), "softcap": ("softcap",), "slopes": ("alibi",), "ids": ("documents",),
}  # fmt: skip
_ALWAYS = ("gradients", "grouped heads", "strides")


class Given(TorchContender):
    """q, k, v are tensors (batch, heads, n, d) on the device; without PyTorch NumPy arrays, and no gradients."""

    def __init__(self, name: str, causal: str = "bottom right", dtypes: tuple[str, ...] = ()) -> None:
        self.name, self.causal, self.dtypes = name, causal, dtypes

    @property
    def about(self) -> str:
        return f"the function {self.name}"

    def missing(self, device: str) -> str | None:
        try:
            function = load(self.name)
        except (ImportError, AttributeError) as error:
            return f"{self.name} cannot be imported: {error}"
        if not callable(function):
            return f"{self.name} is a {type(function).__name__}, expected a function"
        return None if device == "cpu" and self._plain else super().missing(device)

    @property
    def _plain(self) -> bool:
        """Whether it is given NumPy arrays."""
        return find_spec("torch") is None

    def versions(self) -> dict[str, str]:
        return {} if self._plain else super().versions()

    def says(self, device: str) -> Says:
        taken = self._taken()
        arguments = {said for name in taken for said in PARAMETERS[name]} | set(_ALWAYS)
        if "causal" in taken:
            arguments.add(f"causal, {self.causal}")
        if {"causal", "mask"} <= taken:
            arguments.add("mask beside causal")
        if self._plain:
            arguments -= {"gradients", "gradients of the bias"}
        return Says(frozenset(arguments), self.dtypes or FLOAT_DTYPES)

    def _taken(self) -> set[str]:
        given = inspect.signature(load(self.name)).parameters
        every = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in given.values())
        return {name for name in PARAMETERS if every or name in given}

    def attend(self, call: Call, x: Tensors) -> Callable[[], Any]:
        function, options = load(self.name), self._options(call, x)
        return lambda: function(x.q, x.k, x.v, **options)

    def prepare(self, call: Call, given: Inputs, device: str) -> Callable[[], Answer]:
        if not self._plain:
            return super().prepare(call, given, device)
        function, options = load(self.name), self._options(call, given)
        q, k, v = (as_array(x, call.layout) for x in (given.q, given.k, given.v))
        named = {"q": q, "k": k, "v": v, **options}
        self._kept = tuple((name, x, x.copy()) for name, x in named.items() if isinstance(x, np.ndarray))

        def run() -> Answer:
            out, lse = results_of(function(q, k, v, **options), np.ndarray)
            return {"out": out} if lse is None else {"out": out, "lse": lse}

        return run

    def inputs_changed(self) -> str:
        if not self._plain:
            return super().inputs_changed()
        return next((name for name, now, before in self._kept if now.tobytes() != before.tobytes()), "")

    def _options(self, call: Call, x: Tensors | Inputs) -> dict[str, Any]:
        """Only what the call has, besides causal and scale."""
        every = {
            "mask": x.mask, "bias": x.bias, "causal": bool(call.causal), "scale": call.effective_scale,
            "window": call.window, "softcap": call.softcap, "slopes": x.slopes, "ids": x.ids,
        }  # fmt: skip
        taken = self._taken()
        return {name: value for name, value in every.items() if name in taken and value is not None}

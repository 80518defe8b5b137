"""A call that contenders are asked, and the numbers that its name stands for: the same on every machine."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.referee.layouts import EXPANDED

TOP_LEFT, BOTTOM_RIGHT = "top left", "bottom right"
PASSES = ("forward", "gradients")
_VISIBLE = 0.6  # of a random mask


@dataclass(frozen=True)
class Call:
    """Attention on arrays of these sizes. `id` names it: feature/dtype/pass/size/seed."""

    id: str
    dtype: str
    backward: bool
    seed: int
    batch: int
    heads: int
    heads_k: int
    n_q: int
    n_k: int
    d: int
    d_v: int
    causal: str = ""  # how the diagonal is aligned, if there is one
    mask: str = ""  # axes that the boolean mask has, of "bhqk"; a missing one has size 1
    bias: str = ""  # the same of the floats that are added to the scores
    hidden: str = ""  # what mask and bias hide: "keys" of rows that keep one, or whole "rows"
    bias_gradient: bool = False
    window: tuple[int, int] | None = None  # keys before and after the query that it sees, itself besides
    softcap: float | None = None
    alibi: bool = False
    documents: bool = False
    scale: float | None = None
    magnified: float = 1.0  # q times this
    inputs: str = "normal"  # "saturated": each query is along one key; "shifted": keys share a large offset
    layout: str = "packed"  # of q, k, v and the gradient of out: see layouts.py

    @property
    def square(self) -> bool:
        return self.n_q == self.n_k

    @property
    def needs(self) -> frozenset[str]:
        """Arguments that a contender must have to be asked this at all."""
        aligned = "causal" if self.square else f"causal, {self.causal}"
        found = {
            "gradients": self.backward, aligned: bool(self.causal), "mask": bool(self.mask), "bias": bool(self.bias),
            "mask beside causal": bool((self.mask or self.bias) and self.causal), "window": self.window is not None,
            "gradients of the bias": self.bias_gradient, "scale": self.scale is not None, "alibi": self.alibi,
            "softcap": self.softcap is not None, "documents": self.documents,
            "grouped heads": self.heads != self.heads_k, "strides": self.layout != "packed",
        }  # fmt: skip
        return frozenset(name for name, needed in found.items() if needed)

    @property
    def effective_scale(self) -> float:
        return 1 / math.sqrt(self.d) if self.scale is None else self.scale

    def describe(self) -> str:
        """For people: its sizes, and what is special about it."""
        heads = f"{self.heads}" if self.heads == self.heads_k else f"{self.heads}/{self.heads_k}"
        told = [
            f"q ({self.batch}, {heads} heads, {self.n_q}, {self.d})", f"keys {self.n_k}",
            "" if self.d == self.d_v else f"d_v {self.d_v}", self.dtype,
            self.causal and ("causal" if self.square else f"causal ({self.causal})"),
            self.mask and f"mask ({_axes(self.mask)})", self.bias and f"bias ({_axes(self.bias)})",
            self.hidden and {"keys": "some keys hidden", "rows": "some rows without keys"}[self.hidden],
            "" if self.window is None else f"window {self.window}", self.softcap and f"softcap {self.softcap:g}",
            self.alibi and "alibi", self.documents and "documents", self.scale is not None and f"scale {self.scale:g}",
            self.magnified != 1 and f"q x {self.magnified:g}", self.inputs != "normal" and f"{self.inputs} rows",
            self.layout != "packed" and f"layout: {self.layout}",
        ]  # fmt: skip
        return ", ".join(x for x in told if x)


def _axes(named: str) -> str:
    return ", ".join(axis if axis in named else "1" for axis in "bhqk")


@dataclass(frozen=True, eq=False)
class Inputs:
    """The numbers of a call, as NumPy arrays without strides of their own, in the call's type."""

    q: Array
    k: Array
    v: Array
    d_out: Array
    mask: Array | None  # True: may attend
    bias: Array | None
    slopes: Array | None  # float32, (heads,)
    ids: Array | None  # int32, (n,)


def inputs(call: Call) -> Inputs:
    rng = np.random.default_rng([call.seed, zlib.crc32(call.id.encode())])
    q, k = (_normal(rng, call, h, n, call.d) for h, n in ((call.heads, call.n_q), (call.heads_k, call.n_k)))
    v, d_out = (_normal(rng, call, h, n, call.d_v) for h, n in ((call.heads_k, call.n_k), (call.heads, call.n_q)))
    if call.inputs == "saturated" and q.size and k.size:
        chosen = rng.integers(0, call.n_k, call.n_q)
        q = 4 * np.repeat(k, call.heads // call.heads_k, axis=1)[:, :, chosen]
    if call.inputs == "shifted":
        k = k + 8
    mask, bias = _mask(rng, call), _bias(rng, call)
    slopes = (2.0 ** -rng.integers(1, 6, call.heads)).astype(np.float32) if call.alibi else None
    ids = np.sort(rng.integers(0, 3, call.n_k)).astype(np.int32) if call.documents else None
    q, k, v, d_out = (np.ascontiguousarray(arrays.narrow(x, call.dtype)) for x in (q * call.magnified, k, v, d_out))
    return Inputs(q, k, v, d_out, mask, None if bias is None else arrays.narrow(bias, call.dtype), slopes, ids)


def _normal(rng: np.random.Generator, call: Call, heads: int, n: int, d: int) -> Array:
    x = rng.standard_normal((call.batch, heads, n, d))
    axis = EXPANDED.get(call.layout)  # expanded along it: the same numbers everywhere
    return x if axis is None or not x.size else np.broadcast_to(x.take([0], axis), x.shape)


def _shape(call: Call, axes: str) -> tuple[int, ...]:
    sizes = {"b": call.batch, "h": call.heads, "q": call.n_q, "k": call.n_k}
    return tuple(sizes[axis] if axis in axes else 1 for axis in "bhqk")


def _mask(rng: np.random.Generator, call: Call) -> Array | None:
    if not call.mask:
        return None
    mask = rng.random(_shape(call, call.mask)) < _VISIBLE
    mask[..., :1] = True
    return mask & ~_rows(rng, call, mask.shape) if call.hidden == "rows" else mask


def _bias(rng: np.random.Generator, call: Call) -> Array | None:
    if not call.bias:
        return None
    bias = rng.standard_normal(_shape(call, call.bias))
    if call.hidden:
        seen = rng.random(bias.shape) < _VISIBLE
        seen[..., :1] = True
        bias = np.where(seen, bias, -np.inf)
        if call.hidden == "rows":
            bias = np.where(_rows(rng, call, bias.shape), -np.inf, bias)
    return bias


def _rows(rng: np.random.Generator, call: Call, shape: tuple[int, ...]) -> Any:
    """Rows that see nothing: one at least, wherever the array tells rows apart."""
    hidden = rng.random((*shape[:3], 1)) < 0.3
    hidden[..., -1:, :] = True
    return hidden

"""The cases that every kernel system is judged by: the conformance suite and the demo read them.

A case is a variant on a shape. Adding a variant to the project means one file in variants/ and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise import arrays, validate
from tilewise import expr as ex
from tilewise.arrays import Array
from tilewise.expr import NK, NQ, B, H, K, Q, S
from tilewise.rope import Rope
from tilewise.spec import Shape
from tilewise.variants import alibi, bias, causal, dense, dilated, document, prefix, relative, softcap, t5, window

Rng = np.random.Generator
Options = dict[str, Any]


def _shape(batch: int, heads: int, heads_k: int, n_q: int, n_k: int, d: int, d_v: int | None = None) -> Shape:
    return Shape(batch, heads, heads_k, n_q, n_k, d, d if d_v is None else d_v)


SHAPES: dict[str, Shape] = {
    "square": _shape(1, 2, 2, 128, 128, 64),
    "batch": _shape(3, 2, 2, 64, 64, 32),
    "grouped": _shape(2, 6, 2, 96, 96, 32),
    "multi-query": _shape(1, 4, 1, 80, 80, 32),
    "ragged": _shape(2, 4, 2, 77, 131, 40, 24),
    "more queries than keys": _shape(1, 2, 1, 131, 77, 16, 48),
    "one query": _shape(2, 4, 2, 1, 200, 64),
    "one key": _shape(1, 2, 2, 50, 1, 64),
    "one of each": _shape(1, 1, 1, 1, 1, 1),
    "smallest head": _shape(1, 2, 2, 70, 70, 1),
    "largest head": _shape(1, 1, 1, 70, 90, 512),
    "several tiles": _shape(1, 4, 2, 300, 420, 64, 48),
    "head of 128": _shape(1, 2, 1, 260, 300, 128),
    "head of 256": _shape(1, 2, 1, 140, 260, 256, 192),
    "no queries": _shape(1, 2, 2, 0, 30, 16),
    "no keys": _shape(1, 2, 2, 30, 0, 16),
}


LARGER = ("several tiles", "head of 128", "head of 256")


def _normal(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _ids(rng: Rng, *shape: int) -> Array:
    return np.sort(rng.integers(0, 4, shape), axis=-1).astype(np.int32)


_HASH = 0x9E3779B97F4A7C15 - 2**64
_HASHES = np.array([-(2**63), _HASH, _HASH + 1, _HASH + 2**32, 7, 2**53, 2**53 + 1, 2**63 - 1])


def _hashes(rng: Rng, *shape: int) -> Array:
    """Ids of 64 bits: some differ in the upper half alone, others are one number as floats."""
    return _HASHES[np.sort(rng.integers(0, len(_HASHES), shape), axis=-1)]


def _hashed_score(q_ids: Array, k_ids: Array) -> Options:
    query, key = ex.load(q_ids, Q), ex.load(k_ids, K)
    return {"mask": query >= key, "score": ex.where(query == key, S, S - 2.0)}


def _masked_bias(rng: Rng, s: Shape) -> Array:
    values = _normal(rng, s.heads, s.n_q, s.n_k)
    values[..., s.n_k // 2 :] = -np.inf
    return values


def _positions(rng: Rng, *shape: int) -> Array:
    return rng.integers(0, 5000, shape).astype(np.int32)


def _part(s: Shape, share: int) -> int:
    """An even number of a head's numbers, two at least."""
    return max(s.d // (2 * share) * 2, 2)


def _scaled_rope(s: Shape) -> Rope:
    """By tables: frequencies a quarter as high, numbers a tenth larger."""
    pairs = _part(s, 3) // 2
    angles = np.arange(max(s.n_q, s.n_k))[:, None] * 500.0 ** (-np.arange(pairs) / pairs) / 4
    return Rope(cos=(1.1 * np.cos(angles)).astype(np.float32), sin=(1.1 * np.sin(angles)).astype(np.float32))


# Each makes the options of one attention call, its arrays drawn from the generator.
VARIANTS: dict[str, Callable[[Rng, Shape], Options]] = {
    "full": lambda rng, s: {},
    "causal": lambda rng, s: {"causal": True},
    "window": lambda rng, s: {"mask": window(17, 5)},
    "causal window": lambda rng, s: {"mask": causal() & window(24)},
    "prefix": lambda rng, s: {"mask": causal() | prefix(11)},
    "document": lambda rng, s: {"mask": document(_ids(rng, s.n_q), _ids(rng, s.n_k))},
    "document per batch": lambda rng, s: {"mask": document(_ids(rng, s.batch, s.n_q), _ids(rng, s.batch, s.n_k))},
    "document of hashes": lambda rng, s: {"mask": document(_hashes(rng, s.n_q), _hashes(rng, s.n_k))},
    "order of hashes": lambda rng, s: _hashed_score(_hashes(rng, s.n_q), _hashes(rng, s.n_k)),
    "dilated": lambda rng, s: {"mask": dilated(3)},
    "dense": lambda rng, s: {"mask": dense(rng.random((s.n_q, s.n_k)) < 0.3)},
    "dense per head": lambda rng, s: {"mask": rng.random((s.batch, s.heads, s.n_q, s.n_k)) < 0.3},
    "added mask": lambda rng, s: {"mask": _masked_bias(rng, s)},
    "causal and a mask": lambda rng, s: {"causal": True, "mask": rng.random((s.n_q, s.n_k)) < 0.5},
    "softcap, added mask": lambda rng, s: {"score": softcap(1.5), "mask": 4 * _normal(rng, s.n_q, s.n_k)},
    "alibi": lambda rng, s: {"score": alibi(s.heads)},
    "alibi slopes": lambda rng, s: {"score": alibi(rng.random(s.heads).astype(np.float32), grad=True)},
    "relative": lambda rng, s: {"score": relative(_normal(rng, 9), grad=True)},
    "relative signed": lambda rng, s: {"score": relative(_normal(rng, s.heads, 21), signed=True, grad=True)},
    "t5": lambda rng, s: {"score": t5(_normal(rng, 32, s.heads), grad=True)},
    "t5 one-sided": lambda rng, s: {"causal": True, "score": t5(_normal(rng, 8), 20, bidirectional=False, grad=True)},
    "softcap": lambda rng, s: {"score": softcap(2.0)},
    "bias": lambda rng, s: {"score": bias(_normal(rng, s.batch, s.heads, s.n_q, s.n_k), grad=True)},
    "bias over batch": lambda rng, s: {"score": bias(_normal(rng, 1, s.heads, s.n_q, s.n_k), grad=True)},
    "bias of keys": lambda rng, s: {"score": bias(_normal(rng, s.batch, 1, 1, s.n_k), grad=True)},
    "sinks": lambda rng, s: {"causal": True, "sinks": _normal(rng, s.heads)},
    "softcap, alibi": lambda rng, s: {"mask": causal(), "score": softcap(3.0) >> alibi(s.heads)},
    "all at once": lambda rng, s: {
        "mask": causal() & (window(40) | prefix(4)),
        "score": softcap(4.0) >> bias(_normal(rng, s.heads, 1, s.n_k), grad=True) >> alibi(s.heads),
        "sinks": _normal(rng, s.heads),
    },
    "near or first": lambda rng, s: {"mask": (Q - K < 32) | (K < 4)},
    "blocks": lambda rng, s: {"mask": (Q // 16) == (K // 16)},
    "negative floor": lambda rng, s: {"mask": ((Q - K) // 5 + (K - Q) % 7) % 2 == 0},
    "heads differ": lambda rng, s: {"mask": (K <= Q + (NK - NQ)) & (abs(Q - K) < 8 * (H + 1) + B)},
    "masking score": lambda rng, s: {"score": ex.where(K % 5 == 2, -np.inf, S * 0.5)},
    "functions": lambda rng, s: {"score": ex.log(1 + ex.exp(S)) - 0.1 * ex.minimum(abs(Q - K), 6) / (1 + H)},
    "rope": lambda rng, s: {"causal": True, "rope": Rope()},
    "rope interleaved": lambda rng, s: {"mask": window(30), "rope": Rope(interleaved=True, base=500.0)},
    "rope of a part": lambda rng, s: {"score": softcap(2.0), "rope": Rope(dim=_part(s, 2))},
    "rope of a part, interleaved": lambda rng, s: {"causal": True, "rope": Rope(dim=_part(s, 6), interleaved=True)},
    "rope of positions": lambda rng, s: {
        "rope": Rope(positions=_positions(rng, s.batch, s.n_q), positions_k=_positions(rng, s.n_k)),
    },
    "rope by tables": lambda rng, s: {"causal": True, "rope": _scaled_rope(s)},
    "rope and learned scores": lambda rng, s: {
        "mask": causal() | prefix(4), "rope": Rope(base=100.0),
        "score": alibi(rng.random(s.heads).astype(np.float32), grad=True)
        >> bias(_normal(rng, 1, 1, s.n_q, s.n_k), grad=True) >> bias(_normal(rng, s.batch, 1, 1, s.n_k), grad=True)
        >> relative(_normal(rng, 9), grad=True),
    },
    "nothing seen": lambda rng, s: {"mask": K < 0},
    "every other row": lambda rng, s: {"mask": Q % 2 == 0},
}  # fmt: skip

# Packed sequences: cumulative lengths of queries and keys; empty ones among them.
PACKED: dict[str, tuple[list[int], list[int]]] = {
    "packed": ([0, 40, 40, 105, 106], [0, 40, 62, 127, 160]),
    "packed, none empty": ([0, 33, 97], [0, 50, 81]),
}
PACKED_VARIANTS: dict[str, Callable[[Rng, Shape], Options]] = {
    "causal": VARIANTS["causal"],
    "window": VARIANTS["window"],
    "softcap, alibi": VARIANTS["softcap, alibi"],
    "sinks": VARIANTS["sinks"],
    "rope": VARIANTS["rope"],
    "rope of positions": lambda rng, s: {
        "causal": True,
        "rope": Rope(
            _part(s, 2), interleaved=True, positions=_positions(rng, s.n_q), positions_k=_positions(rng, s.n_k)
        ),
    },
    "packed ids": lambda rng, s: {"mask": ex.load(_ids(rng, s.n_q), ex.QP) == ex.load(_ids(rng, s.n_k), ex.KP)},
    "packed hashes": lambda rng, s: {
        "mask": ex.load(_hashes(rng, s.n_q), ex.QP) == ex.load(_hashes(rng, s.n_k), ex.KP)
    },
    "bias by sequence": lambda rng, s: {"score": S + ex.load(_normal(rng, s.batch), B, grad=True)},
    "bias of pairs": lambda rng, s: {
        "score": S + ex.load(_normal(rng, s.heads, s.n_q + 1, s.n_k + 1), H, Q, K, grad=True)
    },
    "biases of rows": lambda rng, s: {
        "score": S
        + ex.load(_normal(rng, s.n_q + 1), Q, grad=True)  # longer than any sequence
        + ex.load(_normal(rng, s.heads_k, s.n_k), ex.HK, ex.KP, grad=True)
        + ex.load(_normal(rng, s.batch, s.n_k + 1), B, K, grad=True)
    },
    "t5": VARIANTS["t5"],
}


# -- rows with all their weight on one key ----------------------------------------------------------------------------

PLACES = ("first", "middle", "last")  # where in the order of keys a row's dominant one comes
_TOGETHER = 8  # dominant keys beside each other, so that they are not all the same


def dominant(place: str, n_q: int, n_k: int, is_causal: bool) -> Array:
    """The key of each query row that is to have all the weight: among the first it sees, in the middle, or the last."""
    row = np.arange(n_q)
    seen = row + 1 + n_k - n_q if is_causal else np.full(n_q, n_k)
    aside = row % np.minimum(_TOGETHER, seen)
    found: Array = {"first": aside, "middle": (seen // 2 + aside) % seen, "last": seen - 1 - aside}[place]
    return found


def one_hot_queries(k: Array, s: Shape, keys: Array, gap: float) -> Array:
    """Queries that point at these keys: each is its key, as long as puts every other score lower by about that gap."""
    wide = np.repeat(arrays.widen(k, np.float64), s.group, axis=1)
    aimed = wide[:, :, keys]
    scores = aimed @ wide.swapaxes(-1, -2) / np.sqrt(s.d)
    own = np.take_along_axis(scores, keys[None, None, :, None], axis=-1)
    others = np.where(np.arange(s.n_k) == keys[:, None], -np.inf, scores)
    lead = own - others.max(axis=-1, keepdims=True)
    if lead.min() <= 0:
        raise ValueError(f"one-hot rows: a key is nearer to another than to itself at d {s.d}; take a larger d")
    return arrays.narrow(aimed * (gap / lead), arrays.dtype_name(k))


@dataclass(frozen=True, eq=False)
class Inputs:
    """A case made real: arrays of one type, and the options of the call."""

    q: Array
    k: Array
    v: Array
    options: Options = field(default_factory=dict)
    lengths: tuple[Array, Array] | None = None

    def call(self) -> validate.Call:
        if self.lengths is None:
            return validate.prepare(self.q, self.k, self.v, **self.options)
        return validate.prepare_varlen(self.q, self.k, self.v, *self.lengths, **self.options)


@dataclass(frozen=True)
class Case:
    """A variant on a shape, in a type."""

    variant: str
    shape: str
    dtype: str = "float32"
    strided: bool = False  # stored as (batch, n, heads, d)
    magnitude: float = 1.0  # of q: large ones make huge scores
    one_hot: str = ""  # one of PLACES: where each row finds the key that has all of its weight
    gap: float = 20.0  # between that key's score and every other

    @property
    def name(self) -> str:
        extra = (" strided" if self.strided else "") + (f" x{self.magnitude:g}" if self.magnitude != 1 else "")
        extra += f" one-hot {self.one_hot} by {self.gap:g}" if self.one_hot else ""
        return f"{self.variant} | {self.shape} | {self.dtype}{extra}"

    def inputs(self, seed: int = 0) -> Inputs:
        rng = np.random.default_rng([seed, *self.name.encode()])
        if self.shape in PACKED:
            return self._packed(rng)
        s = SHAPES[self.shape]
        sizes = ((s.heads, s.n_q, s.d), (s.heads_k, s.n_k, s.d), (s.heads_k, s.n_k, s.d_v))
        q, k, v = (self._array(rng, m, s.batch, *size) for m, size in zip((self.magnitude, 1, 1), sizes, strict=True))
        if self.one_hot:
            q = one_hot_queries(k, s, dominant(self.one_hot, s.n_q, s.n_k, self.variant == "causal"), self.gap)
        return Inputs(q, k, v, VARIANTS[self.variant](rng, s))

    def _array(self, rng: Rng, magnitude: float, batch: int, heads: int, n: int, d: int) -> Array:
        values = magnitude * rng.standard_normal((batch, n, heads, d) if self.strided else (batch, heads, n, d))
        stored = arrays.narrow(values, self.dtype)
        return stored.swapaxes(1, 2) if self.strided else stored

    def _packed(self, rng: Rng) -> Inputs:
        lengths_q, lengths_k = (np.array(x, np.int32) for x in PACKED[self.shape])
        s = Shape(len(lengths_q) - 1, 4, 2, int(lengths_q[-1]), int(lengths_k[-1]), 32, 24)
        q, k, v = (
            arrays.narrow(rng.standard_normal(size), self.dtype)
            for size in ((s.n_q, s.heads, s.d), (s.n_k, s.heads_k, s.d), (s.n_k, s.heads_k, s.d_v))
        )
        return Inputs(q, k, v, PACKED_VARIANTS[self.variant](rng, s), (lengths_q, lengths_k))


def conformance() -> list[Case]:
    """Every variant on one demanding shape, every shape under the main variants, types, strides, packed, extremes."""
    cases = [Case(variant, "ragged") for variant in VARIANTS]
    cases += [
        Case(variant, shape)
        for shape in SHAPES
        if shape not in ("ragged", *LARGER)
        for variant in ("full", "causal", "all at once")
    ]
    cases += [
        Case(variant, "grouped", dtype)
        for dtype in ("float16", "bfloat16", "float64")
        for variant in ("full", "causal", "t5", "all at once", "rope")
    ]
    cases += [Case(variant, "grouped", strided=True) for variant in ("causal", "bias", "rope")]
    cases += [Case("rope", shape) for shape in ("more queries than keys", "one query", "no queries", "no keys")]
    cases += [Case(variant, shape) for shape in PACKED for variant in PACKED_VARIANTS]
    cases += [Case("causal", "grouped", dtype, magnitude=1e4) for dtype in ("float16", "float32")]
    return cases + _for_tensor_cores()


def _for_tensor_cores() -> list[Case]:
    """Half precision, over several of the large tiles of kernels that are made for it."""
    cases = [Case(variant, "several tiles", "bfloat16") for variant in VARIANTS]
    cases += [
        Case(variant, shape, dtype)
        for shape, dtype in (("head of 128", "bfloat16"), ("head of 128", "float16"), ("head of 256", "float16"))
        for variant in ("full", "causal", "all at once")
    ]
    cases += [Case(variant, "packed", "bfloat16") for variant in PACKED_VARIANTS]
    cases += [Case("causal", shape, "float16") for shape in ("more queries than keys", "one key", "one query")]
    cases.append(Case("bias", "several tiles", "float16", strided=True))
    cases += [Case("full", "several tiles", dtype, magnitude=m) for dtype in ("float16", "bfloat16") for m in (30, 1e4)]
    return cases

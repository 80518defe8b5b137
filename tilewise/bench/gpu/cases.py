"""What is timed on a GPU: a case (a variant at a size), and its tensors, drawn on the device itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.bench.problem import CAP, DOCUMENTS
from tilewise.schedule import itemsize
from tilewise.variants.alibi import alibi, published_slopes
from tilewise.variants.bias import bias
from tilewise.variants.causal import causal
from tilewise.variants.document import document
from tilewise.variants.softcap import softcap
from tilewise.variants.window import window

TOKENS, HIDDEN = 16384, 2048
DTYPE = "bfloat16"
BEYOND_L2 = 512 << 20  # bytes of inputs that calls take turns on: several times the cache of any GPU
MOST_SETS = 8  # however small the inputs are

Options = dict[str, Any]
Extras = Mapping[str, Any]  # the arrays that a variant reads, on the device
Mod = Callable[..., Any]  # a mask_mod or score_mod, as FlexAttention has them


@dataclass(frozen=True)
class Case:
    """As many tokens in all, and as wide a model, whatever n and d: batch = tokens / n, heads = hidden / d."""

    variant: str
    n: int  # queries and keys; of ragged sequences the mean
    d: int
    group: int = 1  # query heads for each key head
    inputs: str = "normal"
    packed: str = ""  # sequences behind each other, one call for all: "equal" or "ragged" lengths
    backward: bool = False  # the gradients alone, of inputs for which forward was called
    step: bool = False  # a training step of a module, projections and all gradients included
    queries: int = 0  # of each sequence, over a cache of n keys; 0: as many as keys, and no cache
    model: int = 0  # columns of an output projection, which is computed as well; 0: none
    dtype: str = DTYPE
    tokens: int = TOKENS
    hidden: int = HIDDEN

    @property
    def batch(self) -> int:
        return self.tokens // self.n

    @property
    def heads(self) -> int:
        return self.hidden // self.d

    @property
    def heads_k(self) -> int:
        return self.heads // self.group

    @property
    def lengths(self) -> list[int]:
        """Of every sequence."""
        if self.packed != "ragged":
            return [self.n] * self.batch
        cuts = np.random.default_rng(0).choice(self.tokens - 1, self.batch - 1, replace=False) + 1
        return [int(length) for length in np.diff(np.sort([0, *cuts, self.tokens]))]

    @property
    def flops(self) -> float:
        """The products over the visible pairs, the same count for everyone: two of forward, five of backward, however
        often a kernel computes them; of a step all seven, and those of its projections. Causal counts half of full."""
        products = 7 if self.step else 5 if self.backward else 2
        projections = 3 * 2 * self.tokens * 4 * self.hidden**2 if self.step else 0
        projections += 2 * self.batch * (self.queries or self.n) * self.hidden * self.model
        pairs = sum(map(VARIANTS[self.variant].pairs, self.lengths)) * (self.queries / self.n if self.queries else 1)
        return 2 * products * self.d * self.heads * pairs + projections

    @property
    def read_bytes(self) -> int:
        """k and v, once."""
        return 2 * self.batch * self.heads_k * self.n * self.d * itemsize(self.dtype)

    def describe(self) -> dict[str, Any]:
        """The case's part of a record."""
        return {
            "variant": self.variant, "n": self.n, "d": self.d, "batch": self.batch, "heads": self.heads,
            "heads_k": self.heads_k, "inputs": self.inputs, "packed": self.packed, "backward": self.backward,
            "step": self.step, "queries": self.queries, "model": self.model, "dtype": self.dtype, "flops": self.flops,
        }  # fmt: skip


# -- variants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A variant as tilewise writes it, and as every peer that can say it does."""

    options: Callable[[Case, Extras], Options]
    pairs: Callable[[int], float]  # visible ones of a head, at so many queries and keys
    mask: Callable[[Extras], Mod] | None = None  # FlexAttention's; the reference reads it too
    score: Callable[[Extras], Mod] | None = None
    flash: Options | None = None  # FlashAttention-4's arguments; None: functions must say it, which flash.py has
    sdpa: Options | None = None
    extras: Callable[[Case], dict[str, Any]] = lambda case: {}  # NumPy arrays, or the shape of one to be drawn


def document_ids(n: int) -> Any:
    return np.sort(np.random.default_rng(0).integers(0, DOCUMENTS, n)).astype(np.int32)


def _window(width: int) -> Variant:
    return Variant(
        lambda case, x: {"mask": causal() & window(width)},
        lambda n: float(sum(min(i, width) + 1 for i in range(n))),
        mask=lambda x: lambda b, h, q, k: (q >= k) & (q - k <= width),
        flash={"causal": True, "window_size": (width, 0)},
    )


def _document_pairs(n: int) -> float:
    counts = np.bincount(document_ids(n)).astype(float)
    return float((counts * (counts + 1) / 2).sum())


def _sees_past(x: Extras) -> Mod:
    return lambda b, h, q, k: q >= k


def _of_document(x: Extras) -> Mod:
    ids = x["ids"]
    return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])


def _by_distance(x: Extras) -> Mod:
    slopes = x["slopes"]
    return lambda s, b, h, q, k: s - slopes[h] * (q - k)


def _capped(x: Extras) -> Mod:
    import torch

    return lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)


def _biased(x: Extras) -> Mod:
    values = x["bias"]
    return lambda s, b, h, q, k: s + values[q, k]


def _half(n: int) -> float:
    return n * n / 2


VARIANTS: dict[str, Variant] = {
    "full": Variant(lambda case, x: {}, lambda n: float(n * n), flash={}, sdpa={}),
    "causal": Variant(
        lambda case, x: {"causal": True}, _half, _sees_past, flash={"causal": True}, sdpa={"is_causal": True}
    ),
    "window 256": _window(256),
    "window 1024": _window(1024),
    "document": Variant(
        lambda case, x: {"mask": causal() & document(x["ids"])}, _document_pairs, _of_document,
        extras=lambda case: {"ids": document_ids(case.n)},
    ),
    "alibi": Variant(
        lambda case, x: {"mask": causal(), "score": alibi(case.heads)}, _half, _sees_past, _by_distance,
        extras=lambda case: {"slopes": published_slopes(case.heads)},
    ),
    "softcap": Variant(
        lambda case, x: {"mask": causal(), "score": softcap(CAP)}, _half, _sees_past, _capped,
        flash={"causal": True, "softcap": CAP},
    ),
    "bias": Variant(
        lambda case, x: {"score": bias(x["bias"], grad=case.backward)}, lambda n: float(n * n), None, _biased,
        extras=lambda case: {"bias": (case.n, case.n)},
    ),
}  # fmt: skip


# -- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Inputs:
    """(batch, heads, n, d), or (tokens, heads, d) of packed sequences with their cumulative lengths."""

    q: Any
    k: Any
    v: Any
    lengths: Any = None  # on the CPU, where a call reads them without waiting for the GPU
    extras: Extras = field(default_factory=dict)
    d_out: Any = None

    @property
    def wanted(self) -> tuple[Any, ...]:
        """What gets a gradient."""
        return tuple(x for x in (self.q, self.k, self.v, *self.extras.values()) if x.requires_grad)

    def sequence(self, x: Any, i: int) -> Any:
        """(heads, length, d) of one sequence, of an input or an output."""
        if self.lengths is None:
            return x[i]
        return x[int(self.lengths[i]) : int(self.lengths[i + 1])].transpose(0, 1)


def sets(case: Case, device: str = "cuda", beyond: int = BEYOND_L2) -> list[Inputs]:
    """Inputs of the same kind, at least two: calls take turns on them, so that none finds its own in the cache."""
    first = draw(case, 0, device)
    one = sum(x.nbytes for x in (first.q, first.k, first.v))
    count = max(2, min(MOST_SETS, -(-beyond // one)))
    return [first, *(draw(case, i, device, first.extras) for i in range(1, count))]


def draw(case: Case, seed: int, device: str, extras: Extras | None = None) -> Inputs:
    """Normal numbers from a generator of its own: the default one belongs to graphs that are being captured."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))

    q, k, v = (normal(*_shape(case, heads)) for heads in (case.heads, case.heads_k, case.heads_k))
    if case.queries:
        q = q[:, :, : case.queries].contiguous()
    q, k = _INPUTS[case.inputs](q, k)
    lengths = None
    if case.packed:
        lengths = torch.tensor([0, *np.cumsum(case.lengths).tolist()], dtype=torch.int32)
    if extras is None:
        made = VARIANTS[case.variant].extras(case)
        extras = {
            name: normal(*x).requires_grad_(case.backward)
            if isinstance(x, tuple)
            else torch.from_numpy(x.copy()).to(device)
            for name, x in made.items()
        }
    d_out = normal(*q.shape) if case.backward else None
    for x in (q, k, v):
        x.requires_grad_(case.backward)
    return Inputs(q, k, v, lengths, extras, d_out)


def _shape(case: Case, heads: int) -> tuple[int, ...]:
    return (case.tokens, heads, case.d) if case.packed else (case.batch, heads, case.n, case.d)


def _ramp(q: Any, k: Any, first: float, last: float) -> tuple[Any, Any]:
    """Scores that grow or shrink along the keys: every new maximum makes an online softmax rescale."""
    import torch

    return q * 3, (k * torch.linspace(first, last, k.shape[-2], device=k.device)[:, None]).to(k.dtype)


_INPUTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "normal": lambda q, k: (q, k),
    "falling": lambda q, k: _ramp(q, k, 12.0, 0.02),
    "rising": lambda q, k: _ramp(q, k, 0.02, 12.0),
    "x8": lambda q, k: (q * 8, k),
    "x64": lambda q, k: (q * 8, k * 8),
}

"""Problems of decoding, and what is expected of them: the float64 reference on the same sequences, packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

import tilewise as tw
from tilewise import arrays, validate
from tilewise.arrays import Array
from tilewise.contract import Expected, expected_forward
from tilewise.expr import NK, B, H, K, Q, S, load

CAPACITY = 150
Options = dict[str, Any]


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


# Each makes the options of a call, its arrays drawn from the generator.
VARIANTS: dict[str, Callable[[np.random.Generator, Any], Options]] = {
    "full": lambda rng, p: {},
    "causal": lambda rng, p: {"causal": True},
    "window": lambda rng, p: {"mask": tw.causal() & tw.window(37)},
    "window behind": lambda rng, p: {"mask": tw.window(70, 0) & ~tw.window(20)},
    "first keys and a window": lambda rng, p: {"mask": tw.causal() & (tw.window(9) | tw.prefix(4))},
    "dilated": lambda rng, p: {"causal": True, "mask": tw.dilated(3)},
    "window of its head": lambda rng, p: {"mask": K >= NK - 8 * (H + 1)},
    "sequences differ": lambda rng, p: {"mask": K >= 10 * B, "score": S + load(_normal(rng, p.batch), B)},
    "dense": lambda rng, p: {"mask": rng.random((p.batch, p.heads, p.n_q, CAPACITY)) < 0.5},
    "nothing": lambda rng, p: {"mask": K > NK},
    "alibi": lambda rng, p: {"causal": True, "score": tw.alibi(p.heads)},
    "softcap": lambda rng, p: {"causal": True, "score": tw.softcap(1.5)},
    "bias": lambda rng, p: {"score": tw.bias(_normal(rng, 1, p.heads, p.n_q, CAPACITY))},
    "scores that mask": lambda rng, p: {"score": tw.where((K + Q) % 3 == H % 3, S, -np.inf)},
    "sinks": lambda rng, p: {"sinks": _normal(rng, p.heads)},
    "all at once": lambda rng, p: {
        "mask": tw.causal() & tw.window(60), "score": tw.softcap(2.0) >> tw.alibi(p.heads),
        "sinks": _normal(rng, p.heads), "scale": 0.3,
    },
}  # fmt: skip


ROPES = {
    "halves": tw.Rope(), "interleaved, in part": tw.Rope(6, interleaved=True),
    "halves, in part": tw.Rope(10, base=500.0),
    "tables": tw.Rope(cos=np.cos(np.arange(1.0, 8 * CAPACITY + 1).reshape(CAPACITY, 8) / 9),
                      sin=np.sin(np.arange(1.0, 8 * CAPACITY + 1).reshape(CAPACITY, 8) / 9)),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Sequences of these lengths, and n_q queries at the end of each."""

    variant: str = "causal"
    lengths: tuple[int, ...] = (130, 0, 1, 77)
    n_q: int = 1
    heads_k: int = 2
    group: int = 2
    d: int = 16
    d_v: int = 16
    dtype: str = "float32"
    page: int | None = None
    seed: int = field(default=0, repr=False)
    rope: str | None = None

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def heads(self) -> int:
        return self.heads_k * self.group

    def _drawn(self, salt: int, *shape: int) -> Array:
        return arrays.narrow(_normal(np.random.default_rng((self.seed, salt)), *shape), self.dtype)

    @cached_property
    def q(self) -> Array:
        return self._drawn(0, self.batch, self.heads, self.n_q, self.d)

    @cached_property
    def k(self) -> Array:
        return self._drawn(1, self.batch, self.heads_k, max(self.lengths), self.d)

    @cached_property
    def v(self) -> Array:
        return self._drawn(2, self.batch, self.heads_k, max(self.lengths), self.d_v)

    @cached_property
    def options(self) -> Options:
        return VARIANTS[self.variant](np.random.default_rng(self.seed), self)

    @property
    def turning(self) -> tw.Rope | None:
        return None if self.rope is None else ROPES[self.rope]

    def cache(self, k: Any, v: Any) -> Any:
        """An empty one for arrays like these."""
        if self.page is None:
            return tw.KVCache.like(k, v, capacity=CAPACITY)
        pages = sum(-(-n // self.page) for n in self.lengths) + 2
        return tw.PagedKVCache.like(k, v, pages=max(pages, -(-CAPACITY // self.page)), page_size=self.page,
                                    capacity=CAPACITY)  # fmt: skip

    def expected(self) -> list[Expected]:
        """Of out and lse, as check() lays them out."""
        q = np.concatenate(list(self.q.swapaxes(1, 2)))
        k, v = (
            np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(self.lengths)]) for x in (self.k, self.v)
        )
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        options = {**self.options, "rope": self.turning}
        mask = options.get("mask")
        if isinstance(mask, np.ndarray):  # packed sequences take no arrays, but expressions that read them
            options["mask"] = load(mask, B, H, Q, K)
        return expected_forward(validate.prepare_varlen(q, k, v, np.arange(self.batch + 1) * self.n_q, ends, **options))

    def check(self, out: Any, lse: Any) -> None:
        """Results of (batch, heads, n, ...), against the contract."""
        got = {"out": out, "lse": lse}
        for expected in self.expected():
            x = arrays.as_numpy(got[expected.what])
            expected.check(x.swapaxes(0, 1).reshape(1, self.heads, self.batch * self.n_q, *x.shape[3:]))


def random_problems(count: int) -> list[Problem]:
    rng = np.random.default_rng(7)
    return [
        Problem(
            str(rng.choice(list(VARIANTS))), tuple(int(n) for n in rng.integers(0, CAPACITY, rng.integers(1, 4))),
            int(rng.integers(1, 6)), int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.integers(1, 40)),
            int(rng.integers(1, 40)), str(rng.choice(["float16", "bfloat16", "float32"])),
            [None, 16, 32, 128][rng.integers(4)], seed,
        )
        for seed in range(count)
    ]  # fmt: skip

"""The cases of linear attention that every kernel system is tested on, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.expr import S, tanh
from tilewise.linear.spec import Problem
from tilewise.linear.state import LinearState
from tilewise.linear.validate import prepare


@dataclass(frozen=True)
class LinearCase:
    name: str
    batch: int = 1
    heads: int = 2
    heads_k: int = 2
    n: int = 100  # chunks that are full, and one that is not
    d: int = 16
    d_v: int = 16
    dtype: str = "float32"
    decay: str | None = None  # "head" or "token"
    carried: bool = False  # from an initial state
    lengths: tuple[int, ...] | None = None
    feature_map: Any = "elu"
    causal: bool = True
    normalize: bool = True
    scale: float = 1.0

    def problem(self, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)
        packed = self.lengths is not None
        n, batch = (self.lengths[-1], len(self.lengths) - 1) if self.lengths is not None else (self.n, self.batch)

        def rows(heads: int, d: int) -> Any:
            shape = (n, heads, d) if packed else (self.batch, heads, n, d)
            return arrays.narrow(rng.standard_normal(shape) / 2, self.dtype)

        wide, heads = arrays.compute_dtype(self.dtype), self.heads_k
        q, k, v = rows(self.heads, self.d), rows(heads, self.d), rows(heads, self.d_v)
        tokens = (n, heads) if packed else (self.batch, heads, n)
        logs = {
            "head": -np.linspace(0.01, 0.3, heads), "token": np.log(rng.uniform(0.5, 1.0, tokens)),
        }  # fmt: skip
        state = None
        if self.carried:
            shapes = (batch, heads, self.d, self.d_v), (batch, heads, self.d), (batch, heads)
            state = LinearState(*(rng.uniform(0.0, 2.0, shape).astype(wide) for shape in shapes))
        return prepare(
            q, k, v, feature_map=self.feature_map, causal=self.causal, normalize=self.normalize, scale=self.scale,
            decay=None if self.decay is None else logs[self.decay].astype(wide), initial_state=state,
            lengths=None if self.lengths is None else np.array(self.lengths),
        ).problem  # fmt: skip


CASES = [
    LinearCase("plain", batch=2),
    LinearCase("all of a sequence", causal=False, carried=True, heads=4),
    LinearCase("not normalized", normalize=False, feature_map="identity", scale=0.25),
    LinearCase("relu", feature_map="relu", n=70),
    LinearCase("squared relu", feature_map="relu2", carried=True, n=70),
    LinearCase("exp", feature_map="exp", n=70, d=7, d_v=5),
    LinearCase("an expression", feature_map=tanh(S) + 1.5, decay="head", n=70),
    LinearCase("decay by head", decay="head", carried=True),
    LinearCase("decay by token", decay="token", normalize=False, carried=True),
    LinearCase("gates, grouped heads", decay="token", heads=4, d=24, d_v=40),
    LinearCase("packed", lengths=(0, 70, 70, 71, 100), carried=True, decay="token", heads=4),
    LinearCase("packed, all of each", lengths=(0, 70, 70, 100), causal=False),
    LinearCase("one token", n=1, carried=True, decay="token"),
    LinearCase("nothing", n=0, carried=True, decay="token"),
    LinearCase("float16", dtype="float16", decay="head", carried=True),
    LinearCase("bfloat16", dtype="bfloat16", decay="token", d=32, d_v=32),
    LinearCase("float64", dtype="float64", decay="token", carried=True, n=70),
]

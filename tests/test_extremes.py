"""Integer arguments at their extremes where PyTorch is: modules, caches of tensors, how a sequence lies over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.extremes import VALUES, Case, check

torch = pytest.importorskip("torch")
from tilewise import parallel  # noqa: E402
from tilewise.nn import MultiHeadAttention  # noqa: E402
from tilewise.parallel import sharding  # noqa: E402

MOST = 2**31 - 1
WIDE = torch.zeros(1).expand(2, 64, 1, 512)  # so that 2^31 keys are beyond any machine


def module(features: Any = 8, heads: Any = 1, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(features, heads, **options)


def rows(layout: parallel.Layout) -> int:
    return layout.n


CASES: dict[str, Case] = {
    "nn: features": Case(lambda n: module(n).qkv.in_features, lambda n: n, 1, 1, "features:"),
    "nn: heads": Case(lambda n: module(8, n).heads, lambda n: n, 1, 1, "heads"),
    "nn: heads_k": Case(lambda n: module(heads_k=n).heads_k, lambda n: n, 1, 1, "heads_k:"),
    "nn: head_dim": Case(lambda n: module(head_dim=n).head_dim, lambda n: n, 1, 512, "head_dim:"),
    "nn: cache for a batch": Case(lambda n: module().new_cache(n, 2**14).batch, lambda n: n, 1, 1, "batch"),
    "nn: capacity": Case(lambda n: module(512).new_cache(8, n).capacity, lambda n: n, 1, 1, "capacity"),
    "KVCache.like: capacity": Case(
        lambda n: tw.KVCache.like(WIDE, WIDE, capacity=n).capacity, lambda n: n, 1, 1, "capacity"
    ),
    "PagedKVCache.like: pages": Case(
        lambda n: len(tw.PagedKVCache.like(WIDE, WIDE, pages=n).k), lambda n: n, 1, 1, "pages"
    ),
    "PagedKVCache.like: batch": Case(
        lambda n: tw.PagedKVCache.like(WIDE, WIDE, pages=1, batch=n).batch, lambda n: n, 1, 100, "batch:"
    ),
    "contiguous: n": Case(lambda n: rows(parallel.contiguous(n, 2)), lambda n: n, 0, MOST, "n:"),
    "contiguous: ranks": Case(lambda n: parallel.contiguous(4, n).ranks, lambda n: n, 1, 100, "ranks:"),
    "zigzag: n": Case(lambda n: rows(parallel.zigzag(n, 2)), lambda n: n, 0, MOST, "n:"),
    "zigzag: ranks": Case(lambda n: parallel.zigzag(4, n).ranks, lambda n: n, 1, 100, "ranks:"),
    "balanced: n": Case(lambda n: rows(parallel.balanced(n, 2, causal=True)), lambda n: n, 0, MOST, "n:"),
    "balanced: ranks": Case(lambda n: parallel.balanced(4, n, causal=True).ranks, lambda n: n, 1, 100, "ranks:"),
    "balanced: pieces": Case(lambda n: rows(parallel.balanced(4, 2, pieces=n)), lambda _: 4, 1, 100, "pieces:"),
    "shard: dim": Case(lambda n: sharding._check(torch.zeros(2, 2), n), None, -2, 1, "dim:"),
    "sdpa: scale": Case(
        lambda n: tw.scaled_dot_product_attention(*[torch.zeros(1, 1, 3, 4)] * 3, scale=n),
        lambda _: np.zeros((1, 1, 3, 4)), -(2**64), 2**64, "scale:",
    ),
}  # fmt: skip
TAKEN_AS_A_NUMBER = {"sdpa: scale": ("1.0", "float32 1")}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", CASES)
def test_integers_at_their_extremes(case: str, value: str) -> None:
    if value in TAKEN_AS_A_NUMBER.get(case, ()):
        CASES[case].call(VALUES[value])
    else:
        check(CASES[case], VALUES[value])

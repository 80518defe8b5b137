"""Extra memory grows as O(N), measured: doubling the sequence doubles it, where the full matrix would quadruple."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

import tilewise as tw


def _peak(call: Callable[[], object]) -> int:
    call()  # plans and caches are made once
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _forward(n: int) -> int:
    q, k, v = np.random.default_rng(n).standard_normal((3, n, 16)).astype(np.float32)
    return _peak(lambda: tw.attention(q, k, v, causal=True, score=tw.alibi(1)))


def _backward(n: int) -> int:
    q, k, v, d_out = np.random.default_rng(n).standard_normal((4, n, 16)).astype(np.float32)
    slopes = np.ones(1, np.float32)

    def both() -> None:
        _, pullback = tw.attention_vjp(q, k, v, causal=True, score=tw.alibi(slopes, grad=True))
        pullback(d_out)

    return _peak(both)


@pytest.mark.parametrize("measure", [_forward, _backward])
def test_memory_is_linear(measure: Callable[[int], int]) -> None:
    peaks = [measure(n) for n in (2048, 4096, 8192)]
    growth = np.diff(peaks)
    assert growth[1] < 2.5 * growth[0], f"twice the length, twice the growth: {peaks}"
    assert peaks[-1] < 0.05 * 4 * 8192**2, "far below the full matrix"


def test_the_measure_can_fail() -> None:
    """Standard attention, measured the same way, is quadratic."""
    from tilewise.lab import standard_attention

    def standard(n: int) -> int:
        q, k, v = np.ones((3, n, 16), np.float32)
        return _peak(lambda: standard_attention(q, k, v))

    peaks = [standard(n) for n in (512, 1024, 2048)]
    growth = np.diff(peaks)
    assert growth[1] > 3 * growth[0]

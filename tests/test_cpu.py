"""What the native engine promises beyond the conformance suite: how it rounds, and what it takes and gives in place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tilewise as tw
from tests.conformance.paths import forced, paths
from tilewise import arrays, dispatch

REASON = dispatch.kernel("cpu").unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"cpu cannot run on this machine: {REASON}")


@pytest.fixture(params=paths("cpu"))
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced("cpu", request.param):
        yield request.param


@pytest.mark.parametrize("dtype", arrays.FLOAT_DTYPES)
@pytest.mark.parametrize("n_q", [1, 3, 8, 21])  # rows of delta are summed some at a time, and the rest one by one
def test_a_single_key_has_no_gradient_of_scores(path: str, dtype: str, n_q: int) -> None:
    """Its weight is 1 whatever its score. d_p and delta, the same sum, are rounded alike, so nothing is left of them."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (arrays.narrow(rng.standard_normal((2, 2, n, 40)), dtype) for n in (n_q, 1, 1, n_q))
    _, pullback = tw.attention_vjp(q, k, v, kernel="cpu")
    grads = pullback(d_out)
    assert not np.any(arrays.widen(grads.q, np.float64))
    assert not np.any(arrays.widen(grads.k, np.float64))

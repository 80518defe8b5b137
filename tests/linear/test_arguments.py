"""What callers pass: names, layouts, states; and errors that name the argument, what came and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 4, 9, 8)).astype(np.float32) for _ in range(3))
STATE = tw.linear_attention(Q, K, V, return_state=True, kernel="numpy")[1]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"feature_map": "softmax"}, ValueError, "feature_map: expected one of 'identity', 'elu', .* got 'softmax'"),
        ({"feature_map": np.exp}, TypeError, r"feature_map: .* got ufunc; call it with the variable"),
        ({"feature_map": tw.S > 0}, TypeError, "feature_map: expected a number, got the condition"),
        ({"feature_map": tw.S * tw.H}, ValueError, r"feature_map: expected an expression of tw.S alone"),
        ({"feature_map": tw.load(np.ones(1), 0) * tw.S}, ValueError, r"feature_map: .* without arrays"),
        ({"feature_map": tw.exp(2.0)}, ValueError, r"feature_map: expected an expression of tw.S alone"),
        ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
        ({"normalize": None}, TypeError, "normalize: expected True or False"),
        ({"scale": np.nan}, ValueError, "scale: expected a finite number, got nan"),
        ({"decay": 0.5}, ValueError, r"decay: expected logs .*<= 0, got 0.5; of a gate g take log"),
        ({"decay": -np.inf}, ValueError, "decay: expected logs .* got -inf"),
        ({"decay": [-0.1] * 4}, TypeError, "decay: expected floats, .* got list; make an array of it"),
        ({"decay": np.zeros(4, np.int64)}, TypeError, "decay: expected floats, .* got int64"),
        ({"decay": np.zeros(3)}, ValueError, r"decay: expected shape \(2, 4, 9\), .* or \(4,\), .* got \(3,\)"),
        ({"decay": -0.1, "causal": False}, ValueError, "decay: expected None with causal=False"),
        ({"initial_state": STATE.kv}, TypeError, "initial_state: expected a tw.LinearState, .* got ndarray"),
        ({"initial_state": STATE.map(lambda x: x[:1])}, ValueError, r"initial_state.kv: expected shape \(2, 4, 8, 8\)"),
        ({"initial_state": STATE.map(np.float64)}, TypeError, "initial_state.kv: expected float32, .* got float64"),
        ({"lengths": [0, 9]}, ValueError, r"q: packed sequences are \(total, heads, d\)"),
        ({"kernel": "cuda"}, ValueError, "kernel: expected one of auto, .*numpy.* got 'cuda'"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        tw.linear_attention(Q, K, V, **options)


def test_errors_of_sizes() -> None:
    with pytest.raises(ValueError, match=r"k: expected 9 keys, one a query, got 8; .*initial_state"):
        tw.linear_attention(Q, K[:, :, :8], V[:, :, :8])
    with pytest.raises(ValueError, match="lengths: expected cumulative lengths that rise from 0 to 9"):
        tw.linear_attention(Q[0].swapaxes(0, 1), K[0].swapaxes(0, 1), V[0].swapaxes(0, 1), lengths=[0, 8])
    _, _, pullback = tw.linear_attention_vjp(Q, K, V, kernel="numpy")
    with pytest.raises(ValueError, match=r"d_out: expected shape \(2, 4, 9, 8\)"):
        pullback(Q[:1])
    with pytest.raises(TypeError, match=r"d_state: expected a tw.LinearState"):
        pullback(Q, Q)


@pytest.mark.parametrize("kernel", ["auto", "numpy"])
@pytest.mark.parametrize("library", ["NumPy", "PyTorch"])
def test_lengths_whose_differences_wrap_around_are_refused(kernel: str, library: str) -> None:
    q, lengths = np.ones((64, 2, 16), np.float32), np.array([0, 2**63 - 1, -(2**63), -1, 64])
    if library == "PyTorch":
        torch = pytest.importorskip("torch")
        q, lengths = torch.from_numpy(q), torch.from_numpy(lengths)
    with pytest.raises(ValueError, match="lengths: expected cumulative lengths that rise from 0 to 64"):
        tw.linear_attention(q, q, q, lengths=lengths, kernel=kernel)


def test_layouts() -> None:
    """A sequence alone, in a batch, with heads and packed are the same."""
    decay = np.log(RNG.uniform(0.5, 1, (2, 4, 9)))
    whole = tw.linear_attention(Q, K, V, decay=decay, kernel="numpy")
    alone = tw.linear_attention(Q[0, 1], K[0, 1], V[0, 1], decay=decay[0, 1], kernel="numpy")
    batched = tw.linear_attention(Q[:, 1], K[:, 1], V[:, 1], decay=decay[:, 1], kernel="numpy")
    flat = (np.concatenate(list(x.swapaxes(1, 2))) for x in (Q, K, V, decay))
    q, k, v, logs = flat
    packed = tw.linear_attention(q, k, v, decay=logs, lengths=[0, 9, 18], kernel="numpy")
    np.testing.assert_array_equal(alone, whole[0, 1])
    np.testing.assert_array_equal(batched, whole[:, 1])
    np.testing.assert_allclose(packed[9:].swapaxes(0, 1), whole[1], rtol=1e-6)


def test_a_decay_of_each_head_has_a_gradient_of_each_head() -> None:
    by_head = np.array([-0.1, -0.2, -0.3, -0.4], np.float32)
    by_token = np.broadcast_to(by_head[:, None], (2, 4, 9)).copy()
    grads = [tw.linear_attention_vjp(Q, K, V, decay=x, kernel="numpy")[2](V).decay for x in (by_head, by_token)]
    assert grads[0].shape == (4,)
    np.testing.assert_allclose(grads[0], grads[1].sum(axis=(0, 2)), rtol=1e-4)


@pytest.mark.parametrize(
    ("later", "error", "told"),
    [
        (3, TypeError, "later: expected a LinearState, got int"),
        (
            STATE.map(lambda x: x[:1]),
            ValueError,
            r"later: expected a state of kv \(2, 4, 8, 8\), .* got \(1, 4, 8, 8\)",
        ),
    ],
)
def test_states_that_do_not_follow(later: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        STATE.then(later)


def test_a_number_decays_all_heads() -> None:
    every = tw.linear_attention(Q, K, V, decay=np.full(4, -0.5, np.float32))
    np.testing.assert_array_equal(tw.linear_attention(Q, K, V, decay=-0.5), every)


def test_rows_without_weight_are_0() -> None:
    out, _, pullback = tw.linear_attention_vjp(-np.abs(Q), K, V, feature_map="relu", kernel="numpy")
    assert not out.any()
    assert all(np.isfinite(x).all() for x in (pullback(V).q, pullback(V).k, pullback(V).v))

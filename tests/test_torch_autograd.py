"""PyTorch tensors: the bits that NumPy arrays give, no copies, and the gradients of autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.problems import assert_close, bits, store
from tilewise import arrays, reference
from tilewise.expr import H, Q, S
from tilewise.spec import Attention


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_gives_the_bits_of_numpy(dtype):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((2, h, n, 12)) for h, n in ((4, 33), (2, 40), (2, 40))]
    from_numpy = tw.attention(*(store(x, dtype, "numpy") for x in values), causal=True, return_lse=True)
    from_torch = tw.attention(*(store(x, dtype, "torch") for x in values), causal=True, return_lse=True)
    assert isinstance(from_torch[0], torch.Tensor)
    assert isinstance(from_numpy[0], np.ndarray)
    assert from_torch[0].dtype == getattr(torch, dtype)
    for a, b in zip(from_numpy, from_torch, strict=True):
        assert bits(a) == bits(b)


def test_torch_inputs_are_not_copied_or_touched():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    copies, versions = [x.clone() for x in (q, k, v)], [x._version for x in (q, k, v)]
    out = tw.attention(q, k, v, causal=True)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies, strict=True))
    assert [x._version for x in (q, k, v)] == versions
    assert arrays.as_numpy(q).ctypes.data == q.data_ptr()
    half = q.bfloat16()
    assert arrays.as_numpy(half).ctypes.data == half.data_ptr()
    assert out.dtype == q.dtype
    assert not out.requires_grad


def _leaf(rng: Any, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).requires_grad_()


AUTOGRAD = {
    "plain": lambda rng: ({}, []),
    "causal": lambda rng: ({"causal": True}, []),
    "bias": lambda rng: (lambda b: ({"score": tw.bias(b)}, [b]))(_leaf(rng, 4, 6, 7)),
    "bias over heads": lambda rng: (lambda b: ({"score": tw.bias(b)}, [b]))(_leaf(rng, 2, 1, 1, 7)),
    "float mask": lambda rng: (lambda b: ({"mask": b}, [b]))(_leaf(rng, 6, 7)),
    "relative": lambda rng: (lambda t: ({"score": tw.relative(t, signed=True)}, [t]))(_leaf(rng, 4, 5)),
    "t5": lambda rng: (lambda t: ({"score": tw.t5(t, 10), "causal": True}, [t]))(_leaf(rng, 8, 4)),
    "alibi": lambda rng: (lambda s: ({"score": tw.alibi(s)}, [s]))(_leaf(rng, 4)),
    "a scalar": lambda rng: (lambda s: ({"score": S * s}, [s]))(_leaf(rng)),
    "twice": lambda rng: (lambda t: ({"score": S * tw.load(t, H) + tw.load(t, Q % 4)}, [t]))(_leaf(rng, 4)),
    "two arrays": lambda rng: (lambda a, b: ({"score": tw.softcap(2.0) >> tw.bias(a) >> tw.alibi(b)}, [a, b]))(
        _leaf(rng, 6, 7), _leaf(rng, 4)
    ),
    "sinks": lambda rng: (lambda s: ({"sinks": s, "causal": True}, [s]))(_leaf(rng, 4)),
    "sinks and all": lambda rng: (lambda s, t: ({"sinks": s, "mask": Q % 2 == 0, "score": tw.alibi(t)}, [s, t]))(
        _leaf(rng, 4), _leaf(rng, 4)
    ),
}


@pytest.mark.parametrize("name", AUTOGRAD)
def test_autograd_equals_the_reference(name):
    rng = np.random.default_rng(0)
    q, k, v = _leaf(rng, 2, 4, 6, 3), _leaf(rng, 2, 2, 7, 3), _leaf(rng, 2, 2, 7, 5)
    options, leaves = AUTOGRAD[name](rng)
    out, lse = tw.attention(q, k, v, return_lse=True, **options)
    d_out, d_lse = (torch.from_numpy(rng.standard_normal(tuple(x.shape))) for x in (out, lse))
    if (Q % 2 == 0) is options.get("mask"):
        d_lse[:, :, 1::2] = 0
    torch.autograd.backward([out, lse], [d_out, d_lse])
    from tilewise.validate import prepare

    spec = prepare(q, k, v, **options).spec
    want = reference.backward(spec, q, k, v, d_out, d_lse)
    for x, expected in ((q, want.q), (k, want.k), (v, want.v)):
        np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-9, atol=1e-12)
    expected = ([want.sinks] if spec.sinks is not None else []) + list(want.arrays)
    assert len(expected) == len(leaves)
    for leaf, e in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(leaf.grad.numpy(), e.reshape(leaf.shape), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_gradient_of_an_array_without_dimensions(dtype, library):
    rng = np.random.default_rng(0)
    q, k, v = (store(rng.standard_normal((1, 2, 5, 4)), dtype, library) for _ in range(3))
    factor = store(np.asarray(0.5), dtype, library)
    out, pullback = tw.attention_vjp(q, k, v, score=S * tw.load(factor, grad=True))
    (found,) = pullback(out).arrays
    assert tuple(found.shape) == ()
    assert found.dtype == factor.dtype
    want = reference.backward(Attention(0.5, None, S * tw.load(factor, grad=True)), q, k, v, out).arrays[0]
    assert_close(found, want, dtype, 800)


@pytest.mark.parametrize("name", ["causal", "bias", "relative", "alibi", "twice", "two arrays", "sinks", "float mask"])
def test_gradcheck(name):
    rng = np.random.default_rng(1)
    q, k, v = _leaf(rng, 2, 4, 6, 3), _leaf(rng, 2, 2, 7, 3), _leaf(rng, 2, 2, 7, 2)
    options, leaves = AUTOGRAD[name](rng)

    def call(q, k, v, *_):
        return tw.attention(q, k, v, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, (q, k, v, *leaves), atol=1e-6, rtol=1e-4, fast_mode=True)


def test_autograd_of_packed_sequences():
    rng = np.random.default_rng(0)
    q, k, v = (_leaf(rng, 9, 2, 3) for _ in range(3))
    ends = torch.tensor([0, 4, 4, 9])
    assert torch.autograd.gradcheck(
        lambda *x: tw.attention_varlen(*x, ends, ends, causal=True, return_lse=True), (q, k, v), fast_mode=True
    )


def test_autograd_against_torch_itself():
    rng = np.random.default_rng(0)
    q, k, v = (_leaf(rng, 2, 3, 10, 8) for _ in range(3))
    ours = tw.attention(q, k, v, causal=True)
    ours.sum().backward()
    found = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs.sum().backward()
    torch.testing.assert_close(ours, theirs)
    for x, f in zip((q, k, v), found, strict=True):
        torch.testing.assert_close(f, x.grad)


def test_no_gradient_is_made_for_what_does_not_want_one():
    q = torch.randn(1, 1, 4, 2, requires_grad=True)
    k, v = torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2)
    tw.attention(q, k, v).sum().backward()
    assert q.grad is not None
    assert k.grad is None

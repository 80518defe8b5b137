"""Calls of the Triton kernels: types of gradients, fresh memory, origins, calls of nothing. By Triton's interpreter."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.triton.test_ops import needs_triton
from tilewise import dispatch
from tilewise.contract import backward_results, check_results, expected_backward, expected_forward, forward_results
from tilewise.expr import KP, H, K, Q, load
from tilewise.kernels.triton import arguments, modules
from tilewise.spec import Attention, Positions, Shape
from tilewise.validate import Call, prepare, prepare_varlen

pytestmark = needs_triton
DTYPES = (torch.float16, torch.bfloat16)


def _drawn(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


def _check_backward(call: Call, d_out: Any) -> None:
    kernel = dispatch.kernel("triton")
    saved = kernel.forward(call.spec, call.q, call.k, call.v)
    grads = kernel.backward(call.spec, call.q, call.k, call.v, saved, d_out)
    check_results(expected_backward(call, d_out, None), backward_results(grads))


@pytest.mark.parametrize("n", [4, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wider_gradient_of_what_is_turned(dtype: torch.dtype, n: int) -> None:
    """Weights are recomputed from q and k as forward turned and rounded them, inline or before."""
    q, k, v = ((_drawn(1, 2, n, 64, seed=i) * x).to(dtype) for i, x in enumerate((16, 16, 1)))
    call = prepare(q, k, v, causal=True, rope=tw.Rope())
    for d_out in (_drawn(1, 2, n, 64, seed=3), _drawn(1, 2, n, 64, seed=4).to(dtype)):
        _check_backward(call, d_out)


def test_a_gradient_of_the_other_half_type() -> None:
    """float16 has no number as large, and bfloat16 none as exact."""
    for dtype, other, size in ((*DTYPES, 1e5), (*DTYPES[::-1], 1.0)):
        q, k, v = (_drawn(1, 1, n, 8, seed=n).to(dtype) / 8 for n in (3, 6, 6))
        _check_backward(prepare(q, k, v), (size * (1 + _drawn(1, 1, 3, 8, seed=4) / 1000)).to(other))


@pytest.mark.parametrize("kernel", ["numpy", "triton"])
def test_no_sequence_at_all(kernel: str) -> None:
    q, k, v = (_drawn(0, heads, 8) for heads in (4, 2, 2))
    call = prepare_varlen(q, k, v, np.array([0]), np.array([0]))
    assert dispatch.kernel(kernel).forward(call.spec, call.q, call.k, call.v).out.shape == (1, 4, 0, 8)


def test_whatever_was_in_memory() -> None:
    """What is allocated is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        q, k, v = (_drawn(2, heads, n, 8) for heads, n in ((4, 37), (2, 150), (2, 150)))
        _check_backward(prepare(q, k, v, causal=True, sinks=_drawn(4)), _drawn(2, 4, 37, 8, seed=9))
        ends = np.array([0, 20, 20, 37])
        q, k, v = (_drawn(37, heads, 8) for heads in (4, 2, 2))
        _check_backward(prepare_varlen(q, k, v, ends, ends, causal=True), _drawn(1, 4, 37, 8, seed=9))
    finally:
        torch.use_deterministic_algorithms(False)


def _trained(call: Call) -> Call:
    """As a call whose gradients are wanted."""
    return replace(call, spec=replace(call.spec, keeps_remainder=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_rounding_takes_from_the_output_is_kept(dtype: torch.dtype) -> None:
    """All weights are 1, and lose nothing by being narrowed: what is left is the error of the sums."""
    q, k, v = (_drawn(1, 2, n, 16, seed=i).to(dtype) for i, n in enumerate((90, 70, 70)))
    call = _trained(prepare(0 * q, k, v, causal=True))
    saved = dispatch.kernel("triton").forward(call.spec, call.q, call.k, call.v)
    exact = torch.from_numpy(expected_forward(call)[0].exact)
    assert saved.remainder.dtype == dtype and saved.remainder.stride() == saved.out.stride()
    assert not saved.remainder[:, :, :20].any(), "rows without keys lose nothing"
    whole = saved.out.double() + saved.remainder.double()
    assert float((whole - exact).abs().max()) < 2.0**-15 * float(exact.abs().max())


def test_what_is_stored_as_it_is_has_no_remainder() -> None:
    kernel, x = dispatch.kernel("triton"), _drawn(1, 1, 5, 8)
    wide = _trained(prepare(x, x, x))
    assert kernel.forward(wide.spec, x, x, x).remainder is None
    half = prepare(*(x.bfloat16() for _ in range(3)))
    assert kernel.forward(half.spec, half.q, half.k, half.v).remainder is None, "nobody asked for it"


@pytest.mark.parametrize("d_out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_saturated_rows(d_out_dtype: torch.dtype) -> None:
    """Of queries times 12; made from the rounded output alone, d_q would be twice as far off."""
    q, k, v, d_out = (_drawn(1, 2, 160, 64, seed=i) for i in range(4))
    call = _trained(prepare(*((12 * q).bfloat16(), k.bfloat16(), v.bfloat16()), causal=True))
    kernel = dispatch.kernel("triton")
    d_out = d_out.bfloat16().to(d_out_dtype)
    saved = kernel.forward(call.spec, call.q, call.k, call.v)
    got = kernel.backward(call.spec, call.q, call.k, call.v, saved, d_out).q
    exact = torch.from_numpy(expected_backward(call, d_out, None)[0].exact)
    assert float((got.double() - exact).norm() / exact.norm()) < 3e-3


def test_a_part_of_a_longer_call() -> None:
    """Variables begin at its origin, in arrays read by keys as well."""
    by_k, by_kp = (_drawn(2, 70, seed=i).numpy() for i in (5, 6))
    score = tw.S + load(by_k, H, K) + load(by_kp, 0, KP) + load(_drawn(50, 70, seed=7).numpy(), Q, K)
    spec = Attention(0.3, tw.causal(), score, positions=Positions(7, 11, 50, 70))
    q, k, v = (_drawn(1, 2, n, 8, seed=i) for i, n in enumerate((20, 30, 30)))
    call = Call(spec, q, k, v, 4)
    check_results(expected_forward(call), forward_results(dispatch.kernel("triton").forward(spec, q, k, v)))
    _check_backward(call, _drawn(1, 2, 20, 8, seed=8))


def test_cells_of_a_bias_are_read_side_by_side() -> None:
    """What that takes: the array has all keys, and variables are known to begin at 0."""
    spec = Attention(0.3, None, tw.S + load(np.zeros((9, 9), np.float32), Q, K))
    for n_k, count in ((9, 1), (10, 0)):
        made = modules.variant(spec, n_k)
        assert made is not None and inspect.getsource(made).count("cell_of(arrays") == count
    for shape, is_zero in ((Shape(1, 1, 1, 9, 9, 8, 8), True), (Shape(1, 1, 1, 9, 9, 8, 8, origin_k=3), False)):
        assert bool(arguments.records_of(spec, shape, None)[3]) == is_zero

"""Every kernel system on masks and scores that share forms: a bound here is a float there, and an index elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tilewise as tw
from tests.compositions import composed
from tests.conformance.test_conformance import COMPILED, GPU_RUNGS, SYSTEMS
from tests.fuzzing.drawing.dice import Dice
from tilewise import arrays, dispatch, validate
from tilewise.contract import (
    backward_results,
    check_results,
    expected_backward,
    expected_forward,
    forward_results,
    gradients_to_pull,
    on_device,
    on_host,
)
from tilewise.dispatch import Kernel
from tilewise.spec import Shape, Tile
from tilewise.validate import Call

# Forward passes walk several tiles of keys, backward passes of Hopper two of 128.
SIZES, TILE = (40, 150), Tile(128, 16)
SEEDS = 40
FAST = ("numpy", "cpu")  # the others' kernels are each compiled first, TileLang's in many seconds, or interpreted


def _call(seed: int) -> Call:
    dice = Dice(seed)
    n_q, n_k = SIZES if seed % 2 else (SIZES[1], SIZES[1])
    q, k, v = (arrays.narrow(dice.normal((1, heads, n, 16)), "float16") for heads, n in ((4, n_q), (2, n_k), (2, n_k)))
    # Not every system sums up gradients of what forms other than Q - K index.
    mask, score = composed(seed, Shape(1, 4, 2, n_q, n_k, 16, 16), gradients=seed % 4 == 3)
    return validate.prepare(q, k, v, mask=mask, score=score)


def _seeds(name: str, quick: tuple[int, ...]) -> list[Any]:
    quick = tuple(range(SEEDS)) if name in FAST else () if name in COMPILED else quick
    return [pytest.param(name, x, marks=() if x in quick else pytest.mark.slow) for x in range(SEEDS)]


def _kernel(name: str, call: Call, backward: bool) -> Kernel | None:
    """The kernel, or None if it refuses this call, which is then checked to raise."""
    kernel, shape = dispatch.kernel(name), replace(call.shape, backward=backward)
    reason = kernel.unavailable()
    if reason is not None:
        pytest.skip(f"{name} cannot run on this machine: {reason}")
    if kernel.unsupported(call.spec, shape) is None:
        return kernel
    with pytest.raises(tw.Unsupported, match=name):
        dispatch.resolve(name, call.spec, shape)
    return None


def _check_forward(name: str, seed: int, device: str = "cpu") -> None:
    host = _call(seed)
    call = on_device(host, device)
    kernel = _kernel(name, call, backward=False)
    if kernel is None:
        return
    done = forward_results(kernel.forward(call.spec, call.q, call.k, call.v, TILE))
    check_results(expected_forward(host), {what: on_host(x) for what, x in done.items()})


def _check_backward(name: str, seed: int, device: str = "cpu") -> None:
    host = _call(seed)
    call = on_device(host, device)
    kernel = _kernel(name, call, backward=True)
    if kernel is None:
        return
    pulled = gradients_to_pull(host)
    there = pulled if device == "cpu" else tuple(arrays.as_tensor(x).to(device) for x in pulled)
    saved = kernel.forward(call.spec, call.q, call.k, call.v, None)
    done = backward_results(kernel.backward(call.spec, call.q, call.k, call.v, saved, *there, None))
    check_results(expected_backward(host, *pulled), {what: on_host(x) for what, x in done.items()})


@pytest.mark.parametrize(("name", "seed"), [x for name in (*SYSTEMS, *COMPILED) for x in _seeds(name, (12, 14))])
def test_forward(name: str, seed: int) -> None:
    _check_forward(name, seed)


@pytest.mark.parametrize(("name", "seed"), [x for name in (*SYSTEMS, COMPILED[0]) for x in _seeds(name, (3, 19))])
def test_backward(name: str, seed: int) -> None:
    _check_backward(name, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", [*GPU_RUNGS, "cuda/unordered"])
def test_on_a_gpu(name: str, seed: int) -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is no NVIDIA GPU")
    _check_forward(name, seed, "cuda:0")
    _check_backward(name, seed, "cuda:0")

"""Every kernel system on every case, forward and backward. What a system declares unsupported must raise."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import numpy as np
import pytest

import tilewise as tw
from tilewise import dispatch
from tilewise.cases import Case, conformance
from tilewise.contract import check_backward, check_forward
from tilewise.dispatch import Kernel
from tilewise.spec import Tile

# Beside a system's own tile: smaller ones than the cases' shapes, wide and high, dividing nothing.
TILES = {"numpy": (None, Tile(32, 48), Tile(61, 16))}
RUNS = [(name, case, tile) for name in dispatch.NAMES for case in conformance() for tile in TILES.get(name, (None,))]


def _id(run: tuple[str, Case, Tile | None]) -> str:
    return f"{run[0]} | {run[1].name} | {run[2] or 'default tile'}"


def _kernel(name: str, case: Case, backward: bool) -> Kernel | None:
    """The kernel, or None if it refuses this case, which is then checked to raise."""
    kernel = dispatch.kernel(name)
    reason = kernel.unavailable()
    if reason is not None:
        pytest.skip(f"{name} cannot run on this machine: {reason}")
    call = case.inputs().call()
    shape = replace(call.shape, backward=backward)
    if kernel.unsupported(call.spec, shape) is None:
        return kernel
    with pytest.raises(tw.Unsupported, match=name):
        dispatch.resolve(name, call.spec, shape)
    return None


@pytest.mark.parametrize("run", RUNS, ids=_id)
def test_forward(run: tuple[str, Case, Tile | None]) -> None:
    name, case, tile = run
    kernel = _kernel(name, case, backward=False)
    if kernel is not None:
        check_forward(kernel, case, tile)


@pytest.mark.parametrize("run", RUNS, ids=_id)
def test_backward(run: tuple[str, Case, Tile | None]) -> None:
    name, case, tile = run
    kernel = _kernel(name, case, backward=True)
    if kernel is not None:
        check_backward(kernel, case, tile)


@pytest.mark.parametrize("case", conformance(), ids=lambda case: case.name)
def test_public_call_gives_the_kernels_bits(case: Case) -> None:
    """The API adds layout, not arithmetic; and the same call gives the same bits."""
    inputs = case.inputs()
    call = inputs.call()
    want = dispatch.resolve("auto", call.spec, call.shape).forward(call.spec, call.q, call.k, call.v)
    if inputs.lengths is None:
        out, lse = tw.attention(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True)
    else:
        out, lse = tw.attention_varlen(inputs.q, inputs.k, inputs.v, *inputs.lengths, **inputs.options, return_lse=True)
    assert np.array_equal(out, call.restore(want.out))
    assert np.array_equal(lse, call.restore(want.lse))
    assert out.shape == (*inputs.q.shape[:-1], inputs.v.shape[-1])
    assert lse.shape == inputs.q.shape[:-1]


def test_every_variant_has_a_case() -> None:
    """A named variant that no case exercises is a variant nobody checks."""
    from tilewise import cases
    from tilewise.variants import VARIANTS

    source = inspect.getsource(cases)
    assert [name for name in VARIANTS if not re.search(rf"\b{name}\(", source)] == []

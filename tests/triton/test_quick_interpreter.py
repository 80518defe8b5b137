"""The interpreter that tests run is as good as Triton's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewise.cases import Case
from tilewise.contract import backward_results, forward_results, gradients_to_pull
from tilewise.kernels.triton import TritonKernel
from tilewise.kernels.triton.modules import is_interpreted

reason = TritonKernel().unavailable() or ("" if is_interpreted() else "TRITON_INTERPRET=1 is not set")
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)


def _results(case: Case) -> dict[str, Any]:
    kernel, call = TritonKernel(), case.inputs().call()
    saved = kernel.forward(call.spec, call.q, call.k, call.v)
    grads = kernel.backward(call.spec, call.q, call.k, call.v, saved, *gradients_to_pull(call))
    return {**forward_results(saved), **backward_results(grads)}


def test_it_gives_the_bits_of_tritons_own() -> None:
    from tests.triton import quick_interpreter

    case = Case("bias", "one key", "bfloat16")
    quick = _results(case)
    with quick_interpreter.as_triton_has_it():
        plain = _results(case)
    assert quick.keys() == plain.keys()
    assert all(np.array_equal(quick[name], plain[name]) for name in plain)


def test_launches_take_their_patches_back() -> None:
    """Those that fail too: the next launch, and whoever compiles, finds Triton's own language."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterError

    from tests.triton.table import fails

    own = tl.load, tl.tensor.__add__
    _results(Case("causal", "one key"))
    assert (tl.load, tl.tensor.__add__) == own
    with pytest.raises(InterpreterError, match="as it should"):
        fails[(1,)](0)
    assert (tl.load, tl.tensor.__add__) == own
    _results(Case("causal", "one key"))

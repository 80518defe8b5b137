"""Every kernel system on every case of linear attention, forward and backward, within the numeric contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tilewise.contract import ContractError, Expected, check_results
from tilewise.dispatch import Unsupported
from tilewise.linear import contract, dispatch
from tilewise.linear.cases import CASES, LinearCase
from tilewise.linear.kernels import numpy as numpy_kernel
from tilewise.linear.spec import Problem

BY_NAME = {case.name: case for case in CASES}


# Kernels that are compiled for each case, in seconds: a few cases have all that there is to them.
COMPILED = {"tilelang-c": ("gates, grouped heads", "nothing")}  # "packed": test_tilelang.py


def _runs() -> Iterator[Any]:
    for name in dispatch.SYSTEMS:
        for case in CASES:
            is_slow = case.name not in COMPILED.get(name, (case.name,)) and case.dtype in ("float16", "float32")
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(name, case, id=f"{name}-{case.name}", marks=marks)


@pytest.mark.parametrize(("name", "case"), list(_runs()))
def test_case(name: str, case: LinearCase) -> None:
    problem, kernel = case.problem(), dispatch.kernel(name)
    if kernel.unavailable():
        pytest.skip(str(kernel.unavailable()))
    if kernel.unsupported(problem.shape):
        with pytest.raises(Unsupported, match="cannot compute"):
            dispatch.resolve(name, problem.shape)
        return
    d_out, d_state = contract.gradients_to_pull(problem)
    chunk = 64 if name == "triton" else None  # its interpreter takes long for many small ones
    done = kernel.forward(problem, chunk)
    grads = kernel.backward(problem, done, d_out, d_state, chunk)
    check_results(_expected(case.name), {**contract.forward_results(done), **contract.backward_results(grads)})


@cache
def _expected(name: str) -> list[Expected]:
    return contract.expected_of(BY_NAME[name].problem())


def _forgets_decay(self: Any) -> Any:
    return np.ones_like(self.past[..., -1:, :])


def _sees_later_keys(problem: Problem, part: slice) -> Any:
    within, past, end = _RIGHT(problem, part)
    return np.ones_like(within), past, end


_RIGHT = numpy_kernel._decays


@pytest.mark.parametrize("mistake", ["forgets decay", "sees later keys", "normalizes by ones"])
def test_the_contract_catches(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong in one place turns the suite red."""
    problem = BY_NAME["decay by head"].problem()
    if mistake == "forgets decay":
        monkeypatch.setattr(numpy_kernel._Chunk, "kept", property(_forgets_decay))
    elif mistake == "sees later keys":
        monkeypatch.setattr(numpy_kernel, "_decays", _sees_later_keys)
    kernel = dispatch.kernel("numpy")
    given = replace(problem, spec=replace(problem.spec, normalize=False)) if mistake.startswith("norm") else problem
    out = next(e for e in contract.expected_of(problem) if e.what == "out")
    with pytest.raises(ContractError, match="off by"):
        out.check(kernel.forward(given, 16).out)

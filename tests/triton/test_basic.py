"""The first kernel, one query a program: a case of every kind, as each of its programs is interpreted on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tilewise as tw
from tests.triton.test_ops import needs_triton
from tilewise import dispatch
from tilewise.cases import Case
from tilewise.contract import check_forward

CASES = [
    Case("full", "one key"),
    Case("causal", "smallest head"),
    Case("window", "packed"),
    Case("sinks", "one query"),
    Case("all at once", "one query", "bfloat16"),
]


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_of_every_kind(case: Case) -> None:
    check_forward(dispatch.kernel("triton/basic"), case)


@needs_triton
def test_it_says_that_it_has_no_backward_pass() -> None:
    call = CASES[1].inputs().call()
    with pytest.raises(tw.Unsupported, match="first exercise"):
        dispatch.resolve("triton/basic", call.spec, replace(call.shape, backward=True))

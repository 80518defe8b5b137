"""The suite can fail: each of these kernels has one classic mistake, and conformance catches every one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.wrong_kernels import BACKWARD_MISTAKES, SPEC_MISTAKES, STATE_MISTAKES, Wrong
from tilewise.cases import Case
from tilewise.contract import check_backward, check_forward
from tilewise.kernels.numpy import NumpyKernel
from tilewise.spec import Tile

TILE = Tile(32, 32)
CASES = [
    Case("causal", "ragged"), Case("all at once", "ragged"), Case("full", "square"), Case("softcap", "ragged"),
    Case("causal", "more queries than keys"), Case("causal", "packed"),
]  # fmt: skip


def _caught(check: Callable[..., None], kernel: NumpyKernel) -> list[str]:
    """The cases that turn red."""
    red = []
    for case in CASES:
        try:
            check(kernel, case, TILE)
        except AssertionError:
            red.append(case.name)
    return red


@pytest.mark.parametrize("mistake", STATE_MISTAKES)
def test_forward_mistake_is_caught(mistake: str) -> None:
    assert _caught(check_forward, Wrong(patch=STATE_MISTAKES[mistake]))


@pytest.mark.parametrize("mistake", BACKWARD_MISTAKES)
def test_backward_mistake_is_caught(mistake: str) -> None:
    assert _caught(check_backward, Wrong(patch=BACKWARD_MISTAKES[mistake]))


@pytest.mark.parametrize("mistake", SPEC_MISTAKES)
@pytest.mark.parametrize("check", [check_forward, check_backward])
def test_wrong_attention_is_caught(mistake: str, check: Callable[..., None]) -> None:
    assert _caught(check, Wrong(SPEC_MISTAKES[mistake]))


def test_the_right_kernel_passes() -> None:
    assert not _caught(check_forward, NumpyKernel())
    assert not _caught(check_backward, NumpyKernel())

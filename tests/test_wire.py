"""A call as a line of text and arrays: what is said comes back, all of it, and nothing else is in the line."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import tilewise as tw
from tilewise import wire
from tilewise.cases import Case, conformance
from tilewise.expr import H, K, Q, S
from tilewise.spec import Attention, Lengths, Positions
from tilewise.walking import loads


def _again(spec: Attention, kernel: str = "auto") -> tuple[str, Attention]:
    line, given = wire.encode(spec, kernel)
    template = wire.decode(line, given)
    assert template.kernel == kernel
    return line, template.fill(given, spec.sinks)


@pytest.mark.parametrize("case", [c for c in conformance() if c.dtype == "float32"], ids=lambda case: case.name)
def test_what_is_said_comes_back(case: Case) -> None:
    spec = case.inputs().call().spec
    _, again = _again(spec)
    for have, want in ((again.mask, spec.mask), (again.score, spec.score)):
        assert (have is None) == (want is None)
        if have is not None and want is not None:
            assert have.key == want.key
            assert all(x.array is y.array for x, y in zip(loads(have), loads(want), strict=True))
    assert again.sinks is spec.sinks
    assert (again.lengths is None) == (spec.lengths is None)
    if again.lengths is not None and spec.lengths is not None:
        assert again.lengths.q is spec.lengths.q
        assert again.lengths.k is spec.lengths.k


@pytest.mark.parametrize("scale", [0.0, -1.5, 1 / math.sqrt(7), 5e-324, 1.7976931348623157e308])
def test_the_scale_has_all_its_bits(scale: float) -> None:
    assert _again(Attention(scale))[1].scale == scale


def test_nothing_is_forgotten() -> None:
    """A field added to Attention must travel too, but for keeps_remainder, which the operator says."""
    spec = Attention(
        0.5, K <= Q, S * 2.0, np.ones(2), Lengths(np.array([0, 3]), np.array([0, 4])), Positions(1, 2, 30, 40), True,
        tw.Rope(4, 500.0, True, np.arange(3), np.arange(4), np.ones((9, 2)), np.zeros((9, 2))), True,
    )  # fmt: skip
    _, again = _again(spec, "numpy")
    assert again.positions == spec.positions
    assert again.batch_invariant
    assert again.wide_out
    names = "scale", "mask", "score", "sinks", "lengths", "positions", "batch_invariant", "rope", "wide_out"
    assert set(vars(again)) == {*names, "keeps_remainder"}
    assert vars(again.rope) == vars(spec.rope)


def test_an_expression_without_arrays_comes_back_itself() -> None:
    mask = tw.causal() & tw.window(3)
    assert _again(Attention(1.0, mask))[1].mask is mask


def test_an_array_that_mask_and_score_read_travels_once() -> None:
    one, two = np.arange(4), np.arange(3.0)
    spec = Attention(1.0, tw.load(one, Q) == tw.load(one, K), S + tw.load(two, H) * tw.load(one, K))
    line, given = wire.encode(spec, "auto")
    assert [x is y for x, y in zip(given, (one, two), strict=True)] == [True, True]
    assert wire.score_arrays(line) == [1, 0]
    again = wire.decode(line, given).fill(given, wanted=[1])
    assert [slot.array is two for slot in again.wanted] == [True]


def test_sizes_are_not_part_of_the_line() -> None:
    """One compiled graph serves all lengths."""
    lines = {
        wire.encode(Attention(1.0, tw.dense(np.ones((n, n), bool)), tw.bias(np.ones((2, n, 1)))), "auto")[0]
        for n in (3, 40)
    }
    assert len(lines) == 1
    assert json.loads(lines.pop())["mask"] == "load(a0, Q, K)"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Attention(1.0, tw.causal(), tw.alibi(2)), True),
        (Attention(1.0, None, S + tw.load(np.ones(2), tw.B)), False),
        (Attention(1.0, tw.Q + tw.B > K), False),
        (Attention(1.0, lengths=Lengths(np.array([0, 1]), np.array([0, 1]))), False),
    ],
)
def test_who_looks_at_the_batch(spec: Attention, expected: bool) -> None:
    assert wire.ignores_batch(wire.encode(spec, "auto")[0]) == expected

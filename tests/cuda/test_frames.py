"""Values of a row in the frame of a tile: one owner each, and what the generator refuses to mix."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.compositions import composed, drawn
from tests.cuda.test_ops import SHAPE, _values, needs_compiler, numpy_values
from tilewise import arrays, dispatch, validate
from tilewise.contract import (
    backward_results,
    check_results,
    expected_backward,
    expected_forward,
    forward_results,
    gradients_to_pull,
)
from tilewise.derivative import score_slopes
from tilewise.expr import NK, NQ, Expr, H, K, Loaded, Q, S, load
from tilewise.kernels.cuda import ops, terms
from tilewise.kernels.cuda.ops import variant
from tilewise.kernels.cuda.terms import Frame, FrameError, Place, Term
from tilewise.spec import Attention
from tilewise.validate import Call

# A bound of K that is the start of a float as well, joined to nothing by `&` alone.
SHARED: dict[str, tuple[Expr, Any]] = {
    "K <= Q": ((H == 0) | (K <= Q), S - 0.1 * abs(Q - K)),
    "K < Q + 1": ((H == 0) | (K < Q + 1), S - 0.1 * (Q - K)),
    "K <= H + Q": ((H == 0) | (H + Q >= K), S - 0.1 * abs(K - (H + Q))),
    "bottom right": (~(Q + (NK - NQ) < K) & (K % 3 != 1), S + 0.1 * (K - (Q + (NK - NQ)))),
    "a gradient": ((H == 0) | (K <= Q), S - load(np.array([0.1, 0.2], np.float32), H, grad=True) * abs(Q - K)),
    "an index": ((H == 0) | (K <= Q), S - 0.1 * abs(Q - K) + load(np.arange(9, dtype=np.float32) / 9, Q - K)),
}


def _call(name: str) -> Call:
    rng = np.random.default_rng(0)
    q, k, v = (arrays.narrow(rng.standard_normal((1, 2, n, 64)), "float16") for n in (129, 200, 200))
    mask, score = SHARED[name]
    return validate.prepare(q, k, v, mask=mask, score=score)


some_slow = pytest.mark.parametrize(
    "name", [x if x in ("K <= Q", "a gradient") else pytest.param(x, marks=pytest.mark.slow) for x in SHARED]
)


@needs_compiler
@some_slow
@pytest.mark.parametrize("kernel", dispatch.simulated_rungs())
def test_a_bound_may_be_the_start_of_a_float(kernel: str, name: str) -> None:
    call, system = _call(name), dispatch.kernel(kernel)
    done = system.forward(call.spec, call.q, call.k, call.v, None)
    check_results(expected_forward(call), forward_results(done))


@needs_compiler
@some_slow
@pytest.mark.parametrize("kernel", ["cuda-sim/tiled", "cuda-sim/forward_sm90"])
def test_gradients_of_a_bound_that_is_the_start_of_a_float(kernel: str, name: str) -> None:
    call, system = _call(name), dispatch.kernel(kernel)
    saved = system.forward(call.spec, call.q, call.k, call.v, None)
    pulled = gradients_to_pull(call)
    done = system.backward(call.spec, call.q, call.k, call.v, saved, *pulled, None)
    check_results(expected_backward(call, *pulled), backward_results(done))


@needs_compiler
@pytest.mark.parametrize(
    "seeds", [range(10), *(pytest.param(range(n, n + 10), marks=pytest.mark.slow) for n in range(10, 100, 10))], ids=str
)
def test_compositions_are_numpys(seeds: range) -> None:
    for seed in seeds:
        mask, score = composed(seed, SHAPE)
        s, scores, conditions = _values(mask, score)
        assert np.array_equal(conditions, numpy_values(mask, s)), f"seed {seed}: {mask!r}"
        np.testing.assert_allclose(
            scores, numpy_values(score, s), rtol=3e-6, atol=3e-6, err_msg=f"seed {seed}: {mask!r}, {score!r}"
        )


# -- the generator ----------------------------------------------------------------------------------------------------

_FIELD = re.compile(r"^    ([\w<>]+) (\w+(?:, \w+)*);$", re.MULTILINE)
_ASSIGNED = re.compile(r"[^=<>!]=[^=]")
_BOUND = re.compile(r"key\.column [<>]=? (?:row\.)?(\w+)")
_START = re.compile(r"\b(?:row\.)?(\w+) [+-] float\(key\.column\)")
DRAWN = 1200


def _fields(text: str) -> dict[str, dict[str, str]]:
    """The fields of each struct, and their types."""
    structs = re.findall(r"struct (\w+)(?: : \w+)? \{(.*?)\n?\};", text, re.DOTALL)
    return {
        name: {x: type_ for type_, found in _FIELD.findall(body) for x in found.split(", ")} for name, body in structs
    }


def _text(mask: Expr | None, score: Expr | None) -> str:
    return variant(mask, score, score_slopes(Attention(1.0, mask, score))[S]).text


def _mixed(text: str) -> set[str]:
    """Names that are a bound of a mask's tile and what a score's float starts from."""
    return {*_BOUND.findall(text)} & {*_START.findall(text)}


def test_no_name_is_both_a_bound_and_a_start() -> None:
    """Of all that the fuzz draws; among it are bounds of the very sum that a float starts from."""
    shared = 0
    for seed in range(DRAWN):
        text = _text(*drawn(seed, SHAPE))
        assert _mixed(text) == set(), f"seed {seed}:\n{text}"
        fields = _fields(text)["RowInTile"]
        assert all(fields[name] == "int" for name in _BOUND.findall(text))
        assert all(fields[name] == "float" for name in _START.findall(text))
        bounds = re.findall(r"[{,] (row\.r\d+ - first_key)", text)
        shared += any(f"float({bound})" in text for bound in bounds)
    assert shared > DRAWN / 50


def test_a_name_that_is_both_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that takes what a tile made of a row's value for any use, as one did."""
    moved = ops._Writer.moved

    def mistaken(self: Any, value: Term, frame: Frame, type_: str = "int") -> Term:
        return replace(moved(self, value, Frame.FROM_FIRST_KEY), type=type_, frame=frame)

    monkeypatch.setattr(ops._Writer, "moved", mistaken)
    assert len(_mixed(_text(*SHARED["K <= Q"]))) == 1
    assert sum(bool(_mixed(_text(*drawn(seed, SHAPE)))) for seed in range(300)) > 5


def test_no_name_is_used_in_two_frames() -> None:
    """A name is a field of one struct, and nothing is assigned to it after it was made."""
    for seed in range(300):
        text = _text(*drawn(seed, SHAPE))
        fields = _fields(text)
        assert set(fields) == {"Head", "Row", "Key", "RowInTile", "Near"}
        assert max(Counter(x for found in fields.values() for x in found).values()) == 1, text
        assert {name for name, found in fields.items() if any(x.startswith("t") for x in found)} <= {"RowInTile"}
        assigned = [line.strip() for line in text.splitlines() if _ASSIGNED.search(line)]
        assert all(line.startswith("const") for line in assigned), assigned


def test_a_value_of_both_has_two_names() -> None:
    """The row's own value is one; the bound and the start that a tile makes of it are two more."""
    text = variant(*SHARED["K <= Q"]).text
    made = re.findall(r"return \{row, (.*)\};", text)
    assert len(made) == 1
    bound, _, start = made[0].split(", ")
    assert start == f"float({bound})"
    row = re.fullmatch(r"row\.(r\d+) - first_key", bound)
    assert row is not None
    assert f"const int {row[1]} = Q - head.origin_k;" in text


def test_named_variants_share_what_they_have_in_common() -> None:
    """The same sum is one value of the row, however its parts were added: the bound of the one starts the other."""
    text = variant(tw.causal() | tw.prefix(9), tw.alibi(4)).text
    bounds = set(re.findall(r"[{,] (row\.r\d+ - first_key)", text))
    assert any(f"float({bound})" in text for bound in bounds)


def test_what_no_score_reads_is_not_held() -> None:
    """Where keys end is the one value of a tile that every mask needs; a row holds no float for a tile to replace."""
    text = variant(load(np.zeros(9, bool), H), S + load(np.zeros(4, np.float32), H)).text
    assert list(_fields(text)["RowInTile"].values()) == ["int"]
    fields = _fields(variant(*SHARED["K <= Q"]).text)
    assert set(fields["Row"].values()) == {"int"}
    assert sorted(fields["RowInTile"].values()) == ["float", "int", "int"]


def _row(frame: Frame) -> Term:
    return Term("t1", "int", Place.ROW, frame=frame)


@pytest.mark.parametrize("frame", [Frame.FROM_FIRST_KEY, Frame.TO_FIRST_KEY])
def test_operations_take_absolute_values_alone(frame: Frame) -> None:
    writer = ops._Writer()
    for op in ("add", "lt", "float", "neg", "minimum"):
        args = (_row(frame), _row(frame))[: 1 if op in ("float", "neg") else 2]
        with pytest.raises(FrameError, match=f"t1 \\({frame.name}\\)"):
            writer._ops()[op](*args)
    with pytest.raises(FrameError):
        writer._load(Loaded(np.zeros(3, np.float32)), _row(frame))
    with pytest.raises(FrameError):
        writer.moved(_row(frame), frame)
    with pytest.raises(FrameError):
        writer.function("bool", "mask", lambda: _row(frame))


def test_columns_meet_values_of_their_frame_alone() -> None:
    assert terms.compared_with_column("<=", _row(Frame.FROM_FIRST_KEY)) == "key.column <= row.t1"
    assert terms.joined_to_column(1, _row(Frame.TO_FIRST_KEY)) == "row.t1 + float(key.column)"
    assert terms.joined_to_column(-1, _row(Frame.FROM_FIRST_KEY)) == "row.t1 - float(key.column)"
    for frame in (Frame.ABSOLUTE, Frame.TO_FIRST_KEY):
        with pytest.raises(FrameError, match=frame.name):
            terms.compared_with_column("<=", _row(frame))
    for sign, frame in ((1, Frame.ABSOLUTE), (-1, Frame.ABSOLUTE), (1, Frame.FROM_FIRST_KEY), (-1, Frame.TO_FIRST_KEY)):
        with pytest.raises(FrameError, match=frame.name):
            terms.joined_to_column(sign, _row(frame))

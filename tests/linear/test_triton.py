"""Linear attention in Triton, by its interpreter: several segments, chunks of other sizes, the same bits again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.linear.cases_on_gpu import RAW
from tilewise import arrays
from tilewise.linear import contract, dispatch
from tilewise.linear.cases import CASES, LinearCase
from tilewise.linear.kernels.operands import tensors_of

TRITON = dispatch.kernel("triton")
pytestmark = pytest.mark.skipif(TRITON.unavailable() is not None, reason=str(TRITON.unavailable()))
NAMES = ("decay by token", "gates, grouped heads", "packed", "all of a sequence")
IN_SEGMENTS = [replace(case, n=70) for case in CASES if case.name in NAMES]


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chunks each, as a GPU would have them in a long sequence."""
    from tilewise.linear.kernels.triton import call

    monkeypatch.setattr(call, "segment_rows", lambda n, chunk, programs, slots: 2 * chunk)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("case", IN_SEGMENTS, ids=lambda case: case.name)
def test_segments(case: LinearCase) -> None:
    contract.check(TRITON, case.problem(), chunk=16)


BF16: dict[str, Any] = {"dtype": "bfloat16"}
PREPARED = [
    LinearCase("segments", 1, 2, 2, n=70, d=16, d_v=16, **BF16),
    LinearCase("grouped, carried", 2, 4, 2, n=50, d=16, d_v=16, carried=True, **BF16),
    LinearCase("scaled, not normalized", 1, 2, 1, n=50, d=16, d_v=16, scale=0.5, normalize=False, **BF16),
    LinearCase("no features", 1, 2, 1, n=50, d=16, d_v=16, feature_map="identity", scale=0.5, **BF16),
    LinearCase("heads that are padded", 1, 2, 1, n=37, d=40, d_v=24, **BF16),
    LinearCase("packed", lengths=(0, 21, 21, 60), d=16, d_v=16, carried=True, **BF16),
]
OTHERS = [
    LinearCase("widths that differ", 1, 2, 1, n=40, d=80, d_v=24, **BF16),
    LinearCase("gates, grouped", 1, 4, 2, n=70, d=16, d_v=16, decay="token", carried=True, scale=0.5, **BF16),
    LinearCase("gates, packed", lengths=(0, 21, 21, 60), d=16, d_v=16, decay="token", **BF16),
    LinearCase("all of a sequence", 1, 4, 2, n=70, d=16, d_v=16, causal=False, carried=True, **BF16),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, in their order."""
    from tilewise.linear.kernels.triton.tape import Tape

    names: list[str] = []
    launch = Tape.launch
    monkeypatch.setattr(Tape, "launch", lambda tape, kernel, *args, **named: (
        names.append(kernel.fn.__name__), launch(tape, kernel, *args, **named)
    ))  # fmt: skip
    return names


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("case", [*PREPARED, *OTHERS], ids=lambda case: case.name)
def test_rows_that_are_made_ready(case: LinearCase, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.linear.kernels.triton import call

    monkeypatch.setattr(call, "LARGE", 0)
    problem = case.problem()
    if case.feature_map == "identity":  # whose weights have a sum to divide by if none is below 0
        q, k, v = (arrays.widen(x, np.float32) for x in (problem.q, problem.k, problem.v))
        given = {"q": abs(q), "k": abs(k), "v": v + 2}  # of which a row's sum of weights has a gradient that counts
        problem = replace(problem, **{name: arrays.narrow(x, case.dtype) for name, x in given.items()})
    contract.check(TRITON, problem, chunk=16)
    assert "map_rows" in launched and ("pull_rows" in launched) is case.normalize
    assert ("weigh_rows" in launched) is ("z_rows" in launched) is (case.normalize and case.causal)
    assert ("plain_outputs" in launched) is (case in PREPARED) is not ("outputs" in launched)


AT_ONCE = 16  # chunks whose z is found side by side, as many as a chunk has rows
LONG_SEGMENTS = [
    LinearCase("more chunks than go at once", 1, 2, 1, n=300, d=16, d_v=16, **BF16),
    LinearCase("and gates", 1, 2, 1, n=300, d=16, d_v=16, decay="token", carried=True, **BF16),
    LinearCase("one segment", 1, 2, 1, n=10, d=16, d_v=16, decay="token", carried=True, **BF16),
]


@pytest.mark.parametrize("case", LONG_SEGMENTS, ids=lambda case: case.name)
def test_rows_that_are_made_ready_in_long_segments(case: LinearCase, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.linear.kernels.triton import call

    monkeypatch.setattr(call, "LARGE", 0)
    monkeypatch.setattr(call, "segment_rows", lambda n, chunk, programs, slots: (AT_ONCE + 4) * chunk)
    contract.check(TRITON, case.problem(), chunk=AT_ONCE)


def test_sums_that_cancel_are_divided_in_float32() -> None:
    """Keys have a large part in common, to which queries are almost orthogonal."""
    from tilewise.linear.kernels.triton import call

    rng = np.random.default_rng(0)
    case = LinearCase("cancelling", 1, 1, 1, n=64, d=16, d_v=16, feature_map="identity", **BF16)
    common = np.zeros(16)
    common[:2] = 8.0, 8.0
    q = rng.standard_normal((1, 1, 64, 16)) / 8
    q[..., 1] = 0.02 - q[..., 0]
    k = common + rng.standard_normal((1, 1, 64, 16)) / 8
    rows = {name: arrays.narrow(x, case.dtype) for name, x in (("q", q), ("k", k))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "LARGE", 0)
        contract.check(TRITON, replace(case.problem(), **rows), chunk=64)


@pytest.mark.parametrize(("options", "backward", "are_ready"), [
    ({}, False, True), ({}, True, True), ({"n": 8}, False, False), ({"dtype": "float16"}, False, False),
    ({"dtype": "float32"}, True, False), ({"causal": False}, False, False), ({"causal": False}, True, True),
], ids=str)  # fmt: skip
def test_which_calls_make_rows_ready(
    options: dict[str, Any], backward: bool, are_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.linear.kernels.triton import call
    from tilewise.linear.kernels.triton.tape import Tape

    monkeypatch.setattr(call, "LARGE", 2 * 9 * 16)
    case = LinearCase("any", 1, 2, 1, **{"n": 9, "d": 16, "d_v": 16, **BF16, **options})
    problem = tensors_of(case.problem(), lambda x: x)
    assert call.Call(problem, call.segments_of(problem), None, Tape(), backward).prepares is are_ready


def test_segments_of_packed_sequences_are_no_longer_than_those() -> None:
    from tilewise.linear.kernels.triton import call

    case = LinearCase("packed", 1, 8, 8, lengths=(0, 21, 21, 400), d=64, d_v=64, **BF16)
    segments = call.segments_of(tensors_of(case.problem(), lambda x: x))
    assert segments.rows == int((segments.table[:, 1] - segments.table[:, 0]).max().item() + 63) // 64 * 64


PLAIN = [
    LinearCase("segments", 1, 2, 2, n=70, d=16, d_v=16, **RAW),
    LinearCase("grouped, carried, scaled", 2, 4, 2, n=50, d=16, d_v=16, carried=True, scale=0.5, **RAW),
    LinearCase("heads that are padded", 1, 2, 1, n=37, d=40, d_v=24, **RAW),
    LinearCase("packed", lengths=(0, 21, 21, 60), d=16, d_v=16, carried=True, **RAW),
]


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_plain_calls_have_a_kernel_of_their_own(case: LinearCase, launched: list[str]) -> None:
    contract.check(TRITON, case.problem(), chunk=16)
    assert "plain_outputs" in launched and "outputs" not in launched


@pytest.mark.parametrize("other", [{"feature_map": "elu"}, {"normalize": True}, {"dtype": "float16"}, {"decay": "head"},
                                   {"d_v": 80}, {"causal": False}], ids=str)  # fmt: skip
def test_other_calls_are_not_plain(other: dict[str, Any]) -> None:
    from tilewise.linear.kernels.triton.call import Call, segments_of
    from tilewise.linear.kernels.triton.tape import Tape

    for options, is_plain in (({}, True), (other, False)):
        problem = tensors_of(LinearCase("any", n=9, **{"d": 16, "d_v": 16, **RAW, **options}).problem(), lambda x: x)
        assert Call(problem, segments_of(problem), None, Tape()).is_plain is is_plain


@pytest.mark.usefixtures("short_segments")
def test_columns_are_shared_by_programs() -> None:
    """A state of 80 x 100 is more than one program has."""
    contract.check(TRITON, LinearCase("wide", 1, 1, 1, n=40, d=80, d_v=100, decay="head").problem(), chunk=16)


@pytest.mark.usefixtures("short_segments")
def test_gradients_have_the_same_bits_again() -> None:
    problem = LinearCase("any", 1, 4, 2, n=70, decay="token", dtype="bfloat16").problem()
    d_out, d_state = contract.gradients_to_pull(problem)
    first, second = (
        contract.backward_results(TRITON.backward(problem, TRITON.forward(problem), d_out, d_state)) for _ in range(2)
    )
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name], err_msg=name)


def test_wide_heads_are_refused() -> None:
    shape = LinearCase("wide", 1, 1, 1, n=4, d=200).problem().shape
    assert "room for 128 x 128, and they are 200 and 16" in str(TRITON.unsupported(shape))


def test_segments_fill_a_gpu_and_no_more() -> None:
    from tilewise.linear.kernels.triton.call import segment_rows

    assert segment_rows(16384, 64, programs=32, slots=264) == 2048  # eight segments: 256 programs
    assert segment_rows(2048, 64, programs=256, slots=264) == 2048  # heads enough
    assert segment_rows(100, 64, programs=2, slots=264) == 128  # too short to be worth a state


def test_tables_stay_for_graphs_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.pytorch import graphs

    before = LinearCase("any", n=37).problem()
    TRITON.forward(before)
    monkeypatch.setattr(graphs, "is_capturing", lambda: True)
    monkeypatch.setattr(graphs, "held", {})
    TRITON.forward(before)
    assert graphs.held
    with pytest.raises(RuntimeError, match="captured around a call that was never made before"):
        TRITON.forward(LinearCase("any", n=38).problem())

"""The judge of random calls: each rule that it judges by is shown. test_fuzz_judge_agrees.py asks others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.fuzzing.judging.errors import Bounded
from tests.fuzzing.judging.exact import answer
from tests.fuzzing.judging.slopes import slopes
from tests.fuzzing.judging.values import Values, evaluate, kind_of
from tests.fuzzing.judging.walk import ExpressionError, read, read_score
from tests.fuzzing.question import Cache, Given, LinearQuestion, Numbers, Question

LEAST, MOST = -(2**63), 2**63 - 1

# -- what each operation means ----------------------------------------------------------------------------------------

Q, K = np.arange(4)[:, None], np.arange(5)
ENV = {
    "B": np.int64(1), "H": np.int64(5), "HK": np.int64(2), "Q": Q, "K": K, "NQ": np.int64(4), "NK": np.int64(5),
    "QP": Q + 10, "KP": K + 20, "S": (Q - K) / 2,
}  # fmt: skip
ARRAYS = (
    Given(np.array([10, 20, 30]), "int64"),
    Given(np.array([[0.5, -1.5], [2.5, 3.5]]), "float32"),
    Given(np.array([LEAST, MOST, -1, 0, 2**53 + 1, 2**53]), "int64"),
    Given(np.array([True, False]), "bool"),
    Given(np.asarray(7.0), "float64"),
)
LOADS = {name: f"load(a2, {i} + 0 * Q)" for i, name in enumerate(("LEAST", "MOST", "MINUS_1", "NONE", "ODD", "EVEN"))}


def _value(text: str, dtype: Any = np.float64) -> Numbers:
    for name, load in LOADS.items():
        text = text.replace(name, load)
    walk = read(text, tuple(map(kind_of, ARRAYS)))
    with np.errstate(all="ignore"):
        return np.asarray(evaluate(walk, ENV, ARRAYS, Values(dtype))[-1])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Division of whole numbers floors, the remainder has the divisor's sign, and by 0 both are 0.
        ("(Q - 7) // 2", (Q - 7) // 2),
        ("(Q - 7) % 3", (Q - 7) % 3),
        ("(Q + 7) // -3", [[-3], [-3], [-3], [-4]]),
        ("(Q + 7) % -3", [[-2], [-1], [0], [-2]]),
        ("(Q + 5) // (Q - Q)", 0),
        ("(Q - 5) % (K - K)", 0),
        ("5 // Q", [[0], [5], [2], [1]]),
        # Floats: floor of the quotient, and what is left.
        ("-7.5 // 2.0", -4.0),
        ("-7.5 % 2.0", 0.5),
        ("7.5 % -2.0", -0.5),
        ("1.0 // (Q * 0.0)", np.inf),
        ("0.0 % (Q * 0.0)", np.nan),
        # `/` makes floats; an int beside a float becomes one; a whole number alone does not.
        ("(Q - 3) / 2", (Q - 3) / 2),
        ("7 / 2", 3.5),
        ("Q + 0.5", Q + 0.5),
        ("minimum(Q, 1.5)", [[0.0], [1.0], [1.5], [1.5]]),
        ("where(Q > 1, Q, 0.5)", [[0.5], [0.5], [2.0], [3.0]]),
        ("Q > 1.5", Q > 1),
        ("float(Q) // 2", Q // 2 * 1.0),
        # Whole numbers have 64 bits, wrap around, and are compared as they are.
        ("MOST + 1", LEAST),
        ("LEAST - 1", MOST),
        ("-LEAST", LEAST),
        ("abs(LEAST)", LEAST),
        ("MOST * 2", -2),
        ("LEAST // MINUS_1", LEAST),
        ("LEAST % MINUS_1", 0),
        ("MOST // 2", 2**62 - 1),
        ("MOST % 10", 7),
        ("ODD == EVEN", False),
        ("float(ODD) == float(EVEN)", True),
        # Any index is clamped to its array.
        ("load(a0, Q - 100)", 10),
        ("load(a0, 100 * (Q + 1))", 30),
        ("load(a0, Q - 1)", [[10], [10], [20], [30]]),
        ("load(a1, H, -H)", 2.5),
        ("load(a1, MOST, LEAST)", 2.5),
        ("load(a4)", 7.0),
        ("a4 + 1", 8.0),
        # Conditions.
        ("(Q > 1) & ~(K > 2)", (Q > 1) & (K < 3)),
        ("(Q > 1) | (K > 2)", (Q > 1) | (K > 2)),
        ("where(Q > 1, K > 2, K < 1)", np.where(Q > 1, K > 2, K < 1)),
        ("(Q > 1) == (K > 2)", (Q > 1) == (K > 2)),
        ("load(a3, K) != (Q < 2)", [[False, True, True, True, True]] * 2 + [[True, False, False, False, False]] * 2),
        ("Q != K", Q != K),
        # Variables, functions, names, and scores after one another.
        ("B + 10 * HK + 100 * H", 521),
        ("QP * 100 + KP", (Q + 10) * 100 + K + 20),
        ("NK - NQ", 1),
        ("abs(Q - K) + maximum(Q, 2) + min(K, 1)", abs(Q - K) + np.maximum(Q, 2) + np.minimum(K, 1)),
        ("exp(S) + log(Q + 1) + tanh(K)", np.exp((Q - K) / 2) + np.log(Q + 1.0) + np.tanh(K)),
        ("log(Q * 0)", -np.inf),
        ("where(Q < K, -inf, S)", np.where(Q < K, -np.inf, (Q - K) / 2)),
        ("t0 = Q + 1; t1 = t0 * t0; t1 - t0", (Q + 1) ** 2 - (Q + 1)),
        ("S * 2 >> S + 1 >> S * S", (Q - K + 1.0) ** 2),
        ("t0 = S + 1; K >> t0 * S", (K + 1.0) * K),
        ("t0 = S + 1; t0 >> t0 * S", ((Q - K) / 2 + 2) * ((Q - K) / 2 + 1)),
        ("-(-3) - -2", 5),
        ("2 - 3 - 4 * 5 % 3", -3),
    ],
)
def test_an_operation_means(text: str, value: Any) -> None:
    found, expected = _value(text), np.asarray(value)
    assert np.array_equal(found, np.broadcast_to(expected, found.shape), equal_nan=found.dtype.kind == "f")
    assert found.dtype.kind == expected.dtype.kind


def test_floats_have_the_type_computed_in() -> None:
    assert _value("0.1 + 0.2", np.float32) == np.float32(0.1) + np.float32(0.2)
    assert _value("float(MOST)", np.float32).dtype == np.float32
    assert _value("load(a1, 0 * Q, 0 * Q) / 3", np.longdouble).dtype == np.longdouble


@pytest.mark.parametrize(
    "text",
    [
        "Q & K", "~Q", "(Q > 1) + 1", "where(Q, 1, 2)", "load(a0, 0.5)", "load(a9, Q)", "Q and K", "Q ** 2",
        "Q < K < 3", "'a'", "__import__('os')", "Q.real", "[1]", "exp(Q > 1)", "(Q > 1) < (K > 1)", "x", "abs(Q, K)",
        "x = Q; x", "1 if Q else 2", "exp(x=Q)",
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        read(text, tuple(map(kind_of, ARRAYS)))


# -- slopes where they are not unique ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "at", "slope"),
    [
        ("abs(S)", 0.0, 0.0),
        ("abs(S)", -2.0, -1.0),
        ("minimum(S, 2.0)", 2.0, 1.0),
        ("minimum(2.0, S)", 2.0, 0.0),
        ("maximum(S, 2.0)", 2.0, 1.0),
        ("maximum(2.0, S)", 2.0, 0.0),
        ("maximum(S, S)", 2.0, 1.0),
        ("minimum(S * 2, S * 3)", 0.0, 2.0),
        ("where(S > 0.0, S, 0.0)", 0.0, 0.0),
        ("where(S >= 0.0, S * 3, -S)", 0.0, 3.0),
        ("where(S > 0.0, log(S), 0.0)", 0.0, 0.0),
        ("where(S > 0.0, 1.0 / S, 0.0)", 0.0, 0.0),
        ("S // 0.3", 1.0, 0.0),
        ("S % 0.3", 1.0, 1.0),
        ("7.5 % S", 2.0, -3.0),
        ("Q + 0 * K", 1.0, None),
        ("S * S * S", 2.0, 12.0),
        ("exp(2 * S) / S", 1.0, np.exp(2.0)),
        ("tanh(S) * 1.0 - -S", 0.0, 2.0),
        ("log(S) + 1 / S", 2.0, 0.25),
        ("S - S", 3.0, 0.0),
        ("S * 2 >> S * S", 3.0, 24.0),
        ("float(Q) * S", 3.0, [[0.0], [1.0], [2.0], [3.0]]),
    ],
)
def test_a_slope_is(text: str, at: float, slope: Any) -> None:
    walk = read_score(text)
    with np.errstate(all="ignore"):
        found = evaluate(walk, {**ENV, "S": np.float64(at)}, (), Values(np.float64))
        by = slopes(walk, found, (), Values(np.float64))
    (got,) = by.values() if by else (None,)
    assert got is None if slope is None else np.allclose(got, slope, rtol=1e-14, atol=0)


# -- what attention means ---------------------------------------------------------------------------------------------


def given(values: Any, dtype: str = "float32", wants_gradient: bool = False) -> Given:
    return Given(np.asarray(values), dtype, wants_gradient=wants_gradient)


def small(heads: int = 1, heads_k: int = 1, n_q: int = 3, n_k: int = 4, batch: int = 1, **more: Any) -> Question:
    """Numbers that float32 has, and a gradient for each result."""
    rng = np.random.default_rng(7)

    def some(*shape: int) -> Given:
        return given(rng.integers(-8, 9, shape) / 8)

    q, k, v = some(batch, heads, n_q, 2), some(batch, heads_k, n_k, 2), some(batch, heads_k, n_k, 3)
    d_out, d_lse = some(batch, heads, n_q, 3), some(batch, heads, n_q)
    return Question(q, k, v, **{"scale": 0.5, "d_out": d_out, "d_lse": d_lse, **more})


def exactly(question: Question) -> dict[str, Numbers]:
    found = answer(question)
    assert found.unfit is None
    return {what: x.exact for what, x in found.results.items()}


def weights(question: Question, score: Numbers) -> Numbers:
    """Of scores that somebody else has made."""
    p = np.exp(score)
    total = p.sum(-1, keepdims=True)
    return p / np.where(total == 0, 1, total)


def products(question: Question) -> Numbers:
    q, k = question.q.values, question.k.values
    return question.scale * (q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2))


def test_attention_is_a_softmax() -> None:
    question = small()
    found, p = exactly(question), weights(question, products(question))
    assert np.allclose(found["out"], p @ question.v.values, rtol=1e-14)
    assert np.allclose(found["lse"], np.log(np.exp(products(question)).sum(-1)), rtol=1e-14)


def test_a_row_without_keys_is_0_and_its_lse_minus_infinity() -> None:
    found = exactly(small(mask="Q > 0"))
    assert (found["out"][:, :, 0] == 0).all() and (found["lse"][:, :, 0] == -np.inf).all()
    assert (found["d_q"][:, :, 0] == 0).all() and not np.isnan(found["d_k"]).any()
    assert (found["out"][:, :, 1:] != 0).all()


def test_no_keys_at_all() -> None:
    found = exactly(small(n_k=0))
    assert (found["out"] == 0).all() and (found["lse"] == -np.inf).all() and (found["d_q"] == 0).all()


def test_a_score_of_minus_infinity_is_a_masked_key() -> None:
    masked, scored = exactly(small(mask="K <= Q")), exactly(small(score="where(K <= Q, S, -inf)"))
    for what, values in masked.items():
        assert np.array_equal(values, scored[what]), what


@pytest.mark.parametrize("more", [{"score": "where(K > 0, S / K, -inf)"}, {"score": "S / K", "mask": "K > 0"}])
def test_nothing_flows_through_a_masked_key_whatever_its_slope(more: dict[str, Any]) -> None:
    found = exactly(small(**more))
    assert all(not np.isnan(x).any() for x in found.values())
    assert (found["d_k"][:, :, 0] == 0).all()


def test_query_heads_share_keys_one_group_after_the_other() -> None:
    question = small(heads=4, heads_k=2, score="S + HK * 2 - H", mask="K < HK + 2")
    h, k = np.arange(4)[:, None, None], np.arange(4)
    score = np.where(k < h // 2 + 2, products(question) + h // 2 * 2 - h, -np.inf)
    found, p = exactly(question), weights(question, score)
    assert np.allclose(found["out"], p @ np.repeat(question.v.values, 2, axis=1), rtol=1e-13)
    d_v = p.swapaxes(-1, -2) @ question.d_out.values  # type: ignore[union-attr]
    assert np.allclose(found["d_v"], d_v.reshape(1, 2, 2, 4, 3).sum(2), rtol=1e-13)


def test_sinks_join_the_sum_and_have_no_value() -> None:
    sinks = [0.5, -np.inf]
    question = small(heads=2, sinks=given(sinks), mask="Q > 0")
    found = exactly(question)
    p = np.exp(products(question)[:, :, 1:])
    total = p.sum(-1, keepdims=True) + np.exp(np.reshape(sinks, (2, 1, 1)))
    assert np.allclose(found["out"][:, :, 1:], p / total @ question.v.values, rtol=1e-14)
    assert found["lse"][0, :, 0].tolist() == sinks and (found["out"][:, :, 0] == 0).all()
    assert found["d_sinks"][1] == 0 and found["d_sinks"][0] != 0


def test_packed_sequences_are_as_each_alone() -> None:
    text = "S - 0.25 * (Q + NK - NQ - K) + load(a0, QP) * load(a1, KP) + B"
    tables = (given([1.0, 2.0, 3.0, 4.0, 5.0]), given([1.0, -1.0, 0.5, 2.0, 0.0, 3.0]))
    whole = small(n_q=5, n_k=6, lengths=((0, 2, 2, 5), (0, 3, 5, 6)), score=text, arrays=tables, mask="K < 5")
    found = exactly(whole)
    for i, (rows, keys) in enumerate(((slice(0, 2), slice(0, 3)), (slice(2, 5), slice(5, 6)))):
        one = replace(
            whole, lengths=None, score=text.replace("B", str(2 * i)), arrays=(
                given(tables[0].values[rows]), given(tables[1].values[keys])),
            **{name: given(getattr(whole, name).values[:, :, part])
               for name, part in (("q", rows), ("k", keys), ("v", keys), ("d_out", rows), ("d_lse", rows))},
        )  # fmt: skip
        alone = exactly(one)
        for what, part in (("out", rows), ("lse", rows), ("d_q", rows), ("d_k", keys), ("d_v", keys)):
            assert np.allclose(found[what][:, :, part], alone[what], rtol=1e-13, atol=1e-15), what
    assert (found["d_k"][:, :, 3:5] == 0).all()  # of a sequence without queries


def test_a_part_has_the_positions_of_the_whole() -> None:
    whole = small(n_q=5, n_k=6, mask="K <= Q + NK - NQ", score="S + Q * 0.5 - K + 0.1 * (QP - Q) * (K - KP - 1)")
    part = replace(
        whole, origin=(2, 0), total=(5, 6),
        **{name: given(getattr(whole, name).values[:, :, 2:]) for name in ("q", "d_out", "d_lse")},
    )  # fmt: skip
    # QP is counted from the part's own first row.
    score = "S + Q * 0.5 - K + 0.1 * (0 - 2) * (0 - 1)"
    assert np.allclose(
        exactly(part)["out"], exactly(replace(whole, score=score))["out"][:, :, 2:], rtol=1e-13, atol=1e-15
    )


def test_a_cache_has_each_sequences_own_length() -> None:
    text = "S - 0.25 * (Q + (NK - NQ) - K) * (B + 1) + load(a0, K)"
    question = small(
        batch=2, n_q=2, n_k=6, score=text, mask="K <= Q + (NK - NQ)", arrays=(given(np.arange(6) / 4),),
        cache=Cache((3, 6)), d_out=None, d_lse=None,
    )  # fmt: skip
    question.k.values[0, :, 3:] = question.v.values[0, :, 3:] = np.nan  # nobody reads there
    found = exactly(question)
    for b, n in ((0, 3), (1, 6)):
        alone = replace(
            question, cache=None, score=text.replace("B", str(b)), arrays=(given(np.arange(n) / 4),),
            q=given(question.q.values[b : b + 1]), k=given(question.k.values[b : b + 1, :, :n]),
            v=given(question.v.values[b : b + 1, :, :n]),
        )  # fmt: skip
        assert np.array_equal(found["out"][b], exactly(alone)["out"][0])


def test_arrays_have_gradients_by_first_appearance_in_the_score() -> None:
    arrays = tuple(given(np.full(4, x), wants_gradient=wants) for x, wants in ((1.0, True), (2.0, False), (3.0, True)))
    question = small(
        n_q=4, score="S + load(a2, K) * load(a1, Q) + load(a0, Q - K)", mask="load(a0, K) > 0.0", arrays=arrays
    )  # fmt: skip
    found = answer(question).results
    assert list(found) == ["out", "lse", "d_q", "d_k", "d_v", "d_array 0", "d_array 1"]
    assert np.abs(found["d_array 1"].exact[1:]).min() > 0 and found["d_array 0"].exact.shape == (4,)
    assert list(answer(replace(question, score="S")).results) == ["out", "lse", "d_q", "d_k", "d_v"]  # the mask's own


def test_types_of_results() -> None:
    question = small(sinks=given([0.5], "bfloat16"), score="S * load(a0)", arrays=(given(0.5, "float64", True),))
    found = answer(replace(question, **{name: given(getattr(question, name).values, "float16") for name in "qkv"}))
    assert {what: (x.dtype, x.rounded_as) for what, x in found.results.items()} == {
        "out": ("float16", "float16"), "lse": ("float32", "float32"), "d_q": ("float16", "float16"),
        "d_k": ("float16", "float16"), "d_v": ("float16", "float16"), "d_sinks": ("bfloat16", "bfloat16"),
        "d_array 0": ("float64", "float16"),
    }  # fmt: skip
    wide = answer(replace(question, **{name: given(getattr(question, name).values, "float64") for name in "qkv"}))
    assert wide.results["lse"].dtype == "float64" and wide.results["out"].exact.dtype == np.longdouble
    assert wide.results["out"].dense.dtype == np.float32


def test_what_storing_takes_from_out_makes_gradients_more_exact() -> None:
    """In saturated rows, where d_score is a difference of numbers nearly equal."""
    rng, errors = np.random.default_rng(1), []
    q, k, v, d_out = (given(x, "float16") for x in np.float64(np.float16(rng.standard_normal((4, 1, 2, 30, 16)))))
    for found in answer(Question(given(q.values * 8, "float16"), k, v, 0.5, d_out=d_out)).results.values():
        lost, kept = (np.abs(x.dense - x.exact).max() for x in (found, found.with_remainder))
        if found.what in ("out", "lse", "d_v"):
            assert kept == lost
        else:
            errors.append(kept / lost)
    assert len(errors) == 2 and max(errors) < 0.8
    wide = answer(small()).results["d_q"]
    assert wide.with_remainder is wide  # nothing is lost


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"score": "S / (Q - Q)"}, "scores NaN"),
        ({"score": "exp((S + 8) * 1000)"}, "scores NaN"),
        ({"score": "S * 1e8"}, "weights that rounding changes"),
        ({"score": "where(S < S * 1.0000000001, -inf, S)"}, "too close to call"),
        ({"mask": "log(K + 1.0) >= log(K + 1.0)"}, "too close to call"),
        ({"score": "S + tanh((S + 8) * 1e37)"}, "slopes NaN"),
        ({"score": "S + (Q + 1) * 2147483647 * 2"}, "beyond 32 bits"),
        ({"score": "S + load(a0, K)", "arrays": (given([1.0, 2.0]),)}, "which needs 4"),
        ({"score": "S + load(a0, K + 0)", "arrays": (given([1.0, 2.0]),)}, "which needs 4"),
        ({"sinks": given([60000.0], "float16"), "d_lse": given(np.full((1, 1, 3), 3e4))}, "range of their type"),
        # Each of these is near one of those, and can be judged.
        ({"score": "where(K > Q, -inf, S) - 2 / (K + 1)"}, None),
        ({"score": "S + tanh((S + 8) * 1e7)"}, None),
        ({"mask": "0.5 * K >= 0.25 * Q"}, None),
        ({"score": "S * load(a0, K + 1)", "arrays": (given([1.0, 2.0]),)}, None),
        ({"score": "S + float(load(a0, K + 1) * 2147483647)", "mask": "K < 1", "arrays": (given([4, 0]),)}, None),
    ],
)
def test_unfit(more: dict[str, Any], why: str | None) -> None:
    reason = answer(small(**more)).unfit
    assert reason is None if why is None else why in (reason or "fit")


@pytest.mark.parametrize(
    ("text", "s", "off", "least", "most"),
    [
        ("S + 1000.0", 0.5, 0.0, 0.0, 0.0),  # short numbers: nothing is lost
        ("S + 0.1", 0.3, 0.0, 1e-8, 1e-7),
        ("S * S", 3.0, 0.01, 0.06, 0.061),
        ("1.0 / S", 0.5, 0.01, 0.04, 0.041),
        ("1.0 / S", 0.5, 0.6, np.inf, np.inf),
        ("S // 0.1", 0.3, 0.0, 1.0, 1.1),  # either side of a step
        ("S // 0.1", 0.35, 0.0, 0.0, 1e-6),
        ("S % 0.5", 0.7, 0.01, 0.01, 0.02),
        ("S % 0.5", 1.0, 0.01, 0.5, 0.52),
        ("exp(S)", 2.0, 0.1, 7.39 * 0.1051, 7.4 * 0.1052),
        ("log(S)", 2.0, 0.1, 0.05, 0.06),
        ("tanh(S)", 20.0, 0.1, 1e-7, 1e-6),
        ("where(S > 1.0, 5.0, S)", 1.0, 0.01, 4.0, 4.1),
        ("where(S > 1.0, 5.0, S)", 2.0, 0.01, 0.0, 0.0),
        ("maximum(S, 1.0)", 0.0, 0.01, 0.0, 0.0),
        ("maximum(S, 1.0)", 0.995, 0.01, 0.01, 0.01),
        ("load(a0, where(S > 1.0, 0, 1)) * 1.0", 1.0, 0.01, np.inf, np.inf),
        ("where(S > -inf, 1.0, 2.0)", -np.inf, 0.0, 0.0, 0.0),
        ("exp(S)", 100.0, 0.0, np.inf, np.inf),  # beyond float32
    ],
)
def test_an_error_grows_by(text: str, s: float, off: float, least: float, most: float) -> None:
    """Of a number that is S, give or take `off`, in a kernel that computes in float32."""
    with np.errstate(all="ignore"):
        env = {"S": (np.float64(s), off)}
        _, error = evaluate(read(text, tuple(map(kind_of, ARRAYS))), env, ARRAYS, Bounded("float32"))[-1]
    assert least <= error <= most


def test_a_sum_of_weights_near_0_divides_no_row() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (given(rng.integers(-8, 9, (1, 1, 6, 3)) / 8) for _ in range(3))
    k.values[0, 0, 3:] = -k.values[0, 0, :3]
    assert "sums of weights" in (answer(LinearQuestion(q, k, v, causal=False)).unfit or "fit")
    assert answer(LinearQuestion(q, k, v, causal=False, normalize=False)).unfit is None
    assert answer(LinearQuestion(q, k, v, feature="exp(S)", causal=False)).unfit is None
    nothing = answer(LinearQuestion(q, k, v, feature="where(S > 2.0, S, 0.0)"))  # no weights at all, and no rounding
    assert nothing.unfit is None and (nothing.results["out"].exact == 0).all()

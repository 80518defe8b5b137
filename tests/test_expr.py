"""Expressions: what operators build, what they mean, and what they refuse."""

from __future__ import annotations

import math
import operator
import pickle
import time
import weakref

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.strategies import value
from tilewise import expr as ex
from tilewise.derivative import derivative
from tilewise.expr import BOOL, FLOAT, INT, NK, NQ, B, H, K, Q, S, load
from tilewise.walking import evaluate

GRID = [-7, -3, -2, -1, 0, 1, 2, 5]
FLOAT_GRID = [-2.5, -1.0, -0.25, 0.0, 0.5, 1.0, 3.75]


def _or_zero(function):
    return lambda a, b: 0 if b == 0 else function(a, b)


BINARY = {
    "add": (operator.add, operator.add, INT),
    "sub": (operator.sub, operator.sub, INT),
    "mul": (operator.mul, operator.mul, INT),
    "floordiv": (operator.floordiv, _or_zero(operator.floordiv), INT),
    "mod": (operator.mod, _or_zero(operator.mod), INT),
    "lt": (operator.lt, operator.lt, BOOL),
    "le": (operator.le, operator.le, BOOL),
    "gt": (operator.gt, operator.gt, BOOL),
    "ge": (operator.ge, operator.ge, BOOL),
    "eq": (operator.eq, operator.eq, BOOL),
    "ne": (operator.ne, operator.ne, BOOL),
    "minimum": (tw.minimum, min, INT),
    "maximum": (tw.maximum, max, INT),
}


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BINARY)
def test_integer_operators_match_python(name):
    build, meaning, kind = BINARY[name]
    expr = build(Q, K)
    assert expr.kind == kind
    for a in GRID:
        for b in GRID:
            assert value(expr, Q=a, K=b) == meaning(a, b), (name, a, b)
            if not (name in ("floordiv", "mod") and b == 0):
                assert value(build(Q, b), Q=a) == meaning(a, b), (name, a, b)
                assert value(build(Q, np.int64(b)), Q=a) == meaning(a, b), (name, a, b)
            assert value(build(a, K), K=b) == meaning(a, b), (name, a, b)
            assert value(build(np.int32(a), K), K=b) == meaning(a, b), (name, a, b)


@pytest.mark.parametrize("name", BINARY)
def test_integer_operators_match_python_on_arrays(name):
    build, meaning, _ = BINARY[name]
    a, b = np.array(GRID)[:, None], np.array(GRID)
    found = value(build(Q, K), Q=a, K=b)
    assert found.tolist() == [[meaning(x, y) for y in GRID] for x in GRID]


@pytest.mark.parametrize("name", [*BINARY, "div"])
def test_float_operators_match_python(name):
    build, meaning, kind = BINARY.get(name, (operator.truediv, operator.truediv, FLOAT))
    expr = build(S, tw.load(np.array(0.0)))
    assert expr.kind == (FLOAT if kind == INT else kind)
    for a in FLOAT_GRID:
        for b in FLOAT_GRID:
            if b == 0 and name in ("div", "floordiv", "mod"):
                continue
            for made in (build(S, b), build(S, np.float32(b)), build(S, tw.load(np.array(b)))):
                assert value(made, S=a) == meaning(a, b), (name, a, b)
            assert value(build(np.float64(a), S), S=b) == meaning(a, b), (name, a, b)
            assert value(build(a, S), S=b) == meaning(a, b), (name, a, b)


def test_unary_operators_and_functions():
    for a in GRID:
        assert value(-Q, Q=a) == -a
        assert value(+Q, Q=a) == a
        assert value(abs(Q), Q=a) == abs(a)
    for a in FLOAT_GRID:
        assert value(-S, S=a) == -a
        assert value(abs(S), S=a) == abs(a)
        assert value(tw.exp(S), S=a) == pytest.approx(math.exp(a))
        assert value(tw.tanh(S), S=a) == pytest.approx(math.tanh(a))
        assert value(tw.where(S < 0.25, S, 2), S=a) == (a if a < 0.25 else 2.0)
        if a > 0:
            assert value(tw.log(S), S=a) == pytest.approx(math.log(a))
    assert value(tw.log(S), S=0.0) == -np.inf
    assert np.isnan(value(tw.log(S), S=-1.0))
    assert value(S / 0.0, S=1.0) == np.inf


def test_logic_table():
    p, q = Q > 0, K > 0
    for a in (0, 1):
        for b in (0, 1):
            env = {"Q": a, "K": b}
            assert value(p & q, **env) == bool(a and b)
            assert value(p | q, **env) == bool(a or b)
            assert value(~p, **env) == (not a)
            assert value(p == q, **env) == (a == b)
            assert value(p != q, **env) == (a != b)
            assert value(tw.where(p, q, ~q), **env) == (bool(b) if a else not b)
            for constant in (True, False, np.True_, np.False_):
                assert value(p & constant, **env) == bool(a and constant)
                assert value(constant | p, **env) == bool(a or constant)
                assert value(constant & p, **env) == bool(a and constant)


def test_types_and_promotion():
    assert [e.kind for e in (S, B, H, Q, K, NQ, NK)] == [FLOAT] + [INT] * 6
    assert (Q + 1).kind == INT
    assert (Q + 1.0).kind == FLOAT
    assert (Q + S).kind == FLOAT
    assert (Q / K).kind == FLOAT
    assert (Q // K).kind == INT
    assert (Q // 2.0).kind == FLOAT
    assert (Q % K).kind == INT
    assert tw.where(Q < K, Q, S).kind == FLOAT
    assert tw.where(Q < K, Q, K).kind == INT
    assert tw.minimum(Q, 0.5).kind == FLOAT
    assert tw.exp(Q).kind == FLOAT
    assert (Q < S).kind == BOOL
    assert tw.load(np.zeros(3, np.int8), Q).kind == INT
    assert tw.load(np.zeros(3, np.float16), Q).kind == FLOAT
    assert tw.load(np.zeros(3, bool), Q).kind == BOOL
    assert tw.load(torch.zeros(3, dtype=torch.bfloat16), Q).kind == FLOAT
    # 7 // 2 as floats is 3.0, and int / int is a float.
    assert value(Q / 2, Q=7) == 3.5
    # True is not 1 and 1 is not 1.0: they would be one node if interning compared them.
    assert ex.constant(True) is not ex.constant(1)
    assert ex.constant(1) is not ex.constant(1.0)
    assert ex.constant(0.0) is not ex.constant(-0.0)


@pytest.mark.parametrize(
    "build, part",
    [
        (lambda: (Q < K) + 1, "tw.where(condition, 1, 0)"),
        (lambda: -(Q < K), "needs numbers"),
        (lambda: abs(Q < K), "needs numbers"),
        (lambda: Q & K, "needs conditions"),
        (lambda: ~Q, "compare it first"),
        (lambda: tw.where(Q, 1, 2), "needs conditions"),
        (lambda: tw.where(Q < K, Q, Q < K), "needs numbers"),
        (lambda: (Q < K) < (K < Q), "needs numbers"),
        (lambda: tw.exp(Q < K), "needs numbers"),
        (lambda: Q + "1", "expected an expression or a number, got str"),
        (lambda: Q + None, "expected an expression or a number, got NoneType"),
        (lambda: Q + np.zeros(3), "or tw.load(array, index, ...)"),
        (lambda: np.zeros(3) + Q, "or tw.load(array, index, ...)"),
        (lambda: Q + 1j, "expected an expression or a number, got complex"),
        (lambda: Q**2, "expressions have no powers"),
        (lambda: (Q < 1) ^ (K < 1), "conditions differ where a != b"),
        (lambda: float(Q), "no single number"),
        (lambda: math.exp(Q), "tw.exp"),
        (lambda: (Q < K) >> S, "combine masks with &"),
        (lambda: S >> 3, "composes two scores"),
        (lambda: tw.Expr(), "built from tw.Q"),
    ],
)
def test_refusals_give_advice(build, part):
    with pytest.raises(TypeError) as error:
        build()
    assert part in str(error.value)


def test_constants_are_checked():
    with pytest.raises(ValueError, match="32 bit, got 2147483648"):
        Q + 2**31
    assert (Q + (2**31 - 1)).kind == INT
    with pytest.raises(ValueError, match="NaN"):
        S + math.nan
    for build in (lambda: Q // 0, lambda: Q % 0, lambda: S // 0.0):
        with pytest.raises(ZeroDivisionError):
            build()


# -- what Python must not do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: Q < 3 and K < 3,
        lambda: Q < 3 or K < 3,
        lambda: not Q < 3,
        lambda: 1 if Q < 3 else 0,
        lambda: min(Q, K),
        lambda: max(Q, K),
        lambda: 0 <= Q < K,
        lambda: bool(Q),
        lambda: Q in [K, 3],
        lambda: sorted([Q, K]),
        lambda: all([Q < K]),
    ],
)
def test_truth_value_is_refused_with_advice(misuse):
    with pytest.raises(TypeError) as error:
        misuse()
    for advice in ("`&`", "`|`", "`~`", "tw.where"):
        assert advice in str(error.value)


@pytest.mark.parametrize(
    "misuse, part",
    [
        (lambda: [1, 2, 3][Q], "tw.load(array, index, ...)"),
        (lambda: np.arange(3)[Q], "tw.load(array, index, ...)"),
        (lambda: torch.arange(3)[Q], "tw.load(array, index, ...)"),
        (lambda: torch.zeros(3, 3)[Q, K], "tw.load(array, index, ...)"),
        (lambda: np.zeros((3, 3))[Q, K], "tw.load(array, index, ...)"),
        (lambda: np.asarray(Q), "not an array"),
        (lambda: range(Q), "tw.load(array, index, ...)"),
        (lambda: list(Q), "not a sequence"),
        (lambda: [*Q], "not a sequence"),
        (lambda: sum(Q), "not a sequence"),
    ],
)
def test_indexing_and_iterating_are_refused(misuse, part):
    with pytest.raises(TypeError) as error:
        misuse()
    assert part in str(error.value)


@pytest.mark.parametrize(
    "build, kind, part",
    [
        (lambda: tw.load([1, 2], Q), TypeError, "got list"),
        (lambda: tw.load(np.zeros((2, 2)), Q), TypeError, "shape (2, 2), got 1 indices"),
        (lambda: tw.load(np.zeros(2), S), TypeError, "index 0 must be an integer expression"),
        (lambda: tw.load(np.zeros(2), 2), IndexError, "index 0 is 2, the array's size there is 2"),
        (lambda: tw.load(np.zeros(2), -1), IndexError, "index 0 is -1"),
        (lambda: tw.load(np.zeros(0), Q + 1), ValueError, "empty"),
        (lambda: tw.load(np.zeros(2, complex), Q), TypeError, "complex128"),
        (lambda: tw.load(np.array(["a"]), Q), TypeError, "cannot be loaded"),
        (lambda: tw.load(np.zeros(2, int), Q, grad=True), TypeError, "float array, got int64"),
    ],
)
def test_load_is_checked(build, kind, part):
    with pytest.raises(kind) as error:
        build()
    assert part in str(error.value)


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_equal_expressions_are_one_object():
    assert (Q + K) is (Q + K)
    assert tw.causal() is tw.causal()
    assert (Q + 1) is not (Q + 1.0)
    ids = np.arange(4)
    assert tw.document(ids) is tw.document(ids)
    assert tw.document(ids) is not tw.document(ids.copy())
    assert tw.softcap(3.0) is tw.softcap(3)
    x = np.zeros(4, np.float32)
    assert tw.load(x, Q) is not tw.load(x, Q, grad=True)
    assert len({Q, K, Q}) == 2  # hashing is by identity


def test_what_a_variant_calls_its_array_is_no_part_of_the_expression():
    x = np.zeros(4, np.float32)
    assert S + tw.load(x, K) is tw.bias(x)
    assert repr(tw.bias(x)) == "S + load(a0, K)"
    assert tw.bias(x).key == (S + tw.load(x.copy(), K)).key


def test_a_dead_expression_leaves_nothing_behind():
    # An array's id may be given again; the expression must not be.
    seen = set()
    for i in range(200):
        e = tw.load(np.full(2, i), Q)
        seen.add(int(value(e, Q=0)))
    assert seen == set(range(200))


def test_an_expression_built_anew_for_each_call_is_the_same():
    """So what was found out about it is not lost between calls; but no array of the caller's is held, nor ever more."""
    q = np.ones((4, 5, 8), np.float32)

    def call(score):
        tw.attention(q[:, None], q[:, None], q[:, None], score=score)
        return weakref.ref(score)

    capped = call(tw.softcap(7.5) >> tw.alibi(1))
    assert capped() is not None
    assert capped() is tw.softcap(7.5) >> tw.alibi(1)
    loaded = call(S * tw.load(np.ones(1, np.float32), H))
    assert loaded() is None
    for i in range(100):
        call(S + 1.0 / (i + 1))
    assert capped() is None


def test_doubling_does_not_blow_up():
    start = time.process_time()
    x = S
    for _ in range(60):
        x = x + x
    assert value(x, S=1.0) == 2.0**60
    text, key = repr(x), x.key
    assert len(text) < 5000
    assert key == x.key
    assert tw.parse(text) is x
    assert derivative(x, S).kind == FLOAT
    assert value(derivative(x, S), S=0.5) == 2.0**60
    y = S
    for _ in range(60):
        y = y >> (S + S)
    assert y is x
    assert time.process_time() - start < 2


def test_a_deep_chain_works():
    start = time.process_time()
    x = S
    for i in range(5000):
        x = x + float(i % 7) if i % 2 else tw.maximum(x, -1.0)
    expected = sum(float(i % 7) for i in range(1, 5000, 2))
    assert value(x, S=0.0) == expected
    assert x.key == x.key
    assert len(x.key) < 300_000
    assert value(derivative(x, S), S=0.0) == 1.0
    assert value(x >> (S * 2), S=0.0) == 2 * expected
    del x
    assert time.process_time() - start < 5


def test_key_has_slots_for_arrays():
    ids = np.arange(5, dtype=np.int32)
    key = tw.document(ids).key
    assert key == "load(a0, Q) == load(a0, K); a0: int32[1]"
    assert tw.document(np.ones(9, np.int32)).key == key
    assert tw.document(torch.ones(9, dtype=torch.int32)).key == key
    assert tw.document(ids.astype(np.int64)).key != key
    assert tw.document(ids, ids.copy()).key == "load(a0, Q) == load(a1, K); a0: int32[1]; a1: int32[1]"
    assert tw.bias(np.zeros((4, 4), np.float16)).key == "S + load(a0, Q, K); a0: float16[2]"
    assert tw.bias(torch.zeros(4, 4, dtype=torch.bfloat16)).key == "S + load(a0, Q, K); a0: bfloat16[2]"
    assert tw.causal().key == "K <= Q + (NK - NQ)"


def test_keys_of_different_expressions_differ():
    c = Q < K
    pairs = [
        (ex.where(c, ex.as_float(Q), ex.as_float(K)), ex.where(c, Q, K)),
        (ex.as_float(Q) + ex.as_float(K), ex.as_float(Q + K)),
        (Q - (K - 1), Q - K - 1),
        (-(Q // 2), -Q // 2),
        ((Q % 2) * 3, Q % (2 * K)),
        (c & (K < 3), c | (K < 3)),
        (S + 0.0, S),
        (ex.constant(1), ex.constant(1.0)),
    ]
    for a, b in pairs:
        assert a.key != b.key, (a, b)


def test_operations_that_change_nothing_are_not_built():
    unchanged = [
        (K + 0, K), (0 + K, K), (K - 0, K), (K * 1, K), (1 * K, K), (K // 1, K), (K + 0 * 1 - 0, K),
        (S * 1.0, S), (1 * S, S), (S / 1, S), (S - 0, S), (S + -0.0, S), (operator.neg(-S), S), (np.multiply(S, 1), S),
        (operator.neg(-K), K), (K * 1.0, ex.as_float(K)), (K / 1, ex.as_float(K)), (1.0 * K + S, K + S),
    ]  # fmt: skip
    for found, expected in unchanged:
        assert found is expected, (found, expected)
    # What other ways lead to.
    assert (-S >> -S) is S
    assert ex.substitute(Q + K, {K: ex.constant(0)}) is Q
    assert tw.parse("-(-Q) + 0 * 1 + (K - 0)") is Q + K
    assert pickle.loads(pickle.dumps(load(np.zeros(3), K + 0))).args[0] is K


def test_operations_that_change_a_bit_are_built():
    others = [S + 0.0, S + 0, 0 + S, 0 - K, K % 1, 1 // K, 0 // K, S // 1.0, K * 0, 1 / S, 0.0 - S, K + 1, K - 1]
    for found in others:
        assert len(found.args) == 2, found
    assert math.copysign(1, value(S + 0.0, S=-0.0)) == 1
    assert math.copysign(1, value(S - 0.0, S=-0.0)) == -1
    assert value(S // 1.0, S=1.5) == 1.0


def test_an_index_that_is_a_variable_in_the_end_is_checked_as_one():
    q = k = v = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match="expected 4 along axis 0, got 3"):
        tw.attention(q, k, v, score=S + load(np.zeros(3, np.float32), K + 0))
    tw.attention(q, k, v, score=S + load(np.zeros(3, np.float32), tw.minimum(K, 2)))


def test_rshift_composes_in_order():
    double, add = S * 2.0, S + 3.0
    assert value(double >> add, S=5.0) == 13
    assert value(add >> double, S=5.0) == 16
    assert value(double >> add >> double, S=5.0) == 26
    assert value(tw.softcap(2.0) >> S + Q, S=1.0, Q=4) == pytest.approx(4 + 2 * math.tanh(0.5))
    assert (double >> S) is double
    assert (S >> double) is double
    # A whole number on the left becomes a float, as S is one.
    assert (Q >> double).kind == FLOAT
    assert value(Q >> double, Q=3) == 6.0
    assert value(double >> tw.where(S > 5, S, -np.inf), S=2.0) == -np.inf


# -- NumPy's and PyTorch's functions ----------------------------------------------------------------------------------


def test_numpy_functions_build_expressions():
    pairs = [
        (np.tanh(S), tw.tanh(S)), (np.exp(S), tw.exp(S)), (np.log(S), tw.log(S)),
        (np.abs(Q), abs(Q)), (np.absolute(Q), abs(Q)), (np.negative(Q), -Q),
        (np.minimum(Q, 3), tw.minimum(Q, 3)), (np.maximum(2, K), tw.maximum(2, K)),
        (np.add(Q, K), Q + K), (np.subtract(1, Q), 1 - Q), (np.multiply(Q, K), Q * K), (np.divide(Q, K), Q / K),
        (np.floor_divide(Q, K), Q // K), (np.mod(Q, K), Q % K), (np.remainder(Q, 3), Q % 3),
        (np.less(Q, K), Q < K), (np.less_equal(Q, K), Q <= K), (np.greater(Q, K), Q > K),
        (np.greater_equal(Q, K), Q >= K), (np.equal(Q, K), Q == K), (np.not_equal(Q, K), Q != K),
        (np.logical_and(Q < K, K < 3), (Q < K) & (K < 3)), (np.logical_or(Q < K, K < 3), (Q < K) | (K < 3)),
        (np.logical_not(Q < K), ~(Q < K)), (np.invert(Q < K), ~(Q < K)),
        (np.bitwise_and(Q < K, K < 3), (Q < K) & (K < 3)), (np.bitwise_or(Q < K, K < 3), (Q < K) | (K < 3)),
        (np.int64(3) - Q, 3 - Q), (np.float32(0.5) * S, 0.5 * S), (np.int8(2) < Q, Q > 2), (np.int64(7) // Q, 7 // Q),
    ]  # fmt: skip
    for i, (found, expected) in enumerate(pairs):
        assert isinstance(found, tw.Expr), i
        env = {"S": 0.7, "Q": 5, "K": 2}
        assert value(found, **env) == value(expected, **env), (i, found, expected)
        assert found.kind == expected.kind, i


def test_torch_functions_build_expressions():
    three, half = torch.tensor(3), torch.tensor(0.5)
    pairs = [
        (torch.tanh(S), tw.tanh(S)), (torch.exp(S), tw.exp(S)), (torch.log(S), tw.log(S)),
        (torch.abs(Q - K), abs(Q - K)), (torch.neg(Q), -Q),
        (torch.where(Q < K, S, -float("inf")), tw.where(Q < K, S, -np.inf)),
        (torch.minimum(Q, K), tw.minimum(Q, K)), (torch.maximum(Q, K), tw.maximum(Q, K)),
        (torch.logical_and(Q < K, K < 3), (Q < K) & (K < 3)), (torch.logical_or(Q < K, K < 3), (Q < K) | (K < 3)),
        (torch.logical_not(Q < K), ~(Q < K)),
        (three + Q, 3 + Q), (three - Q, 3 - Q), (three * Q, 3 * Q), (three / Q, 3 / Q), (three // Q, 3 // Q),
        (three % Q, 3 % Q), (Q + three, Q + 3), (Q - three, Q - 3), (Q // three, Q // 3), (Q % three, Q % 3),
        (Q / three, Q / 3), (half * S, 0.5 * S), (S - half, S - 0.5),
        (torch.sub(Q, K), Q - K), (torch.mul(Q, K), Q * K), (torch.div(Q, K), Q / K), (torch.add(Q, K), Q + K),
        (torch.lt(Q, K), Q < K), (torch.le(Q, K), Q <= K), (torch.gt(Q, K), Q > K), (torch.ge(Q, K), Q >= K),
        (torch.eq(Q, K), Q == K), (torch.ne(Q, K), Q != K), (torch.remainder(Q, K), Q % K),
        (three < Q, Q > 3), (three <= Q, Q >= 3), (three > Q, Q < 3), (three >= Q, Q <= 3),
        (three == Q, Q == 3), (three != Q, Q != 3), (operator.lt(Q, three), Q < 3), (operator.eq(Q, three), Q == 3),
        (torch.tensor(True) & (Q < K), Q < K), (torch.tensor(False) | (Q < K), Q < K),
        ((Q < K) & torch.tensor(True), Q < K),
    ]  # fmt: skip
    for i, (found, expected) in enumerate(pairs):
        assert isinstance(found, tw.Expr), (i, found)
        for env in ({"S": 0.75, "Q": 5, "K": 2}, {"S": -1.5, "Q": 3, "K": 4}):
            np.testing.assert_equal(value(found, **env), value(expected, **env), err_msg=f"{i} {found} {expected}")
        assert found.kind == expected.kind, i


@pytest.mark.parametrize(
    "call", [lambda: np.sin(S), lambda: torch.sigmoid(S), lambda: np.add.reduce(S), lambda: torch.clamp(S, min=0)]
)
def test_unknown_functions_are_refused_with_a_list(call):
    with pytest.raises(TypeError, match="expressions know abs, minimum, maximum, where, exp, log, tanh"):
        call()


def test_np_where_is_refused_with_advice():
    with pytest.raises(TypeError, match=r"tw\.where"):
        np.where(Q < K, 1, 2)


def test_values_are_forgotten_after_their_last_use():
    """They may be arrays of a whole grid, and an expression may have thousands of nodes."""

    class Value:
        alive = most = 0

        def __init__(self, *of):
            Value.alive += 1
            Value.most = max(Value.most, Value.alive)

        def __del__(self):
            Value.alive -= 1

    long, square = K + 1, Q * Q
    for i in range(500):
        long = (long * square) % (i + 2) + long
    ops = dict.fromkeys(("const", "add", "mul", "mod"), Value)
    kept = Value(), Value()
    assert isinstance(evaluate(long, {"K": kept[0], "Q": kept[1]}, ops), Value)
    assert Value.most < 12

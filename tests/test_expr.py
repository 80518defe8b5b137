"""Expressions: what operators build, what they mean, what they refuse, and their derivatives."""

from __future__ import annotations

import math
import operator
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given

import tilewise as tw
from tests.strategies import dense_values, float_exprs, profile
from tilewise import expr as ex
from tilewise import reference
from tilewise.derivative import ONE, ZERO, derivative
from tilewise.expr import BOOL, FLOAT, INT, NK, NQ, B, H, K, Q, S
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Attention
from tilewise.walking import evaluate

GRID = [-7, -3, -2, -1, 0, 1, 2, 5]
FLOAT_GRID = [-2.5, -1.0, -0.25, 0.0, 0.5, 1.0, 3.75]


def value(expr, dtype=np.float64, **env):
    result = evaluate(expr, env, numpy_ops(dtype))
    return np.asarray(result)[()]


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
        (ex.lift(True) & c, ex.lift(False) | c),
        (S * 1, S),
        (ex.constant(1), ex.constant(1.0)),
    ]
    for a, b in pairs:
        assert a.key != b.key, (a, b)


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


# -- FlexAttention's functions ----------------------------------------------------------------------------------------

SIZES = (2, 4, 9, 11)  # batch, heads, queries, keys


def _dense_mod(function, score=None):
    """What FlexAttention computes: the function at every (b, h, q, k), elementwise on tensors."""
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in SIZES), indexing="ij")
    args = (b, h, q, k) if score is None else (score, b, h, q, k)
    return function(*args).broadcast_to(SIZES).numpy()


_ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])
_slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
_table = torch.linspace(-1, 1, 4 * 9 * 11, dtype=torch.float64).reshape(4, 9, 11)
_limit = torch.tensor(6)

MASK_MODS = {
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "sliding window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 3),
    "document": lambda b, h, q_idx, kv_idx: _ids[q_idx] == _ids[kv_idx],
    "document, causal": lambda b, h, q_idx, kv_idx: (_ids[q_idx] == _ids[kv_idx]) & (q_idx >= kv_idx),
    "prefix": lambda b, h, q_idx, kv_idx: (kv_idx < 4) | (q_idx >= kv_idx),
    "length in a tensor": lambda b, h, q_idx, kv_idx: kv_idx < _limit,
    "tensor first": lambda b, h, q_idx, kv_idx: _limit > kv_idx,
    "by head": lambda b, h, q_idx, kv_idx: torch.abs(q_idx - kv_idx) <= 2 * h + b,
    "dilated": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0,
}
SCORE_MODS = {
    "identity": lambda s, b, h, q_idx, kv_idx: s,
    "alibi": lambda s, b, h, q_idx, kv_idx: s + _slopes[h] * (kv_idx - q_idx),
    "soft cap": lambda s, b, h, q_idx, kv_idx: 2.0 * torch.tanh(s / 2.0),
    "causal": lambda s, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, s, -float("inf")),
    "bias": lambda s, b, h, q_idx, kv_idx: s + _table[h, q_idx, kv_idx],
    "relative": lambda s, b, h, q_idx, kv_idx: s + 0.125 * torch.abs(q_idx - kv_idx),
    "capped alibi": lambda s, b, h, q_idx, kv_idx: torch.tanh(s) - _slopes[h] * torch.abs(q_idx - kv_idx),
    "scaled by a tensor": lambda s, b, h, q_idx, kv_idx: _slopes[0] * s if b is None else s * _slopes[h],
}


@pytest.mark.parametrize("name", MASK_MODS)
def test_from_mask_mod_means_what_flex_attention_computes(name):
    mask = tw.from_mask_mod(MASK_MODS[name])
    shape = tw.spec.Shape(*SIZES[:2], SIZES[1], *SIZES[2:], 4, 4)
    found = dense_values(mask, shape)
    np.testing.assert_array_equal(found, _dense_mod(MASK_MODS[name]))
    assert found.any()
    assert not found.all()


@pytest.mark.parametrize("name", SCORE_MODS)
def test_from_score_mod_means_what_flex_attention_computes(name):
    score = tw.from_score_mod(SCORE_MODS[name])
    shape = tw.spec.Shape(*SIZES[:2], SIZES[1], *SIZES[2:], 4, 4)
    s = dense_values(S, shape)
    expected = _dense_mod(SCORE_MODS[name], torch.from_numpy(s.copy()))
    np.testing.assert_allclose(dense_values(score, shape), expected, rtol=1e-12, atol=1e-15)


def test_from_mods_against_flex_attention_itself():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def score_mod(score, b, h, q_idx, kv_idx):
        return 5.0 * torch.tanh(score / 5.0) - slopes[h] * torch.abs(q_idx - kv_idx)

    def mask_mod(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    n, rng = 128, torch.Generator().manual_seed(0)
    slopes, ids = torch.tensor([0.1, 0.2]), (torch.arange(n) // 50)
    q, k, v = (torch.randn(1, 2, n, 16, generator=rng) for _ in range(3))
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it runs unfused, which is what is wanted here
        block_mask = create_block_mask(mask_mod, 1, 2, n, n, device="cpu")
        expected = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
    found = tw.attention(q, k, v, mask=tw.from_mask_mod(mask_mod), score=tw.from_score_mod(score_mod))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call, part",
    [
        (lambda: tw.from_mask_mod(3), "from_mask_mod: expected a function of 4 arguments, got int"),
        (lambda: tw.from_score_mod("x"), "from_score_mod: expected a function of 5 arguments, got str"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: q - k), "must return a condition"),
        (lambda: tw.from_score_mod(lambda s, b, h, q, k: q < k), "must return a number"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: np.arange(3)[q] == 0), "tw.load"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: torch.zeros(2, 2)[q] == 0), "one index a dimension"),
        (lambda: tw.from_mask_mod(lambda b, h, q, k: q >= k and q < 3), "`&`"),
    ],
)
def test_from_mods_are_checked(call, part):
    with pytest.raises(TypeError) as error:
        call()
    assert part in str(error.value)


def test_flex_mode_ends_with_the_call():
    with pytest.raises(TypeError):
        tw.from_mask_mod(lambda b, h, q, k: 1 / 0 if q else None)
    with pytest.raises(TypeError, match=r"tw\.load"):
        torch.arange(3)[Q]


# -- derivatives ------------------------------------------------------------------------------------------------------

_x = np.array([0.3, -0.7, 1.3, 2.1])
X = tw.load(_x, Q)

DERIVATIVES = {
    "S": S,
    "add": S + X,
    "sub": X - S,
    "mul": S * X * 3.0,
    "square": S * S * X * X,
    "div": S / (X + 5.0),
    "div by S": X / (S * S + 1.0),
    "floordiv": S // 1.7 + X,
    "mod": S % 1.7 + X % 0.9,
    "mod by S": X % (S * S + 0.5),
    "neg": -S - -X,
    "abs": abs(S) + abs(X),
    "minimum": tw.minimum(S, X),
    "maximum": tw.maximum(S * 0.5, X * 2.0),
    "where": tw.where(Q < 2, S * 2.0, X * X * S),
    "where by S": tw.where(S > 0.1, S * S, X),
    "exp": tw.exp(S * 0.5) * tw.exp(-X),
    "log": tw.log(S * S + 1.0) * tw.log(X * X + 2.0),
    "tanh": tw.tanh(S / 2.0) + tw.tanh(X),
    "ints": S * Q + K * X,
    "softcap": tw.softcap(1.5),
    "composed": tw.softcap(1.5) >> (S - X * abs(Q - K)) >> tw.where(K <= Q, S, S * 0.25) >> tw.log(1 + tw.exp(S)),
    "twice": (S + X) >> S * S,
    "through the condition alone": tw.where(S < X, 1.0, 2.0),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("wrt", ["S", "load"])
def test_derivative_against_finite_differences(name, wrt):
    expr, step = DERIVATIVES[name], 1e-6
    q, k = np.arange(4)[:, None], np.arange(5)
    s = np.random.default_rng(3).standard_normal((4, 5)) + 0.01

    def at(shift):
        env = {"S": s + (shift if wrt == "S" else 0), "Q": q, "K": k}
        ops = dict(numpy_ops(np.float64))
        read = ops["load"]
        ops["load"] = lambda slot, *i: read(slot, *i) + (shift if wrt == "load" else 0)
        return np.broadcast_to(evaluate(expr, env, ops), (4, 5))

    numeric = (at(step) - at(-step)) / (2 * step)
    made = derivative(expr, S if wrt == "S" else X)
    found = np.broadcast_to(evaluate(made, {"S": s, "Q": q, "K": k}, numpy_ops(np.float64)), (4, 5))
    np.testing.assert_allclose(found, numeric, rtol=1e-5, atol=1e-6)


def test_derivative_is_simple_where_it_can_be():
    assert derivative(S, S) is ONE
    assert derivative(S + X, S) is ONE
    assert derivative(S + X, X) is ONE
    assert derivative(S * 3.0, S) is ex.constant(3.0)
    assert derivative(S / 4.0, S) is ex.constant(0.25)
    assert derivative(X, S) is ZERO
    assert derivative(Q * 1.0, S) is ZERO
    assert derivative(S // 2.0, S) is ZERO
    assert derivative(tw.where(Q < K, S, S + 1), S) is ONE
    assert derivative(tw.alibi(4), S) is ONE


def test_derivative_where_constants_make_no_number():
    """Such a branch may well never be taken; its slope is found out when it is."""
    assert value(derivative(S / 0.0, S), S=1.0) == np.inf
    assert np.isnan(value(derivative(S * np.inf * -0.0, S), S=1.0))
    assert value(derivative(tw.where(S > 0, S, S / 0.0), S), S=1.0) == 1.0


def test_corners_take_one_side():
    for expr in (abs(S), tw.minimum(S, 0.0), tw.maximum(0.0, S)):
        assert value(derivative(expr, S), S=0.0) in (-1.0, 0.0, 1.0)
    assert value(derivative(abs(S), S), S=0.0) == 0.0


@profile(150)
@given(float_exprs(3))
def test_derivative_of_anything_builds_and_evaluates(expr):
    made = derivative(expr, S)
    assert made.kind == FLOAT
    assert dense_values(made).shape == dense_values(expr).shape


def test_reference_uses_the_derivative_of_the_score():
    """End to end: the oracle's gradient against finite differences of the oracle's output, in every array."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 4, 3)) for _ in range(3))
    slopes, sinks = rng.random(2), rng.standard_normal(2)
    score = tw.softcap(1.5) >> tw.alibi(slopes, grad=True)

    def loss():
        done = reference.forward(Attention(0.7, tw.causal(), score, sinks), q, k, v)
        return float((done.out * d_out).sum() + (done.lse * d_lse).sum())

    d_out, d_lse = rng.standard_normal((1, 2, 4, 3)), rng.standard_normal((1, 2, 4))
    grads = reference.backward(Attention(0.7, tw.causal(), score, sinks), q, k, v, d_out, d_lse)
    for x, grad in ((q, grads.q), (k, grads.k), (v, grads.v), (slopes, grads.arrays[0]), (sinks, grads.sinks)):
        for at in np.ndindex(x.shape):
            kept = x[at]
            x[at] = kept + 1e-6
            above = loss()
            x[at] = kept - 1e-6
            below = loss()
            x[at] = kept
            assert grad[at] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-7)

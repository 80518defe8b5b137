"""Expressions as text: what is printed reads back; what is hostile is refused, quickly, and never run."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.strategies import any_exprs, dense_values, profile
from tilewise import expr as ex
from tilewise import text, walking
from tilewise.expr import KP, NK, NQ, QP, B, H, K, Q, S
from tilewise.text import MAX_INLINE, MAX_LENGTH
from tilewise.walking import evaluate, loads, variables


def arrays_of(expr):
    return [slot.array for slot in loads(expr)]


def assert_reads_back(expr):
    again = tw.parse(str(expr), arrays_of(expr))
    assert again.key == expr.key
    assert again.kind == expr.kind
    np.testing.assert_array_equal(dense_values(again), dense_values(expr))


# -- round trips ------------------------------------------------------------------------------------------------------


@profile(400)
@given(any_exprs(4))
def test_text_reads_back(expr):
    assert_reads_back(expr)


@pytest.mark.slow
@profile(8000)
@given(any_exprs(5))
def test_text_reads_back_long(expr):
    assert_reads_back(expr)


def test_variants_read_back():
    rng = np.random.default_rng(0)
    for expr in [
        tw.causal(), tw.window(3, 1), tw.prefix(2), tw.dilated(3), tw.softcap(30.0), tw.alibi(4), tw.alibi(3),
        tw.document(np.arange(14)), tw.document(np.zeros((2, 12), np.int8), np.ones(14, np.int8)),
        tw.relative(np.zeros(5)), tw.relative(np.zeros((4, 5)), signed=True), tw.t5(np.zeros((32, 4))),
        tw.bias(rng.random((4, 12, 14))), tw.dense(rng.random((12, 14)) < 0.5),
        tw.softcap(3.0) >> tw.alibi(4) >> tw.bias(rng.random((12, 14))),
        (tw.causal() | tw.prefix(4)) & ~tw.window(2),
    ]:  # fmt: skip
        assert_reads_back(expr)


def test_sharing_is_printed_by_name():
    x = S
    for _ in range(40):
        x = tw.tanh(x) + x * 0.5
    text = str(x)
    assert text.startswith("t0 = ")
    assert len(text) < 4000
    assert tw.parse(text) is x
    small = (Q + K) * (Q + K)
    assert str(small) == "(Q + K) * (Q + K)"  # sharing is named only where text would grow


@pytest.mark.parametrize("depth", [100, 1000, 3000])
def test_deep_chains_read_back(depth):
    x = S
    for i in range(depth):
        x = x + float(i % 3)
    start = time.process_time()
    assert tw.parse(str(x)) is x
    m = Q < K
    for i in range(depth // 2):
        m = ~(m & (Q < i)) if i % 2 else (K < i) | m
    assert tw.parse(str(m)) is m
    assert time.process_time() - start < 5


def test_infinities_and_signs_read_back():
    for number in (0.0, -0.0, 1e22, 1e-300, -1e16, np.inf, -np.inf, 0.1, 123456789.123):
        assert tw.parse(str(ex.constant(number))) is ex.constant(number), number
        assert tw.parse(str(S - number)) is S - number
        assert tw.parse(str(number * S)) is number * S
    for number in (0, -1, 2**31 - 1, -(2**31), True, False):
        assert tw.parse(str(ex.constant(number))) is ex.constant(number), number


# -- what it looks like -----------------------------------------------------------------------------------------------

SAMPLES = [
    (tw.causal(), "K <= Q + (NK - NQ)"),
    (tw.window(5, 2), "(K >= Q + (NK - NQ) - 5) & (K <= Q + (NK - NQ) + 2)"),
    (tw.prefix(3), "K < 3"),
    (tw.causal() | tw.prefix(3), "(K <= Q + (NK - NQ)) | (K < 3)"),
    (tw.dilated(2), "(Q + (NK - NQ) - K) % 2 == 0"),
    (tw.softcap(30.0), "30.0 * tanh(S / 30.0)"),
    (tw.alibi(8), "S - load(a0, H) * abs(Q + (NK - NQ) - K)"),
    (tw.softcap(2) >> tw.alibi(8), "2.0 * tanh(S / 2.0) - load(a0, H) * abs(Q + (NK - NQ) - K)"),
    (~(Q < K), "~(Q < K)"),
    (~((Q < K) & (K < 3)), "~((Q < K) & (K < 3))"),
    ((Q < K) & ((K < 3) | (Q < 2)), "(Q < K) & ((K < 3) | (Q < 2))"),
    (((Q < K) & (K < 3)) | (Q < 2), "(Q < K) & (K < 3) | (Q < 2)"),
    (-Q - -K, "-Q - -K"),
    (-(Q + K), "-(Q + K)"),
    (Q - (K - 1), "Q - (K - 1)"),
    ((Q - K) - 1, "Q - K - 1"),
    (Q * (K + 1), "Q * (K + 1)"),
    (Q // (K // 2), "Q // (K // 2)"),
    (Q // K // 2, "Q // K // 2"),
    (Q % 3 * 2, "Q % 3 * 2"),
    (Q / K, "Q / K"),
    (S * Q, "S * Q"),
    (tw.where(K <= Q, S, -np.inf), "where(K <= Q, S, -inf)"),
    (tw.minimum(abs(Q - K), 7), "minimum(abs(Q - K), 7)"),
    (tw.load(np.zeros((2, 3)), B, QP) + KP, "load(a0, B, QP) + KP"),
    (ex.as_float(Q) // ex.as_float(K), "float(Q) // float(K)"),
    (tw.log(1 + tw.exp(S)), "log(1.0 + exp(S))"),
]


@pytest.mark.parametrize("expr, text", SAMPLES, ids=[t for _, t in SAMPLES])
def test_text_is_readable(expr, text):
    assert str(expr) == repr(expr) == text
    assert tw.parse(text, arrays_of(expr)).key == expr.key


@pytest.mark.parametrize(
    "text, expected",
    [
        ("causal() & window(512)", lambda: tw.causal() & tw.window(512)),
        ("causal() | prefix(3)", lambda: tw.causal() | tw.prefix(3)),
        ("window(left=3, right=0)", lambda: tw.window(3, 0)),
        ("softcap(30) >> S * 2", lambda: tw.softcap(30) >> S * 2),
        ("min(Q, K) + max(Q, 3)", lambda: tw.minimum(Q, K) + tw.maximum(Q, 3)),
        ("  K<=Q+(NK-NQ)\n", lambda: tw.causal()),
        ("K <= Q  # causal", lambda: K <= Q),
        ("(\n K <= Q)", lambda: K <= Q),
        ("True", lambda: ex.constant(True)),
        ("-3", lambda: ex.constant(-3)),
        ("t0 = Q - K; t0 * t0 < 9", lambda: (Q - K) * (Q - K) < 9),
        ("t0 = Q - K\nt0 * t0 < 9", lambda: (Q - K) * (Q - K) < 9),
    ],
)
def test_text_a_person_would_write(text, expected):
    assert tw.parse(text) is expected()


def test_lists_are_arrays():
    found = tw.parse("document([0, 0, 1, 1])")
    np.testing.assert_array_equal(
        np.broadcast_to(evaluate(found, {"Q": np.arange(4)[:, None], "K": np.arange(4)}, _ops()), (4, 4)),
        np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool)),
    )
    assert tw.parse("alibi([0.5, 0.25])").key == tw.alibi(np.array([0.5, 0.25])).key
    assert tw.parse("relative([1.5, -2.0], signed=False)").key == tw.relative(np.zeros(2)).key


def _ops():
    from tilewise.kernels.numpy.ops import numpy_ops

    return numpy_ops(np.float64)


def test_arrays_are_named_in_order():
    ids, slopes = np.arange(4), torch.ones(4)
    assert tw.parse("document(a0)", [ids]) is tw.document(ids)
    assert tw.parse("alibi(a1)", [ids, slopes]) is tw.alibi(slopes)
    assert tw.parse("load(a1, H) * S + load(a0, Q)", [ids, slopes]) is tw.load(slopes, H) * S + tw.load(ids, Q)


# -- hostile text -----------------------------------------------------------------------------------------------------

HOSTILE = {
    "import": "__import__('os').system('touch /tmp/tilewise_was_here')",
    "import statement": "import os",
    "open": "open('/etc/passwd')",
    "eval": "eval('1')",
    "exec": "exec('x=1')",
    "print": "print(1)",
    "attribute": "Q.__class__",
    "attribute of a call": "causal().key",
    "method": "S.__add__(1)",
    "attribute of a number": "(1).real",
    "subscript": "Q[0]",
    "array subscript": "a0[Q]",
    "slice": "[1, 2][0:1]",
    "lambda": "lambda: 1",
    "lambda call": "(lambda: 1)()",
    "list comprehension": "[x for x in [1]]",
    "generator": "max(x for x in [1])",
    "dict": "{1: 2}",
    "set": "{1, 2}",
    "tuple": "(1, 2)",
    "f-string": "f'{Q}'",
    "string": "'Q'",
    "bytes": "b'Q'",
    "triple string": "'''Q'''",
    "walrus": "(x := 1)",
    "starred": "max(*[1, 2])",
    "kwargs": "window(**{'left': 3})",
    "kwargs name": "window(**a0)",
    "power": "2 ** 3",
    "huge exponent": "9 ** 999999999",
    "power tower": "9**9**9",
    "matmul": "Q @ K",
    "xor": "(Q < K) ^ (K < Q)",
    "left shift": "1 << 100000000",
    "is": "Q is K",
    "in": "Q in [1]",
    "dunder": "__builtins__",
    "dunder call": "__builtins__()",
    "globals": "globals()",
    "module": "np",
    "tw": "tw.causal()",
    "call of a call": "causal()()",
    "call of an expression": "(Q + K)()",
    "call of a variable": "Q(1)",
    "call of a number": "3(4)",
    "call of an array": "a0(1)",
    "function alone": "causal",
    "many heads": "alibi(2000000000)",
    "negative heads": "alibi(-5)",
    "huge heads": "alibi(" + "9" * 500 + ")",
    "huge window": "window(" + "9" * 100 + ")",
    "huge int": "Q + 99999999999",
    "huger int": "9" * 5000,
    "huge float to int": "Q + 1e400j",
    "imaginary": "1j",
    "nan": "nan",
    "NaN": "S * NaN",
    "nan made": "float(nan)",
    "ellipsis": "...",
    "none": "None",
    "yield": "(yield 1)",
    "await": "await Q",
    "assignment": "Q = 3",
    "assignment to a function": "causal = 3; Q",
    "assignment to a dunder": "__builtins__ = 3; Q",
    "augmented": "t0 += 1; Q",
    "annotated": "t0: int = 1; Q",
    "tuple target": "t0, t1 = 1, 2; Q",
    "two targets": "t0 = t1 = 3; t0",
    "assignment alone": "t0 = Q",
    "def": "def f(): pass",
    "class": "class A: pass",
    "del": "del Q",
    "global": "global Q",
    "raise": "raise Q",
    "while": "while True: pass",
    "for": "for t0 in Q: pass",
    "with": "with Q: pass",
    "assert": "assert Q",
    "return": "return Q",
    "decorator": "@causal\ndef f(): pass",
    "match": "match Q:\n case _: pass",
    "two expressions": "Q; K",
    "empty": "",
    "blank": "   \n ",
    "comment alone": "# nothing",
    "NUL": "Q\x00 + K",
    "NUL alone": "\x00",
    "surrogate": "Q + \ud800",
    "fullwidth": "\uff31 + K",
    "cyrillic": "Q + \u041a",
    "greek": "\u039a <= Q",
    "mathematical": "\U0001d410 + K",
    "fullwidth digits": "Q + \uff11",
    "zero width": "Q\u200b + K",
    "right to left": "Q \u202e + K",
    "fullwidth parenthesis": "causal\uff08\uff09",
    "unicode minus": "Q \u2212 K",
    "superscript": "Q\u00b2",
    "non-breaking space": "Q\u00a0+ K",
    "line continuation": "Q + \\",
    "form feed": "Q +\x0c",
    "tab indent": "\tQ\n K",
    "backtick": "`Q`",
    "unclosed": "causal(",
    "unopened": "causal)",
    "unknown keyword": "window(3, size=2)",
    "same keyword twice": "window(left=3, left=4)",
    "too many arguments": "causal(1, 2, 3)",
    "string argument": "window('3')",
    "bool argument": "window(True)",
    "float argument": "window(3.5)",
    "infinite argument": "softcap(1e400)",
    "zero argument": "softcap(0)",
    "missing argument": "softcap()",
    "expression argument": "window(Q)",
    "division by zero": "Q // 0",
    "modulo zero": "Q % 0",
    "mixed types": "(Q < K) + 1",
    "not a condition": "~Q",
    "number & number": "Q & K",
    "missing array": "document(a7)",
    "array alone": "a0",
    "list alone": "[1, 2]",
    "empty list": "[]",
    "ragged list": "document([[1, 2], [3]])",
    "list of expressions": "document([Q, K])",
    "list of huge ints": "document([99999999999999999999999])",
    "list of strings": "document(['a'])",
    "dense of nothing": "load([], Q + 1)",
    "load of a number": "load(3, Q)",
    "load of a function": "load(causal, Q)",
    "load out of range": "load([1, 2], 5)",
    "load without index": "load([1, 2])",
    "parentheses": "(" * 10000 + "Q" + ")" * 10000,
    "tildes": "~" * 10000 + "(Q < K)",
    "minuses": "-" * 10000 + "Q",
    "pluses": "+" * 10000 + "Q",
    "nots": "not " * 10000 + "Q",
    "brackets": "[" * 10000 + "]" * 10000,
    "calls": "abs(" * 10000 + "Q" + ")" * 10000,
    "long sum": "Q" + " + Q" * 15000,
    "long and": "(Q < K)" + " & (Q < K)" * 6000,
    "long compare": "Q" + " < Q" * 15000,
    "long ternary": "1 if 1 else " * 5000 + "1",
    "lambdas": "lambda: " * 8000 + "1",
    "1 MB": "Q + " * 250_000 + "Q",
    "1 MB of NUL": "\x00" * 1_000_000,
    "1 MB of digits": "1" * 1_000_000,
    "composition doubles": "t0 = S + 1; " + "".join(f"t{i} = t{i - 1} >> t{i - 1}; " for i in range(1, 60)) + "t59",
    "composition trebles": "t0 = tanh(S) + S; "
    + "".join(f"t{i} = t{i - 1} >> t{i - 1} >> t{i - 1}; " for i in range(1, 40))
    + "t39",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_quickly(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gc.disable()  # what other tests left behind is not the parser's time
    try:
        start = time.process_time()
        with pytest.raises(tw.ExpressionError) as error:
            tw.parse(HOSTILE[name], [np.arange(4)])
        taken = time.process_time() - start
    finally:
        gc.enable()
    assert taken < 1
    assert len(str(error.value)) < 1500
    assert not list(tmp_path.iterdir())


@profile(500)
@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_refused(text):
    with contextlib.suppress(tw.ExpressionError):
        assert isinstance(tw.parse(text), tw.Expr)


_TOKENS = [
    "Q", "K", "S", "H", "a0", "t0", "1", "0", "-1", "2.5", "inf", "(", ")", "[", "]", ",", ";", "=", "+", "-", "*", "/",
    "//", "%", "**", "&", "|", "~", "<", "<=", "==", ">>", "causal", "window", "alibi", "softcap", "load", "where",
    "min", "exp", "float", "not", "and", "if", "else", ".", ":", "\n", " ", "lambda", "'", "relative", "t5", "document",
    "grad", "True", "dense", "bias",
]  # fmt: skip


@profile(800)
@given(st.lists(st.sampled_from(_TOKENS), max_size=14))
def test_any_tokens_are_an_expression_or_refused(tokens):
    with contextlib.suppress(tw.ExpressionError):
        assert isinstance(tw.parse(" ".join(tokens), [np.arange(4.0)]), tw.Expr)


@pytest.mark.slow
@profile(30000)
@given(st.lists(st.sampled_from(_TOKENS), max_size=20))
def test_any_tokens_are_an_expression_or_refused_long(tokens):
    with contextlib.suppress(tw.ExpressionError):
        assert isinstance(tw.parse(" ".join(tokens), [np.arange(4.0)]), tw.Expr)


@pytest.mark.parametrize(
    "text, part",
    [
        ("K < Q and K > 3", "use & and | instead of `and` and `or`"),
        ("K < Q or K > 3", "use & and | instead of `and` and `or`"),
        ("not K < Q", "use ~ instead of `not`"),
        ("1 if K < Q else 2", "use where(condition, a, b) instead of `if`"),
        ("0 <= K < Q", "write (a < b) & (b < c) instead of a < b < c"),
        ("Q ** 2", "powers are not part of expressions; multiply"),
        ("casual()", "unknown function 'casual'; known: "),
        ("k <= q", "unknown name 'k'; known: "),
        ("causal", "causal is a function: write causal(...)"),
        ("K <= ", "not an expression: 'K <= '"),
        ("", "expected an expression, such as causal() & window(512)"),
        ("window(-1)", "window: left must be a whole number of at least 0, got -1"),
        ("softcap(0)", "softcap: cap must be a positive number, got 0"),
        ("Q + 4294967296", "integers in expressions are 32 bit, got 4294967296"),
        ("alibi(100000)", "at most 65536"),
        ("Q + \u041a", "ASCII"),
        ("x" * 70000, "70000 characters; 65536 is the most"),
        ("load(a0, Q)", "unknown name 'a0'"),
        ("max(*[1, 2])", "'*[1, 2]' is not allowed here"),
        ("window(**x)", "** is not allowed"),
    ],
)
def test_errors_help(text, part):
    with pytest.raises(tw.ExpressionError) as error:
        tw.parse(text)
    assert part in str(error.value)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize("text", [None, 5, b"Q", ["Q"], Q])
def test_only_text_is_parsed(text):
    with pytest.raises(TypeError, match="parse: expected text"):
        tw.parse(text)


def test_limits_are_what_they_say():
    fits = "Q" + " " * (MAX_LENGTH - 1)
    assert tw.parse(fits) is Q
    with pytest.raises(tw.ExpressionError):
        tw.parse(fits + " ")
    assert MAX_INLINE >= 64
    assert {"NQ", "NK"} <= variables(tw.parse("NQ + NK"))
    assert tw.parse("NQ + NK") is NQ + NK


def test_an_error_is_a_value_error():
    assert issubclass(tw.ExpressionError, ValueError)


# -- chains of `>>` ---------------------------------------------------------------------------------------------------


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each walk visits."""
    counted: list[int] = []

    def nodes(*roots: tw.Expr) -> list[tw.Expr]:
        found = walking.nodes(*roots)
        counted.append(len(found))
        return found

    monkeypatch.setattr(text, "nodes", nodes)
    monkeypatch.setattr(ex, "nodes", nodes)
    return counted


def _chain(count: int) -> str:
    return ">>".join(f"S*{i + 2}.0" for i in range(count))


def _named_chain(count: int) -> str:
    """As long as can be: it nests nothing."""
    return "t0=S;" + "".join(f"t{i + 1}=t{i}>>S*{i + 2}.0;" for i in range(count)) + f"t{count}"


@pytest.mark.parametrize("chain", [_chain, _named_chain])
def test_a_chain_costs_what_it_is_long(visited: list[int], chain: Callable[[int], str]) -> None:
    def steps(count: int) -> int:
        visited.clear()
        tw.parse(chain(count))
        return sum(visited)

    assert steps(200) < 2.2 * steps(100)


def test_a_chain_means_what_it_meant() -> None:
    assert tw.parse(_named_chain(3)) is tw.parse(_chain(3)) is tw.S * 2.0 * 3.0 * 4.0
    assert repr(tw.parse(_named_chain(3000))).count("*") == 3000


@pytest.mark.parametrize("line", ["t{i}=S+1.0>>t{before}", "t{i}=t{before}>>t{before}"])
def test_a_chain_that_copies_what_it_has_made_is_refused_soon(visited: list[int], line: str) -> None:
    lines = ["t0=S*2.0", *(line.format(i=i, before=i - 1) for i in range(1, 3000)), "t2999"]
    with pytest.raises(tw.ExpressionError, match="`>>` would copy more than 16384 operations; write a >> b >> c"):
        tw.parse(";".join(lines))
    assert sum(visited) < 4 * text.MAX_NODES

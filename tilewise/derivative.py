"""The derivative op table: what one node's value does to the whole expression, as an expression again.

derivative(score, S) and derivative(score, a load) are what every backward pass multiplies by. Comparisons, // and
integer arithmetic have derivative 0; where abs, minimum or maximum have a corner, one side is taken (abs: 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewise.expr import FLOAT, Expr, S, constant, where
from tilewise.spec import Attention
from tilewise.walking import nodes

ZERO, ONE = constant(0.0), constant(1.0)

# Each entry takes the node and the derivatives of its arguments.
_Rule = Callable[..., Expr]
_RULES: dict[str, _Rule] = {
    "add": lambda n, da, db: _add(da, db),
    "sub": lambda n, da, db: _add(da, _mul(constant(-1.0), db)),
    "mul": lambda n, da, db: _add(_mul(da, n.args[1]), _mul(n.args[0], db)),
    "div": lambda n, da, db: _add(_div(da, n.args[1]), _mul(constant(-1.0), _div(_mul(n, db), n.args[1]))),
    "mod": lambda n, da, db: _add(da, _mul(constant(-1.0), _mul(n.args[0] // n.args[1], db))),
    "neg": lambda n, da: _mul(constant(-1.0), da),
    "abs": lambda n, da: _mul(_sign(n.args[0]), da),
    "minimum": lambda n, da, db: _where(n.args[0] <= n.args[1], da, db),
    "maximum": lambda n, da, db: _where(n.args[0] >= n.args[1], da, db),
    "where": lambda n, _, da, db: _where(n.args[0], da, db),
    "exp": lambda n, da: _mul(n, da),
    "log": lambda n, da: _div(da, n.args[0]),
    "tanh": lambda n, da: _mul(ONE - n * n, da),
}


def derivative(expr: Expr, wrt: Expr) -> Expr:
    """d expr / d wrt, for a node `wrt` of it (S, or a load)."""
    slopes: dict[Expr, Expr] = {}
    for node in nodes(expr):
        if node is wrt:
            slopes[node] = ONE
        elif node.op in _RULES and node.kind == FLOAT and any(slopes[a] is not ZERO for a in node.args):
            slopes[node] = _RULES[node.op](node, *(slopes[a] for a in node.args))
        else:
            slopes[node] = ZERO
    return slopes[expr]


def score_slopes(spec: Attention) -> dict[Expr, Expr]:
    """d score / d S, and d score / d load for each load whose array wants a gradient."""
    if spec.score is None:
        return {S: ONE}
    wanted = {id(slot.array) for slot in spec.wanted}
    reads = [n for n in nodes(spec.score) if n.op == "load" and id(n.payload.array) in wanted]
    return {wrt: derivative(spec.score, wrt) for wrt in (S, *reads)}


# -- arithmetic that knows 0 (expr.py knows 1), so that the derivative of S is 1 and not a heap of products -----------
# Constants are folded unless that is NaN, which is no constant: S / 0.0 has a slope all the same.


def _add(a: Expr, b: Expr) -> Expr:
    return b if a is ZERO else a if b is ZERO else a + b


def _mul(a: Expr, b: Expr) -> Expr:
    if a is ZERO or b is ZERO:
        return ZERO
    product = float(a.payload * b.payload) if a.op == b.op == "const" else math.nan
    if not math.isnan(product):
        return constant(product)
    return a * b


def _div(a: Expr, b: Expr) -> Expr:
    quotient = float(a.payload / b.payload) if a.op == b.op == "const" and b.payload != 0 else math.nan
    if not math.isnan(quotient):
        return constant(quotient)
    return a if a is ZERO else a / b


def _where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return a if a is b else where(condition, a, b)


def _sign(x: Expr) -> Expr:
    return where(x > 0, ONE, where(x < 0, constant(-1.0), ZERO))

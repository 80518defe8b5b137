"""Expressions as text, and text as expressions.

`to_text` prints what `parse` reads back. `parse` never evaluates Python: it walks the syntax tree against a whitelist
of names and operators and refuses everything else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tilewise import expr as ex
from tilewise.arrays import compiling
from tilewise.expr import Expr
from tilewise.walking import loads, nodes

MAX_LENGTH = 65536
MAX_INLINE = 256  # nodes as printed; beyond it shared and deep parts are named, so that no text blows up
MAX_PART = 1024  # characters of a part, once parts are named: no text nests deeper than it can be parsed
MAX_NODES = 16384  # that `>>` may copy, all together: of a thing with itself it doubles it

_SYMBOL = {**ex.ARITHMETIC, **ex.COMPARISONS, **ex.LOGIC}
# How tightly Python binds: & and | bind tighter than comparisons.
_COMPARE, _UNARY, _ATOM = 0, 7, 9
_STRENGTH = {"or": 1, "and": 2, "add": 5, "sub": 5, "mul": 6, "div": 6, "floordiv": 6, "mod": 6}
_TAKES_FLOATS = ("div", "exp", "log", "tanh")


class _Text(NamedTuple):
    text: str
    strength: int

    def inside(self, strength: int) -> str:
        return self.text if self.strength >= strength else f"({self.text})"


def to_text(expr: Expr) -> str:
    """Readable text that `parse` understands. Loaded arrays are named a0, a1 ... in order of first appearance."""
    order = nodes(expr)
    names = {id(slot.array): f"a{i}" for i, slot in enumerate(loads(expr))}
    printed: dict[Expr, int] = {}
    uses: dict[Expr, int] = {}
    for node in order:
        printed[node] = 1 + sum(printed[a] for a in node.args)
        for a in node.args:
            uses[a] = uses.get(a, 0) + 1
    share = printed[expr] > MAX_INLINE
    parts: dict[Expr, _Text] = {}
    statements: list[str] = []
    for node in order:
        parts[node] = _print_node(node, parts, names)
        if share and node.args and (uses.get(node, 0) > 1 or (uses.get(node, 0) and len(parts[node].text) > MAX_PART)):
            name = f"t{len(statements)}"
            statements.append(f"{name} = {parts[node].text}")
            parts[node] = _Text(name, _ATOM)
    return "; ".join([*statements, parts[expr].text])


def _print_node(node: Expr, parts: dict[Expr, _Text], names: dict[int, str]) -> _Text:
    op, args = node.op, [parts[a] for a in node.args]
    if op in ("const", "var"):
        return _Text(str(node.payload), _UNARY if str(node.payload).startswith("-") else _ATOM)
    if op == "load":
        return _Text(f"load({', '.join([names[id(node.payload.array)], *(a.text for a in args)])})", _ATOM)
    if op == "float":
        return _Text(f"float({args[0].text})", _ATOM)
    # Python-like promotion writes most conversions by itself; only where it would not are they printed.
    if op in _TAKES_FLOATS or not all(a.op == "float" for a in node.args if a.kind != ex.BOOL):
        args = [parts[a.args[0]] if a.op == "float" else parts[a] for a in node.args]
    if op in ("not", "neg"):
        return _Text(f"{'~' if op == 'not' else '-'}{args[0].inside(_UNARY)}", _UNARY)
    if op in _SYMBOL:
        strength = _STRENGTH.get(op, _COMPARE)
        left = args[0].inside(strength if strength else 1)
        return _Text(f"{left} {_SYMBOL[op]} {args[1].inside(strength + 1)}", strength)
    return _Text(f"{op}({', '.join(a.text for a in args)})", _ATOM)


# -- parsing ----------------------------------------------------------------------------------------------------------

_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.Div: "__truediv__",
    ast.FloorDiv: "__floordiv__", ast.Mod: "__mod__", ast.BitAnd: "__and__", ast.BitOr: "__or__",
    ast.RShift: "__rshift__",
    ast.Lt: "__lt__", ast.LtE: "__le__", ast.Gt: "__gt__", ast.GtE: "__ge__", ast.Eq: "__eq__", ast.NotEq: "__ne__",
}  # fmt: skip
_FUNCTIONS = {
    "abs": lambda x: abs(ex.lift(x)), "float": lambda x: ex.as_float(ex.lift(x)), "load": ex.load,
    "min": ex.minimum, "max": ex.maximum, "minimum": ex.minimum, "maximum": ex.maximum,
    "where": ex.where, "exp": ex.exp, "log": ex.log, "tanh": ex.tanh,
}  # fmt: skip
_ADVICE: dict[type[Any], str] = {
    ast.BoolOp: "use & and | instead of `and` and `or`",
    ast.Not: "use ~ instead of `not`",
    ast.IfExp: "use where(condition, a, b) instead of `if`",
    ast.Pow: "powers are not part of expressions; multiply",
}


class ExpressionError(ValueError):
    """Text that is not an expression, with what is wrong and where."""


def parse(text: str, arrays: Sequence[Any] = ()) -> Expr:
    """Text such as "causal() & window(512)" as an expression. a0, a1 ... name the given arrays."""
    if compiling():
        raise TypeError("parse: torch.compile cannot follow it; parse the text outside the compiled function")
    if not isinstance(text, str):
        raise TypeError(f"parse: expected text such as 'causal() & window(512)', got {type(text).__name__}")
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"the expression has {len(text)} characters; {MAX_LENGTH} is the most")
    if not text.isascii():  # Python folds letters that look alike into one name
        odd = next(c for c in text if not c.isascii())
        raise ExpressionError(f"in {_shorten(text)!a}: expressions are written in ASCII, got {odd!a}")
    return read(text, arrays)


def read(text: str, arrays: Sequence[Any] = ()) -> Expr:
    """`parse` for text that is `to_text`'s own, of any length."""
    try:
        return _Parser(text, arrays).parse()
    except (SyntaxError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", "it is nested too deeply")
        raise ExpressionError(f"not an expression: {_shorten(text)!r}: {reason}") from None
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"in {_shorten(text)!r}: {error}") from error


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


class _Parser:
    def __init__(self, text: str, arrays: Sequence[Any]) -> None:
        from tilewise.variants import VARIANTS

        self.text, self.copied = text, 0
        self.names: dict[str, Any] = {"inf": ex.constant(float("inf")), **ex.VARIABLES}
        self.names.update((f"a{i}", array) for i, array in enumerate(arrays))
        self.functions: dict[str, Any] = {**_FUNCTIONS, **VARIANTS}

    def parse(self) -> Expr:
        body = ast.parse(self.text.strip()).body
        if not body:
            raise self.error(None, "expected an expression, such as causal() & window(512)")
        *definitions, last = body
        for line in definitions:
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if re.fullmatch(r"t\d+", name):
                    self.names[name] = self.value(value)
                case _:
                    raise self.error(line, "expected one expression")
        if not isinstance(last, ast.Expr):
            raise self.error(last, "expected an expression, such as causal() & window(512)")
        value = self.value(last.value)
        if isinstance(value, np.ndarray | list) or not isinstance(value, Expr | bool | int | float):
            raise self.error(last, "an array alone is not an expression")
        return ex.lift(value)

    def value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -ex.lift(self.value(operand))
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~ex.lift(self.value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                a, b = ex.lift(self.value(left)), ex.lift(self.value(right))
                if isinstance(op, ast.RShift):
                    self.count_copied(node, b)
                return getattr(a, _BINARY[type(op)])(b)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _BINARY:
                return getattr(ex.lift(self.value(left)), _BINARY[type(op)])(ex.lift(self.value(right)))
            case ast.Compare(ops=[_, _, *_]):
                raise self.error(node, "write (a < b) & (b < c) instead of a < b < c")
            case ast.Name(id=name):
                return self.lookup(node, name)
            case ast.List(elts=elements):
                return np.array([self.number(e) for e in elements])
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                return self.call(node, name, args, keywords)
        advice = _ADVICE.get(type(node)) or _ADVICE.get(type(getattr(node, "op", node)))
        raise self.error(node, advice or "only numbers, lists of numbers, variables, operators and named functions are")

    def count_copied(self, node: ast.AST, after: Expr) -> None:
        """`first >> after` copies `after` alone. What is copied is counted over the whole text, so that a chain costs
        what its text is long, and one that builds on itself ends soon."""
        self.copied += len(nodes(after))
        if self.copied > MAX_NODES:
            raise self.error(node, f"`>>` would copy more than {MAX_NODES} operations; write a >> b >> c from the left")

    def number(self, node: ast.AST) -> bool | int | float:
        value = self.value(node)
        if isinstance(value, Expr):
            raise self.error(node, "a list holds numbers alone")
        return value  # type: ignore[no-any-return]

    def lookup(self, node: ast.AST, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if name in self.functions:
            raise self.error(node, f"{name} is a function: write {name}(...)")
        raise self.error(node, f"unknown name {name!r}; known: {', '.join([*self.names, *sorted(self.functions)])}")

    def call(self, node: ast.AST, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        if name not in self.functions:
            raise self.error(node, f"unknown function {name!r}; known: {', '.join(sorted(self.functions))}")
        if any(k.arg is None for k in keywords):
            raise self.error(node, "** is not allowed")
        if len({k.arg for k in keywords}) < len(keywords):
            raise self.error(node, "an argument is given twice")
        return self.functions[name](*map(self.value, args), **{str(k.arg): self.value(k.value) for k in keywords})

    def error(self, node: ast.AST | None, reason: str) -> ExpressionError:
        source = (ast.get_source_segment(self.text.strip(), node) or "") if node is not None else ""
        return ExpressionError(f"in {_shorten(self.text)!r}: {_shorten(source)!r} is not allowed here: {reason}")

"""Reads the text of an expression into steps, each of a known type, by rules of its own.

The language is docs/design.md's: variables, numbers, arrays by name, Python's operators, and a few functions. Types are
bool, int and float. Where an int meets a float it becomes one, a step of its own. What Python would compute with any
arguments is refused: a mistake in a drawn text is one to be told.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

BOOL, INT, FLOAT = "bool", "int", "float"
VARIABLES = {"S": FLOAT, **dict.fromkeys(("B", "H", "HK", "Q", "K", "NQ", "NK", "QP", "KP"), INT)}

_ARITHMETIC = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
}  # fmt: skip
_COMPARISONS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
_LOGIC = {ast.BitAnd: "and", ast.BitOr: "or"}
_PICKS = {"minimum": "minimum", "maximum": "maximum", "min": "minimum", "max": "maximum"}
_FUNCTIONS = ("exp", "log", "tanh")


class ExpressionError(ValueError):
    """Text that is no expression of the language."""


@dataclass(frozen=True)
class Step:
    """One operation on the results of earlier steps. kind: of its result; operands: of what it works on."""

    op: str
    args: tuple[int, ...]
    kind: str
    operands: str
    payload: Any = None  # a number, a variable's name, or which array is read
    reads_array: bool = False  # it, or what it is computed from


@dataclass(frozen=True)
class Walk:
    """A text as steps; the last is its value."""

    text: str
    steps: tuple[Step, ...]

    @property
    def kind(self) -> str:
        return self.steps[-1].kind

    def loads(self) -> list[int]:
        """The steps that read arrays, in order of first appearance, what an index reads before what it indexes."""
        return [i for i, step in enumerate(self.steps) if step.op == "load"]


@lru_cache(maxsize=1024)
def read(text: str, arrays: tuple[str, ...] = ()) -> Walk:
    """The text's steps; arrays: the types that a0, a1 ... hold, bool, int or float."""
    reader = _Reader(text, arrays)
    last = reader.whole()
    return Walk(text, tuple(_reachable(reader.steps, last)))


@lru_cache(maxsize=1024)
def read_score(text: str, arrays: tuple[str, ...] = ()) -> Walk:
    """The same of a score, which is a float whatever its text is."""
    reader = _Reader(text, arrays)
    last = reader.float(reader.whole())
    return Walk(text, tuple(_reachable(reader.steps, last)))


def _reachable(steps: list[Step], last: int) -> list[Step]:
    """The steps that the last one needs, in order of first appearance."""
    order: list[int] = []
    seen: set[int] = set()

    def visit(at: int) -> None:
        if at not in seen:
            seen.add(at)
            for arg in steps[at].args:
                visit(arg)
            order.append(at)

    visit(last)
    place = {old: new for new, old in enumerate(order)}
    return [
        Step(s.op, tuple(place[a] for a in s.args), s.kind, s.operands, s.payload, s.reads_array)
        for s in (steps[at] for at in order)
    ]


class _Reader:
    def __init__(self, text: str, arrays: tuple[str, ...]) -> None:
        self.text, self.arrays = text, arrays
        self.steps: list[Step] = []
        self.known: dict[Any, int] = {}
        self.named: dict[str, ast.AST] = {}
        self.values: dict[tuple[str, int | None], int] = {}
        self.score: int | None = None  # what S is: of `a >> b`, in b the value of a

    def whole(self) -> int:
        *definitions, last = ast.parse(self.text.strip()).body
        for line in definitions:
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if re.fullmatch(r"t\d+", name):
                    self.named[name] = value
                case _:
                    raise self.refused(line)
        if not isinstance(last, ast.Expr):
            raise self.refused(last)
        return self.value(last.value)

    # -- the syntax ----------------------------------------------------------------------------------------------------
    def value(self, node: ast.AST) -> int:
        match node:
            case ast.Constant(value=bool() | int() | float() as number):
                return self.number(number)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.negative(self.value(operand))
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self.step("not", self.typed(self.value(operand), BOOL), kind=BOOL)
            case ast.BinOp(left=left, op=ast.RShift(), right=right):
                return self.composed(left, right)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self.arithmetic(_ARITHMETIC[type(op)], self.value(left), self.value(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _LOGIC:
                return self.logic(_LOGIC[type(op)], self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return self.comparison(_COMPARISONS[type(op)], self.value(left), self.value(right))
            case ast.Name(id=name):
                return self.name(name)
            case ast.Call(func=ast.Name(id="load"), args=[ast.Name(id=name), *index], keywords=[]):
                return self.load(name, [self.typed(self.value(i), INT) for i in index])
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(name, [self.value(a) for a in args])
        raise self.refused(node)

    def refused(self, node: ast.AST) -> ExpressionError:
        return ExpressionError(f"{ast.unparse(node)!r} in {self.text!r}")

    def name(self, name: str) -> int:
        if name == "inf":
            return self.number(float("inf"))
        if name == "S" and self.score is not None:
            return self.score
        if name in VARIABLES:
            return self.step("var", kind=VARIABLES[name], payload=name)
        if name in self.named:
            key = name, self.score
            if key not in self.values:
                self.values[key] = self.value(self.named[name])
            return self.values[key]
        if re.fullmatch(r"a\d+", name):  # an array of no dimensions is a number
            return self.load(name, [])
        raise ExpressionError(f"{name!r} in {self.text!r}")

    def composed(self, first: ast.AST, then: ast.AST) -> int:
        outer, self.score = self.score, self.float(self.value(first))
        made, self.score = self.value(then), outer
        return made

    def load(self, name: str, index: list[int]) -> int:
        number = int(name.removeprefix("a"))
        if name != f"a{number}" or number >= len(self.arrays):
            raise ExpressionError(f"there is no array {name!r} for {self.text!r}")
        return self.step("load", *index, kind=self.arrays[number], payload=number)

    def call(self, name: str, args: list[int]) -> int:
        if name in _PICKS and len(args) == 2:
            return self.arithmetic(_PICKS[name], *args)
        if name in _FUNCTIONS and len(args) == 1:
            return self.step(name, self.float(args[0]), kind=FLOAT)
        if name == "abs" and len(args) == 1:
            return self.step("abs", args[0], kind=self.a_number(args[0]))
        if name == "float" and len(args) == 1:
            return self.float(args[0])
        if name == "where" and len(args) == 3:
            a, b = self.alike(args[1], args[2])
            return self.step("where", self.typed(args[0], BOOL), a, b, kind=self.kind(a), operands=self.kind(a))
        raise ExpressionError(f"{name}(...) of {len(args)} arguments in {self.text!r}")

    # -- the types -----------------------------------------------------------------------------------------------------
    def kind(self, at: int) -> str:
        return self.steps[at].kind

    def typed(self, at: int, kind: str) -> int:
        if self.kind(at) != kind:
            raise ExpressionError(f"a {self.kind(at)} where a {kind} is due, in {self.text!r}")
        return at

    def a_number(self, at: int) -> str:
        if self.kind(at) == BOOL:
            raise ExpressionError(f"a condition where a number is due, in {self.text!r}")
        return self.kind(at)

    def float(self, at: int) -> int:
        if self.a_number(at) == FLOAT:
            return at
        if self.steps[at].op == "const":
            return self.number(float(self.steps[at].payload))
        return self.step("float", at, kind=FLOAT)

    def alike(self, a: int, b: int) -> tuple[int, int]:
        if self.kind(a) == self.kind(b):
            return a, b
        return self.float(a), self.float(b)

    def number(self, value: bool | int | float) -> int:
        kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
        return self.step("const", kind=kind, payload=value)

    def negative(self, at: int) -> int:
        if self.steps[at].op == "const":
            self.a_number(at)
            return self.number(-self.steps[at].payload)
        return self.step("neg", at, kind=self.a_number(at))

    def arithmetic(self, op: str, a: int, b: int) -> int:
        self.a_number(a), self.a_number(b)
        a, b = (self.float(a), self.float(b)) if op == "div" else self.alike(a, b)
        return self.step(op, a, b, kind=self.kind(a))

    def comparison(self, op: str, a: int, b: int) -> int:
        a, b = self.alike(a, b)
        if self.kind(a) == BOOL and op not in ("eq", "ne"):
            raise ExpressionError(f"conditions have no order, in {self.text!r}")
        return self.step(op, a, b, kind=BOOL)

    def logic(self, op: str, a: int, b: int) -> int:
        for one, other in ((a, b), (b, a)):
            self.typed(one, BOOL)
            if self.steps[one].op == "const":  # what is decided reads no arrays, so that none has a gradient by it
                return other if self.steps[one].payload == (op == "and") else one
        return self.step(op, a, b, kind=BOOL)

    def step(self, op: str, *args: int, kind: str, operands: str = "", payload: Any = None) -> int:
        """The step, or the same one if it was made before."""
        key = op, args, kind, repr(payload)
        if key not in self.known:
            reads = op == "load" or any(self.steps[a].reads_array for a in args)
            operands = operands or (self.kind(args[0]) if args else kind)
            self.known[key] = len(self.steps)
            self.steps.append(Step(op, args, kind, operands, payload, reads))
        return self.known[key]


# What leaves a whole number as it is: `load(a, K + 0)` reads as `load(a, K)` does.
_NOTHING_AFTER = {"add": 0, "sub": 0, "mul": 1, "floordiv": 1}
_NOTHING_BEFORE = {"add": 0, "mul": 1}


def plain_variable(walk: Walk, at: int) -> str | None:
    """The variable that an index is, and not just reads: the array must have its size there."""
    step = walk.steps[at]
    if step.op == "var":
        return str(step.payload)
    if step.op == "neg" and walk.steps[step.args[0]].op == "neg":
        return plain_variable(walk, walk.steps[step.args[0]].args[0])
    if len(step.args) == 2:
        first, second = step.args
        if step.op in _NOTHING_AFTER and _is_number(walk.steps[second], _NOTHING_AFTER[step.op]):
            return plain_variable(walk, first)
        if step.op in _NOTHING_BEFORE and _is_number(walk.steps[first], _NOTHING_BEFORE[step.op]):
            return plain_variable(walk, second)
    return None


def _is_number(step: Step, value: int) -> bool:
    return step.op == "const" and step.kind == INT and step.payload == value

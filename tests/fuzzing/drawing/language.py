"""The language of masks and scores as small trees: made by operators, printed as text, read back from it.

Nothing here knows the package: that `tilewise.parse` reads these texts, and reads them as the same, is tested. A tree
is what was written, operation by operation; nothing is folded but the sign of a constant, which is part of it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

BOOL, INT, FLOAT = "bool", "int", "float"
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"and": "&", "or": "|"}
FUNCTIONS = {"abs": 1, "float": 1, "exp": 1, "log": 1, "tanh": 1, "minimum": 2, "maximum": 2, "where": 3}
OPERATIONS = (*ARITHMETIC, *COMPARISONS, *LOGIC, *FUNCTIONS, "neg", "not", "load", "const", "var")
VARIABLES = ("S", "B", "H", "HK", "Q", "K", "NQ", "NK", "QP", "KP")

Path = tuple[int, ...]  # which argument, of which argument, from the root


@dataclass(frozen=True)
class Node:
    """An operation, the type of its value, its arguments; `value` is a constant, or a variable's or an array's name."""

    op: str
    kind: str
    args: tuple[Node, ...] = ()
    value: Any = None

    def __add__(self, other: Any) -> Node:
        return make("add", self, other)

    def __radd__(self, other: Any) -> Node:
        return make("add", other, self)

    def __sub__(self, other: Any) -> Node:
        return make("sub", self, other)

    def __rsub__(self, other: Any) -> Node:
        return make("sub", other, self)

    def __mul__(self, other: Any) -> Node:
        return make("mul", self, other)

    def __rmul__(self, other: Any) -> Node:
        return make("mul", other, self)

    def __truediv__(self, other: Any) -> Node:
        return make("div", self, other)

    def __rtruediv__(self, other: Any) -> Node:
        return make("div", other, self)

    def __floordiv__(self, other: Any) -> Node:
        return make("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Node:
        return make("floordiv", other, self)

    def __mod__(self, other: Any) -> Node:
        return make("mod", self, other)

    def __rmod__(self, other: Any) -> Node:
        return make("mod", other, self)

    def __neg__(self) -> Node:
        return make("neg", self)

    def __abs__(self) -> Node:
        return make("abs", self)

    def __invert__(self) -> Node:
        return make("not", self)

    def __and__(self, other: Any) -> Node:
        return make("and", self, other)

    def __or__(self, other: Any) -> Node:
        return make("or", self, other)

    def __lt__(self, other: Any) -> Node:
        return make("lt", self, other)

    def __le__(self, other: Any) -> Node:
        return make("le", self, other)

    def __gt__(self, other: Any) -> Node:
        return make("gt", self, other)

    def __ge__(self, other: Any) -> Node:
        return make("ge", self, other)

    def __str__(self) -> str:
        return text(self)


# -- making -----------------------------------------------------------------------------------------------------------


def constant(value: bool | int | float) -> Node:
    return Node("const", {bool: BOOL, int: INT, float: FLOAT}[type(value)], (), value)


def variable(name: str) -> Node:
    return Node("var", FLOAT if name == "S" else INT, (), name)


def load(array: str, kind: str, *index: Any) -> Node:
    """The number of that kind that an array has at these indices."""
    at = tuple(map(lift, index))
    if any(i.kind != INT for i in at):
        raise TypeError(f"load({array}, ...): indices are whole numbers, got {', '.join(map(str, at))}")
    return Node("load", kind, at, array)


def lift(value: Any) -> Node:
    return value if isinstance(value, Node) else constant(value)


def make(op: str, *given: Any) -> Node:
    """The operation on these arguments; TypeError if they are not of its types."""
    args = tuple(map(lift, given))
    if op == "neg" and args[0].op == "const" and args[0].kind != BOOL:
        return constant(-args[0].value)
    return Node(op, _kind(op, args), args)


def equal(a: Any, b: Any) -> Node:
    """a == b, which Python's own operator is not: it compares trees."""
    return make("eq", a, b)


def differ(a: Any, b: Any) -> Node:
    return make("ne", a, b)


def _kind(op: str, args: tuple[Node, ...]) -> str:
    kinds = [x.kind for x in args]
    if op in ("and", "or", "not"):
        return _checked(op, args, all(kind == BOOL for kind in kinds), BOOL)
    if op == "where":
        both = kinds[1] == kinds[2] == BOOL or BOOL not in kinds[1:]
        return _checked(op, args, kinds[0] == BOOL and both, _common(kinds[1:]))
    if op in ("eq", "ne") and kinds == [BOOL, BOOL]:
        return BOOL
    result = BOOL if op in COMPARISONS else FLOAT if op in ("div", "exp", "log", "tanh", "float") else _common(kinds)
    return _checked(op, args, BOOL not in kinds, result)


def _checked(op: str, args: tuple[Node, ...], fits: bool, kind: str) -> str:
    if not fits:
        raise TypeError(f"{op}: got {', '.join(f'{x} ({x.kind})' for x in args)}")
    return kind


def _common(kinds: Sequence[str]) -> str:
    return FLOAT if FLOAT in kinds else kinds[0]


minimum, maximum, where, exp, log, tanh, as_float = (
    partial(make, op) for op in ("minimum", "maximum", "where", "exp", "log", "tanh", "float")
)  # fmt: skip
S, B, H, HK, Q, K, NQ, NK, QP, KP = map(variable, VARIABLES)
P = Q + (NK - NQ)  # the position of a query, if the last one stands where the last key does


# -- trees ------------------------------------------------------------------------------------------------------------


def nodes(root: Node) -> Iterator[Node]:
    """All of them, each as often as it is written, the root first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(node.args)


def places(root: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every node and where it is, the root first."""
    yield path, root
    for i, child in enumerate(root.args):
        yield from places(child, (*path, i))


def rebuilt(node: Node, args: tuple[Node, ...]) -> Node:
    """The same operation on other arguments; TypeError if they are not of its types."""
    if node.op == "load":
        return load(node.value, node.kind, *args)
    return make(node.op, *args) if args else node


def replaced(root: Node, path: Path, new: Node) -> Node:
    """The tree with another node in that place; TypeError if its type does not fit there."""
    if not path:
        return new
    first, *rest = path
    args = list(root.args)
    args[first] = replaced(args[first], tuple(rest), new)
    return rebuilt(root, tuple(args))


def substituted(root: Node, new: Mapping[str, Node]) -> Node:
    """The tree with these variables replaced."""
    if root.op == "var":
        return new.get(root.value, root)
    return rebuilt(root, tuple(substituted(x, new) for x in root.args))


def renamed(root: Node, names: Mapping[str, str]) -> Node:
    """The tree over arrays of other names."""
    args = tuple(renamed(x, names) for x in root.args)
    return replace(root, args=args, value=names.get(root.value, root.value) if root.op == "load" else root.value)


def depth(root: Node) -> int:
    """How many operations are one inside the other."""
    return 1 + max(map(depth, root.args)) if root.args else 0


def variables(root: Node) -> set[str]:
    return {x.value for x in nodes(root) if x.op == "var"}


def arrays(root: Node) -> set[str]:
    return {x.value for x in nodes(root) if x.op == "load"}


def settled(node: Node) -> Node:
    """A whole number without what leaves it as it is: an index that is a plain variable must fit its array exactly."""
    args = tuple(map(settled, node.args))
    first, last = (args[0], args[-1]) if args else (node, node)
    if (node.op in ("add", "sub") and last == constant(0)) or (node.op in ("mul", "floordiv") and last == constant(1)):
        return first
    if (node.op, first) in (("add", constant(0)), ("mul", constant(1))):
        return last
    if node.op == "neg" and first.op in ("neg", "const"):
        return first.args[0] if first.op == "neg" else constant(-first.value)
    return node


# -- text -------------------------------------------------------------------------------------------------------------

_SYMBOLS = {**ARITHMETIC, **COMPARISONS, **LOGIC}
# How tightly Python binds: & and | bind tighter than comparisons.
_COMPARISON, _SIGN, _ATOM = 0, 7, 9
_STRENGTHS = {"or": 1, "and": 2, "add": 5, "sub": 5, "mul": 6, "div": 6, "floordiv": 6, "mod": 6}


def text(root: Node) -> str:
    """What `parse` and `tilewise.parse` read back."""
    return _printed(root)[0]


def _printed(node: Node) -> tuple[str, int]:
    if node.op in ("const", "var"):
        return str(node.value), _SIGN if str(node.value).startswith("-") else _ATOM
    if node.op in ("neg", "not"):
        return ("-" if node.op == "neg" else "~") + _inside(node.args[0], _SIGN), _SIGN
    if node.op in _SYMBOLS:
        strength = _STRENGTHS.get(node.op, _COMPARISON)
        left, right = _inside(node.args[0], strength or 1), _inside(node.args[1], strength + 1)
        return f"{left} {_SYMBOLS[node.op]} {right}", strength
    given = [_printed(x)[0] for x in node.args]
    return f"{node.op}({', '.join([node.value, *given] if node.op == 'load' else given)})", _ATOM


def _inside(node: Node, strength: int) -> str:
    printed, own = _printed(node)
    return printed if own >= strength else f"({printed})"


_READ: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.BitAnd: "and", ast.BitOr: "or", ast.Invert: "not", ast.USub: "neg",
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip


def parse(written: str, kinds: Sequence[str] = ()) -> Node:
    """The tree that a text prints. kinds: of the numbers in a0, a1 ... (see `kind_of`)."""
    return _read(ast.parse(written.strip(), mode="eval").body, kinds)


def kind_of(dtype: str) -> str:
    """What an array of this type holds."""
    return BOOL if dtype == "bool" else FLOAT if "float" in dtype else INT


def _read(node: ast.AST, kinds: Sequence[str]) -> Node:
    read: Callable[[ast.AST], Node] = partial(_read, kinds=kinds)
    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            return constant(number)
        case ast.Name(id="inf"):
            return constant(float("inf"))
        case ast.Name(id=name) if name in VARIABLES:
            return variable(name)
        case ast.UnaryOp(op=op, operand=x):
            return make(_READ[type(op)], read(x))
        case ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b]):
            return make(_READ[type(op)], read(a), read(b))
        case ast.Call(func=ast.Name(id="load"), args=[ast.Name(id=name), *index]):
            return load(name, kinds[int(name[1:])], *map(read, index))
        case ast.Call(func=ast.Name(id=name), args=args) if FUNCTIONS.get(name) == len(args):
            return make(name, *map(read, args))
    raise ValueError(f"not in the language: {ast.unparse(node)!r}")

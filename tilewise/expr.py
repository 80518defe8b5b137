"""Expressions: the small language in which every variant is written, once.

An expression is an immutable graph of nodes over the variables below. Python's operators build it; an op table says
what each operation means (values, bounds over a tile, derivatives, source text), and walking.py goes through the graph.
`==` builds an expression too, so nothing here may compare expressions with `==`: use `is` or `key`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from tilewise import arrays
from tilewise.sharing import Lock
from tilewise.walking import loads, nodes, remembered

BOOL, INT, FLOAT = "bool", "int", "float"
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"and": "&", "or": "|"}

_ADVICE = (
    "an expression has no truth value, so Python's `and`, `or`, `not`, `if`, `min`, `max` and chained comparisons "
    "cannot use it; write `&`, `|`, `~`, tw.where(condition, a, b), tw.minimum(a, b), tw.maximum(a, b), "
    "and (a < b) & (b < c)"
)


INDEX_ADVICE = "an expression cannot index an array; write tw.load(array, index, ...), one index a dimension"


@dataclass(frozen=True, eq=False)
class Loaded:
    """A runtime array as an expression reads it: whose it is, and whether its gradient is wanted."""

    array: Any
    grad: bool = False
    constant: bool = False  # made by a variant itself, so a kernel may move it to the caller's device
    label: str = ""  # what a variant's user knows it as ("alibi: slopes"), for errors alone: no part of what it is

    @property
    def wants_grad(self) -> bool:
        return self.grad or bool(getattr(self.array, "requires_grad", False))


class Expr:
    """One node: an operation, its arguments, and the type of its value (bool, int or float)."""

    __slots__ = ("__weakref__", "args", "kind", "memo", "op", "payload")
    __hash__ = object.__hash__

    op: str
    args: tuple[Expr, ...]
    kind: str
    payload: Any  # a constant's value, a variable's name, a load's Loaded
    memo: dict[Any, Any]  # what was found out about it, never anything that holds the node itself

    def __init__(self) -> None:
        raise TypeError("expressions are built from tw.Q, tw.K, tw.S ... with operators, not by calling Expr")

    # -- operators ----------------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> Expr:
        return arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return arithmetic("div", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return arithmetic("div", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return arithmetic("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return arithmetic("floordiv", other, self)

    def __mod__(self, other: Any) -> Expr:
        return arithmetic("mod", self, other)

    def __rmod__(self, other: Any) -> Expr:
        return arithmetic("mod", other, self)

    def __neg__(self) -> Expr:
        _number("-", self)
        return constant(-self.payload) if self.op == "const" else _node("neg", (self,), self.kind)

    def __pos__(self) -> Expr:
        return _number("+", self)

    def __abs__(self) -> Expr:
        return _node("abs", (_number("abs", self),), self.kind)

    def __lt__(self, other: Any) -> Expr:
        return comparison("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return comparison("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return comparison("gt", self, other)

    def __ge__(self, other: Any) -> Expr:
        return comparison("ge", self, other)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return comparison("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return comparison("ne", self, other)

    def __and__(self, other: Any) -> Expr:
        return logic("and", self, other)

    def __rand__(self, other: Any) -> Expr:
        return logic("and", other, self)

    def __or__(self, other: Any) -> Expr:
        return logic("or", self, other)

    def __ror__(self, other: Any) -> Expr:
        return logic("or", other, self)

    def __invert__(self) -> Expr:
        return _not(self)

    def __rshift__(self, after: Any) -> Expr:
        """`first >> after`: the score `after`, applied to the result of `first`."""
        if not isinstance(after, Expr) or self.kind == BOOL or after.kind == BOOL:
            raise TypeError(
                f"`>>` composes two scores (numbers over tw.S), got {self!r} >> {after!r}; combine masks with &"
            )
        return _substituted(after, [(S, as_float(self))])

    # -- what FlexAttention's functions call on a tensor (its and_masks and or_masks begin with new_ones, new_zeros;
    # those of transformers ask each part to come to the device of the first) -----------------------------------------
    @property
    def device(self) -> None:
        """An expression is nowhere; the arrays it reads are each where they are."""

    def to(self, device: Any = None, **options: Any) -> Expr:
        """The same over its arrays on another device; with None, as they are."""

        def moved(slot: Loaded) -> Any:  # what a variant made itself is brought to the caller's device anyway
            stays = slot.constant or not arrays.is_torch(slot.array)
            return slot.array if stays else slot.array.to(device, **options)

        return self if device is None else with_arrays(self, moved)

    def abs(self) -> Expr:
        return abs(self)

    def exp(self) -> Expr:
        return exp(self)

    def log(self) -> Expr:
        return log(self)

    def tanh(self) -> Expr:
        return tanh(self)

    def new_ones(self, *args: Any, **kwargs: Any) -> Expr:
        return constant(True)

    def new_zeros(self, *args: Any, **kwargs: Any) -> Expr:
        return constant(False)

    # -- copies -------------------------------------------------------------------------------------------------------
    # A node must be the interned one, or `S` would not be S: copies are made of the same nodes over copied arrays.
    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Expr:
        return from_records(copy.deepcopy(records(self), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return from_records, (records(self),)

    # -- what Python must not do with an expression --------------------------------------------------------------------
    def __bool__(self) -> NoReturn:
        raise TypeError(_ADVICE)

    def __index__(self) -> NoReturn:
        raise TypeError(INDEX_ADVICE)

    def __float__(self) -> NoReturn:
        raise TypeError("an expression is no single number; functions are tw.exp, tw.log, tw.tanh, abs, tw.minimum ...")

    __int__ = __float__

    def __pow__(self, other: Any) -> NoReturn:
        raise TypeError("expressions have no powers; multiply: x * x")

    __rpow__ = __pow__

    def __xor__(self, other: Any) -> NoReturn:
        raise TypeError("expressions have no ^; conditions differ where a != b")

    __rxor__ = __xor__

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        # NumPy asks for this where it indexes, and in functions such as np.where.
        raise TypeError(f"an expression is not an array (write tw.where for np.where), and {INDEX_ADVICE}")

    def __iter__(self) -> NoReturn:
        raise TypeError("an expression is one number for each (query, key), not a sequence")

    # -- NumPy's and PyTorch's functions build expressions too ---------------------------------------------------------
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Expr:
        from tilewise.flex import foreign

        plain = method == "__call__" and not kwargs
        return foreign(ufunc.__name__ if plain else f"{ufunc.__name__}.{method}", inputs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Expr:
        from tilewise.flex import foreign, torch_name

        return foreign(f"{torch_name(func)} with keywords" if kwargs else torch_name(func), args)

    # -- text ---------------------------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        from tilewise.text import to_text

        return remembered(self, "text", to_text)

    @property
    def key(self) -> str:
        """Canonical text, each loaded array replaced by a slot (dtype, rank): what compiled kernels are kept by."""
        return remembered(self, "key", _key)


def _key(expr: Expr) -> str:
    slots = "; ".join(f"a{i}: {arrays.dtype_name(x.array)}[{len(x.array.shape)}]" for i, x in enumerate(loads(expr)))
    return f"{expr!r}; {slots}" if slots else repr(expr)


# -- building nodes ---------------------------------------------------------------------------------------------------

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_lock = Lock()


def _node(op: str, args: tuple[Expr, ...], kind: str, payload: Any = None) -> Expr:
    """The node with this operation and these arguments. Equal nodes are one object, so that reuse costs nothing."""
    if arrays.compiling():  # torch.compile follows plain objects alone; they are interned when the call is read
        return _new_node(op, args, kind, payload)
    if args and (same := _unchanged(op, args)) is not None:
        return same
    key = (op, kind, _identity(payload), *map(id, args))
    with _lock:
        node = _interned.get(key)
        if node is None:
            node = _interned[key] = _new_node(op, args, kind, payload)
        return node


# Operations that leave their other operand as it is, to the bit: x + 0.0 would make 0.0 of -0.0.
_BY_NOTHING_ON_THE_RIGHT = {
    ("add", "0"), ("sub", "0"), ("mul", "1"), ("floordiv", "1"),
    ("add", "-0.0"), ("sub", "0.0"), ("mul", "1.0"), ("div", "1.0"),
}  # fmt: skip
_BY_NOTHING_ON_THE_LEFT = {("add", "0"), ("mul", "1"), ("add", "-0.0"), ("mul", "1.0")}


def _unchanged(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """The operand whose value the operation leaves as it is, so that `load(a, K + 0)` is `load(a, K)` everywhere."""
    first, last = args[0], args[-1]
    if op == "neg" and first.op == "neg":
        return first.args[0]
    if last.op == "const" and (op, repr(last.payload)) in _BY_NOTHING_ON_THE_RIGHT:
        return first
    if first.op == "const" and (op, repr(first.payload)) in _BY_NOTHING_ON_THE_LEFT:
        return last
    return None


def keep(expr: Expr) -> None:
    """Hold a call's expression for some calls, as one that is built anew for each: it is then made of the same nodes,
    and what was found out about them (its program, its text) is still known. Not if it reads a caller's array, or a
    tensor of torch.compile's, which would be held as well."""
    if not arrays.compiling() and all(slot.constant and isinstance(slot.array, np.ndarray) for slot in loads(expr)):
        _hold(expr)


@lru_cache(maxsize=64)
def _hold(expr: Expr) -> None:
    """Nothing to compute: a cache holds what it was asked for last."""


def _new_node(op: str, args: tuple[Expr, ...], kind: str, payload: Any) -> Expr:
    node = object.__new__(Expr)
    node.op, node.args, node.kind, node.payload, node.memo = op, args, kind, payload, {}
    return node


def _identity(payload: Any) -> Any:
    """What makes two constants, variables or loads the same."""
    if isinstance(payload, Loaded):
        return id(payload.array), payload.grad, payload.constant
    return repr(payload)  # tells 1 from 1.0 from True, and 0.0 from -0.0


Record = tuple[str, tuple[int, ...], str, Any]  # operation, its arguments by number, kind, payload


def records(root: Expr) -> list[Record]:
    """The nodes as plain data, arguments first."""
    order = nodes(root)
    number = {id(node): i for i, node in enumerate(order)}
    return [(node.op, tuple(number[id(a)] for a in node.args), node.kind, node.payload) for node in order]


def from_records(given: Iterable[Record]) -> Expr:
    """The expression again. A payload that is an expression stands for itself."""
    made: list[Expr] = []
    for op, args, kind, payload in given:
        made.append(payload if isinstance(payload, Expr) else _node(op, tuple(made[a] for a in args), kind, payload))
    return made[-1]


def with_arrays(root: Expr, change: Callable[[Loaded], Any]) -> Expr:
    """The same over other arrays. One that is read twice is changed once: arrays are told by which object they are."""
    changed: dict[int, Any] = {}

    def of(payload: Any) -> Any:
        if not isinstance(payload, Loaded):
            return payload
        if id(payload.array) not in changed:
            changed[id(payload.array)] = change(payload)
        return replace(payload, array=changed[id(payload.array)])

    return from_records((op, args, kind, of(payload)) for op, args, kind, payload in records(root))


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation over other arguments of the same types."""
    if all(a is b for a, b in zip(args, node.args, strict=True)):
        return node
    return _node(node.op, args, node.kind, node.payload)


def substitute(expr: Expr, replacements: Mapping[Expr, Expr]) -> Expr:
    """`expr` with each of these nodes replaced by another of the same type."""
    return _substituted(expr, list(replacements.items()))


def _substituted(expr: Expr, replacements: list[tuple[Expr, Expr]]) -> Expr:
    new = {id(old): other for old, other in replacements}
    for node in nodes(expr):
        if id(node) not in new:
            new[id(node)] = rebuild(node, tuple(new[id(a)] for a in node.args))
    return new[id(expr)]


def variable(name: str, kind: str = INT) -> Expr:
    return _node("var", (), kind, name)


def constant(value: bool | int | float) -> Expr:
    if isinstance(value, bool):
        return _node("const", (), BOOL, value)
    if isinstance(value, int):
        if not INT32_MIN <= value <= INT32_MAX:
            raise ValueError(f"integers in expressions are 32 bit, got {value}; use a float")
        return _node("const", (), INT, value)
    if value != value:  # NaN
        raise ValueError("NaN cannot be a constant of an expression; -inf marks a masked score")
    return _node("const", (), FLOAT, value)


def lift(value: Any) -> Expr:
    """A number, or an array of no dimensions, as an expression."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)):  # torch.compile of PyTorch 2.9 knows no unions
        return constant(value)
    if hasattr(value, "shape") and len(value.shape) == 0:
        return load(value)
    if hasattr(value, "shape"):
        raise TypeError(
            f"an array of shape {tuple(value.shape)} cannot stand in an expression; "
            "write tw.dense(array) for a mask, tw.bias(array) for a bias, "
            "or tw.load(array, index, ...), one index a dimension"
        )
    raise TypeError(f"expected an expression or a number, got {type(value).__name__}: {value!r}")


def as_float(x: Expr) -> Expr:
    if x.kind == FLOAT:
        return x
    return constant(float(x.payload)) if x.op == "const" else _node("float", (x,), FLOAT)


def _number(symbol: str, x: Expr) -> Expr:
    if x.kind == BOOL:
        raise TypeError(f"`{symbol}` needs numbers, got the condition {x!r}; write tw.where(condition, 1, 0)")
    return x


def _condition(symbol: str, x: Expr) -> Expr:
    if x.kind != BOOL:
        raise TypeError(
            f"`{symbol}` needs conditions, got the number {x!r}; compare it first, "
            "and put comparisons in parentheses: (a < b) & (c < d)"
        )
    return x


def _numbers(symbol: str, a: Any, b: Any) -> tuple[Expr, Expr]:
    """Both operands as numbers of one type."""
    a, b = _number(symbol, lift(a)), _number(symbol, lift(b))
    return (a, b) if a.kind == b.kind else (as_float(a), as_float(b))


def arithmetic(op: str, a: Any, b: Any) -> Expr:
    a, b = _numbers(ARITHMETIC[op], a, b)
    if op in ("floordiv", "mod") and b.op == "const" and b.payload == 0:
        raise ZeroDivisionError(f"`{ARITHMETIC[op]} 0` in an expression")
    if op == "div":
        a, b = as_float(a), as_float(b)
    return _node(op, (a, b), a.kind)


def comparison(op: str, a: Any, b: Any) -> Expr:
    x, y = lift(a), lift(b)
    if op in ("eq", "ne") and x.kind == y.kind == BOOL:
        same = (x & y) | (_not(x) & _not(y))
        return same if op == "eq" else _not(same)
    return _node(op, _numbers(COMPARISONS[op], x, y), BOOL)


def logic(op: str, a: Any, b: Any) -> Expr:
    symbol = LOGIC[op]
    x, y = _condition(symbol, lift(a)), _condition(symbol, lift(b))
    for known, other in ((x, y), (y, x)):  # FlexAttention's and_masks begin with True, its or_masks with False
        if known.op == "const":
            return other if known.payload == (op == "and") else known
    return _node(op, (x, y), BOOL)


def _not(x: Expr) -> Expr:  # `~x`, which torch.compile cannot follow
    return _node("not", (_condition("~", x),), BOOL)


def where(condition: Any, a: Any, b: Any) -> Expr:
    """`a` where the condition holds, else `b`."""
    test, x, y = _condition("where", lift(condition)), lift(a), lift(b)
    if x.kind == y.kind == BOOL:
        return (test & x) | (_not(test) & y)
    x, y = _numbers("where", x, y)
    return _node("where", (test, x, y), x.kind)


def minimum(a: Any, b: Any) -> Expr:
    a, b = _numbers("minimum", a, b)
    return _node("minimum", (a, b), a.kind)


def maximum(a: Any, b: Any) -> Expr:
    a, b = _numbers("maximum", a, b)
    return _node("maximum", (a, b), a.kind)


def exp(x: Any) -> Expr:
    return _node("exp", (as_float(_number("exp", lift(x))),), FLOAT)


def log(x: Any) -> Expr:
    return _node("log", (as_float(_number("log", lift(x))),), FLOAT)


def tanh(x: Any) -> Expr:
    return _node("tanh", (as_float(_number("tanh", lift(x))),), FLOAT)


def load(array: Any, *index: Any, grad: bool = False) -> Expr:
    """Read `array[index]` at run time, one integer index a dimension; with grad=True its gradient is wanted.

    An index that is a plain variable (load(slopes, H)) must match the array's size; any other index is clamped to it.
    `H + 0` is H: to read a shorter array, clamp by yourself, as in load(slopes, tw.minimum(H, len(slopes) - 1)).
    """
    return load_slot(Loaded(arrays.from_foreign("load(array, ...)", array), grad), *index)


def load_slot(slot: Loaded, *index: Any) -> Expr:
    array = slot.array
    if arrays.compiling() and isinstance(array, np.ndarray):
        array = arrays.as_tensor(array)
        slot = Loaded(array, slot.grad, slot.constant, slot.label)
    if not arrays.is_array(array) and (not hasattr(array, "shape") or not hasattr(array, "dtype")):
        raise TypeError(f"load(array, ...) needs an array, got {type(array).__name__}; try np.asarray(...)")
    if len(index) != len(array.shape):
        raise TypeError(
            f"load(array, ...) needs one index a dimension: the array has shape {tuple(array.shape)}, "
            f"got {len(index)} indices"
        )
    kind = arrays.value_kind(array)
    for i, given in enumerate(index):
        if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
            _check_place(array, i, given)
        elif isinstance(given, (float, np.floating, str)):
            found = f"got the {type(given).__name__} {given!r}"
            raise TypeError(f"load(array, ...): index {i} must be an integer expression, {found}")
    indices = tuple(lift(i) for i in index)
    for i, node in enumerate(indices):
        if node.kind != INT:
            raise TypeError(f"load(array, ...): index {i} must be an integer expression, got the {node.kind} {node!r}")
        if array.shape[i] == 0 and node.op != "var":
            raise ValueError(f"load(array, ...): the array is empty: shape {tuple(array.shape)}")
        if node.op == "const":
            _check_place(array, i, node.payload)
    if slot.grad and kind != FLOAT:
        raise TypeError(f"load(array, ..., grad=True) needs a float array, got {arrays.dtype_name(array)}")
    return _node("load", indices, kind, slot)


def _check_place(array: Any, axis: int, index: Any) -> None:
    if not 0 <= index < array.shape[axis]:
        raise IndexError(f"load(array, ...): index {axis} is {index}, the array's size there is {array.shape[axis]}")


S = variable("S", FLOAT)
B, H, HK, Q, K, NQ, NK, QP, KP = map(variable, ("B", "H", "HK", "Q", "K", "NQ", "NK", "QP", "KP"))
VARIABLES = {v.payload: v for v in (S, B, H, HK, Q, K, NQ, NK, QP, KP)}

"""Walking an expression: each node once, arguments first, however often it is used and however deep it lies.

Nothing here builds nodes, so that expr.py, which does, can walk what it has built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tilewise import arrays

if TYPE_CHECKING:
    from tilewise.expr import Expr, Loaded

T = TypeVar("T")
OpTable = Mapping[str, Callable[..., Any]]


def remembered(expr: Expr, what: Any, find: Callable[[Expr], T]) -> T:
    """find(expr), found once: a node never changes. The result must not hold the node, or it would never be freed."""
    if arrays.compiling():  # which follows no changes to what it has seen
        return find(expr)
    if what not in expr.memo:
        expr.memo[what] = find(expr)
    found: T = expr.memo[what]
    return found


def nodes(*roots: Expr) -> list[Expr]:
    """Every node once, arguments before what uses them, in order of first appearance."""
    if len(roots) == 1:
        return [*remembered(roots[0], "below", lambda root: _walk(root)[:-1]), roots[0]]
    return _walk(*roots)


def _walk(*roots: Expr) -> list[Expr]:
    """No recursion: any depth works."""
    order: list[Expr] = []
    seen: set[int] = set()  # by id: torch.compile cannot follow the hash of an object
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
    return order


def evaluate(expr: Expr, env: Mapping[str, Any], ops: OpTable) -> Any:
    """The meaning of `expr` under an op table: each node's operation, applied to its arguments' values, once a node."""
    values: dict[Expr, Any] = {}
    for node, done in zip(nodes(expr), remembered(expr, "done", _last_uses), strict=True):
        values[node] = _value(node, values, env, ops)
        for other in done:  # values may be large arrays, and expressions long
            del values[other]
    return values[expr]


def evaluate_all(expr: Expr, env: Mapping[str, Any], ops: OpTable) -> dict[Expr, Any]:
    """The values of every node of `expr`."""
    values: dict[Expr, Any] = {}
    for node in nodes(expr):
        values[node] = _value(node, values, env, ops)
    return values


def _value(node: Expr, values: Mapping[Expr, Any], env: Mapping[str, Any], ops: OpTable) -> Any:
    if node.op == "var":
        return env[node.payload]
    given = (node.payload,) if node.op in ("const", "load") else ()
    return ops[node.op](*given, *(values[a] for a in node.args))


def _last_uses(expr: Expr) -> list[tuple[Expr, ...]]:
    """For each node in order, those that no later one uses."""
    seen: set[int] = set()
    found: list[tuple[Expr, ...]] = []
    for node in reversed(nodes(expr)):
        last = {id(a): a for a in node.args if id(a) not in seen}
        seen.update(last)
        found.append(tuple(last.values()))
    return found[::-1]


def variables(expr: Expr) -> frozenset[str]:
    return remembered(expr, "variables", lambda e: frozenset(n.payload for n in nodes(e) if n.op == "var"))


def loads(*exprs: Expr) -> list[Loaded]:
    """The arrays read, one entry each, in order of first appearance."""
    slots: dict[int, Loaded] = {}
    for slot in (slot for expr in exprs for slot in remembered(expr, "loads", _loads)):
        known = slots.get(id(slot.array))
        if known is None or (slot.grad and not known.grad):
            slots[id(slot.array)] = slot
    return list(slots.values())


def _loads(expr: Expr) -> list[Loaded]:
    return [node.payload for node in nodes(expr) if node.op == "load"]

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
    return evaluate_all(expr, env, ops)[expr]


def evaluate_all(expr: Expr, env: Mapping[str, Any], ops: OpTable) -> dict[Expr, Any]:
    """The values of every node of `expr`."""
    values: dict[Expr, Any] = {}
    for node in nodes(expr):
        if node.op == "var":
            values[node] = env[node.payload]
        elif node.op in ("const", "load"):
            values[node] = ops[node.op](node.payload, *(values[a] for a in node.args))
        else:
            values[node] = ops[node.op](*(values[a] for a in node.args))
    return values


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

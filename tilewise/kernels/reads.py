"""How a score reads an array that wants a gradient: which of a call's scores share a cell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from tilewise.arrays import Array, is_torch
from tilewise.derivative import score_slopes
from tilewise.expr import COMPARISONS, INT, Expr, S, with_arrays
from tilewise.kernels import gpus
from tilewise.reference import values
from tilewise.spec import Attention, Shape
from tilewise.walking import nodes, variables

_HEADS = ("B", "H", "HK")
_QUERIES, _KEYS = frozenset(("Q", "QP")), frozenset(("K", "KP"))


class Sharing(Enum):
    """What a cell belongs to, beside batch indices and heads."""

    ROWS = "a query, or all of them"
    COLUMNS = "a key"
    PAIRS = "a query and a key"
    DISTANCES = "all queries and keys of a distance"


@dataclass(frozen=True, eq=False)
class Read:
    """One load in the score, the derivative of the score by it, and who shares its cells."""

    node: Expr
    slope: Expr
    sharing: Sharing

    @property
    def array(self) -> Any:
        return self.node.payload.array

    @property
    def axis(self) -> int:
        """The first that is read at more than a number, a batch index or a head."""
        return next(i for i, index in enumerate(self.node.args) if not _is_plain(index, _HEADS))


def reads(spec: Attention) -> list[Read]:
    """Every read of an array that wants a gradient; ValueError, with a reason, if one is beyond what kernels sum up."""
    return [Read(node, slope, _sharing(node, spec)) for node, slope in score_slopes(spec).items() if node is not S]


def unsupported(spec: Attention) -> str | None:
    try:
        reads(spec)
    except ValueError as reason:
        return str(reason)
    return None


def too_many(spec: Attention, shape: Shape) -> str | None:
    """Why a launch has no room for the heads, the batch, or the packed sequences whose distances are summed up."""
    summed = 0 if spec.lengths is None or not (shape.backward and spec.wanted) else len(spec.lengths.q) - 1
    return gpus.too_many(shape, summed)


def _sharing(node: Expr, spec: Attention) -> Sharing:
    others = [i for i in node.args if not _is_plain(i, _HEADS)]
    heads = [i for i in node.args if i.op == "var" and i.payload in ("H", "HK")]
    batches = [i for i in node.args if i.op == "var" and i.payload == "B"]
    used = frozenset().union(*map(variables, others)) if others else frozenset()
    if used & set(_HEADS) or len(heads) > 1 or len(batches) > 1:
        raise ValueError(f"it sums up no gradients of an array read at {node!r}")
    if not others:
        return Sharing.ROWS
    if len(others) == 1 and _is_plain(others[0], _QUERIES):
        return Sharing.ROWS
    if len(others) == 1 and _is_plain(others[0], _KEYS):
        return Sharing.COLUMNS
    if len(others) == 2 and [i.payload for i in node.args[-2:]] == ["Q", "K"]:
        return Sharing.PAIRS
    is_of_sequence = spec.lengths is None or not used & {"QP", "KP"}  # in a pack they have distances of their own
    if len(others) == 1 and is_of_sequence and depends_on_difference(others[0], _QUERIES, _KEYS):
        return Sharing.DISTANCES
    raise ValueError(f"it sums up no gradients of an array read at {node!r}")


def _is_plain(index: Expr, names: Any) -> bool:
    return index.op == "const" or (index.op == "var" and index.payload in names)


def depends_on_difference(expr: Expr, ones: frozenset[str], others: frozenset[str]) -> bool:
    """Whether variables of these two kinds (queries and keys, say) come in as their difference alone."""
    forms: dict[Expr, tuple[float, float] | None] = {}  # how often each kind is in a sum; None: in no sum
    for node in nodes(expr):
        args = [forms[a] for a in node.args]
        if node.op == "var":
            forms[node] = (float(node.payload in ones), float(node.payload in others))
        elif node.op in ("add", "sub") and None not in args:
            sign = 1 if node.op == "add" else -1
            (a, b), (c, d) = args[0] or (0, 0), args[1] or (0, 0)
            forms[node] = a + sign * c, b + sign * d
        elif node.op in ("neg", "float") and None not in args:
            (a, b), sign = args[0] or (0, 0), -1 if node.op == "neg" else 1
            forms[node] = sign * a, sign * b
        elif node.op in COMPARISONS and node.args[0].kind == node.args[1].kind == INT and None not in args:
            (a, b), (c, d) = args[0] or (0, 0), args[1] or (0, 0)
            forms[node] = (0.0, 0.0) if a + b == c + d else None  # what is compared is their difference
        elif all(form is not None and form[0] + form[1] == 0 for form in args):
            forms[node] = (0.0, 0.0)
        else:
            forms[node] = None
    form = forms[expr]
    return form is not None and form[0] + form[1] == 0


def cells_of_distances(index: Expr, shape: Shape, size: int, least: int, count: int) -> Array:
    """The cell along the axis of this index that scores of each distance q - k read, from the least distance on."""
    distance = np.arange(least, least + count)
    env = shape.env(0, 0, np.maximum(distance, 0), np.maximum(-distance, 0))
    on_host = with_arrays(index, lambda slot: slot.array.cpu() if is_torch(slot.array) else slot.array)
    cells: Array = np.clip(np.broadcast_to(values(on_host, env), distance.shape), 0, size - 1)
    return cells


def readers_of_cells(cells: Array, size: int) -> tuple[Array, Array]:
    """Who reads each cell: readers, one cell's after another's; and where each cell's begin, and the last one's end."""
    order = np.argsort(cells, kind="stable")
    return order.astype(np.int32), np.searchsorted(cells[order], np.arange(size + 1)).astype(np.int32)

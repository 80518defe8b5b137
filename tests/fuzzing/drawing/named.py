"""The named variants twice: as their definitions in docs/design.md, written out, and as texts of their constructors.

What is judged are the definitions; the call is made with the constructors, so that the two are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.forms import Pool
from tests.fuzzing.drawing.language import BOOL, FLOAT, INT, K, Node, P, S
from tests.fuzzing.drawing.tables import Table
from tests.fuzzing.question import FLOATS, INTEGERS, Numbers

HEADS = "HEADS"  # stands for the number of heads, until there is one


class Named(NamedTuple):
    """A definition, and a text that means it."""

    node: Node
    written: str


def _flag(pool: Pool) -> bool:
    return pool.dice.chance(0.5)


def _floats(pool: Pool, dims: tuple[str | int, ...], fill: str = "normal") -> str:
    table = Table(dims, pool.dice.one_of(FLOATS), fill, wants_gradient=pool.dice.chance(0.5))
    return f"a{pool.table(table)}"


# -- masks ------------------------------------------------------------------------------------------------------------


def _causal(pool: Pool) -> Named:
    return Named(K <= P, "causal()")


def _window(pool: Pool) -> Named:
    left, right = pool.dice.below(pool.reach), pool.dice.one_of((None, 0, pool.dice.below(pool.reach)))
    node = (P - left <= K) & (K <= P + (left if right is None else right))
    return Named(node, f"window({left})" if right is None else f"window({left}, {right})")


def _prefix(pool: Pool) -> Named:
    n = pool.dice.below(pool.reach)
    return Named(K < n, f"prefix({n})")


def _document(pool: Pool) -> Named:
    dtype = pool.dice.one_of(INTEGERS[:4])
    fill = "hashes" if dtype == "int64" else "ids"  # ids of documents are often hashes
    q_first, k_first = ((la.B,) if pool.dice.chance(0.3) else () for _ in range(2))
    q_ids, k_ids = (
        f"a{pool.table(Table((*(['B'] if first else []), name), dtype, fill))}"
        for first, name in ((q_first, "Q"), (k_first, "K"))
    )
    node = la.equal(la.load(q_ids, INT, *q_first, la.Q), la.load(k_ids, INT, *k_first, K))
    return Named(node, f"document({q_ids}, {k_ids})")


def _dilated(pool: Pool) -> Named:
    step = 1 + pool.dice.below(7)
    return Named(la.equal((P - K) % step, 0), f"dilated({step})")


def _dense(pool: Pool) -> Named:
    dims, index = _broadcast(pool)
    name = f"a{pool.table(Table(dims, 'bool', 'truth', share=pool.dice.one_of((0.05, 0.5, 0.95))))}"
    return Named(la.load(name, BOOL, *index), f"dense({name})")


def _broadcast(pool: Pool) -> tuple[tuple[str | int, ...], list[Node]]:
    """The axes of what broadcasts to (batch, heads, queries, keys), and where they are read: an axis of 1 at 0."""
    dims = tuple(1 if pool.dice.chance(0.3) else name for name in "BHQK"[4 - pool.dice.between(1, 4) :])
    return dims, [la.lift(0) if isinstance(name, int) else la.variable(name) for name in dims]


# -- scores -----------------------------------------------------------------------------------------------------------


def _alibi(pool: Pool) -> Named:
    published = pool.dice.chance(0.4)
    name = f"a{pool.table(Table(('H',), 'float32', 'slopes'))}" if published else _floats(pool, ("H",))
    return Named(S - la.load(name, FLOAT, la.H) * abs(P - K), f"alibi({HEADS if published else name})")


def _relative(pool: Pool) -> Named:
    signed, half = _flag(pool), pool.dice.below(20)
    last = 2 * half if signed else half
    entry = la.minimum(la.maximum(K - P + half, 0), last) if signed else la.minimum(abs(P - K), last)
    heads = [la.H] if _flag(pool) else []
    name = _floats(pool, (*(["H"] if heads else []), last + 1))
    return Named(S + la.load(name, FLOAT, *heads, entry), f"relative({name}{', signed=True' if signed else ''})")


def _t5(pool: Pool) -> Named:
    side, both = pool.dice.between(1, 9), _flag(pool)
    buckets = 2 * side if both else side + 1
    one_side = side if both else buckets
    furthest = max(one_side // 2, 1) + 1 + pool.dice.below(60)
    lookup = pool.table(Table((), "int32", "small", values=buckets_of_t5(one_side, furthest, both)))
    entry = P - K + furthest if both else P - K  # beyond either end it is read there
    heads = [la.H] if _flag(pool) else []
    name = _floats(pool, (buckets, *(["H"] if heads else [])))
    node = S + la.load(name, FLOAT, la.load(f"a{lookup}", INT, entry), *heads)
    return Named(node, f"t5({name}, {furthest}{'' if both else ', bidirectional=False'})")


def buckets_of_t5(side: int, furthest: int, both: bool) -> Numbers:
    """T5's bucket of each distance, from -furthest (keys after the query) or from 0: the first half of a side's are
    exact, the others logarithmic, in float32 as T5 has it."""
    exact = max(side // 2, 1)

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        wide = np.log(np.float32(distance) / exact) / np.float32(math.log(furthest / exact))
        return min(exact + int(np.float32(wide) * np.float32(side - exact)), side - 1)

    before = [bucket(distance) for distance in range(furthest + 1)]
    after = [bucket(distance) + side for distance in range(furthest, 0, -1)]
    return np.array(after + before if both else before, np.int64)


def _softcap(pool: Pool) -> Named:
    cap = pool.dice.one_of((0.5, 2, 30.0))
    return Named(cap * la.tanh(S / cap), f"softcap({cap})")


def _bias(pool: Pool) -> Named:
    dims, index = _broadcast(pool)
    name = _floats(pool, dims, "masked" if pool.dice.chance(0.3) else "normal")
    return Named(S + la.load(name, FLOAT, *index), f"bias({name})")


MASKS: dict[str, Callable[[Pool], Named]] = {
    "causal": _causal, "window": _window, "prefix": _prefix, "document": _document, "dilated": _dilated,
    "dense": _dense,
}  # fmt: skip
SCORES: dict[str, Callable[[Pool], Named]] = {
    "alibi": _alibi, "relative": _relative, "t5": _t5, "softcap": _softcap, "bias": _bias,
}  # fmt: skip


def mask(pool: Pool) -> Named:
    """One, or several joined by &, | and ~, conditions over the pool's forms among them."""
    made = _one(pool, MASKS)
    for _ in range(pool.dice.weighted({0: 4, 1: 4, 2: 1})):
        other = _one(pool, MASKS)
        if pool.dice.chance(0.3):
            bound = pool.bound()
            other = Named(bound, la.text(bound))
        join, symbol = (la.Node.__and__, "&") if pool.dice.chance(0.6) else (la.Node.__or__, "|")
        made = Named(join(made.node, other.node), f"({made.written}) {symbol} ({other.written})")
    return Named(~made.node, f"~({made.written})") if pool.dice.chance(0.1) else made


def score(pool: Pool) -> Named:
    """One, or several in a row, applied from the left."""
    made = _one(pool, SCORES)
    for _ in range(pool.dice.weighted({0: 5, 1: 4, 2: 1})):
        after = _one(pool, SCORES)
        made = Named(la.substituted(after.node, {"S": made.node}), f"({made.written}) >> ({after.written})")
    return made


def _one(pool: Pool, makers: dict[str, Callable[[Pool], Named]]) -> Named:
    name = pool.dice.one_of(list(makers))
    pool.names.append(f"named {name}")
    return makers[name](pool)

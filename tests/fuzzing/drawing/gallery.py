"""FlexAttention's gallery: the masks and scores that people write, as texts of our own over a pool's forms.

The ideas are those of attention-gym; every mask meets every score.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzzing.drawing import language as la
from tests.fuzzing.drawing.forms import Pool
from tests.fuzzing.drawing.language import FLOAT, INT, B, H, K, Node, Q, S, where
from tests.fuzzing.drawing.tables import ANY, Table

Maker = Callable[[Pool], Node]


# -- masks ------------------------------------------------------------------------------------------------------------


def _size(pool: Pool, least: int = 1) -> int:
    return max(abs(pool.number()), least)


def _causal(pool: Pool) -> Node:
    return pool.position() >= K


def _sliding(pool: Pool) -> Node:
    p = pool.position()
    return (p >= K) & (p - K <= _size(pool))


def _prefix_of_each(pool: Pool) -> Node:
    at = pool.table(Table(("B",), "int32", "places"))
    return (K < la.load(f"a{at}", INT, B)) | _causal(pool)


def _document(pool: Pool) -> Node:
    dtype = pool.dice.one_of(("int32", "int64", "int16"))
    q_ids, k_ids = (pool.table(Table((name,), dtype, "ids")) for name in "QK")
    same = la.equal(la.load(f"a{q_ids}", INT, Q), la.load(f"a{k_ids}", INT, K))
    return same & _causal(pool) if pool.dice.chance(0.5) else same


def _order_of_hashes(pool: Pool) -> Node:
    """Ids of 64 bits, some of which are one number as floats, or differ in the upper half alone."""
    q_ids, k_ids = (pool.table(Table((name,), "int64", "hashes")) for name in "QK")
    return la.load(f"a{q_ids}", INT, Q) >= la.load(f"a{k_ids}", INT, K)


def _document_starts(pool: Pool) -> Node:
    """Positions within documents: an array read by what another array holds."""
    ids, starts = pool.table(Table(("Q",), "int32", "ids")), pool.table(Table((ANY,), "int32", "places"))
    start = la.load(f"a{starts}", INT, la.load(f"a{ids}", INT, Q))
    return (pool.position() - start >= K - start) & (K >= start - _size(pool))


def _dilated(pool: Pool) -> Node:
    p, step = pool.position(), _size(pool, 2) % 6 + 1
    return la.equal((p - K) % step, 0) & (abs(p - K) <= step * _size(pool))


def _natten(pool: Pool) -> Node:
    """A neighbourhood in a picture, whose rows are `width` long, moved inside at its edges."""
    width, reach = _size(pool, 3), _size(pool) % 4 + 1
    p = pool.position()
    column = la.minimum(la.maximum(p % width, reach), width - 1 - reach)
    return (abs(p // width - K // width) <= reach) & (abs(column - K % width) <= reach)


def _per_head(pool: Pool) -> Node:
    p = pool.position()
    return (p >= K) & (p - K <= _size(pool) * (H + 1))


def _longformer(pool: Pool) -> Node:
    few = _size(pool)
    return (K < few) | (Q < few) | (abs(pool.position() - K) <= _size(pool))


def _strided(pool: Pool) -> Node:
    p, step = pool.position(), _size(pool, 2)
    return (p >= K) & (la.equal((p - K) % step, 0) | la.equal(p // step, K // step))


def _spans(pool: Pool) -> Node:
    """Causal, but for pictures inside a text, which are seen as wholes."""
    first, size = _size(pool), _size(pool)
    inside = [(x >= first) & (x < first + size) for x in (pool.position(), K)]
    return _causal(pool) | (inside[0] & inside[1])


def _padding(pool: Pool) -> Node:
    at = pool.table(Table(("B",), pool.dice.one_of(("int32", "int64")), "places"))
    return (K < la.load(f"a{at}", INT, B)) & _causal(pool)


def _blocks(pool: Pool) -> Node:
    size = _size(pool, 2)
    return pool.position() // size >= K // size


MASKS: dict[str, Maker] = {
    "causal": _causal,
    "sliding window": _sliding,
    "two-sided window": lambda pool: abs(pool.position() - K) <= _size(pool),
    "prefix lm": lambda pool: (K < _size(pool)) | _causal(pool),
    "prefix of each": _prefix_of_each,
    "document": _document,
    "order of hashes": _order_of_hashes,
    "document starts": _document_starts,
    "dilated window": _dilated,
    "natten": _natten,
    "strictly before": lambda pool: K < pool.position(),
    "checkerboard": lambda pool: la.equal((pool.position() + K) % 2, 0),
    "block diagonal": lambda pool: la.equal(pool.position() // 16, K // 16),
    "block causal": _blocks,
    "window of each head": _per_head,
    "sink and window": lambda pool: (K < 4) | _sliding(pool),
    "longformer": _longformer,
    "strided": _strided,
    "spans": _spans,
    "padding": _padding,
    "even heads causal": lambda pool: la.equal(H % 2, 1) | _causal(pool),
}


# -- scores -----------------------------------------------------------------------------------------------------------


def _alibi(pool: Pool) -> Node:
    at = pool.table(Table(("H",), "float32", "slopes" if pool.dice.chance(0.5) else "normal"))
    return S + la.load(f"a{at}", FLOAT, H) * (K - pool.position())


def _softcap(pool: Pool) -> Node:
    cap = pool.dice.one_of((0.5, 2.0, 30.0))
    return cap * la.tanh(S / cap)


def _table(pool: Pool) -> Node:
    """A bias by distance, of each head or of all."""
    by_head, half = pool.dice.chance(0.5), _size(pool)
    dims = ("H", ANY) if by_head else (ANY,)
    at = pool.table(Table(dims, pool.dice.one_of(("float32", "bfloat16", "float16")), "normal", wants_gradient=True))
    return S + la.load(f"a{at}", FLOAT, *([H] if by_head else []), pool.position() - K + half)


def _bias(pool: Pool) -> Node:
    names = [name for name in "BHQK" if pool.dice.chance(0.6)] or ["K"]
    masked = "masked" if pool.dice.chance(0.3) else "normal"
    table = Table(tuple(names), pool.dice.one_of(("float32", "bfloat16")), masked, wants_gradient=pool.dice.chance(0.5))
    return S + la.load(f"a{pool.table(table)}", FLOAT, *map(la.variable, names))


def _checkerboard(pool: Pool) -> Node:
    apart = abs(K - pool.position())
    return where(la.equal(apart % 2, 1), S * 0.5, where(la.equal(apart % 3, 0), S * 2.0, S))


def _temperature(pool: Pool) -> Node:
    at = pool.table(Table(("H",), "float32", "normal", wants_gradient=pool.dice.chance(0.5)))
    return S * (1.0 + 0.25 * la.load(f"a{at}", FLOAT, H))


def _gauss(pool: Pool) -> Node:
    apart = la.as_float(pool.position() - K)
    return S - 0.001 * apart * apart


def _heads_differ(pool: Pool) -> Node:
    return where(la.equal(H, 0), S, S - 0.1 * abs(pool.position() - K))


SCORES: dict[str, Maker] = {
    "as it is": lambda pool: S,
    "alibi": _alibi,
    "softcap": _softcap,
    "relative": lambda pool: S + 0.05 * (pool.position() - K),
    "relative table": _table,
    "bias": _bias,
    "checkerboard": _checkerboard,
    "causal by score": lambda pool: where(pool.position() >= K, S, -float("inf")),
    "temperature": _temperature,
    "stick-breaking": lambda pool: -la.log(1.0 + la.exp(-S)),
    "logarithm": lambda pool: S - la.log(1.0 + abs(pool.position() - K)),
    "gauss": _gauss,
    "heads differ": _heads_differ,
    "inverse distance": lambda pool: S + 1.0 / (1.0 + abs(pool.position() - K)),
}


def mask(pool: Pool) -> Node:
    name = pool.dice.one_of(list(MASKS))
    pool.names.append(f"gallery mask {name}")
    return MASKS[name](pool)


def score(pool: Pool) -> Node:
    name = pool.dice.one_of(list(SCORES))
    pool.names.append(f"gallery score {name}")
    return SCORES[name](pool)

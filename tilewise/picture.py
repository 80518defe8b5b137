"""A variant as a picture in text: queries down, keys across."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.arrays import Array
from tilewise.expr import BOOL, Expr
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Shape
from tilewise.validate import whole
from tilewise.walking import evaluate

SHADES = "░▒▓█"
MOST = 4096  # queries or keys


def picture(expr: Expr, n_q: int = 8, n_k: int = 8, *, s: Any = 0.0, head: int = 0, heads: int = 8) -> str:
    """A small case of a mask or a score, drawn.

    A mask shows ■ for a key the query sees and · for one it does not. A score shows what it makes of the score s (a
    number, or anything that broadcasts to (n_q, n_k)): a darker cell is a larger number, · is -inf.
    """
    values = grid(expr, n_q, n_k, s=s, head=head, heads=heads)
    if expr.kind == BOOL:
        cells = np.where(values, "■", "·")
    else:
        seen = np.isfinite(values)
        low, high = (values[seen].min(), values[seen].max()) if seen.any() else (0.0, 0.0)
        level = (np.where(seen, values, low) - low) / ((high - low) or 1.0) * len(SHADES)
        cells = np.where(seen, np.array(list(SHADES))[np.minimum(level.astype(int), len(SHADES) - 1)], "·")
    return "\n".join(" ".join(row) for row in cells)


def grid(expr: Expr, n_q: int, n_k: int, *, s: Any = 0.0, head: int = 0, heads: int = 8) -> Array:
    """The values of a mask or a score over n_q queries and n_k keys of one head."""
    n_q, n_k = whole("n_q", n_q, 1, MOST), whole("n_k", n_k, 1, MOST)
    heads = whole("heads", heads)
    head = whole("head", head, 0, heads - 1)
    env = Shape(1, heads, heads, n_q, n_k, 1, 1).env(0, head, np.arange(n_q)[:, None], np.arange(n_k))
    scores = np.broadcast_to(np.asarray(s, np.float64), (n_q, n_k))
    return np.broadcast_to(evaluate(expr, {**env, "S": scores}, numpy_ops(np.float64)), (n_q, n_k))

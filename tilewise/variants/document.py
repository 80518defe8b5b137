"""Documents packed into one sequence: a query sees the keys of its own. Tiles between documents are skipped."""

from typing import Any

from tilewise.expr import B, Expr, K, Q
from tilewise.variants._checks import array, read


def document(ids: Any, k_ids: Any = None) -> Expr:
    """Keys whose id equals the query's. ids: integers, (n,) or (batch, n); k_ids: the keys' own, if they differ.

    >>> print(picture(document(np.array([0, 0, 0, 1, 1, 2])), 6, 6))
    ■ ■ ■ · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ · · ·
    · · · ■ ■ ·
    · · · ■ ■ ·
    · · · · · ■
    """
    q_ids = array("document", "ids", ids, "int", range(1, 3))
    named_k = "k_ids" if k_ids is not None else "ids (those of the keys too, unless k_ids are given)"
    k_ids = q_ids if k_ids is None else array("document", "k_ids", k_ids, "int", range(1, 3))
    batch_q, batch_k = ([B] if len(x.shape) == 2 else [] for x in (q_ids, k_ids))
    return read("document", "ids", q_ids, *batch_q, Q) == read("document", named_k, k_ids, *batch_k, K)

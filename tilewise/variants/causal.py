"""Causal: a query sees the keys up to its own position. Aligned bottom right: the last query sees the last key."""

from tilewise.expr import Expr, K
from tilewise.variants._checks import P


def causal() -> Expr:
    """Keys at or before the query.

    >>> print(picture(causal(), 4, 6))
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■ ■
    """
    return K <= P

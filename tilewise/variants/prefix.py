"""A prefix that every query sees. With causal it is the mask of a prefix language model: causal() | prefix(n)."""

from tilewise.expr import Expr, K
from tilewise.variants._checks import whole


def prefix(n: int) -> Expr:
    """The first n keys.

    ■ ■ · · · ·
    ■ ■ · · · ·
    ■ ■ · · · ·
    """
    return whole("prefix", "n", n, 0) > K

"""A dilated pattern: a query sees every step-th key, counted from its own position."""

from tilewise.expr import Expr, K
from tilewise.variants._checks import P, whole


def dilated(step: int) -> Expr:
    """Keys whose distance from the query is a multiple of step.

    >>> print(picture(dilated(3), 6, 6))
    ■ · · ■ · ·
    · ■ · · ■ ·
    · · ■ · · ■
    ■ · · ■ · ·
    · ■ · · ■ ·
    · · ■ · · ■
    """
    return (P - K) % whole("dilated", "step", step, 1) == 0

"""A sliding window: a query sees the keys near its own position. Work grows with n x window, not n squared."""

from tilewise.expr import Expr, K
from tilewise.variants._checks import P, whole

MAX_DISTANCE = 2**30  # a position plus this much is still a 32-bit integer


def window(left: int, right: int | None = None) -> Expr:
    """Keys from `left` before the query to `right` after it, both inclusive; window(n) is window(n, n).

    >>> print(picture(window(2, 1), 6, 6))
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    · ■ ■ ■ ■ ·
    · · ■ ■ ■ ■
    · · · ■ ■ ■
    """
    left = whole("window", "left", left, 0, MAX_DISTANCE)
    right = left if right is None else whole("window", "right", right, 0, MAX_DISTANCE)
    return (K >= P - left) & (K <= P + right)

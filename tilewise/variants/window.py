"""A sliding window: a query sees the keys near its own position. Work grows with n x window, not n squared."""

from tilewise.expr import Expr, K
from tilewise.variants._checks import P, whole


def window(left: int, right: int | None = None) -> Expr:
    """Keys from `left` before the query to `right` after it, both inclusive; window(n) is window(n, n).

    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    · ■ ■ ■ ■ ·
    · · ■ ■ ■ ■
    · · · ■ ■ ■
    """
    left = whole("window", "left", left, 0)
    right = left if right is None else whole("window", "right", right, 0)
    return (P - left <= K) & (P + right >= K)

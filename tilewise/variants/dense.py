"""Any mask at all, given as an array of booleans. Blocks of it that are all False are skipped."""

from typing import Any

from tilewise.expr import B, Expr, H, K, Q
from tilewise.variants._checks import array, read
from tilewise.variants.bias import broadcast_index


def dense(mask: Any) -> Expr:
    """Keys where the array is True; its shape broadcasts to (batch, heads, queries, keys).

    >>> print(picture(dense(np.array([[1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0]]) > 0), 2, 6))
    ■ · ■ ■ · ■
    · ■ · ■ ■ ·
    """
    mask = array("dense", "mask", mask, "bool", range(1, 5))
    return read("dense", "mask", mask, *broadcast_index(mask, (B, H, Q, K)))

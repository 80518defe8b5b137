"""A learned bias by relative position: one number a distance, clipped at the table's end."""

from typing import Any

from tilewise.expr import Expr, H, K, S, maximum, minimum
from tilewise.variants._checks import P, array, read


def relative(table: Any, signed: bool = False, grad: bool = False) -> Expr:
    """S + table[distance], or table[head, distance]; distances past the end take the last entry.

    signed: the table has 2 * m + 1 entries, for key positions from m before the query to m after it.

    >>> print(picture(relative(np.array([3.0, 2, 1, 0])), 6, 6))
    █ ▓ ▒ ░ ░ ░
    ▓ █ ▓ ▒ ░ ░
    ▒ ▓ █ ▓ ▒ ░
    ░ ▒ ▓ █ ▓ ▒
    ░ ░ ▒ ▓ █ ▓
    ░ ░ ░ ▒ ▓ █
    """
    table = array("relative", "table", table, "float", range(1, 3))
    size = table.shape[-1]
    if size == 0:
        raise ValueError("relative: table must have at least one entry, got none")
    if signed and size % 2 == 0:
        raise ValueError(f"relative: a signed table has an odd number of entries (2 * m + 1), got {size}")
    if signed:
        entry = minimum(maximum(K - P + size // 2, 0), size - 1)
    else:
        entry = minimum(abs(P - K), size - 1)
    head = [H] if len(table.shape) == 2 else []
    return S + read("relative", "table", table, *head, entry, grad=grad)

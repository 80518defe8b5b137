"""A bias added to the scores, with a gradient if it wants one."""

from typing import Any

from tilewise.expr import B, Expr, H, K, Q, S
from tilewise.variants._checks import array, read


def bias(values: Any, grad: bool = False) -> Expr:
    """S + values; their shape broadcasts to (batch, heads, queries, keys). -inf masks a key.

    >>> print(picture(bias(np.array([[0.0, 1, 2, 3, 1, 2], [1, 2, 3, 0, 1, 2]])), 2, 6))
    ░ ▒ ▓ █ ▒ ▓
    ▒ ▓ █ ░ ▒ ▓
    """
    values = array("bias", "values", values, "float", range(1, 5))
    return S + read("bias", "values", values, *broadcast_index(values, (B, H, Q, K)), grad=grad)


def broadcast_index(values: Any, variables: tuple[Expr, ...]) -> list[Expr | int]:
    """An index a dimension, aligned right; a dimension of size 1 is read at 0 by all."""
    aligned = variables[len(variables) - len(values.shape) :]
    return [0 if size == 1 else variable for size, variable in zip(values.shape, aligned, strict=True)]

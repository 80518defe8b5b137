"""ALiBi: a penalty that grows with distance, at a slope of its own for each head."""

from numbers import Integral
from typing import Any

import numpy as np

from tilewise.expr import Expr, H, K, S
from tilewise.variants._checks import P, array, constant_table, read, whole

MAX_HEADS = 65536


def alibi(slopes: Any, grad: bool = False) -> Expr:
    """S - slope[head] * distance. slopes: (heads,) floats, or the number of heads for the published slopes.

    >>> print(picture(alibi(8), 6, 6))
    █ █ ▓ ▒ ░ ░
    █ █ █ ▓ ▒ ░
    ▓ █ █ █ ▓ ▒
    ▒ ▓ █ █ █ ▓
    ░ ▒ ▓ █ █ █
    ░ ░ ▒ ▓ █ █
    """
    if isinstance(slopes, Integral):
        heads = whole("alibi", "the number of heads", slopes, 1, MAX_HEADS)
        slope = read("alibi", "slopes", published_slopes(heads), H, constant=True)
    else:
        slope = read("alibi", "slopes", array("alibi", "slopes", slopes, "float", range(1, 2)), H, grad=grad)
    return S - slope * abs(P - K)


@constant_table
def published_slopes(heads: int) -> Any:
    """Powers of 2 ** (-8 / heads); if heads is no power of 2, every other slope of the next power is added."""
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / lower) for i in range(lower)]
    extra = [2.0 ** (-4 * (2 * i + 1) / lower) for i in range(heads - lower)]
    return np.array(slopes + extra, np.float32)

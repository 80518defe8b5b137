"""The operations of expressions that Triton has not, or has otherwise: what they give is what NumPy gives.

Spliced into every variant's source, so that one module is all that its kernels call.
"""

import triton
import triton.language as tl


@triton.jit
def cell_of(row, key, size, step):
    """row[key], 0 outside. Of clamped indices Triton would not know that neighbours lie side by side, and load them one
    by one."""
    return tl.load(row + tl.cast(key, tl.int64) * step, mask=(key >= 0) & (key < size), other=0)


@triton.jit
def floor_quotient(a, b):
    """Whole numbers: floored, and 0 if divided by 0."""
    divisor = tl.where(b == 0, 1, b)
    quotient = a // divisor  # rounded towards 0
    below = (quotient * divisor != a) & ((a < 0) != (divisor < 0))
    return tl.where(b == 0, 0, quotient - tl.cast(below, quotient.dtype))


@triton.jit
def floor_remainder(a, b):
    return tl.where(b == 0, 0, a - b * floor_quotient(a, b))


@triton.jit
def tanh(x):
    """A polynomial near 0, where the quotient would lose digits."""
    square = x * x
    small = -5.70498872745e-3
    small = small * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = small * square - 3.33332819422e-1
    size = tl.abs(x)
    large = 1 - 2 / (1 + tl.exp(2 * size))
    return tl.where(size < 0.625, small * square * x + x, tl.where(x < 0, -large, large))

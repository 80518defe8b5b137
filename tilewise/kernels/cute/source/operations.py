"""The operations of expressions that CuTe's DSL has not, or has otherwise: what they give is what NumPy gives.

Spliced into every variant's source, so that one module is all that its kernels call.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64


def where(condition, a, b):
    """Both are computed, and one is taken; they are of one type. The DSL's own gives a value that has lost its type."""
    return type(a)(cutlass.select_(Boolean(condition).ir_value(), a.ir_value(), b.ir_value()))


def negated(condition):
    return where(condition, Boolean(False), Boolean(True))


def minimum(a, b):
    return where(a < b, a, b)


def maximum(a, b):
    return where(a > b, a, b)


def float_minimum(a, b):
    """NaN stays NaN, as in NumPy."""
    return where((a < b) | (a != a), a, b)


def float_maximum(a, b):
    return where((a > b) | (a != a), a, b)


def absolute(a):
    return where(a < 0, -a, a)


def floor_quotient(a, b):
    """Whole numbers: floored, and 0 if divided by 0. Numbers without a sign are left to the DSL: it takes for granted
    that differences of coordinates are not negative, and its own // does not floor them."""
    unsigned = Uint64 if isinstance(a, Int64) else Uint32
    divisor = absolute(where(b == 0, type(b)(1), b))
    dividend = where(b < 0, -a, a)
    size = type(a)(unsigned(where(dividend < 0, -1 - dividend, dividend)) // unsigned(divisor))
    return where(b == 0, type(a)(0), where(dividend < 0, -1 - size, size))


def floor_remainder(a, b):
    """The DSL's own % has the sign of a."""
    return where(b == 0, type(a)(0), a - b * floor_quotient(a, b))


def float_floor_quotient(a, b):
    return cute.math.floor(a / b)


def float_floor_remainder(a, b):
    return a - b * float_floor_quotient(a, b)


def exp(a):
    return cute.math.exp(a)


def log(a):
    return cute.math.log(a)


def tanh(a):
    """A polynomial near 0, where the quotient would lose digits."""
    square = a * a
    small = Float32(-5.70498872745e-3)
    for factor in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        small = small * square + factor
    size = absolute(a)
    large = 1.0 - 2.0 / (1.0 + exp(2.0 * size))
    return where(size < 0.625, small * square * a + a, where(a < 0.0, -large, large))


def cell(array, *index):
    """array[index], each index clamped to its axis: nothing is read outside. A single number is an array of one."""
    return array[tuple(clamped(i, n) for i, n in zip(index or (0,), array.shape, strict=True))]


def clamped(index, size):
    type_ = Int64 if isinstance(index, Int64) else Int32
    return maximum(minimum(type_(index), type_(size - 1)), type_(0))

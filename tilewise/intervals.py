"""The interval op table: bounds of an expression over whole tiles at once, with no N x N work.

A number is (lo, hi), both inclusive, arrays over a grid of tiles (batch, heads, query tiles, key tiles), broadcast. A
condition is the same over {False, True}: (holds everywhere, holds somewhere). NaN bounds mean "unknown"; comparisons
are written so that unknown never proves anything. A wrong bound is a wrong answer, so float bounds widen outward.

Bounds of integers stay integers of 64 bits, since float64 would take two ids beyond 2^53 for one. What may leave 64
bits wraps around in kernels, and so may be any integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import INT, Expr, Loaded, rebuild, variable
from tilewise.walking import OpTable, evaluate, nodes, remembered, variables

Interval = tuple[Any, Any]

FLOAT_MAX = float(np.finfo(np.float32).max)
SCORE: Interval = (np.asarray(-(2.0**120)), np.asarray(2.0**120))  # S: finite, with room for what a variant adds
ARITHMETIC_ERROR = 2.0**-20  # a few roundings of float32
FUNCTION_ERROR = 2.0**-8  # the fast exp and tanh of GPUs
_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max  # an integer that may be any
_SURELY_64_BITS = 2.0**62  # integers of 64 bits hold this, though it was computed in floats
_COARSE = 16  # long 1-D arrays are summarised by this many entries at a time


def _widen(bounds: Interval, error: float) -> Interval:
    """Outward by a relative error and the smallest normal number; beyond float32's range is infinity."""
    lo, hi = (np.asarray(b, np.float64) for b in bounds)
    tiny = float(np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):
        lo = np.where(np.isinf(lo), lo, lo - np.abs(lo) * error - tiny)
        hi = np.where(np.isinf(hi), hi, hi + np.abs(hi) * error + tiny)
    return np.where(lo < -FLOAT_MAX, -np.inf, lo), np.where(hi > FLOAT_MAX, np.inf, hi)


def _is_float(*bounds: Any) -> bool:
    return any(np.asarray(b).dtype.kind == "f" for b in bounds)


def _hull(*candidates: Any) -> Interval:
    lo = hi = candidates[0]
    for c in candidates[1:]:
        lo, hi = np.minimum(lo, c), np.maximum(hi, c)
    return lo, hi


def _arithmetic(bounds: Any) -> Any:
    """An operation on bounds that widens its result if it is a float."""

    def apply(*args: Interval) -> Interval:
        with np.errstate(all="ignore"):
            lo, hi = bounds(*args)
        return _widen((lo, hi), ARITHMETIC_ERROR) if _is_float(lo, hi) else (lo, hi)

    return apply


def _within_64_bits(bounds: Any) -> Any:
    """An operation on bounds whose integers may leave 64 bits, if operands do not fit 32."""

    def apply(*args: Interval) -> Interval:
        with np.errstate(over="ignore"):
            lo, hi = bounds(*args)
        if _is_float(lo, hi) or all(np.min(a[0]) >= -(2**31) and np.max(a[1]) <= 2**31 for a in args):
            return lo, hi
        near = bounds(*((np.asarray(a[0], np.float64), np.asarray(a[1], np.float64)) for a in args))
        return _any_integer(~((near[0] > -_SURELY_64_BITS) & (near[1] < _SURELY_64_BITS)), (lo, hi))

    return apply


def _any_integer(unknown: Any, bounds: Interval) -> Interval:
    return np.where(unknown, _LEAST, bounds[0]), np.where(unknown, _MOST, bounds[1])


def _negated(a: Interval) -> Interval:
    return -a[1], -a[0]


def _unless(unknown: Any, bounds: Interval) -> Interval:
    """The bounds, or NaN where the result itself may be NaN."""
    if not np.any(unknown):
        return bounds
    return np.where(unknown, np.nan, bounds[0]), np.where(unknown, np.nan, bounds[1])


def _add(a: Interval, b: Interval) -> Interval:
    opposite = ((a[0] == -np.inf) & (b[1] == np.inf)) | ((a[1] == np.inf) & (b[0] == -np.inf))
    return _unless(opposite, (a[0] + b[0], a[1] + b[1]))


def _mul(a: Interval, b: Interval) -> Interval:
    zero_times_infinite = (_has_zero(a) & _infinite(b)) | (_has_zero(b) & _infinite(a))
    return _unless(zero_times_infinite, _hull(*(x * y for x in a for y in b)))


def _div(a: Interval, b: Interval) -> Interval:
    return _unless(_has_zero(b) | (_infinite(a) & _infinite(b)), _hull(*(x / y for x in a for y in b)))


def _has_zero(a: Interval) -> Any:
    return ~((a[0] > 0) | (a[1] < 0))


def _infinite(a: Interval) -> Any:
    return np.isinf(a[0]) | np.isinf(a[1])


def _floordiv(a: Interval, b: Interval) -> Interval:
    if _is_float(*a, *b):
        lo, hi = _widen(_div(a, b), ARITHMETIC_ERROR)
        return np.floor(lo), np.floor(hi)
    # An integer divided by 0 is 0, so a divisor that may be 0 adds 0; next to 0 it is 1 or -1.
    positive = _hull(*(x // np.maximum(y, 1) for x in a for y in b))
    negative = _hull(*(x // np.minimum(y, -1) for x in a for y in b))
    lo = np.where(b[1] > 0, positive[0], negative[0])
    hi = np.where(b[1] > 0, positive[1], negative[1])
    both = (b[1] > 0) & (b[0] < 0)
    lo, hi = np.where(both, np.minimum(lo, negative[0]), lo), np.where(both, np.maximum(hi, negative[1]), hi)
    zero = (b[0] <= 0) & (b[1] >= 0)
    only_zero = (b[0] == 0) & (b[1] == 0)
    lo, hi = np.where(zero, np.minimum(lo, 0), lo), np.where(zero, np.maximum(hi, 0), hi)
    lo, hi = np.where(only_zero, 0, lo), np.where(only_zero, 0, hi)
    return _any_integer(a[0] == _LEAST, (lo, hi))  # the least integer divided by -1 wraps around


def _mod(a: Interval, b: Interval) -> Interval:
    if _is_float(*a, *b):
        return _unless(True, a)
    # Within one period the remainder rises with the dividend; beyond it, it is anything the divisor allows.
    divisor = np.where(b[0] == 0, 1, b[0])
    one_period = (b[0] == b[1]) & (b[0] != 0) & (a[0] // divisor == a[1] // divisor)
    lo = np.where(one_period, a[0] % divisor, np.minimum(b[0] + 1, 0))
    hi = np.where(one_period, a[1] % divisor, np.maximum(b[1] - 1, 0))
    return lo, hi


def _abs(a: Interval) -> Interval:
    inside = (a[0] <= 0) & (a[1] >= 0)
    lo, hi = _hull(np.abs(a[0]), np.abs(a[1]))
    return np.where(inside, np.zeros_like(lo), lo), hi


def _monotone(function: Any) -> Any:
    def apply(a: Interval) -> Interval:
        with np.errstate(all="ignore"):
            lo, hi = function(np.asarray(a[0], np.float64)), function(np.asarray(a[1], np.float64))
        return _widen((lo, hi), FUNCTION_ERROR)

    return apply


def _log(a: Interval) -> Interval:
    return _unless(~(a[0] >= 0), _monotone(np.log)(a))  # of a negative number it is NaN


def _where(c: Interval, a: Interval, b: Interval) -> Interval:
    lo, hi = np.minimum(a[0], b[0]), np.maximum(a[1], b[1])
    always, sometimes = c
    return (
        np.where(always, a[0], np.where(sometimes, lo, b[0])),
        np.where(always, a[1], np.where(sometimes, hi, b[1])),
    )


def _lt(a: Interval, b: Interval) -> Interval:
    return a[1] < b[0], ~(a[0] >= b[1])


def _le(a: Interval, b: Interval) -> Interval:
    return a[1] <= b[0], ~(a[0] > b[1])


def _eq(a: Interval, b: Interval) -> Interval:
    return (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]), ~((a[0] > b[1]) | (a[1] < b[0]))


def _not(a: Interval) -> Interval:
    return ~np.asarray(a[1], bool), ~np.asarray(a[0], bool)


def _const(value: bool | int | float) -> Interval:
    """A float that float32 cannot hold is rounded on most systems, so it is known only nearly."""
    bounds = np.asarray(value), np.asarray(value)
    with np.errstate(over="ignore"):
        exact = not isinstance(value, float) or float(np.float32(value)) == value
    return bounds if exact else _widen(bounds, ARITHMETIC_ERROR)


_UNKNOWN: dict[str, Interval] = {
    "bool": (np.asarray(False), np.asarray(True)),
    "int": (np.asarray(_LEAST), np.asarray(_MOST)),
    "float": (np.asarray(np.nan), np.asarray(np.nan)),
}


def _load(slot: Loaded, *index: Interval) -> Interval:
    """The smallest and largest value the array has anywhere in the box that the indices span.

    An array on another device is not looked at, since that would wait for it: its values are unknown.
    """
    kind = arrays.value_kind(slot.array)
    if arrays.is_elsewhere(slot.array):
        return _UNKNOWN[kind]
    array = arrays.as_numpy(slot.array)
    box = [_within(i, n) for i, n in zip(index, array.shape, strict=True)]
    lo, hi = _line(_comparable(array), box[0]) if array.ndim == 1 else _box(array, box)
    if _is_half(array):
        lo, hi = (arrays.widen(_ordered(np.asarray(b)).view(array.dtype), np.float32) for b in (lo, hi))
    if kind == "float":
        return _widen(_unless(np.isnan(lo) | np.isnan(hi), (lo, hi)), ARITHMETIC_ERROR)
    return (lo, hi) if kind == "bool" else (lo.astype(np.int64), hi.astype(np.int64))


def _is_half(array: Array) -> bool:
    return array.dtype in (np.float16, arrays.BFLOAT16)


def _comparable(array: Array) -> Array:
    """Half precision as integers in the same order, which NumPy compares fifty times as fast; the rest as it is."""
    return _ordered(array.view(np.int16)) if _is_half(array) else array


def _ordered(bits: Array) -> Array:
    """The bits of half-precision numbers as integers in their order, NaN beyond the infinities; and back again."""
    ordered: Array = bits ^ ((bits >> 15) & np.int16(0x7FFF))
    return ordered


def _within(index: Interval, size: int) -> Interval:
    """Bounds of an index, clamped as every op table clamps the index itself; an unknown one may be any."""
    ends = zip(index, (0, size - 1), strict=True)
    known = [np.where(np.isnan(i), end, i).astype(np.int64) for i, end in ends]
    lo, hi = np.broadcast_arrays(*(np.clip(i, 0, size - 1) for i in known))
    return lo, hi


def _line(array: Array, box: Interval) -> Interval:
    """Minimum and maximum over any ranges of a 1-D array."""
    step = _COARSE if len(array) > 65536 else 1
    starts = np.arange(0, len(array), step)
    low, high = np.minimum.reduceat(array, starts), np.maximum.reduceat(array, starts)
    return _over_ranges(low, high, box[0] // step, box[1] // step)


def _over_ranges(low: Array, high: Array, first: Array, last: Array) -> Interval:
    """Minima of low and maxima of high over ranges of their last axis, at each place of the axes before it, which
    broadcast with the ranges: two overlapping power-of-two spans cover each range."""
    grid = np.broadcast_shapes(low.shape[:-1], first.shape)
    places = grid or (1,)  # one range for all tiles, as of load(a, 3): np.nonzero takes no single number
    first, last = np.broadcast_to(first, places), np.broadcast_to(last, places)
    lo, hi = np.empty(places, low.dtype), np.empty(places, high.dtype)
    level = np.frexp(last - first + 1)[1] - 1  # floor(log2(length))
    for i in range(int(level.max(initial=-1)) + 1):
        at = np.nonzero(level == i)
        place = tuple(x if size > 1 else 0 for x, size in zip(at, low.shape[:-1], strict=False))
        a, b = (*place, first[at]), (*place, last[at] - 2**i + 1)
        lo[at], hi[at] = np.minimum(low[a], low[b]), np.maximum(high[a], high[b])
        low = np.minimum(low[..., : -(2**i)], low[..., 2**i :])
        high = np.maximum(high[..., : -(2**i)], high[..., 2**i :])
    return lo.reshape(grid), hi.reshape(grid)


def _box(array: Array, box: list[Interval]) -> Interval:
    """Minimum and maximum over boxes of an array, one pass over it.

    Each index ranges along an axis of the grid that it has for itself; one is free to range along others as well.
    """
    grid = np.broadcast_shapes(*(lo.shape for lo, _ in box)) if box else ()
    own: dict[int, int] = {}  # the axis of the grid that an index has for itself, counted from the last
    free: int | None = None
    for i, (lo, _) in enumerate(box):
        along = {a - lo.ndim for a, size in enumerate(lo.shape) if size > 1}
        if len(along) <= 1 and not along & set(own.values()):
            own.update((i, a) for a in along)
        elif free is None:
            free = i
        else:  # the whole axis is right, if loose
            box[i] = np.asarray(0), np.asarray(array.shape[i] - 1)
    # Only what the boxes touch is looked at: a plan asks for a band of a dense mask at a time.
    low = high = array[tuple(slice(int(first.min()), int(last.max()) + 1) for first, last in box)]
    ranges = [(first - first.min(), last - first.min()) for first, last in box]
    for i, (first, last) in enumerate(ranges):
        if i != free:
            low, high = _reduce(low, high, i, first.ravel(), last.ravel())
    low, high = _comparable(low), _comparable(high)  # as they are yet if no axis had ranges
    # From the array's own axis order to the grid's; the free index comes last.
    order = sorted((i for i in range(array.ndim) if i != free), key=lambda i: own.get(i, -99))
    shape = [1] * len(grid)
    for i, a in own.items():
        shape[a] = low.shape[i]
    if free is None:
        return low.transpose(order).reshape(shape), high.transpose(order).reshape(shape)
    low, high = (x.transpose(*order, free).reshape(*shape, x.shape[free]) for x in (low, high))
    return _over_ranges(low, high, *ranges[free])


def _reduce(low: Array, high: Array, axis: int, first: Array, last: Array) -> Interval:
    """Minima of low and maxima of high over ranges of an axis, as _comparable numbers.

    A range at a time: the maxima find it in a cache, and no copy of half precision is larger.
    """
    if len(first) == low.shape[axis] and np.array_equal(first, last):  # one of each, as heads are: nothing to reduce
        in_order = not np.any(np.diff(first) != 1)
        return (low, high) if in_order else (low.take(first, axis), high.take(first, axis))
    lows, highs = [], []
    for a, b in zip(first, last, strict=True):
        span = (*[slice(None)] * axis, slice(a, b + 1))
        below = _comparable(low[span])
        above = below if low is high else _comparable(high[span])
        lows.append(np.minimum.reduce(below, axis))
        highs.append(np.maximum.reduce(above, axis))
    return np.stack(lows, axis), np.stack(highs, axis)


INTERVAL_OPS: OpTable = {
    "const": _const,
    "load": _load,
    "float": lambda a: _widen(a, ARITHMETIC_ERROR),
    "add": _arithmetic(_within_64_bits(_add)),
    "sub": _arithmetic(_within_64_bits(lambda a, b: _add(a, _negated(b)))),
    "mul": _arithmetic(_within_64_bits(_mul)),
    "div": _arithmetic(_div),
    "floordiv": _arithmetic(_floordiv),
    "mod": _arithmetic(_mod),
    "neg": _within_64_bits(_negated),
    "abs": _within_64_bits(_abs),
    "minimum": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "maximum": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "exp": _monotone(np.exp),
    "log": _log,
    "tanh": _monotone(np.tanh),
    "where": _where,
    "lt": _lt,
    "le": _le,
    "gt": lambda a, b: _lt(b, a),
    "ge": lambda a, b: _le(b, a),
    "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)),
    "and": lambda a, b: (np.logical_and(a[0], b[0]), np.logical_and(a[1], b[1])),
    "or": lambda a, b: (np.logical_or(a[0], b[0]), np.logical_or(a[1], b[1])),
    "not": _not,
}


# -- whole expressions ------------------------------------------------------------------------------------------------

# The axis of the grid along which a variable varies.
_AXES = {"B": 0, "H": 1, "HK": 1, "Q": 2, "QP": 2, "K": 3, "KP": 3}
_ANYWHERE = variable("ANYWHERE", INT)  # an index of which nothing is known


def bounds(expr: Expr, env: Mapping[str, Any]) -> Interval:
    """Bounds of an expression over each tile of a grid. Those of a tile are the same whatever tiles lie beside it."""
    other = remembered(expr, "followed", _followed)
    unknown = np.asarray(np.nan)
    env = {**env, _ANYWHERE.payload: (unknown, unknown)}
    found: Interval = evaluate(expr if other is None else other, env, INTERVAL_OPS)
    return found


def _followed(expr: Expr) -> Expr | None:
    """The same, where a load has more than one free index (`_box`) with only the first of them; None if none has.

    An index is free by what it is made of. In a grid of one row or column it may look as if it was not, and a tile
    would have other bounds there.
    """
    made: dict[Expr, Expr] = {}
    for node in nodes(expr):
        args = [made[a] for a in node.args]
        if node.op == "load":
            for i in _free(node)[1:]:
                args[i] = _ANYWHERE
        made[node] = rebuild(node, tuple(args))
    return None if made[expr] is expr else made[expr]


def _free(load: Expr) -> list[int]:
    """The indices that vary along several axes of the grid, or along one that an index before them has."""
    taken: set[int] = set()
    free = []
    for i, index in enumerate(load.args):
        along = {_AXES[name] for name in variables(index) if name in _AXES}
        if len(along) > 1 or along & taken:
            free.append(i)
        else:
            taken |= along
    return free

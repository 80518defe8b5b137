"""The softmax of Hopper's kernel. Where no mask is needed it is speculative: exponentials are taken with the row_max
known before the tile, so that nothing waits for a new one. The sums tell whether that was safe; if not, the tile is
rescaled or computed again.
"""

import operator

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from tilewise.kernels.cute.source.operations import maximum, minimum, where
from tilewise.kernels.cute.source.tiles import (
    exp2,
    finite,
    folded,
    fused,
    largest_in_quad,
    narrowing_of,
    sum_of_quad,
)
from tilewise.kernels.cute.source.vocabulary import by_rows

PATIENCE = 8.0  # how far, as a power of 2, a row may be above its row_max before it is worth a rescale
FINITE_SUM = 2.0**120  # up to here weights can be rescaled
# A thread's weights of a tile are heavy if they add up to this many times what its whole row had: one of them may be
# most of the row, and its rounding most of the result's error. Of many that are alike roundings cancel out.
HEAVY = 2.0


def safe_sum(element):
    """Weights are safe up to here: one of 2^x is off by a rounding of x. In float16 they must stay below 65504."""
    return 2.0**31 if element is BFloat16 else 2.0**14


def room_to_grow(element):
    """Powers of 2 that a row's sum is brought below 1. In float16, whose small weights would lose digits, it stays
    above."""
    return 32 if element is BFloat16 else -4


def begin_rows(rows, s, element):
    """A row's first keys: scores become weights, and there is nothing to rescale."""
    for row in range(2):
        here = _largest(s, row)
        rows.row_max[row] = here * rows.factor
        shift = finite(rows.row_max[row])
        rows.row_sum[row] = _exponentiate(s, row, rows.factor, -shift)
        rows.narrowing[row] = narrowing_of(here, rows.factor, shift, element)
        rows.total[row] = sum_of_quad(rows.row_sum[row])


def exact(rows, s, patience, element):
    """Scores become weights; what acc is to be multiplied by, for each row. Within `patience` of row_max nothing
    changes: a row decides by itself, so that its bits do not depend on its neighbours."""
    rescales = cute.make_rmem_tensor_like(rows.row_max)
    for row in range(2):
        here = _largest(s, row)
        new_max = here * rows.factor
        rises = new_max > rows.row_max[row] + patience
        larger = where(rises, new_max, rows.row_max[row])
        rescales[row] = where(rises, exp2(rows.row_max[row] - larger), Float32(1.0))
        rows.row_max[row], shift = larger, finite(larger)
        rows.row_sum[row] = rows.row_sum[row] * rescales[row] + _exponentiate(s, row, rows.factor, -shift)
        narrowed = narrowing_of(here, rows.factor, shift, element)
        rows.narrowing[row] = rows.narrowing[row] * rescales[row] + narrowed
        rows.total[row] = sum_of_quad(rows.row_sum[row])
    return rescales


def _largest(s, row):
    s_rows = by_rows(s)
    columns = range(cute.size(s_rows, mode=[1]))
    return largest_in_quad(folded(cute.arch.fmax, [s_rows[row, column] for column in columns]))


def _exponentiate(s, row, factor, shift):
    s_rows = by_rows(s)
    columns = range(cute.size(s_rows, mode=[1]))
    for column in columns:
        s_rows[row, column] = exp2(fused(s_rows[row, column], factor, shift))
    return folded(operator.add, [s_rows[row, column] for column in columns])


def speculate(rows, s, sums, first, last):
    """Weights of some columns with the row_max of the tiles before: no maximum, no exchange between threads. A row that
    had no key yet comes to infinity."""
    s_rows = by_rows(s)
    for column in range(first, last):
        for row in range(2):
            s_rows[row, column] = exp2(fused(s_rows[row, column], rows.factor, -rows.row_max[row]))
            sums[row] = sums[row] + s_rows[row, column]


def any_heavy(rows, sums, rows_left, element):
    """Whether weights of this tile, whose sums these are, may be most of a row of this warp, or are not safe."""
    limits = [cute.arch.fmin(HEAVY * rows.total[row], safe_sum(element)) for row in range(2)]
    return _any_above(limits, sums, rows_left)


def any_above(limit, sums, rows_left):
    return _any_above([limit, limit], sums, rows_left)


def _any_above(limits, sums, rows_left):
    """Of the rows of this warp; those beyond the last query may be anything. rows_left: from the thread's first on."""
    above = [
        where(sums[row] <= limits[row], Int32(0), Int32(1)) & where(rows_left > 8 * row, Int32(1), Int32(0))
        for row in range(2)
    ]
    return cute.arch.vote_any_sync((above[0] | above[1]) != 0)


def tame(rows, s, sums, element):
    """Weights too large, but numbers: a power of 2 brings them down again, further than needed, as they may go on
    growing. What acc is to be multiplied by."""
    s_rows, rescales = by_rows(s), cute.make_rmem_tensor_like(rows.row_max)
    for row in range(2):
        exponent = _exponent(sum_of_quad(sums[row]))
        lowered = maximum(minimum(exponent + room_to_grow(element), Int32(126)), Int32(0))
        lowered = where(exponent > 0, lowered, Int32(0))
        rescales[row] = ((127 - lowered) << 23).bitcast(Float32)
        rows.row_max[row] = rows.row_max[row] + Float32(lowered)
        rows.row_sum[row] = (rows.row_sum[row] + sums[row]) * rescales[row]
        rows.narrowing[row] = rows.narrowing[row] * rescales[row]
        for column in range(cute.size(s_rows, mode=[1])):
            s_rows[row, column] = s_rows[row, column] * rescales[row]
    return rescales


def add_narrowing(rows, s, element):
    """What the heaviest of a thread's weights of a tile gained by being narrowed: others are too light to matter. And
    what the whole row has by now."""
    s_rows = by_rows(s)
    for row in range(2):
        columns = range(cute.size(s_rows, mode=[1]))
        heaviest = folded(cute.arch.fmax, [s_rows[row, column] for column in columns])
        rows.narrowing[row] = rows.narrowing[row] + (heaviest.to(element).to(Float32) - heaviest)
        rows.total[row] = sum_of_quad(rows.row_sum[row])


def _exponent(x):
    """Of 2, of a number that is not negative."""
    return (x.bitcast(Int32) >> 23) - 127

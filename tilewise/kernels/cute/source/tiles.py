"""What kernels share: records of tiles, scores of a tile, the online softmax."""

import operator
from functools import reduce
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from tilewise.kernels.cute.source.operations import maximum, where
from tilewise.kernels.cute.source.vocabulary import by_rows

PARTIAL = 1  # kinds of tiles, as in schedule.py
FIELDS = 14  # of a record, as in tables.py
LOG2_E = 1.4426950408889634
LN_2 = 0.693147182464599609375  # in float32
LN_2_REST = -1.904654323148236e-9  # what it lacks
INFINITY = float("inf")


class Place(NamedTuple):
    """What variables begin at."""

    b: Int32
    h: Int32
    hk: Int32
    origin_q: Int32
    origin_k: Int32
    total_q: Int32
    total_k: Int32
    packed_q: Int32
    packed_k: Int32


class Work(NamedTuple):
    """A tile of queries: the first, where its sequence's rows begin and how many there are, its runs of key tiles."""

    first: Int32
    q_begin: Int32
    k_begin: Int32
    n_q: Int32
    n_k: Int32
    first_run: Int32
    last_run: Int32
    place: Place


def work_of(records, number, b, h, group):
    return work_of_fields([records[b, h, number, field] for field in range(FIELDS)], b, h, group)


def work_of_fields(fields, b, h, group):
    """Fields of a record as in tables.py."""
    first, q_begin, k_begin, n_q, n_k, first_run, n_runs, batch, *place = fields
    return Work(
        first, q_begin, k_begin, n_q, n_k, first_run, first_run + n_runs, Place(batch + b, h, h // group, *place)
    )


def matrix(x, b, h, begin):
    """The rows of one head, from one on."""
    return cute.domain_offset((begin, 0), x[b, h, None, None])


def binary(scale, build):
    """What scores are multiplied by to be exponents of 2. Raw ones are still products of q and k."""
    return scale * LOG2_E if build.raw else Float32(LOG2_E)


def score(s, at, first_key, work, arrays, scale, build, cells=None):
    """Products of q and k as scores. at: where in the tile each of them is. cells: of a table, one for each."""
    for i in range(cute.size(s)):
        if not build.raw and build.scaling == "scores":
            s[i] = s[i] * scale
        if hasattr(build.variant, "score"):
            near = () if cells is None else (cells[i],)
            s[i] = _at(build.variant.score, s[i], at[i], first_key, work, arrays, *near)


def mask(s, at, first_key, work, arrays, build):
    """-inf where a key does not count."""
    for i in range(cute.size(s)):
        counts = (first_key + at[i][1] < work.n_k) & (work.first + at[i][0] < work.n_q)
        if hasattr(build.variant, "mask"):
            counts = counts & _at(build.variant.mask, s[i], at[i], first_key, work, arrays)
        s[i] = where(counts, s[i], Float32(-INFINITY))


def mask_by_variant(s, at, first_key, work, arrays, build):
    """The same, of keys that there are; rows beyond the last query may be anything."""
    for i in range(cute.size(s)):
        counts = _at(build.variant.mask, s[i], at[i], first_key, work, arrays)
        s[i] = where(counts, s[i], Float32(-INFINITY))


def mask_from(s, left):
    """-inf from a key on. left: how many there are from the thread's first one on."""
    s_rows = by_rows(s)
    for column in range(cute.size(s_rows, mode=[1])):
        counts = left > column // 2 * 8 + column % 2  # of each eight keys a thread has two
        for row in range(cute.size(s_rows, mode=[0])):
            s_rows[row, column] = where(counts, s_rows[row, column], Float32(-INFINITY))


def multiply_by_slopes(d_score, product, at, first_key, work, arrays, scale, build):
    """By the derivative of the score; a key of weight 0 passes nothing on, whatever its slope."""
    for i in range(cute.size(d_score)):
        slope = _at(build.variant.slope, product[i] * scale, at[i], first_key, work, arrays)
        d_score[i] = where(d_score[i] == 0.0, Float32(0.0), d_score[i] * slope)


def _at(function, s, at, first_key, work, arrays, *near):
    """A function of the variant, for one score. near: its cell of a table, if it is given one."""
    query, key = work.first + at[0], first_key + at[1]  # within the sequence
    b, h, hk, origin_q, origin_k, total_q, total_k, packed_q, packed_k = work.place
    return function(
        s, b, h, hk, origin_q + query, origin_k + key, packed_q + query, packed_k + key, total_q, total_k, arrays, *near
    )


class Rows(NamedTuple):
    """What a thread knows of its rows; softmax.py is the defining version of what becomes of it.

    row_max is kept as an exponent of 2, which one fused operation takes from a score. row_sum is of the thread's own
    keys; quads are added up in step 7.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    narrowing: cute.Tensor  # what heavy weights gained when they were narrowed, of the thread's own keys as row_sum is
    total: cute.Tensor  # of the quad's row_sum, as it was when somebody last looked
    factor: Float32  # what scores are multiplied by to be exponents of 2


def rows_of(acc, factor):
    """Before their first keys."""
    count = cute.size(by_rows(acc), mode=[0])
    row_max, row_sum, narrowing, total = (cute.make_rmem_tensor((count,), Float32) for _ in range(4))
    row_max.fill(-INFINITY)
    row_sum.fill(0.0)
    narrowing.fill(0.0)
    total.fill(0.0)
    return Rows(row_max, row_sum, narrowing, total, factor)


def online_softmax(rows, s, element):
    """Scores become weights p, which are narrowed to a type next; what acc is to be multiplied by, for each row."""
    s_rows, rescales = by_rows(s), cute.make_rmem_tensor_like(rows.row_max)
    for row in range(cute.size(rows.row_max)):
        columns = range(cute.size(s_rows, mode=[1]))
        largest_here = largest_in_quad(folded(cute.arch.fmax, [s_rows[row, column] for column in columns]))
        new_max = maximum(rows.row_max[row], largest_here * rows.factor)
        shift = finite(new_max)
        rescale = exp2(rows.row_max[row] - shift)
        rows.row_max[row] = new_max
        for column in columns:
            s_rows[row, column] = exp2(fused(s_rows[row, column], rows.factor, -shift))
        sum_here = folded(operator.add, [s_rows[row, column] for column in columns])
        rows.row_sum[row] = rows.row_sum[row] * rescale + sum_here
        narrowed = narrowing_of(largest_here, rows.factor, shift, element)
        rows.narrowing[row] = rows.narrowing[row] * rescale + narrowed
        rescales[row] = rescale
    return rescales


def multiply_rows(acc, factors):
    acc_rows = by_rows(acc)
    for row in range(cute.size(factors)):
        for column in range(cute.size(acc_rows, mode=[1])):
            acc_rows[row, column] = acc_rows[row, column] * factors[row]


def finish(rows, acc, sink):
    """acc becomes the output; the lse of each row. sink: a logit that joins the sum, or None."""
    lse, weights = (cute.make_rmem_tensor_like(rows.row_max) for _ in range(2))
    for row in range(cute.size(rows.row_max)):
        row_sum = sum_of_quad(rows.row_sum[row])
        shift = finite(rows.row_max[row])
        multiplied = row_sum + sum_of_quad(rows.narrowing[row])  # the sum of weights as products took them
        # It is 0 or infinite where row_max was rounded by more than half precision holds.
        is_number = (multiplied > 0.0) & (multiplied < INFINITY)
        without_keys = row_sum == 0.0
        weights[row] = 1.0 / where(is_number, multiplied, where(without_keys, Float32(1.0), row_sum))
        done = fused(shift, Float32(LN_2), fused(shift, Float32(LN_2_REST), cute.math.log(row_sum)))
        lse[row] = where(without_keys, Float32(-INFINITY), done)
        if sink is not None:
            joint = with_sink(lse[row], sink)
            weights[row] = weights[row] * cute.math.exp(lse[row] - finite(joint))
            lse[row] = joint
    multiply_rows(acc, weights)
    return lse


def narrowing_of(largest, factor, shift, element):
    """What the weight of a tile's largest score gains by being narrowed; a quarter of it, as a quad adds up four.

    Where the largest weight is 1 that is nothing, unless scores are so large that row_max was rounded by much. A row
    whose weight is all on one key has that key's v, to the last bit: gradients are differences of such numbers.
    """
    heaviest = exp2(fused(largest, factor, -shift))
    return 0.25 * (heaviest.to(element).to(Float32) - heaviest)


def with_sink(lse, sink):
    """log(exp(lse) + exp(sink))"""
    larger = maximum(lse, sink)
    joint = larger + cute.math.log(cute.math.exp(lse - finite(larger)) + cute.math.exp(sink - finite(larger)))
    return where(larger == -INFINITY, larger, joint)


def finite(row_max):
    """The shift of the exponent; 0 for a row that has no key yet."""
    return where(row_max == -INFINITY, Float32(0.0), row_max)


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


def fused(x, y, z):
    """x * y + z, rounded once."""
    return cute.math.fma(x, y, z)


def folded(combine, values):
    """All values as one, in four chains: in a single one each would wait for the one before."""
    chains = list(values[:4])
    for i, value in enumerate(values[4:]):
        chains[i % 4] = combine(chains[i % 4], value)
    return reduce(combine, chains)


def largest_in_quad(x):
    for step in (1, 2):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=step))
    return x


def sum_of_quad(x):
    for step in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=step)
    return x

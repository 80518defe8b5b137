"""What kernels share: rows of matrices, records of tiles, scores of a tile."""

import triton
import triton.language as tl

EMPTY: tl.constexpr = tl.constexpr(0)
PARTIAL: tl.constexpr = tl.constexpr(1)
FULL: tl.constexpr = tl.constexpr(2)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.693147182464599609375)  # in float32
LN_2_REST: tl.constexpr = tl.constexpr(-1.904654323148236e-9)  # what it lacks

# Triton's interpreter cuts off what does not fit bfloat16, and rounds a product before it adds.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Fields of a record, as in tables.py.
FIRST: tl.constexpr = tl.constexpr(0)  # the tile's first query or key, within its sequence
Q_BEGIN: tl.constexpr = tl.constexpr(1)  # where the sequence's rows are
K_BEGIN: tl.constexpr = tl.constexpr(2)
N_Q: tl.constexpr = tl.constexpr(3)
N_K: tl.constexpr = tl.constexpr(4)
FIRST_RUN: tl.constexpr = tl.constexpr(5)
N_RUNS: tl.constexpr = tl.constexpr(6)
PLACE: tl.constexpr = tl.constexpr(7)  # batch, origin_q, origin_k, total_q, total_k, packed_q, packed_k
FIELDS: tl.constexpr = tl.constexpr(14)


@triton.jit
def tile_of(records, b, h, group, SIZE: tl.constexpr):
    """This program's tile."""
    return tile_at(records, tl.program_id(0), b, h, group, SIZE)


@triton.jit
def tile_at(records, number, b, h, group, SIZE: tl.constexpr):
    """A tile: its first query or key, a multiple of SIZE, where its sequence's rows begin and how many there are, the
    first of its runs and the one behind the last, and what variables begin at."""
    record = records[0] + b * records[1] + h * records[2] + number * FIELDS
    first_run = tl.load(record + FIRST_RUN)
    return (
        tl.multiple_of(tl.load(record + FIRST), SIZE), tl.load(record + Q_BEGIN), tl.load(record + K_BEGIN),
        tl.load(record + N_Q), tl.load(record + N_K), first_run, first_run + tl.load(record + N_RUNS),
        at_head(place_of(record, records[3]), b, h, group),
    )  # fmt: skip


@triton.jit
def place_of(record, FROM_ZERO: tl.constexpr):
    """What variables begin at. Where Triton knows that it is 0, it reads several cells of a variant's array at once."""
    at = record + PLACE
    if FROM_ZERO:
        origin_q, origin_k, packed_q, packed_k = 0, 0, 0, 0
    else:
        origin_q, origin_k, packed_q, packed_k = (
            tl.load(at + 1), tl.load(at + 2), tl.load(at + 5), tl.load(at + 6),
        )  # fmt: skip
    return tl.load(at), origin_q, origin_k, tl.load(at + 3), tl.load(at + 4), packed_q, packed_k


@triton.jit
def at_head(place, b, h, group):
    """What variables begin at, those for batch indices and heads among them."""
    first_b, origin_q, origin_k, total_q, total_k, packed_q, packed_k = place
    return first_b + b, h, h // group, origin_q, origin_k, total_q, total_k, packed_q, packed_k


@triton.jit
def matrix(x, steps, b, h, begin):
    """The rows of one head, from one on."""
    return x + tl.cast(b, tl.int64) * steps[0] + tl.cast(h, tl.int64) * steps[1] + tl.cast(begin, tl.int64) * steps[2]


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """In a type as inputs have it, rounded to the nearest."""
    if INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(TYPE)


@triton.jit
def load_rows(x, step, row, n, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix, 0 where it has none and in columns up to a power of 2."""
    column, inside = tl.arange(0, PADDED), among(row, n)[:, None]
    at = x + row[:, None].to(tl.int64) * step + column[None, :]
    if WIDTH == PADDED:
        return tl.load(at, mask=inside, other=0.0)
    return tl.load(at, mask=inside & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def among(row, n):
    """Whether there are such rows: from 0, as a number below it is a large one without its sign, to n."""
    return tl.cast(row, tl.uint32) < n


@triton.jit
def load_tile(x, steps, map_, b, h, begin, first, n, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of one head from `first` on, 0 where there are none. map_: of x, for a GPU's copy engine, or None."""
    if map_ is not None:
        tile = map_.load([b, h, begin + first, 0]).reshape(ROWS, PADDED)
    else:
        row = first + tl.arange(0, ROWS)
        tile = load_rows(matrix(x, steps, b, h, begin), steps[2], row, n, WIDTH, PADDED)
    return tile


@triton.jit
def store_rows(x, step, row, n, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    at = x + row[:, None].to(tl.int64) * step + column[None, :]
    tl.store(at, narrow(values, x.dtype.element_ty), mask=(row[:, None] < n) & (column[None, :] < WIDTH))


@triton.jit
def finite(row_max):
    """The shift of the exponent; 0 for a row that has no key yet.

    row_max is kept as an exponent of 2. A product in its place would be fused with what is added to it, on a GPU: the
    same row_max would be another number in rescale than in p.
    """
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def binary(scale, RAW: tl.constexpr):
    """What scores are multiplied by to be exponents of 2. RAW ones are still products of q and k."""
    return scale * LOG2_E if RAW else LOG2_E


@triton.jit
def fused(x, y, z):
    """x * y + z, rounded once."""
    if INTERPRETED:
        y, z = tl.zeros_like(x) + y, tl.zeros_like(x) + z
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def lse_of(row_max, row_sum):
    """log(row_sum * 2^row_max). ln 2 has a second part, since row_max may be large."""
    largest = finite(row_max)
    return tl.where(row_sum == 0, float("-inf"), fused(largest, LN_2, largest * LN_2_REST + tl.log(row_sum)))


@triton.jit
def at_scores(function: tl.constexpr, s, query, key, place, loaded):
    """A function of the variant, for every score of a tile. query, key: within the sequence."""
    b, h, hk, origin_q, origin_k, total_q, total_k, packed_q, packed_k = place
    arrays, sizes, steps = loaded
    return function(
        s, b, h, hk, origin_q + query, origin_k + key, packed_q + query, packed_k + key, total_q, total_k,
        arrays, sizes, steps,
    )  # fmt: skip


@triton.jit
def scores(
    s, query, key, kind, n_q, n_k, place, loaded, scale, RAW: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr
):
    """Products of q and k as scores, -inf where a key does not count."""
    # 3 score
    if not RAW:
        s = s * scale
    if SCORE is not None:
        s = at_scores(SCORE, s, query, key, place, loaded) + tl.zeros_like(s)
    # 4 mask (PARTIAL tiles only)
    if kind == PARTIAL:
        counts = (key < n_k) & (query < n_q)
        if MASK is not None:
            counts = counts & at_scores(MASK, s, query, key, place, loaded)
        s = tl.where(counts, s, float("-inf"))
    return s

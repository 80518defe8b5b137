"""The rotary embedding in Triton: rows are turned by their positions, and gradients back; those of whole arrays by a
kernel of its own (`turn`), or as tiles of them are loaded and stored.

A tile that is turned as it is loaded has the two numbers of each pair side by side, whichever way they are stored: a
product of q and k does not mind the order of their columns, as long as both have the same. Numbers that are not turned
make pairs of angle 0. An array that is turned whole keeps its order.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.tiles import among, load_tile, matrix, narrow, store_rows

QUERIES: tl.constexpr = tl.constexpr(0)  # whose turns they are
KEYS: tl.constexpr = tl.constexpr(1)


@triton.jit
def turn(
    x, y, x_steps, y_steps, angles, n, heads, BACK: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """y: the rows of x, (batch, heads, n, WIDTH), turned, or turned BACK. HALF, REST: how many pairs there are, and how
    many numbers behind them, up to a power of 2. A program has the same rows of several heads: it loads their angles,
    which take more bytes than rows of half precision do, once."""
    tiles, groups = tl.cdiv(n, ROWS), tl.cdiv(heads, HEADS)
    tile, group, b = tl.program_id(0) % tiles, tl.program_id(0) // tiles % groups, tl.program_id(0) // tiles // groups
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < n)[:, None]
    cos, sin = angles_of(angles, b, row, inside, 2 * HALF, PAIRS)
    if BACK:
        sin = -sin
    for h in range(group * HEADS, tl.minimum(group * HEADS + HEADS, heads)):
        x_at = matrix(x, x_steps, b, h, 0) + row[:, None].to(tl.int64) * x_steps[2]
        y_at = matrix(y, y_steps, b, h, 0) + row[:, None].to(tl.int64) * y_steps[2]
        if INTERLEAVED:
            one, other = load_pairs(x_at, inside, 2 * PAIRS, 2 * HALF, PAIRS, INTERLEAVED)
            one, other = one * cos - other * sin, other * cos + one * sin
            store_pairs(y_at, inside, one, other, 2 * PAIRS, 2 * HALF, PAIRS, INTERLEAVED)
        else:
            turn_halves(x_at, y_at, inside, cos, sin, PAIRS, HALF)
        if REST > 0:
            column = 2 * PAIRS + tl.arange(0, REST)[None, :]
            there = inside & (column < WIDTH)
            tl.store(y_at + column, tl.load(x_at + column, mask=there), mask=there)


@triton.jit
def turn_halves(x_at, y_at, inside, cos, sin, PAIRS: tl.constexpr, HALF: tl.constexpr):
    pair = tl.arange(0, HALF)[None, :]
    there = inside & (pair < PAIRS)
    one = tl.load(x_at + pair, mask=there, other=0.0).to(tl.float32)
    other = tl.load(x_at + PAIRS + pair, mask=there, other=0.0).to(tl.float32)
    tl.store(y_at + pair, narrow(one * cos - other * sin, y_at.dtype.element_ty), mask=there)
    tl.store(y_at + PAIRS + pair, narrow(other * cos + one * sin, y_at.dtype.element_ty), mask=there)


@triton.jit
def load_head(
    x, steps, map_, b, h, begin, first, n, turns, SIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows of a head of q or k, turned if there are pairs to turn. begin: where its sequence begins."""
    if PAIRS == 0:
        tile = load_tile(x, steps, map_, b, h, begin, first, n, ROWS, WIDTH, PADDED)
    else:
        rows, row = matrix(x, steps, b, h, begin), first + tl.arange(0, ROWS)
        tile = load_turned(rows, steps[2], row, n, turns[SIDE], b, begin, WIDTH, PADDED, PAIRS, INTERLEAVED)
    return tile


@triton.jit
def store_d_head(
    x, steps, b, h, begin, row, n, values, turns, SIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Gradients of what load_head gave, as those of q or k."""
    rows = matrix(x, steps, b, h, begin)
    if PAIRS == 0:
        store_rows(rows, steps[2], row, n, values, WIDTH, PADDED)
    else:
        store_turned_back(rows, steps[2], row, n, values, turns[SIDE], b, begin, WIDTH, PADDED, PAIRS, INTERLEAVED)


@triton.jit
def load_turned(
    x, step, row, n, turn, b, begin, WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    at, inside = x + row[:, None].to(tl.int64) * step, among(row, n)[:, None]
    one, other = load_pairs(at, inside, WIDTH, PADDED, PAIRS, INTERLEAVED)
    cos, sin = angles_of(turn, b, begin + row, inside, PADDED, PAIRS)
    made = tl.join(one * cos - other * sin, other * cos + one * sin)
    return narrow(tl.reshape(made, (row.shape[0], PADDED)), x.dtype.element_ty)


@triton.jit
def store_turned_back(
    x, step, row, n, values, turn, b, begin, WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    at, inside = x + row[:, None].to(tl.int64) * step, row[:, None] < n
    one, other = tl.split(tl.reshape(values, (row.shape[0], PADDED // 2, 2)))
    cos, sin = angles_of(turn, b, begin + row, inside, PADDED, PAIRS)
    store_pairs(at, inside, one * cos + other * sin, other * cos - one * sin, WIDTH, PADDED, PAIRS, INTERLEAVED)


@triton.jit
def load_pairs(at, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second numbers of pairs, to compute with. at: where rows begin, one below the other."""
    if INTERLEAVED:  # whole rows, taken apart: a load of every second number would be one of single numbers
        column = tl.arange(0, PADDED)[None, :]
        rows = tl.load(at + column, mask=inside & (column < WIDTH), other=0.0)
        one, other = tl.split(tl.reshape(rows, (at.shape[0], PADDED // 2, 2)))
    else:
        first, second = columns_of_halves(PADDED, PAIRS)
        one = tl.load(at + first[None, :], mask=inside & (first < WIDTH)[None, :], other=0.0)
        other = tl.load(at + second[None, :], mask=inside & (second < WIDTH)[None, :], other=0.0)
    return one.to(tl.float32), other.to(tl.float32)


@triton.jit
def store_pairs(
    at, inside, one, other, WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    stored: tl.constexpr = at.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, PADDED)[None, :]
        rows = tl.reshape(tl.join(one, other), (at.shape[0], PADDED))
        tl.store(at + column, narrow(rows, stored), mask=inside & (column < WIDTH))
    else:
        first, second = columns_of_halves(PADDED, PAIRS)
        tl.store(at + first[None, :], narrow(one, stored), mask=inside & (first < WIDTH)[None, :])
        tl.store(at + second[None, :], narrow(other, stored), mask=inside & (second < WIDTH)[None, :])


@triton.jit
def columns_of_halves(PADDED: tl.constexpr, PAIRS: tl.constexpr):
    """Where the first and the second number of each pair are stored; behind those that are turned, neighbours pair."""
    pair = tl.arange(0, PADDED // 2)
    if 2 * PAIRS == PADDED:  # what lies side by side is loaded at once, if Triton sees that it does
        first, second = pair, pair + PAIRS
    else:
        first, second = tl.where(pair < PAIRS, pair, 2 * pair), tl.where(pair < PAIRS, pair + PAIRS, 2 * pair + 1)
    return first, second


@triton.jit
def angles_of(turn, b, row, inside, PADDED: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin for each row and pair."""
    cos, sin, batch_step, row_step = turn
    pair = tl.arange(0, PADDED // 2)
    at = (tl.cast(b, tl.int64) * batch_step + row.to(tl.int64) * row_step)[:, None] + pair[None, :]
    known = inside & (pair < PAIRS)[None, :]
    return tl.load(cos + at, mask=known, other=1.0), tl.load(sin + at, mask=known, other=0.0)

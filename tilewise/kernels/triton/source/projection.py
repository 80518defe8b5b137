"""The projection of x to queries, keys and values, one head a program, turned by their positions on the way; and the
gradients of all three, turned back and side by side.

Rows are counted through the batch. A head's columns are computed as pairs are: the first numbers of all pairs, and the
second ones. Without an embedding a pair is a number of the left half and one of the right.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.rope import angles_of, columns_of_pairs, load_pairs, store_pairs

TOGETHER: tl.constexpr = tl.constexpr(8)  # tiles of rows that go through all heads before the next ones: x stays near


@triton.jit
def project(
    x, w, bias, y, x_steps, w_steps, y_steps, turn, rows, n, inner, heads, turned_heads,
    HAS_BIAS: tl.constexpr, TURNED: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y, (batch, heads, n, D), of x, (batch, n, inner), and w, (inner, heads * D)."""
    tile, head = tile_and_head(tl.cdiv(rows, ROWS), heads)
    row, b, i, inside = rows_of(tile, rows, n, ROWS)
    first, second = columns_of_pairs(PADDED, PAIRS, INTERLEAVED)
    x_at = (x + b * x_steps[0] + i * x_steps[1])[:, None]
    w_at = w + tl.cast(head, tl.int64) * D * w_steps[1]
    one, other = tl.zeros([ROWS, PADDED // 2], tl.float32), tl.zeros([ROWS, PADDED // 2], tl.float32)
    for begin in range(0, inner, INNER):
        depth = begin + tl.arange(0, INNER)
        known = depth < inner
        x_tile = tl.load(x_at + depth[None, :] * x_steps[2], mask=inside & known[None, :], other=0.0).to(DOT)
        w_row = w_at + depth[:, None].to(tl.int64) * w_steps[0]
        w_one = tl.load(w_row + first[None, :] * w_steps[1], mask=known[:, None] & (first < D)[None, :], other=0.0)
        w_other = tl.load(w_row + second[None, :] * w_steps[1], mask=known[:, None] & (second < D)[None, :], other=0.0)
        one = tl.dot(x_tile, w_one.to(DOT), one, input_precision=PRECISION)
        other = tl.dot(x_tile, w_other.to(DOT), other, input_precision=PRECISION)
    if HAS_BIAS:
        one += tl.load(bias + head * D + first, mask=first < D, other=0.0).to(tl.float32)[None, :]
        other += tl.load(bias + head * D + second, mask=second < D, other=0.0).to(tl.float32)[None, :]
    if TURNED:
        cos, sin = angles_of(turn, b, i, inside & are_turned(row, head, turned_heads), PADDED, PAIRS)
        one, other = one * cos - other * sin, other * cos + one * sin
    y_at = (y + b * y_steps[0] + head * y_steps[1] + i * y_steps[2])[:, None]
    store_pairs(y_at, inside, one, other, D, PADDED, PAIRS, INTERLEAVED)


@triton.jit
def gather(
    d_y, joined, d_y_steps, turn, rows, n, heads, turned_heads,
    TURNED: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """joined, (rows, heads * D): gradients of the products of x and w, from those of y, (batch, heads, n, D)."""
    tile, head = tile_and_head(tl.cdiv(rows, ROWS), heads)
    row, b, i, inside = rows_of(tile, rows, n, ROWS)
    d_y_at = (d_y + b * d_y_steps[0] + head * d_y_steps[1] + i * d_y_steps[2])[:, None]
    one, other = load_pairs(d_y_at, inside, D, PADDED, PAIRS, INTERLEAVED)
    if TURNED:
        cos, sin = angles_of(turn, b, i, inside & are_turned(row, head, turned_heads), PADDED, PAIRS)
        one, other = one * cos + other * sin, other * cos - one * sin
    joined_at = (joined + row.to(tl.int64) * heads * D + head * D)[:, None]
    store_pairs(joined_at, inside, one, other, D, PADDED, PAIRS, INTERLEAVED)


@triton.jit
def tile_and_head(tiles, heads):
    """Programs in turns: some tiles of rows, all heads of each, then the next tiles."""
    turn = tl.program_id(0) // (TOGETHER * heads)
    size = tl.minimum(tiles - turn * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * heads)
    return turn * TOGETHER + within % size, within // size


@triton.jit
def are_turned(row, head, turned_heads):
    """Whether the head is, for each row: Triton's interpreter cannot join conditions of single numbers."""
    return (row * 0 + head < turned_heads)[:, None]


@triton.jit
def rows_of(tile, rows, n, ROWS: tl.constexpr):
    """Rows counted through the batch, the batch index and the place of each, and which of them there are."""
    row = tile * ROWS + tl.arange(0, ROWS)
    return row, (row // n).to(tl.int64), (row % n).to(tl.int64), (row < rows)[:, None]

"""The projection of x to queries, keys and values, some heads a program, turned by their positions on the way; and the
gradients of all three, turned back and side by side.

Rows are counted through the batch. A tile has the columns of HEADS heads, in PADDED columns each, as they are stored:
only so are they loaded and stored many at a time. The two numbers of a pair come apart in registers.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.tiles import narrow

TOGETHER: tl.constexpr = tl.constexpr(16)  # tiles of rows that go through all heads before the next ones: x stays near


@triton.jit
def project(
    x, w, bias, y, x_map, w_map, x_steps, w_steps, turn, rows, n, inner, heads, turned_heads,
    HAS_BIAS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BY_COLUMNS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """y, (batch, heads, n, D), of x, (batch, n, inner), and w, (inner, heads * D).

    x_map, w_map: of x's rows and w for a GPU's copy engine, or both None; where w lies BY_COLUMNS, of w.T. It gives 0
    behind the end. WHOLE: inner is a multiple of INNER.
    """
    tile, first = tile_and_head(tl.cdiv(rows, ROWS), heads, HEADS)
    made = product(
        x, w, x_map, w_map, x_steps, w_steps, tile, first, rows, n, inner, heads, D, PADDED, HEADS, BY_COLUMNS, WHOLE,
        ROWS, INNER, DOT,
    )  # fmt: skip
    # Counted anew: registers would keep it through the loop.
    b, i, inside = rows_of(tile, rows, n, ROWS)
    head, place, known = columns_of(first, heads, D, PADDED, HEADS)
    if HAS_BIAS:
        made += tl.load(bias + head * D + place, mask=known, other=0.0).to(tl.float32)[None, :]
    stored: tl.constexpr = y.dtype.element_ty
    if PAIRS > 0:
        made = turned(made, turn, b, i, first, turned_heads, False, stored, PADDED, PAIRS, INTERLEAVED)
    else:
        made = narrow(made, stored)
    y_at = (y + (b * heads * n + i) * D)[:, None] + (head.to(tl.int64) * n * D + place)[None, :]
    tl.store(y_at, made, mask=inside[:, None] & known[None, :])


@triton.jit
def product(
    x, w, x_map, w_map, x_steps, w_steps, tile, first, rows, n, inner, heads, D: tl.constexpr, PADDED: tl.constexpr,
    HEADS: tl.constexpr, BY_COLUMNS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A tile of x times w: rows of the tile, and columns of heads from the first on."""
    b, i, _ = rows_of(tile, rows, n, ROWS)
    head, place, known = columns_of(first, heads, D, PADDED, HEADS)
    depth = tl.arange(0, INNER)
    x_at = (x + b * x_steps[0] + i * x_steps[1])[:, None] + depth[None, :]
    w_at = w + depth[:, None].to(tl.int64) * w_steps[0] + (head * D + place)[None, :].to(tl.int64) * w_steps[1]
    known, made = known[None, :], tl.zeros([ROWS, HEADS * PADDED], tl.float32)
    for begin in range(0, inner, INNER):
        if x_map is not None:
            x_tile = x_map.load([tile * ROWS, begin])
            w_tile = tl.trans(w_map.load([first * D, begin])) if BY_COLUMNS else w_map.load([begin, first * D])
        elif WHOLE:
            x_tile = tl.load(x_at + begin)
            w_tile = tl.load(w_at + tl.cast(begin, tl.int64) * w_steps[0], mask=known, other=0.0)
        else:
            inside = begin + depth < inner
            x_tile = tl.load(x_at + begin, mask=inside[None, :], other=0.0)
            w_tile = tl.load(w_at + tl.cast(begin, tl.int64) * w_steps[0], mask=inside[:, None] & known, other=0.0)
        made = tl.dot(x_tile.to(DOT), w_tile.to(DOT), made, input_precision="ieee")
    return made


@triton.jit
def gather(
    d_y, joined, d_y_steps, turn, rows, n, heads, turned_heads,
    D: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """joined, (rows, heads * D): gradients of the products of x and w, from those of y, (batch, heads, n, D)."""
    tile, first = tile_and_head(tl.cdiv(rows, ROWS), heads, HEADS)
    b, i, inside = rows_of(tile, rows, n, ROWS)
    head, place, known = columns_of(first, heads, D, PADDED, HEADS)
    there = inside[:, None] & known[None, :]
    d_y_at = (d_y + b * d_y_steps[0] + i * d_y_steps[2])[:, None] + (head.to(tl.int64) * d_y_steps[1] + place)[None, :]
    made = tl.load(d_y_at, mask=there, other=0.0)
    if PAIRS > 0:
        stored: tl.constexpr = joined.dtype.element_ty
        made = turned(made, turn, b, i, first, turned_heads, True, stored, PADDED, PAIRS, INTERLEAVED)
    tl.store((joined + (b * n + i) * heads * D)[:, None] + (head * D + place)[None, :], made, mask=there)


@triton.jit
def tile_and_head(tiles, heads, HEADS: tl.constexpr):
    """Programs in turns: some tiles of rows, all heads of each, then the next tiles."""
    parts = tl.cdiv(heads, HEADS)
    turn = tl.program_id(0) // (TOGETHER * parts)
    size = tl.minimum(tiles - turn * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * parts)
    return turn * TOGETHER + within % size, within // size * HEADS


@triton.jit
def rows_of(tile, rows, n, ROWS: tl.constexpr):
    """The batch index and the place of each row, and which of them there are; behind the last it is there again."""
    row = tile * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(row, rows - 1)
    return (held // n).to(tl.int64), (held % n).to(tl.int64), row < rows


@triton.jit
def columns_of(first, heads, D: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr):
    """The head of each column and its place there, and which of them there are."""
    column = tl.arange(0, HEADS * PADDED)
    head, place = first + column // PADDED, column % PADDED
    return head, place, (head < heads) & (place < D)


# -- pairs ------------------------------------------------------------------------------------------------------------


@triton.jit
def turned(
    x, turn, b, i, first, turned_heads, BACK: tl.constexpr, TYPE: tl.constexpr, PADDED: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The tile, its heads below turned_heads turned, or turned BACK, and rounded to TYPE.

    Numbers that are not turned are paired too, and stay as they are, whatever the other one is.
    """
    one, other = apart(x, PADDED, PAIRS, INTERLEAVED)
    column = tl.arange(0, x.shape[1] // 2)
    head, pair = first + column // (PADDED // 2), column % (PADDED // 2)
    turns = (head < turned_heads) & (pair < PAIRS)
    cos, sin = angles(turn, b, i, pair, turns, BACK)
    turned_one = tl.where(turns[None, :], one * cos - other * sin, one)
    turned_other = tl.where(turns[None, :], other * cos + one * sin, other)
    return together(narrow(turned_one, TYPE), narrow(turned_other, TYPE), PADDED, PAIRS, INTERLEAVED)


@triton.jit
def apart(x, PADDED: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second numbers of pairs, to compute with.

    Halves of a power of 2 are blocks that a tile is made of. Pairs that lie another way are made neighbours first.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    STEP: tl.constexpr = step_of(PAIRS, INTERLEAVED)
    if STEP == 1 and not INTERLEAVED:
        place = tl.arange(0, COLUMNS) % PADDED
        at = tl.where(place < 2 * PAIRS, place // 2 + place % 2 * PAIRS, place)
        x = columns_from(x, tl.arange(0, COLUMNS) - place + at)
    one, other = tl.split(tl.permute(tl.reshape(x, (ROWS, COLUMNS // 2 // STEP, 2, STEP)), (0, 1, 3, 2)))
    return tl.reshape(one, (ROWS, COLUMNS // 2)).to(tl.float32), tl.reshape(other, (ROWS, COLUMNS // 2)).to(tl.float32)


@triton.jit
def together(one, other, PADDED: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other way round."""
    ROWS: tl.constexpr = one.shape[0]
    COLUMNS: tl.constexpr = 2 * one.shape[1]
    STEP: tl.constexpr = step_of(PAIRS, INTERLEAVED)
    BLOCKS: tl.constexpr = (ROWS, COLUMNS // 2 // STEP, STEP)
    joined = tl.join(tl.reshape(one, BLOCKS), tl.reshape(other, BLOCKS))
    x = tl.reshape(tl.permute(joined, (0, 1, 3, 2)), (ROWS, COLUMNS))
    if STEP == 1 and not INTERLEAVED:
        place = tl.arange(0, COLUMNS) % PADDED
        at = tl.where(place < PAIRS, 2 * place, tl.where(place < 2 * PAIRS, 2 * (place - PAIRS) + 1, place))
        x = columns_from(x, tl.arange(0, COLUMNS) - place + at)
    return x


@triton.constexpr_function
def step_of(pairs, interleaved):
    """How far apart the numbers of a pair lie, or are made to lie: a power of 2."""
    return 1 if interleaved or pairs & (pairs - 1) else pairs


@triton.jit
def columns_from(x, at):
    return tl.gather(x, tl.broadcast_to(at[None, :], x.shape), 1)


@triton.jit
def angles(turn, b, i, pair, known, BACK: tl.constexpr):
    """cos and sin for each row and pair; those of angle 0 where none is known."""
    cos, sin, batch_step, row_step = turn
    at, known = (b * batch_step + i * row_step)[:, None] + pair[None, :], known[None, :]
    cos, sin = tl.load(cos + at, mask=known, other=1.0), tl.load(sin + at, mask=known, other=0.0)
    if BACK:
        sin = -sin
    return cos, sin

"""A cache of keys and values in Triton: where its rows are, and new ones written behind them."""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.tiles import matrix, narrow


@triton.jit
def append(
    k, v, new_k, new_v, lengths, table, counts, k_steps, v_steps, new_k_steps, new_v_steps, table_step, n, units,
    capacity, turn, PAGE: tl.constexpr, HAS_COUNTS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """New keys, turned, and values behind those that a sequence has: some rows of one head.

    units: how many sequences or pages storage has. Whatever lengths and the table hold, nothing else is written.
    """
    hk, b = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = n
    if HAS_COUNTS:
        count = tl.load(counts + b)
    key = tl.load(lengths + b) + row
    inside = (row < n) & (row < count) & (key >= 0) & (key < capacity)
    unit, slot = b, key
    if PAGE is not None:
        pages = table + tl.cast(b, tl.int64) * table_step
        unit, slot = tl.load(pages + key // PAGE, mask=inside, other=-1), key % PAGE
        inside = inside & (unit >= 0) & (unit < units)  # nothing is written to pages that the sequence has not
    k_tile = gather_turned(
        matrix(new_k, new_k_steps, b, hk, row), inside, turn, b, key if COUNTED else row, D, DEPTH, PAIRS, INTERLEAVED
    )
    v_tile = gather_rows(matrix(new_v, new_v_steps, b, hk, row), inside, D_V, COLUMNS)
    scatter_rows(matrix(k, k_steps, unit, hk, slot), k_tile, inside, D, DEPTH)
    scatter_rows(matrix(v, v_steps, unit, hk, slot), v_tile, inside, D_V, COLUMNS)


@triton.jit
def place_of_tile(pages, units, b, first, key, there, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The first and the third index of a tile's keys in storage: sequence and key, or page and key of it."""
    unit, slot = b, key
    if PAGE is not None:
        slot = key % PAGE
        if PAGE % TILE == 0:  # one page has them all
            unit = tl.load(pages + first // PAGE)
        else:
            unit = tl.load(pages + key // PAGE, mask=there)
        unit = tl.minimum(tl.maximum(unit, 0), units - 1)  # whatever a table holds, nothing is read outside the pages
    return unit, slot


@triton.jit
def gather_rows(at, there, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows that begin at these pointers, 0 in columns up to a power of 2 and where there is none (there: None, if all
    are)."""
    column = tl.arange(0, PADDED)
    cells = at[:, None] + column[None, :]
    if there is None:
        if WIDTH == PADDED:
            rows = tl.load(cells)
        else:
            rows = tl.load(cells, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        if WIDTH == PADDED:
            rows = tl.load(cells, mask=there[:, None], other=0.0)
        else:
            rows = tl.load(cells, mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)
    return rows


@triton.jit
def gather_turned(
    at, there, turn, b, place, WIDTH: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """The same, turned if there are pairs to turn, each number where it was: a cache keeps them for others to read.

    place: whose angles each row takes, of those of batch index b.
    """
    rows = gather_rows(at, there, WIDTH, PADDED)
    if PAIRS > 0:
        column = tl.arange(0, PADDED)
        if INTERLEAVED:
            pair, is_second = column // 2, column % 2 == 1
            partner = column + 1 - 2 * (column % 2)
        else:
            pair, is_second = column % PAIRS, column >= PAIRS
            partner = tl.where(is_second, column - PAIRS, column + PAIRS)
        turns = there[:, None] & (column < 2 * PAIRS)[None, :]
        cos, sin, batch_step, row_step = turn
        angle = (tl.cast(b, tl.int64) * batch_step + place.to(tl.int64) * row_step)[:, None] + pair[None, :]
        other = tl.load(at[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(sin + angle, mask=turns, other=0.0)
        sin = tl.where(is_second[None, :], sin, -sin)
        rows = narrow(rows.to(tl.float32) * tl.load(cos + angle, mask=turns, other=1.0) + other * sin, rows.dtype)
    return rows


@triton.jit
def scatter_rows(at, rows, there, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    tl.store(at[:, None] + column[None, :], rows, mask=there[:, None] & (column < WIDTH)[None, :])

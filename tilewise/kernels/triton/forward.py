"""The forward pass in Triton: a program has the queries of one tile, and visits the key tiles of its plan."""

import triton
import triton.language as tl

PARTIAL: tl.constexpr = tl.constexpr(1)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def finite(row_max):
    """The shift of the exponent; 0 for a row that has no key yet."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def scores(
    s, query, key, kind, n_k, place, arrays, sizes, steps, scale, SCORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Products of q and k as powers of 2, -inf where a key does not count. query, key: within the sequence."""
    b, h, hk, origin_q, origin_k, total_q, total_k, packed_q, packed_k = place
    # 3 score
    if SCORE is not None:
        s = SCORE(
            s * scale, b, h, hk, origin_q + query, origin_k + key, packed_q + query, packed_k + key, total_q, total_k,
            arrays, sizes, steps,
        ) + tl.zeros_like(s)  # fmt: skip
        s = s * LOG2_E
    else:
        s = s * (scale * LOG2_E)
    # 4 mask (PARTIAL tiles only)
    if kind == PARTIAL:
        counts = key < n_k
        if MASK is not None:
            counts = counts & MASK(
                s, b, h, hk, origin_q + query, origin_k + key, packed_q + query, packed_k + key, total_q, total_k,
                arrays, sizes, steps,
            )  # fmt: skip
        s = tl.where(counts, s, float("-inf"))
    return s


@triton.jit
def step(
    row_max, row_sum, acc, q, k, v, k_row, v_row, query, first_key, kind, n_k, place, arrays, sizes, steps, scale,
    SCORE: tl.constexpr, MASK: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key = first_key + tl.arange(0, TILE_K)
    # 2 s = q @ k.T
    k_tile = load_rows(k, k_row, key, n_k, D, DEPTH)
    s = tl.dot(q.to(DOT), tl.trans(k_tile).to(DOT), input_precision=PRECISION)
    s = scores(s, query[:, None], key[None, :], kind, n_k, place, arrays, sizes, steps, scale, SCORE, MASK)
    # 5 row_max, rescale, p, row_sum
    new_max = tl.maximum(row_max, tl.max(s, 1))
    shift = finite(new_max)
    rescale = tl.exp2(row_max - shift)
    p = tl.exp2(s - shift[:, None])
    row_sum = row_sum * rescale + tl.sum(p, 1)
    # 6 acc = acc * rescale + p @ v
    v_tile = load_rows(v, v_row, key, n_k, D_V, COLUMNS)
    acc = tl.dot(p.to(v_tile.dtype).to(DOT), v_tile.to(DOT), acc * rescale[:, None], input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit
def load_rows(x, step, row, n, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix, 0 beyond its last row and in columns up to a power of 2."""
    column = tl.arange(0, PADDED)
    at = x + row[:, None].to(tl.int64) * step + column[None, :]
    if WIDTH == PADDED:
        return tl.load(at, mask=row[:, None] < n, other=0.0)
    else:
        return tl.load(at, mask=(row[:, None] < n) & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def place_of(record, b, h, group):
    """What variables begin at: of a tile's record, the fields behind those of its rows."""
    return (
        tl.load(record + 6) + b, h, h // group, tl.load(record + 7), tl.load(record + 8), tl.load(record + 9),
        tl.load(record + 10), tl.load(record + 11), tl.load(record + 12),
    )  # fmt: skip


@triton.jit
def forward(
    q, k, v, out, lse, sinks, records, runs, arrays, sizes, steps,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    lse_batch, lse_head, record_batch, record_head, group, scale,
    SCORE: tl.constexpr, MASK: tl.constexpr, HAS_SINKS: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    record = records + b * record_batch + h * record_head + tl.program_id(0) * FIELDS
    first_query, q_begin, k_begin = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    n_q, n_k = tl.load(record + 3), tl.load(record + 4)
    place = place_of(record, b, h, group)
    hk = (h // group).to(tl.int64)
    bb, hh = b.to(tl.int64), h.to(tl.int64)
    q += bb * q_batch + hh * q_head + q_begin.to(tl.int64) * q_row
    k += bb * k_batch + hk * k_head + k_begin.to(tl.int64) * k_row
    v += bb * v_batch + hk * v_head + k_begin.to(tl.int64) * v_row

    # 1 load q
    query = first_query + tl.arange(0, TILE_Q)
    q_tile = load_rows(q, q_row, query, n_q, D, DEPTH)
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, COLUMNS], tl.float32)
    # for each kv tile of the schedule:
    first_run = tl.load(record + 5)
    for run in range(first_run, first_run + tl.load(record + 13)):
        first, last, kind = tl.load(runs + run * 3), tl.load(runs + run * 3 + 1), tl.load(runs + run * 3 + 2)
        for tile in range(first, last):
            row_max, row_sum, acc = step(
                row_max, row_sum, acc, q_tile, k, v, k_row, v_row, query, tile * TILE_K, kind, n_k, place, arrays, sizes,
                steps, scale, SCORE, MASK, TILE_K, D, D_V, DEPTH, COLUMNS, DOT, PRECISION,
            )  # fmt: skip
    # 7 finish: acc / row_sum, lse
    empty = row_sum == 0
    row_sum = tl.where(empty, 1.0, row_sum)
    done = tl.where(empty, float("-inf"), (finite(row_max) + tl.log2(row_sum)) * LN_2)
    weight = 1 / row_sum
    if HAS_SINKS:
        sink = tl.load(sinks + h).to(tl.float32)
        larger = tl.maximum(done, sink)
        joint = tl.where(
            larger == float("-inf"), larger, larger + tl.log(tl.exp(done - finite(larger)) + tl.exp(sink - finite(larger)))
        )
        weight = weight * tl.exp(done - finite(joint))
        done = joint
    column = tl.arange(0, COLUMNS)
    row = (q_begin + query).to(tl.int64)
    at = out + bb * out_batch + hh * out_head + row[:, None] * out_row + column[None, :]
    tl.store(
        at, (acc * weight[:, None]).to(out.dtype.element_ty), mask=(query[:, None] < n_q) & (column[None, :] < D_V)
    )
    tl.store(lse + bb * lse_batch + hh * lse_head + row, done, mask=query < n_q)

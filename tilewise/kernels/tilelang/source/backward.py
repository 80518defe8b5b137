"""The backward pass in TileLang: weights are recomputed from lse, and every sum has one block, so its order is fixed.

`rows` comes first, and leaves delta and what it makes of lse to the others. A block of `d_query` has the queries of one
tile, a block of `d_keys` the keys of one; both compute, with delta = sum(d_out * out) - d_lse:
d_score = p * (d_out v^T - delta),  d_s = d_score * d score/d S.
"""

import tilelang.language as T

from tilewise.kernels.tilelang.source.tiles import (
    FIRST,
    FIRST_VISIT,
    K_BEGIN,
    LOG2_E,
    N_K,
    N_Q,
    N_VISITS,
    PARTIAL,
    Q_BEGIN,
    Memory,
    Place,
    Sizes,
    after_kernels_before,
    array,
    begin_turn,
    blocks,
    done_with,
    end_turn,
    finite,
    fused,
    load_numbers,
    load_rows,
    loaded,
    multiply,
    record_of,
    records_of,
    share_registers,
    store_rows,
    wait,
)

BY_ROWS = T.GemmWarpPolicy.FullRow


@T.macro
def weights(build, place, product, p, shift, by_key, scale, factor, first, first_key, partial, n_q, n_k):
    """p of a tile, from q k^T; queries down and keys across, or the other way round (by_key)."""
    parallel = Memory.of(build).parallel
    rows, columns = p.shape
    # 3 score
    # 5 p, from the lse that forward saved; products are rounded as forward did, so that delta is the mean of d_p
    for r, c in parallel(rows, columns):
        query, key = (first + c, first_key + r) if by_key else (first + r, first_key + c)
        score = place.score(product[r, c], scale, query, key)
        p[r, c] = T.exp2(fused(build, score, factor, shift[c] if by_key else shift[r]))
    # 4 mask (PARTIAL tiles only)
    if partial:
        for r, c in parallel(rows, columns):
            query, key = (first + c, first_key + r) if by_key else (first + r, first_key + c)
            p[r, c] = T.if_then_else(place.counts(query, key, n_q, n_k), p[r, c], 0)


@T.macro
def passed_on(build, place, name, product, p, d_p, delta, by_key, scale, first, first_key):
    """d_p becomes d_score times a derivative of the score, if it has one that is not 1."""
    rows, columns = p.shape
    for r, c in Memory.of(build).parallel(rows, columns):
        query, key = (first + c, first_key + r) if by_key else (first + r, first_key + c)
        d_score = p[r, c] * (d_p[r, c] - (delta[c] if by_key else delta[r]))
        d_p[r, c] = place.times(name, d_score, product[r, c] * scale, query, key)


def rows(build, variant):
    """What weights are recomputed with: shift, which is -lse as an exponent of 2, and delta.

    delta is summed as d_out v^T will be, from which it is taken away: where a row has one key, or as good as one, their
    errors are the same. So it is on the diagonal of a product, the rest of which nobody needs.
    """
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    tile_q, columns, dtype = build.tile.q, build.columns, build.dtype

    @T.prim_func
    def rows(
        out: array(build, "out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        lse: array(build, "lse", (n.batch, n.heads, n.n_q), "float32"),
        d_lse: array(build, "d_lse", (n.batch, n.heads, n.n_q), "float32"),
        shift: array(build, "shift", (n.batch, n.heads, n.n_rows), "float32"),
        delta: array(build, "delta", (n.batch, n.heads, n.n_rows), "float32"),
    ):
        with T.Kernel(T.ceildiv(n.n_q, tile_q), n.heads, n.batch, threads=build.threads) as (number, h, b):
            d_out_tile = shared([tile_q, columns], dtype)
            out_tile = shared([tile_q, columns], dtype)
            products = fragment([tile_q, tile_q], "float32")
            row_delta = fragment([tile_q], "float32")
            after_kernels_before(build)
            first = number * tile_q
            n_q = T.min(
                n.n_q, n.n_rows
            )  # a value: TileLang would call the size itself as a macro's parameter is called
            # 0 delta = sum(d_out * out) - d_lse
            load_rows(build, d_out, d_out_tile, b, h, 0, first, n_q)
            load_rows(build, out, out_tile, b, h, 0, first, n_q)
            T.gemm(d_out_tile, out_tile, products, transpose_B=True, policy=BY_ROWS, clear_accum=True)
            for r, c in parallel(tile_q, tile_q):
                products[r, c] = T.if_then_else(r == c, products[r, c], 0)
            T.reduce_sum(products, row_delta, dim=1)
            for r in parallel(tile_q):
                if first + r < n_q:
                    delta[b, h, first + r] = row_delta[r] - d_lse[b, h, first + r]
                    shift[b, h, first + r] = -finite(lse[b, h, first + r]) * T.float32(LOG2_E)

    return rows


def d_query(build, variant):
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    tile_q, tile_k, depth, columns, dtype = build.tile.q, build.tile.k, build.depth, build.columns, build.dtype

    @T.prim_func
    def d_query(
        q: array(build, "q", (n.batch, n.heads, n.n_q, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n_k, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n_k, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        shift: array(build, "shift", (n.batch, n.heads, n.n_rows), "float32"),
        delta: array(build, "delta", (n.batch, n.heads, n.n_rows), "float32"),
        d_q: array(build, "d_q", (n.batch, n.heads, n.n_q, build.d), dtype),
        records: records_of(build, n),
        visits: T.Tensor((n.n_visits,), "int32"),
        scale: T.float32,
        factor: T.float32,
        group: T.int32,
        a0: loaded(build, 0),
        a1: loaded(build, 1),
        a2: loaded(build, 2),
        a3: loaded(build, 3),
        a4: loaded(build, 4),
        a5: loaded(build, 5),
        a6: loaded(build, 6),
        a7: loaded(build, 7),
    ):
        with T.Kernel(*blocks(build, n.tiles, n.heads), n.batch, threads=build.threads) as (x, y, b):
            q_tile = shared([tile_q, depth], dtype)
            d_out_tile = shared([tile_q, columns], dtype)
            k_tile = shared([tile_k, depth], dtype)
            v_tile = shared([tile_k, columns], dtype)
            s = fragment([tile_q, tile_k], "float32")
            p = fragment([tile_q, tile_k], "float32") if "slope" in variant.expressions else s
            d_p = fragment([tile_q, tile_k], "float32")
            d_s = fragment([tile_q, tile_k], dtype)
            acc = fragment([tile_q, depth], "float32")
            row_shift = fragment([tile_q], "float32")
            row_delta = fragment([tile_q], "float32")

            share_registers(build)
            after_kernels_before(build)
            number, h = blocks(build, x, y)
            record = record_of(records, b, h, number)
            hk = T.truncdiv(h, group)
            first = record(FIRST)
            q_begin = record(Q_BEGIN)
            k_begin = record(K_BEGIN)
            n_q = record(N_Q)
            n_k = record(N_K)
            first_visit = record(FIRST_VISIT)
            place = Place.of(build, variant, record, b, h, hk, (a0, a1, a2, a3, a4, a5, a6, a7))

            # 1 load q, d_out
            load_rows(build, q, q_tile, b, h, q_begin, first, n_q)
            load_rows(build, d_out, d_out_tile, b, h, q_begin, first, n_q)
            for r in parallel(tile_q):
                row = q_begin + T.min(first + r, n_q - 1)
                row_shift[r] = shift[b, h, row]
                row_delta[r] = delta[b, h, row]
            T.fill(acc, 0)
            # for each kv tile of the schedule:
            n_visits = record(N_VISITS)
            for i in T.Pipelined(n_visits, num_stages=build.stages):
                coming = visits[first_visit + i] // 2 * tile_k
                load_rows(build, k, k_tile, b, hk, k_begin, coming, n_k)
                load_rows(build, v, v_tile, b, hk, k_begin, coming, n_k)
                # 2 s = q @ k.T, d_p = d_out @ v.T
                begin_turn(build, i)
                multiply(build, q_tile, k_tile, s, transpose_B=True, policy=BY_ROWS, clear_accum=True)
                multiply(build, d_out_tile, v_tile, d_p, transpose_B=True, policy=BY_ROWS, clear_accum=True)
                end_turn(build)
                visit = visits[first_visit + i]  # again: who computes reads it behind the products
                first_key = visit // 2 * tile_k
                # 3 score, 4 mask, 5 p
                wait(build, 1)
                weights(
                    build,
                    place,
                    s,
                    p,
                    row_shift,
                    False,
                    scale,
                    factor,
                    first,
                    first_key,
                    visit % 2 == PARTIAL,
                    n_q,
                    n_k,
                )
                wait(build, 0)
                done_with(build, v_tile)
                # 6 d_q += d_s @ k
                passed_on(build, place, "slope", s, p, d_p, row_delta, False, scale, first, first_key)
                T.copy(d_p, d_s)
                T.gemm(d_s, k_tile, acc, policy=BY_ROWS)
            for r, c in parallel(tile_q, depth):
                acc[r, c] *= scale
            store_rows(build, acc, d_q, b, h, q_begin, first, n_q)

    return d_query


def d_keys(build, variant):
    """Its d_k and d_v are those of each query head; heads that share keys are added up behind it."""
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    tile_q, tile_k, depth, columns, dtype = build.tile.q, build.tile.k, build.depth, build.columns, build.dtype

    @T.prim_func
    def d_keys(
        q: array(build, "q", (n.batch, n.heads, n.n_q, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n_k, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n_k, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        shift: array(build, "shift", (n.batch, n.heads, n.n_rows), "float32"),
        delta: array(build, "delta", (n.batch, n.heads, n.n_rows), "float32"),
        d_k: array(build, "d_k", (n.batch, n.heads, n.n_k, build.d), build.sum_dtype),
        d_v: array(build, "d_v", (n.batch, n.heads, n.n_k, build.d_v), build.sum_dtype),
        records: records_of(build, n),
        visits: T.Tensor((n.n_visits,), "int32"),
        scale: T.float32,
        factor: T.float32,
        group: T.int32,
        a0: loaded(build, 0),
        a1: loaded(build, 1),
        a2: loaded(build, 2),
        a3: loaded(build, 3),
        a4: loaded(build, 4),
        a5: loaded(build, 5),
        a6: loaded(build, 6),
        a7: loaded(build, 7),
    ):
        with T.Kernel(*blocks(build, n.tiles, n.heads), n.batch, threads=build.threads) as (x, y, b):
            k_tile = shared([tile_k, depth], dtype)
            v_tile = shared([tile_k, columns], dtype)
            q_tile = shared([tile_q, depth], dtype)
            d_out_tile = shared([tile_q, columns], dtype)
            q_shift = shared([tile_q], "float32")
            q_delta = shared([tile_q], "float32")
            s = fragment([tile_k, tile_q], "float32")
            p = fragment([tile_k, tile_q], "float32") if "slope" in variant.expressions else s
            d_p = fragment([tile_k, tile_q], "float32")
            narrow = fragment([tile_k, tile_q], dtype)
            d_s = fragment([tile_k, tile_q], dtype)
            acc_k = fragment([tile_k, depth], "float32")
            acc_v = fragment([tile_k, columns], "float32")

            share_registers(build)
            after_kernels_before(build)
            number, h = blocks(build, x, y)
            record = record_of(records, b, h, number)
            hk = T.truncdiv(h, group)
            first_key = record(FIRST)
            q_begin = record(Q_BEGIN)
            k_begin = record(K_BEGIN)
            n_q = record(N_Q)
            n_k = record(N_K)
            first_visit = record(FIRST_VISIT)
            place = Place.of(build, variant, record, b, h, hk, (a0, a1, a2, a3, a4, a5, a6, a7))

            # 1 load k, v
            load_rows(build, k, k_tile, b, hk, k_begin, first_key, n_k)
            load_rows(build, v, v_tile, b, hk, k_begin, first_key, n_k)
            T.fill(acc_k, 0)
            T.fill(acc_v, 0)
            # for each q tile of the schedule:
            n_visits = record(N_VISITS)
            for i in T.Pipelined(n_visits, num_stages=build.stages):
                coming = visits[first_visit + i] // 2 * tile_q
                load_rows(build, q, q_tile, b, h, q_begin, coming, n_q)
                load_rows(build, d_out, d_out_tile, b, h, q_begin, coming, n_q)
                load_numbers(build, shift, q_shift, b, h, q_begin, coming, n_q)
                load_numbers(build, delta, q_delta, b, h, q_begin, coming, n_q)
                # 2 s.T = k @ q.T, d_p.T = v @ d_out.T: keys down and queries across, as the sums want their weights
                begin_turn(build, i)
                multiply(build, k_tile, q_tile, s, transpose_B=True, policy=BY_ROWS, clear_accum=True)
                multiply(build, v_tile, d_out_tile, d_p, transpose_B=True, policy=BY_ROWS, clear_accum=True)
                end_turn(build)
                visit = visits[first_visit + i]  # again: who computes reads it behind the products
                first = visit // 2 * tile_q
                # 3 score, 4 mask, 5 p
                wait(build, 1)
                weights(
                    build, place, s, p, q_shift, True, scale, factor, first, first_key, visit % 2 == PARTIAL, n_q, n_k
                )
                # 6 d_v += p.T @ d_out, d_k += d_s.T @ q
                T.copy(p, narrow)
                multiply(build, narrow, d_out_tile, acc_v, policy=BY_ROWS)
                wait(build, 1)
                passed_on(build, place, "slope", s, p, d_p, q_delta, True, scale, first, first_key)
                T.copy(d_p, d_s)
                multiply(build, d_s, q_tile, acc_k, policy=BY_ROWS)
                wait(build, 0)
                done_with(build, q_tile)
                done_with(build, d_out_tile)
            for r, c in parallel(tile_k, depth):
                acc_k[r, c] *= scale
            store_rows(build, acc_k, d_k, b, h, k_begin, first_key, n_k)
            store_rows(build, acc_v, d_v, b, h, k_begin, first_key, n_k)

    return d_keys

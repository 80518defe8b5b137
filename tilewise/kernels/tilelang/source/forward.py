"""The forward pass in TileLang: a block has the queries of one tile, and visits the key tiles of its plan.

Global memory, shared memory, registers: tiles of q, k and v are copied to shared memory, scores, weights and sums are
fragments, which the registers of all threads hold together. The loop is pipelined: TileLang gives the copies to threads
of their own, which run ahead by as many tiles as there are stages, and the products to tensor cores.

row_max follows the scores only when weights would grow beyond 2^GROWTH, so that a tile rarely has anything to rescale.
Until then each thread has its own maxima and sums of the columns that it holds, its lanes, and asks no other.
"""

import tilelang.language as T

from tilewise.kernels.tilelang.source.tiles import (
    FIRST,
    FIRST_VISIT,
    INFINITY,
    K_BEGIN,
    N_K,
    N_Q,
    N_VISITS,
    PARTIAL,
    Q_BEGIN,
    Memory,
    Place,
    Sizes,
    after_kernels_before,
    any_of_warp,
    array,
    begin_turn,
    blocks,
    by_lanes,
    done_with,
    end_turn,
    finite,
    fused,
    lanes,
    load_rows,
    loaded,
    lse_of,
    multiply,
    record_of,
    records_of,
    share_registers,
    store_rows,
    wait,
    weight_of,
    with_sink,
)

GROWTH = 8


def forward(build, variant):
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    tile_q, tile_k, depth, columns, dtype = build.tile.q, build.tile.k, build.depth, build.columns, build.dtype
    by_rows = T.GemmWarpPolicy.FullRow  # each warp has whole rows of scores, so that no warp waits for another's

    @T.prim_func
    def forward(
        q: array(build, "q", (n.batch, n.heads, n.n_q, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n_k, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n_k, build.d_v), dtype),
        out: array(build, "out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        lse: array(build, "lse", (n.batch, n.heads, n.n_q), "float32"),
        sinks: T.Tensor((n.heads,), "float32"),
        records: records_of(build, n),
        visits: T.Tensor((n.n_visits,), "int32"),
        scale: T.float32,
        factor: T.float32,  # what scores are multiplied by to be exponents of 2
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
            k_tile = shared([tile_k, depth], dtype)
            v_tile = shared([tile_k, columns], dtype)
            s = fragment([tile_q, tile_k], "float32")
            p = fragment([tile_q, tile_k], dtype)
            acc = fragment([tile_q, columns], "float32")
            row_max = fragment([tile_q], "float32")  # as an exponent of 2, of some score so far
            largest = fragment([tile_q], "float32")  # of all, before it is one
            rescale = fragment([tile_q], "float32")
            row_sum = fragment([tile_q], "float32")
            row_lse = fragment([tile_q], "float32")
            lane_max = fragment([tile_q, lanes(build)], "float32")
            lane_sum = fragment([tile_q, lanes(build)], "float32")
            grew = T.alloc_var("int32")  # whether row_max did, of one of a thread's rows

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

            # 1 load q
            load_rows(build, q, q_tile, b, h, q_begin, first, n_q)
            T.fill(acc, 0)
            T.fill(row_max, -INFINITY)
            T.fill(lane_max, -INFINITY)
            T.fill(lane_sum, 0)
            # for each kv tile of the schedule, and once more, for the values of the last:
            T.fill(p, 0)
            n_visits = record(N_VISITS)
            for i in T.Pipelined(n_visits + 1, num_stages=build.stages):
                coming = visits[first_visit + T.min(i, n_visits - 1)] // 2 * tile_k
                before = visits[first_visit + T.max(i - 1, 0)] // 2 * tile_k
                load_rows(build, k, k_tile, b, hk, k_begin, coming, n_k)
                # Before the first are none: rows behind the last key, which are 0, as a weight of 0 makes no 0 of inf.
                load_rows(build, v, v_tile, b, hk, k_begin, T.if_then_else(i > 0, before, n_k), n_k)
                # 2 s = q @ k.T
                begin_turn(build, i)
                multiply(build, q_tile, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
                # 6 acc += p @ v, of the tile before, while tensor cores would wait for the weights of this one
                multiply(build, p, v_tile, acc, policy=by_rows)
                end_turn(build)
                visit = visits[first_visit + T.min(i, n_visits - 1)]  # again: who computes reads it behind the products
                first_key = visit // 2 * tile_k
                wait(build, 1)
                done_with(build, k_tile)
                if i < n_visits:
                    # 3 score
                    if not build.raw:
                        for r, c in parallel(tile_q, tile_k):
                            s[r, c] = place.score(s[r, c], scale, first + r, first_key + c)
                    # 4 mask (PARTIAL tiles only)
                    if visit % 2 == PARTIAL:
                        for r, c in parallel(tile_q, tile_k):
                            counts = place.counts(first + r, first_key + c, n_q, n_k)
                            s[r, c] = T.if_then_else(counts, s[r, c], -INFINITY)
                    # 5 row_max, rescale, p, row_sum
                    T.reduce_max(by_lanes(build, s), lane_max, dim=1, clear=False)
                    grew = 0
                    for r, c in parallel(tile_q, lanes(build)):
                        if fused(build, lane_max[r, c], factor, -row_max[r]) > GROWTH:
                            grew = 1
                    if any_of_warp(build, grew):
                        T.reduce_max(lane_max, largest, dim=1)
                        for r in parallel(tile_q):
                            rescale[r] = row_max[r]
                            grew_here = fused(build, largest[r], factor, -row_max[r]) > GROWTH
                            row_max[r] = T.Select(grew_here, largest[r] * factor, row_max[r])
                            rescale[r] = T.exp2(rescale[r] - finite(row_max[r]))
                        for r, c in parallel(tile_q, lanes(build)):
                            lane_sum[r, c] *= rescale[r]
                    for r, c in parallel(tile_q, tile_k):
                        s[r, c] = T.exp2(fused(build, s[r, c], factor, -finite(row_max[r])))
                    T.reduce_sum(by_lanes(build, s), lane_sum, dim=1, clear=False)
                wait(build, 0)
                done_with(build, v_tile)
                if i < n_visits:
                    # 6 acc = acc * rescale
                    if any_of_warp(build, grew):
                        for r, c in parallel(tile_q, columns):
                            acc[r, c] *= rescale[r]
                    T.copy(s, p)

            # 7 finish: acc / row_sum, lse
            T.reduce_max(lane_max, largest, dim=1)
            T.reduce_sum(lane_sum, row_sum, dim=1)
            for r in parallel(tile_q):
                rescale[r] = weight_of(build, row_sum[r], row_max[r], largest[r], factor)
                row_lse[r] = lse_of(build, row_max[r], row_sum[r])
            if build.has_sinks:
                for r in parallel(tile_q):
                    joint = with_sink(row_lse[r], sinks[h])
                    rescale[r] = rescale[r] * T.exp(row_lse[r] - finite(joint))
                    row_lse[r] = joint
            for r, c in parallel(tile_q, columns):
                acc[r, c] *= rescale[r]
            store_rows(build, acc, out, b, h, q_begin, first, n_q)
            for r in parallel(tile_q):
                if first + r < n_q:
                    lse[b, h, q_begin + first + r] = row_lse[r]

    return forward

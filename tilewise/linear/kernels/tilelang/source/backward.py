"""The backward pass: forwards through the chunks for d_q, with the state, and backwards for d_k and d_v, with the
state's gradient. Each number is written by one block, so that the same call gives the same bits.

Rows of d_out are multiplied as they are; by the share that normalizes a row (1 over its sum of weights) only what comes
out of products is, or goes into them from the other side. A row's shift is -sum(d_out * out), without its share.
"""

import tilelang.language as T

from tilewise.kernels.tilelang.source.tiles import Memory, after_kernels_before, array, load_rows
from tilewise.linear.features import slope
from tilewise.linear.kernels.tilelang.source.chunks import (
    RowWeights,
    Segment,
    Sizes,
    add_to_z,
    at,
    decay_all,
    inverse,
    kept,
    left,
    load_decays,
    load_state,
    load_weights,
    load_z,
    map_rows,
    numbers,
    one,
    past,
    segments_of,
    shift_rows,
    states_of,
    store_rows,
    store_state,
    store_z,
    weigh_rows,
    within,
)


def row_weights(build, spec):
    """share and shift of every row."""
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    chunk, columns, dtype, operand = build.chunk, build.columns, build.dtype, build.operand

    @T.prim_func
    def row_weights(
        out: array(build, "out", (n.batch, n.heads, n.n, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n, build.d_v), dtype),
        norm: T.Tensor((n.batch, n.heads, n.n), "float32"),
        share: numbers(build, n, "share", n.heads),
        shift: numbers(build, n, "shift", n.heads),
    ):
        with T.Kernel(T.ceildiv(n.n, chunk), n.heads, n.batch, threads=build.threads) as (number, h, b):
            out_tile = shared([chunk, columns], operand)
            d_out_tile = shared([chunk, columns], operand)
            products = fragment([chunk, columns], "float32")
            sums = fragment([chunk], "float32")
            after_kernels_before(build)
            row = number * chunk
            end = T.min(n.n, row + chunk)
            load_rows(build, out, out_tile, b, h, 0, row, end)
            load_rows(build, d_out, d_out_tile, b, h, 0, row, end)
            for r, c in parallel(chunk, columns):
                products[r, c] = -T.cast(out_tile[r, c], "float32") * T.cast(d_out_tile[r, c], "float32")
            T.reduce_sum(products, sums, dim=1)
            for r in parallel(chunk):
                if row + r < end:
                    shift[b, h, row + r] = sums[r]
                    share[b, h, row + r] = inverse(norm[b, h, row + r])

    return row_weights


def d_query(build, spec):
    """d_rows: the gradient of what a row's weights decayed by."""
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    chunk, depth, columns, dtype, operand = build.chunk, build.depth, build.columns, build.dtype, build.operand

    @T.prim_func
    def d_query(
        q: array(build, "q", (n.batch, n.heads, n.n, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n, build.d_v), dtype),
        decays: numbers(build, n, "decays", n.heads_k),
        share: numbers(build, n, "share", n.heads),
        shift: numbers(build, n, "shift", n.heads),
        states: states_of(build, n, n.heads_k, n.slots),
        d_q: array(build, "d_q", (n.batch, n.heads, n.n, build.d), dtype),
        d_rows: numbers(build, n, "d_rows", n.heads),
        segments: segments_of(n),
        per_batch: T.int32,
        group: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(n.n_segments, n.heads, n.batch, threads=build.threads) as (number, h, b):
            q_tile = shared([chunk, depth], operand)
            k_tile = shared([chunk, depth], operand)
            v_tile = shared([chunk, columns], operand)
            d_out_tile = shared([chunk, columns], operand)
            narrow_k = shared([chunk, depth], operand)
            state_tile = shared([depth, columns], operand)
            w_tile = shared([chunk, chunk], operand)
            c_tile = shared([chunk], "float32")
            weights = RowWeights(build, shared([chunk], "float32"), shared([chunk], "float32"))
            z = shared([depth], "float32")
            total = fragment([depth], "float32")
            f_k = fragment([chunk, depth], "float32")
            w = fragment([chunk, chunk], "float32")
            d_f = fragment([chunk, depth], "float32")
            part = fragment([chunk, depth], "float32")
            sums = fragment([chunk], "float32")
            state = fragment([depth, columns], "float32")
            k_features = k_tile if build.raw_keys else narrow_k
            needs_q = build.decays or not build.raw_keys
            after_kernels_before(build)
            hk = T.truncdiv(h, group)
            segment = Segment.of(segments, number)
            begin = segment.begin
            end = segment.end
            load_state(build, states, b * per_batch + segment.slot, hk, state)
            if build.normalize:
                load_z(build, states, b * per_batch + segment.slot, hk, z)
            for i in T.Pipelined(T.ceildiv(end - begin, chunk), num_stages=build.stages):
                # 1 load d_out
                row = begin + i * chunk
                load_rows(build, d_out, d_out_tile, b, h, 0, row, end)
                if needs_q:
                    load_rows(build, q, q_tile, b, h, 0, row, end)
                load_decays(build, decays, c_tile, b, hk, row, end)
                load_weights(build, share, shift, weights, b, h, row, end)
                # 2 what came before the chunk
                T.copy(state, state_tile)
                T.gemm(d_out_tile, state_tile, d_f, transpose_B=True, clear_accum=True)
                if build.normalize:
                    for r, c in parallel(chunk, depth):
                        d_f[r, c] += weights.shift(r) * z[c]
                if build.decays:
                    for r, c in parallel(chunk, depth):
                        d_f[r, c] *= past(build, c_tile, r)
                if build.causal:
                    # 3 weights within the chunk
                    load_rows(build, k, k_tile, b, hk, 0, row, end)
                    load_rows(build, v, v_tile, b, hk, 0, row, end)
                    if build.normalize or needs_q:
                        map_rows(build, spec.feature, k_tile, f_k, one, row, end)
                    if not build.raw_keys:
                        T.copy(f_k, narrow_k)
                    T.gemm(d_out_tile, v_tile, w, transpose_B=True, clear_accum=True)
                    for r, c in parallel(chunk, chunk):
                        w[r, c] = (w[r, c] + weights.shift(r)) * within(build, c_tile, r, c)
                    T.copy(w, w_tile)
                    T.gemm(w_tile, k_features, d_f)
                    # 4 the state after it
                    decay_all(build, state, c_tile)
                    if build.decays:
                        for r, c in parallel(chunk, depth):
                            f_k[r, c] *= left(build, c_tile, r)
                        T.copy(f_k, narrow_k)
                    if build.normalize:
                        add_to_z(build, f_k, total, z, c_tile)
                    T.gemm(narrow_k if build.decays else k_features, v_tile, state, transpose_A=True)
                # 5 finish: d_q
                if build.scaled or build.normalize:
                    for r, c in parallel(chunk, depth):
                        d_f[r, c] *= scale * weights.share(r)
                if build.decays:
                    for r, c in parallel(chunk, depth):
                        part[r, c] = d_f[r, c] * at(build, spec.feature, q_tile[r, c])
                        part[r, c] = T.if_then_else(c < build.d, part[r, c], 0)
                    T.reduce_sum(part, sums, dim=1)
                    for r in parallel(chunk):
                        if row + r < end:
                            d_rows[b, h, row + r] = sums[r]
                if not build.raw_keys:
                    for r, c in parallel(chunk, depth):
                        d_f[r, c] *= at(build, slope(spec.feature), q_tile[r, c])
                store_rows(build, d_f, narrow_k, d_q, b, h, row, end)

    return d_query


def d_keys(build, spec):
    """Its d_k and d_v are those of each query head; heads that share keys are added up behind it.

    d_states: gradients of the states behind each segment; d_final: of those before a sequence. d_columns: of what keys
    decay by, as d_rows is of rows.
    """
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    chunk, depth, columns, dtype, operand = build.chunk, build.depth, build.columns, build.dtype, build.operand

    @T.prim_func
    def d_keys(
        q: array(build, "q", (n.batch, n.heads, n.n, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n, build.d_v), dtype),
        decays: numbers(build, n, "decays", n.heads_k),
        share: numbers(build, n, "share", n.heads),
        shift: numbers(build, n, "shift", n.heads),
        d_states: states_of(build, n, n.heads, n.slots),
        d_final: states_of(build, n, n.heads, n.n_states),
        d_k: array(build, "d_k", (n.batch, n.heads, n.n, build.d), build.sum_dtype),
        d_v: array(build, "d_v", (n.batch, n.heads, n.n, build.d_v), build.sum_dtype),
        d_columns: numbers(build, n, "d_columns", n.heads),
        segments: segments_of(n),
        per_batch: T.int32,
        group: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(n.n_segments, n.heads, n.batch, threads=build.threads) as (number, h, b):
            q_tile = shared([chunk, depth], operand)
            k_tile = shared([chunk, depth], operand)
            v_tile = shared([chunk, columns], operand)
            d_out_tile = shared([chunk, columns], operand)
            narrow_q = shared([chunk, depth], operand)
            narrow_k = shared([chunk, depth], operand)
            state_tile = shared([depth, columns], operand)
            w_tile = shared([chunk, chunk], operand)
            d_v_tile = shared([chunk, columns], operand)
            c_tile = shared([chunk], "float32")
            weights = RowWeights(build, shared([chunk], "float32"), shared([chunk], "float32"))
            z = shared([depth], "float32")
            total = fragment([depth], "float32")
            f = fragment([chunk, depth], "float32")
            w = fragment([chunk, chunk], "float32")
            acc_k = fragment([chunk, depth], "float32")
            acc_v = fragment([chunk, columns], "float32")
            part = fragment([chunk, depth], "float32")
            sums = fragment([chunk], "float32")
            state = fragment([depth, columns], "float32")
            q_features = q_tile if build.raw_queries else narrow_q
            k_features = k_tile if build.raw_keys else narrow_k
            is_raw = build.raw_queries and not (build.normalize or build.decays)
            after_kernels_before(build)
            hk = T.truncdiv(h, group)
            segment = Segment.of(segments, number)
            begin = segment.begin
            end = segment.end
            chunks = T.ceildiv(end - begin, chunk)
            load_state(build, d_states, b * per_batch + segment.slot, h, state)
            load_z(build, d_states, b * per_batch + segment.slot, h, z)
            for i in T.Pipelined(chunks, num_stages=build.stages):
                # 1 load k, v
                row = begin + (chunks - 1 - i) * chunk
                load_rows(build, k, k_tile, b, hk, 0, row, end)
                load_rows(build, v, v_tile, b, hk, 0, row, end)
                load_decays(build, decays, c_tile, b, hk, row, end)
                if not build.raw_keys:
                    map_rows(build, spec.feature, k_tile, f, one, row, end)
                    T.copy(f, narrow_k)
                # 2 what comes behind the chunk
                T.copy(state, state_tile)
                T.gemm(v_tile, state_tile, acc_k, transpose_B=True, clear_accum=True)
                T.gemm(k_features, state_tile, acc_v, clear_accum=True)
                for r, c in parallel(chunk, depth):
                    acc_k[r, c] = (acc_k[r, c] + z[c]) * left(build, c_tile, r)
                if build.decays:
                    for r, c in parallel(chunk, columns):
                        acc_v[r, c] *= left(build, c_tile, r)
                if build.causal:
                    # 3 weights within the chunk, keys down and queries across
                    load_rows(build, q, q_tile, b, h, 0, row, end)
                    load_rows(build, d_out, d_out_tile, b, h, 0, row, end)
                    load_weights(build, share, shift, weights, b, h, row, end)
                    if not is_raw:
                        map_rows(build, spec.feature, q_tile, f, lambda r: scale, row, end)
                    if not build.raw_queries:
                        T.copy(f, narrow_q)
                    T.gemm(k_features, q_features, w, transpose_B=True, clear_accum=True)
                    for r, c in parallel(chunk, chunk):
                        w[r, c] *= within(build, c_tile, c, r) * weights.share(c)
                    T.copy(w, w_tile)
                    T.gemm(w_tile, d_out_tile, acc_v)
                    T.gemm(v_tile, d_out_tile, w, transpose_B=True, clear_accum=True)
                    for r, c in parallel(chunk, chunk):
                        w[r, c] = (w[r, c] + weights.shift(c)) * within(build, c_tile, c, r) * weights.share(c)
                    T.copy(w, w_tile)
                    T.gemm(w_tile, q_features, acc_k)
                    # 4 the gradient of the state before it
                    decay_all(build, state, c_tile)
                    if not is_raw:
                        weigh_rows(build, f, narrow_q, weights, c_tile)
                    if build.normalize:
                        shift_rows(build, f, weights)
                        add_to_z(build, f, total, z, c_tile)
                    elif build.decays:
                        for j in parallel(depth):
                            z[j] *= kept(build, c_tile)
                    T.gemm(q_features if is_raw else narrow_q, d_out_tile, state, transpose_A=True)
                # 5 finish: d_k, d_v
                if build.decays:
                    for r, c in parallel(chunk, depth):
                        part[r, c] = acc_k[r, c] * T.cast(k_features[r, c], "float32")
                    T.reduce_sum(part, sums, dim=1)
                    for r in parallel(chunk):
                        if row + r < end:
                            d_columns[b, h, row + r] = sums[r]
                if not build.raw_keys:
                    for r, c in parallel(chunk, depth):
                        acc_k[r, c] *= at(build, slope(spec.feature), k_tile[r, c])
                store_rows(build, acc_k, narrow_q, d_k, b, h, row, end)
                store_rows(build, acc_v, d_v_tile, d_v, b, h, row, end)
            if build.causal:  # noqa: SIM102 - the first is asked when the kernel is written, the second when it runs
                if segment.is_first == 1:
                    store_state(build, state, d_final, b + segment.sequence, h)
                    store_z(build, z, d_final, b + segment.sequence, h)

    return d_keys

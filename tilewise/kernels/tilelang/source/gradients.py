"""Gradients of the arrays that a score reads: d_score * (d score / d cell), summed over the scores that read a cell.

A cell may be read by every query and key of some heads (slopes), by a query, a key, a pair of both (a bias), or by all
pairs of one distance (relative tables). Each sum has one block, so its order is fixed.
"""

import tilelang.language as T

from tilewise.kernels.tilelang.source.backward import BY_ROWS, passed_on, weights
from tilewise.kernels.tilelang.source.tiles import (
    FIELDS,
    FIRST,
    FIRST_VISIT,
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
    array,
    load_rows,
    loaded,
    record_of,
    records_of,
)


class Tiles:
    """What the part of a tile's scores is made of and in: tiles of queries down, tiles of keys across."""

    def __init__(self, build, rows, columns):
        memory, self.build, self.rows, self.columns = Memory.of(build), build, rows, columns
        self.q_tile = memory.shared([rows, build.depth], build.dtype)
        self.d_out_tile = memory.shared([rows, build.columns], build.dtype)
        self.k_tile = memory.shared([columns, build.depth], build.dtype)
        self.v_tile = memory.shared([columns, build.columns], build.dtype)
        self.shift = memory.fragment([rows], "float32")
        self.delta = memory.fragment([rows], "float32")
        self.s = memory.fragment([rows, columns], "float32")
        self.p = memory.fragment([rows, columns], "float32")
        self.part = memory.fragment([rows, columns], "float32")


@T.macro
def load_queries(t, arrays, b, h, begin, first, n_q):
    """q, d_out, shift and delta, of the rows from `first` on."""
    load_rows(t.build, arrays[0], t.q_tile, b, h, begin, first, n_q)
    load_rows(t.build, arrays[3], t.d_out_tile, b, h, begin, first, n_q)
    for r in Memory.of(t.build).parallel(t.rows):
        row = begin + T.max(T.min(first + r, n_q - 1), 0)
        t.shift[r] = arrays[4][b, h, row]
        t.delta[r] = arrays[5][b, h, row]


@T.macro
def load_keys(t, arrays, b, hk, begin, first_key, n_k):
    load_rows(t.build, arrays[1], t.k_tile, b, hk, begin, first_key, n_k)
    load_rows(t.build, arrays[2], t.v_tile, b, hk, begin, first_key, n_k)


@T.macro
def part_of(t, place, scale, factor, first, first_key, partial, n_q, n_k):
    """What each score of a tile passes on to the cell that it read."""
    T.gemm(t.q_tile, t.k_tile, t.s, transpose_B=True, policy=BY_ROWS, clear_accum=True)
    T.gemm(t.d_out_tile, t.v_tile, t.part, transpose_B=True, policy=BY_ROWS, clear_accum=True)
    weights(t.build, place, t.s, t.p, t.shift, False, scale, factor, first, first_key, partial, n_q, n_k)
    passed_on(t.build, place, "part", t.s, t.p, t.part, t.delta, False, scale, first, first_key)


def of_rows(build, variant):
    """Sums over keys: (batch, heads, n_q)."""
    n = Sizes()
    _, fragment, parallel = Memory.of(build)
    tile_q, tile_k, dtype = build.tile.q, build.tile.k, build.dtype

    @T.prim_func
    def of_rows(
        q: array(build, "q", (n.batch, n.heads, n.n_q, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n_k, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n_k, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        shift: array(build, "shift", (n.batch, n.heads, n.n_rows), "float32"),
        delta: array(build, "delta", (n.batch, n.heads, n.n_rows), "float32"),
        sums: array(build, "sums", (n.batch, n.heads, n.n_q), "float32"),
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
        with T.Kernel(n.tiles, n.heads, n.batch, threads=build.threads) as (number, h, b):
            t = Tiles(build, tile_q, tile_k)
            arrays = (q, k, v, d_out, shift, delta)
            total = fragment([tile_q], "float32")
            tile_sum = fragment([tile_q], "float32")
            after_kernels_before(build)
            record = record_of(records, b, h, number)
            hk = T.truncdiv(h, group)
            first = record(FIRST)
            q_begin = record(Q_BEGIN)
            k_begin = record(K_BEGIN)
            n_q = record(N_Q)
            n_k = record(N_K)
            first_visit = record(FIRST_VISIT)
            place = Place.of(build, variant, record, b, h, hk, (a0, a1, a2, a3, a4, a5, a6, a7))
            load_queries(t, arrays, b, h, q_begin, first, n_q)
            T.fill(total, 0)
            for i in T.serial(record(N_VISITS)):
                visit = visits[first_visit + i]
                first_key = visit // 2 * tile_k
                load_keys(t, arrays, b, hk, k_begin, first_key, n_k)
                part_of(t, place, scale, factor, first, first_key, visit % 2 == PARTIAL, n_q, n_k)
                T.reduce_sum(t.part, tile_sum, dim=1)
                for r in parallel(tile_q):
                    total[r] += tile_sum[r]
            for r in parallel(tile_q):
                if first + r < n_q:
                    sums[b, h, q_begin + first + r] = total[r]

    return of_rows


def of_columns(build, variant):
    """Sums over queries: (batch, heads, n_k)."""
    n = Sizes()
    _, fragment, parallel = Memory.of(build)
    tile_q, tile_k, dtype = build.tile.q, build.tile.k, build.dtype

    @T.prim_func
    def of_columns(
        q: array(build, "q", (n.batch, n.heads, n.n_q, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n_k, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n_k, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        shift: array(build, "shift", (n.batch, n.heads, n.n_rows), "float32"),
        delta: array(build, "delta", (n.batch, n.heads, n.n_rows), "float32"),
        sums: array(build, "sums", (n.batch, n.heads, n.n_k), "float32"),
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
        with T.Kernel(n.tiles, n.heads, n.batch, threads=build.threads) as (number, h, b):
            t = Tiles(build, tile_q, tile_k)
            arrays = (q, k, v, d_out, shift, delta)
            total = fragment([tile_k], "float32")
            tile_sum = fragment([tile_k], "float32")
            after_kernels_before(build)
            record = record_of(records, b, h, number)
            hk = T.truncdiv(h, group)
            first_key = record(FIRST)
            q_begin = record(Q_BEGIN)
            k_begin = record(K_BEGIN)
            n_q = record(N_Q)
            n_k = record(N_K)
            first_visit = record(FIRST_VISIT)
            place = Place.of(build, variant, record, b, h, hk, (a0, a1, a2, a3, a4, a5, a6, a7))
            load_keys(t, arrays, b, hk, k_begin, first_key, n_k)
            T.fill(total, 0)
            for i in T.serial(record(N_VISITS)):
                visit = visits[first_visit + i]
                first = visit // 2 * tile_q
                load_queries(t, arrays, b, h, q_begin, first, n_q)
                part_of(t, place, scale, factor, first, first_key, visit % 2 == PARTIAL, n_q, n_k)
                T.reduce_sum(t.part, tile_sum, dim=0)
                for c in parallel(tile_k):
                    total[c] += tile_sum[c]
            for c in parallel(tile_k):
                if first_key + c < n_k:
                    sums[b, h, k_begin + first_key + c] = total[c]

    return of_columns


def of_pairs(build, variant):
    """A tile of a (batch or 1, heads or 1, most_q, most_k) gradient, summed over those that share it: batch indices, or
    packed sequences, and heads."""
    n = Sizes()
    _, fragment, parallel = Memory.of(build)
    tile_q, tile_k, dtype = build.tile.q, build.tile.k, build.dtype

    @T.prim_func
    def of_pairs(
        q: array(build, "q", (n.batch, n.heads, n.n_q, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n_k, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n_k, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        shift: array(build, "shift", (n.batch, n.heads, n.n_rows), "float32"),
        delta: array(build, "delta", (n.batch, n.heads, n.n_rows), "float32"),
        grad: T.Tensor((n.kept_batch, n.kept_heads, n.most_q, n.most_k), "float32"),
        sequences: T.Tensor((n.n_sequences, 1, 1, FIELDS), "int32"),
        scale: T.float32,
        factor: T.float32,
        group: T.int32,
        summed_batch: T.int32,
        summed_heads: T.int32,
        a0: loaded(build, 0),
        a1: loaded(build, 1),
        a2: loaded(build, 2),
        a3: loaded(build, 3),
        a4: loaded(build, 4),
        a5: loaded(build, 5),
        a6: loaded(build, 6),
        a7: loaded(build, 7),
    ):
        with T.Kernel(
            T.ceildiv(n.most_k, tile_k), T.ceildiv(n.most_q, tile_q), n.kept_batch * n.kept_heads, threads=build.threads
        ) as (key_number, query_number, kept):
            t = Tiles(build, tile_q, tile_k)
            arrays = (q, k, v, d_out, shift, delta)
            total = fragment([tile_q, tile_k], "float32")
            after_kernels_before(build)
            first = query_number * tile_q
            first_key = key_number * tile_k
            kept_b = T.truncdiv(kept, n.kept_heads)
            kept_h = T.truncmod(kept, n.kept_heads)
            T.fill(total, 0)
            for shared in T.serial(summed_batch * summed_heads):
                sequence = kept_b * summed_batch + T.truncdiv(shared, summed_heads)
                h = kept_h * summed_heads + T.truncmod(shared, summed_heads)
                b = 0 if build.packed else sequence
                hk = T.truncdiv(h, group)
                record = record_of(sequences, sequence if build.packed else 0, 0, 0)
                n_q = record(N_Q)
                n_k = record(N_K)
                place = Place.of(build, variant, record, b, h, hk, (a0, a1, a2, a3, a4, a5, a6, a7))
                load_queries(t, arrays, b, h, record(Q_BEGIN), first, n_q)
                load_keys(t, arrays, b, hk, record(K_BEGIN), first_key, n_k)
                part_of(t, place, scale, factor, first, first_key, True, n_q, n_k)
                for r, c in parallel(tile_q, tile_k):
                    total[r, c] += t.part[r, c]
            for r, c in parallel(tile_q, tile_k):
                if (first + r < n.most_q) & (first_key + c < n.most_k):
                    grad[T.truncdiv(kept, n.kept_heads), T.truncmod(kept, n.kept_heads), first + r, first_key + c] = (
                        total[r, c]
                    )

    return of_pairs


def of_distances(build, variant):
    """Sums over all pairs of a distance q - k: (batch or sequences, heads, distances), from the least on.

    A block has as many distances as a tile has queries. Down each tile they are a slanted band of keys, twice as wide.
    """
    n = Sizes()
    shared, fragment, parallel = Memory.of(build)
    tile, dtype = build.tile.q, build.dtype

    @T.prim_func
    def of_distances(
        q: array(build, "q", (n.batch, n.heads, n.n_q, build.d), dtype),
        k: array(build, "k", (n.batch, n.heads_k, n.n_k, build.d), dtype),
        v: array(build, "v", (n.batch, n.heads_k, n.n_k, build.d_v), dtype),
        d_out: array(build, "d_out", (n.batch, n.heads, n.n_q, build.d_v), dtype),
        shift: array(build, "shift", (n.batch, n.heads, n.n_rows), "float32"),
        delta: array(build, "delta", (n.batch, n.heads, n.n_rows), "float32"),
        sums: T.Tensor((n.kept_batch, n.heads, n.count), "float32"),
        sequences: T.Tensor((n.n_sequences, 1, 1, FIELDS), "int32"),
        scale: T.float32,
        factor: T.float32,
        group: T.int32,
        least: T.int32,
        a0: loaded(build, 0),
        a1: loaded(build, 1),
        a2: loaded(build, 2),
        a3: loaded(build, 3),
        a4: loaded(build, 4),
        a5: loaded(build, 5),
        a6: loaded(build, 6),
        a7: loaded(build, 7),
    ):
        with T.Kernel(T.ceildiv(n.count, tile), n.heads, n.kept_batch, threads=build.threads) as (number, h, sequence):
            t = Tiles(build, tile, 2 * tile)
            arrays = (q, k, v, d_out, shift, delta)
            band = shared([tile, 2 * tile], "float32")
            total = fragment([tile], "float32")
            after_kernels_before(build)
            b = 0 if build.packed else sequence
            hk = T.truncdiv(h, group)
            record = record_of(sequences, sequence if build.packed else 0, 0, 0)
            q_begin = record(Q_BEGIN)
            k_begin = record(K_BEGIN)
            n_q = record(N_Q)
            n_k = record(N_K)
            place = Place.of(build, variant, record, b, h, hk, (a0, a1, a2, a3, a4, a5, a6, a7))
            least_here = least + number * tile
            T.fill(total, 0)
            # Queries whose keys are there: from 0 <= q - distance < n_k for some of the distances.
            begin = T.max(least_here, 0) // tile
            end = T.max(T.ceildiv(T.min(n_q, n_k + least_here + tile), tile), begin)
            for i in T.serial(end - begin):
                first = (begin + i) * tile
                first_key = first - least_here - (tile - 1)  # may be below 0
                load_queries(t, arrays, b, h, q_begin, first, n_q)
                load_keys(t, arrays, b, hk, k_begin, first_key, n_k)
                part_of(t, place, scale, factor, first, first_key, True, n_q, n_k)
                for r, c in parallel(tile, 2 * tile):
                    band[r, c] = T.if_then_else(first_key + c >= 0, t.part[r, c], 0)
                # Distance least_here + j of row r is in column r + tile - 1 - j.
                for j in parallel(tile):
                    for r in T.serial(tile):
                        total[j] += band[r, r + (tile - 1) - j]
            for j in parallel(tile):
                if number * tile + j < n.count:
                    sums[sequence, h, number * tile + j] = total[j]

    return of_distances

"""The first kernel to read: FlashAttention for one head, (n, d) matrices, with nothing around it.

Global memory, shared memory, registers. A block has one tile of queries, which stays in shared memory. Tiles of keys
and values come by, one after the other, and no score outlives its tile. forward.py is the same for batches, heads,
packed sequences and every variant.
"""

import tilelang.language as T

from tilewise.kernels.tilelang.source.tiles import INFINITY, LN_2, LOG2_E, Memory, after_kernels_before


def simple(build, variant):
    """variant: whether it is causal is all that counts."""
    causal = "mask" in variant.expressions
    shared, fragment, parallel = Memory.of(build)
    tile_q, tile_k, d, d_v, dtype = build.tile.q, build.tile.k, build.depth, build.columns, build.dtype
    n_q, n_k = T.dynamic("n_q"), T.dynamic("n_k")

    def tiles_seen(first):
        """One at least, since what was loaded for it is waited for."""
        last = T.min(n_k, first + tile_q + (n_k - n_q)) if causal else n_k
        return T.max(T.ceildiv(last, tile_k), 1)

    @T.prim_func
    def simple(
        q: T.Tensor((n_q, build.d), dtype),
        k: T.Tensor((n_k, build.d), dtype),
        v: T.Tensor((n_k, build.d_v), dtype),
        out: T.Tensor((n_q, build.d_v), dtype),
        lse: T.Tensor((n_q,), "float32"),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(n_q, tile_q), threads=build.threads) as number:
            q_tile = shared([tile_q, d], dtype)
            k_tile = shared([tile_k, d], dtype)
            v_tile = shared([tile_k, d_v], dtype)
            s = fragment([tile_q, tile_k], "float32")  # scores, and then weights
            p = fragment([tile_q, tile_k], dtype)  # weights as tensor cores take them
            acc = fragment([tile_q, d_v], "float32")
            row_max = fragment([tile_q], "float32")
            new_max = fragment([tile_q], "float32")
            rescale = fragment([tile_q], "float32")
            row_sum = fragment([tile_q], "float32")
            tile_sum = fragment([tile_q], "float32")

            after_kernels_before(build)
            # 1 load q
            first = number * tile_q
            T.copy(q[first : first + tile_q, 0:d], q_tile)
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, -1e30)  # below every score, and no infinity: nothing is taken away from that
            # for each kv tile, up to the last that a causal query sees:
            for tile in T.Pipelined(tiles_seen(first), num_stages=build.stages):
                first_key = tile * tile_k
                # 2 s = q @ k.T
                T.copy(k[first_key : first_key + tile_k, 0:d], k_tile)
                T.gemm(q_tile, k_tile, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                # 3 score
                # 4 mask
                for r, c in parallel(tile_q, tile_k):
                    sees = first_key + c <= first + r + (n_k - n_q) if causal else True
                    s[r, c] = T.if_then_else((first_key + c < n_k) & sees, s[r, c] * scale * LOG2_E, -INFINITY)
                # 5 row_max, rescale, p, row_sum
                T.copy(row_max, new_max)
                T.reduce_max(s, new_max, dim=1, clear=False)
                for r, c in parallel(tile_q, tile_k):
                    s[r, c] = T.exp2(s[r, c] - new_max[r])
                T.reduce_sum(s, tile_sum, dim=1)
                for r in parallel(tile_q):
                    rescale[r] = T.exp2(row_max[r] - new_max[r])
                    row_sum[r] = row_sum[r] * rescale[r] + tile_sum[r]
                    row_max[r] = new_max[r]
                T.copy(s, p)
                # 6 acc = acc * rescale + p @ v
                for r, c in parallel(tile_q, d_v):
                    acc[r, c] *= rescale[r]
                T.copy(v[first_key : first_key + tile_k, 0:d_v], v_tile)
                T.gemm(p, v_tile, acc, policy=T.GemmWarpPolicy.FullRow)

            # 7 finish: acc / row_sum, lse
            for r, c in parallel(tile_q, d_v):
                acc[r, c] /= T.if_then_else(row_sum[r] == 0, 1, row_sum[r])
            T.copy(acc, out[first : first + tile_q, 0:d_v])
            for r in parallel(tile_q):
                if first + r < n_q:
                    lse[first + r] = T.if_then_else(row_sum[r] == 0, -INFINITY, row_max[r] * LN_2 + T.log(row_sum[r]))

    return simple

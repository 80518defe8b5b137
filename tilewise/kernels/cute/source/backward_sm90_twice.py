"""The backward pass in Hopper's own way: weights are recomputed from lse, and every sum has one warpgroup, so its order
is fixed.

A block of `d_query` has the queries of one tile, a block of `d_keys` the keys of one; both compute, with
delta = sum(d_out * (out + remainder)) - d_lse:  d_score = p * (d_out v^T - delta),  d_s = d_score * d score/d S.
d_query comes first, and leaves delta and what it makes of lse to the other.

As in forward_sm90.py a producer warp keeps the copy engine busy, and a consumer warpgroup has 64 rows of the block's
tile: scores lie queries down in d_query, keys down in d_keys, so that p and d_s stay in registers as the first operand
of what is summed up. Exponentials run beside the product that makes d_p.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from tilewise.kernels.cute.source.d_keys_sm90 import d_keys
from tilewise.kernels.cute.source.d_query_sm90 import d_query
from tilewise.kernels.cute.source.forward_sm90 import AROUND, MOST_STAGES, SHARED
from tilewise.kernels.cute.source.vocabulary import WARPGROUP, copy_engine, swizzled_tiles

BOTH_SUMS = 256  # columns of d_k and d_v that a warpgroup's registers have room for


def stages_of(held, visited, build, element):
    """As many of the tiles that are visited, of so many rows, as shared memory has room for beside those held."""
    row_bytes = (build.depth + build.columns) * element.width // 8
    return min((SHARED - AROUND - held * row_bytes) // (visited * row_bytes), MOST_STAGES)


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, remainder: cute.Tensor, d_out: cute.Tensor,
    d_q: cute.Tensor, d_k: cute.Tensor, d_v: cute.Tensor,
    lse: cute.Tensor, d_lse: cute.Tensor, shift: cute.Tensor, delta: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, records_by_key: cute.Tensor, runs_by_key: cute.Tensor, arrays: tuple,
    scale: Float32, build: cutlass.Constexpr, stream,
):  # fmt: skip
    """q, k, v, out, its remainder and gradients: (batch, heads, n, d); lse to delta: (batch, heads, n). The plan, both
    ways round."""
    group = q.shape[1] // k.shape[1]

    tile, by_key = build.tile, build.by_key
    count = stages_of(tile.q, tile.k, build, q.element_type)
    layouts, maps, rows = mapped((q, d_out), tile.q, 1, (k, v), tile.k, count, build)
    d_query(*maps, *rows, *layouts, out, remainder, d_out, lse, d_lse, shift, delta, d_q, records, runs, arrays, scale,
            group, build).launch(
        grid=(records.shape[2], q.shape[1], records.shape[0]), block=threads_of(tile.q), min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip

    count = stages_of(by_key.k, by_key.q, build, q.element_type)
    layouts, maps, rows = mapped((q, d_out), by_key.q, count, (k, v), by_key.k, 1, build)
    for summed in cutlass.range_constexpr(len(sums_at_a_time(build))):
        d_keys(*maps, *rows, *layouts, shift, delta, d_k, d_v, records_by_key, runs_by_key, arrays, scale, group,
               build, sums_at_a_time(build)[summed]).launch(
            grid=(records_by_key.shape[2], k.shape[1], records_by_key.shape[0]), block=threads_of(by_key.k),
            min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip


def sums_at_a_time(build):
    """Gradients that a run of d_keys sums up: of k and v, or one after the other if registers have no room for both."""
    return ("kv",) if build.depth + build.columns <= BOTH_SUMS else ("k", "v")


def mapped(of_queries, tile_q, stages_q, of_keys, tile_k, stages_k, build):
    """How tiles of q, d_out, k and v lie in shared memory; maps of these arrays, and the arrays as maps see them."""
    element, widths = of_queries[0].element_type, (build.depth, build.columns)
    layouts = [swizzled_tiles(element, tile_q, width, stages_q) for width in widths]
    layouts += [swizzled_tiles(element, tile_k, width, stages_k) for width in widths]
    made = [copy_engine(x, layout) for x, layout in zip((*of_queries, *of_keys), layouts, strict=True)]
    return layouts, [map_ for map_, _ in made], [rows for _, rows in made]


def threads_of(rows):
    return (WARPGROUP + rows // 64 * WARPGROUP, 1, 1)

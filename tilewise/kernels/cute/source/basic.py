"""The first kernel: a block has 64 queries, and visits the tiles of 64 keys of its plan, one after the other.

Everything is where a picture of the algorithm has it: tiles of q, k, v and p in shared memory, scores, acc and what a
row is known by in registers. Nothing is done ahead. forward_sm90.py is the same for speed.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

from tilewise.kernels.cute.source.tiles import (
    PARTIAL,
    binary,
    finish,
    mask,
    matrix,
    multiply_rows,
    online_softmax,
    rows_of,
    score,
    work_of,
)
from tilewise.kernels.cute.source.vocabulary import (
    THREADS,
    by_rows,
    loading_operand,
    loading_rows,
    product,
    slice_of,
    tile_layout,
    transposed,
)

TILE_Q, TILE_K = 64, 64


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple, scale: Float32,
    build: cutlass.Constexpr, stream,
):  # fmt: skip
    """q, k, v, out: (batch, heads, n, d); lse: (batch, heads, n). A block a query tile, as records has them."""
    batch, heads, tiles = records.shape[0], records.shape[1], records.shape[2]
    attention(q, k, v, out, lse, records, runs, sinks, arrays, scale, build).launch(
        grid=(tiles, heads, batch), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def attention(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple, scale: Float32,
    build: cutlass.Constexpr,
):  # fmt: skip
    number, h, b = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    element = q.element_type
    work = work_of(records, number, b, h, q.shape[1] // k.shape[1])
    tiles, mma = tiles_in(SmemAllocator(), element, build), product(element)
    acc = mma.make_fragment_C(mma.partition_shape_C((TILE_Q, build.columns)))
    rows = rows_of(acc, binary(scale, build))
    attend(acc, rows, q, k, v, tiles, work, runs, arrays, scale, b, h, mma, thread, build)

    # 7 finish: acc / row_sum, lse
    done = finish(rows, acc, sinks[h] if build.has_sinks else None)
    store_lse(done, lse, work, b, h, mma, thread)
    cute.arch.sync_threads()  # v is no longer read: out takes its place
    write_product(tiles.v, acc, mma, thread)
    cute.arch.sync_threads()
    copy_out = loading_rows(element, build.columns, build.vector)
    out_rows = matrix(out, b, h, work.q_begin + work.first)
    store_tile(tiles.v, out_rows, work.n_q - work.first, out.shape[3], copy_out, thread)


class Tiles(NamedTuple):
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor


def tiles_in(memory, element, build):
    """Places for tiles in shared memory."""
    sizes = ((TILE_Q, build.depth), (TILE_K, build.depth), (TILE_K, build.columns), (TILE_Q, TILE_K))
    return Tiles(*(memory.allocate_tensor(element, tile_layout(*size, element), 16) for size in sizes))


@cute.jit
def attend(
    acc, rows, q, k, v, tiles, work, runs, arrays, scale, b, h, mma: cutlass.Constexpr, thread, build: cutlass.Constexpr
):
    """The attention of a tile of queries, but for step 7."""
    k_rows, v_rows = (matrix(x, b, work.place.hk, work.k_begin) for x in (k, v))
    copy_q, copy_v = (loading_rows(q.element_type, width, build.vector) for width in (build.depth, build.columns))
    scale_q, scale_k = (scale if build.scaling == name else None for name in ("q", "k"))
    s = mma.make_fragment_C(mma.partition_shape_C((TILE_Q, TILE_K)))
    at = mma.get_slice(thread).partition_C(cute.make_identity_tensor((TILE_Q, TILE_K)))
    acc.fill(0.0)

    # 1 load q
    q_rows = matrix(q, b, h, work.q_begin + work.first)
    load_tile(tiles.q, q_rows, work.n_q - work.first, q.shape[3], copy_q, thread, scale_q)

    # for each kv tile of the schedule:
    for run in cutlass.range(work.first_run, work.last_run):
        first_tile, last_tile, kind = runs[run, 0], runs[run, 1], runs[run, 2]
        for tile in cutlass.range(first_tile, last_tile):
            first_key = tile * TILE_K
            left = work.n_k - first_key
            cute.arch.sync_threads()  # the tile before is no longer read
            load_tile(tiles.k, cute.domain_offset((first_key, 0), k_rows), left, k.shape[3], copy_q, thread, scale_k)
            load_tile(tiles.v, cute.domain_offset((first_key, 0), v_rows), left, v.shape[3], copy_v, thread, None)
            cute.arch.sync_threads()

            # 2 s = q @ k.T
            s.fill(0.0)
            multiply(mma, s, tiles.q, tiles.k, thread, False)

            # 3 score
            score(s, at, first_key, work, arrays, scale, build)

            # 4 mask (PARTIAL tiles only: one that ends beyond the last key is such a tile)
            if kind == PARTIAL:
                mask(s, at, first_key, work, arrays, build)

            # 5 row_max, rescale, p, row_sum
            rescale = online_softmax(rows, s, tiles.p.element_type)
            write_product(tiles.p, s, mma, thread)
            cute.arch.sync_threads()

            # 6 acc = acc * rescale + p @ v
            multiply_rows(acc, rescale)
            multiply(mma, acc, tiles.p, transposed(tiles.v), thread, True)


@cute.jit
def store_lse(done, lse, work, b, h, mma: cutlass.Constexpr, thread):
    """By the first thread of each quad."""
    at = mma.get_slice(thread).partition_C(cute.make_identity_tensor((TILE_Q, TILE_K)))
    for row in cutlass.range_constexpr(cute.size(done)):
        query = work.first + by_rows(at)[row, 0][0]
        if (at[0][1] == 0) & (query < work.n_q):
            lse[b, h, work.q_begin + query] = done[row]


@cute.jit
def load_tile(tile, rows, count, width, copy: cutlass.Constexpr, thread, factor):
    """So many rows and columns of a matrix, 0 where there are none. factor: what they are multiplied by on the way, or
    None."""
    mine = copy.get_slice(thread)
    source = mine.partition_S(cute.local_tile(rows, tile.shape, (0, 0)))
    target, at = mine.partition_D(tile), mine.partition_S(cute.make_identity_tensor(tile.shape))
    for i in cutlass.range(cute.size(target, mode=[1]), unroll=4):
        for j in cutlass.range_constexpr(cute.size(target, mode=[2])):
            if cute.elem_less(at[0, i, j], (count, width)):
                numbers = cute.make_fragment_like(source[None, i, j])
                cute.copy(copy, source[None, i, j], numbers)
                if cutlass.const_expr(factor is not None):
                    numbers.store((numbers.load().to(Float32) * factor).to(tile.element_type))
                cute.copy(copy, numbers, target[None, i, j])
            else:
                target[None, i, j].fill(0.0)


@cute.jit
def store_tile(tile, rows, count, width, copy: cutlass.Constexpr, thread):
    """The other way round: rows and columns that are none are left out."""
    mine = copy.get_slice(thread)
    target = mine.partition_D(cute.local_tile(rows, tile.shape, (0, 0)))
    source, at = mine.partition_S(tile), mine.partition_S(cute.make_identity_tensor(tile.shape))
    for i in cutlass.range_constexpr(cute.size(source, mode=[1])):
        for j in cutlass.range_constexpr(cute.size(source, mode=[2])):
            if cute.elem_less(at[0, i, j], (count, width)):
                cute.copy(copy, source[None, i, j], target[None, i, j])


@cute.jit
def write_product(tile, product, mma: cutlass.Constexpr, thread):
    """From registers to shared memory, narrowed to the type that is there."""
    narrow = cute.make_rmem_tensor_like(product, tile.element_type)
    narrow.store(product.load().to(tile.element_type))
    cute.autovec_copy(narrow, mma.get_slice(thread).partition_C(tile))


@cute.jit
def multiply(mma: cutlass.Constexpr, acc, a_tile, b_tile, thread, b_transposed: cutlass.Constexpr):
    """acc += a_tile @ b_tile.T, a slice of both at a time."""
    element, mine, width = a_tile.element_type, mma.get_slice(thread), slice_of(a_tile.element_type)
    copy_a = cute.make_tiled_copy_A(loading_operand(element), mma)
    copy_b = cute.make_tiled_copy_B(loading_operand(element, b_transposed), mma)
    from_a, from_b = copy_a.get_slice(thread), copy_b.get_slice(thread)
    (a_rows, depth), b_rows = (cute.size(a_tile, mode=[i]) for i in range(2)), cute.size(b_tile, mode=[0])
    for i in cutlass.range(depth // width, unroll_full=element is not Float32):
        a_slice = cute.local_tile(a_tile, (a_rows, width), (0, i))
        b_slice = cute.local_tile(b_tile, (b_rows, width), (0, i))
        a, b = mma.make_fragment_A(mine.partition_A(a_slice)), mma.make_fragment_B(mine.partition_B(b_slice))
        cute.copy(copy_a, from_a.partition_S(a_slice), from_a.retile(a))
        cute.copy(copy_b, from_b.partition_S(b_slice), from_b.retile(b))
        cute.gemm(mma, acc, a, b, acc)

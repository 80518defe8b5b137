"""Before and after backward_sm90.py: what it needs to know of each query, in tiles as long as its own; and d_q from its
sums, which lie as threads held them. A block has a query tile of one head."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tilewise.kernels.cute.source.backward_sm90_producer import TILES_BEFORE
from tilewise.kernels.cute.source.d_query_sm90 import AT_ONCE, delta_of_part
from tilewise.kernels.cute.source.operations import where
from tilewise.kernels.cute.source.tiles import LOG2_E, finite, matrix, sum_of_quad, work_of
from tilewise.kernels.cute.source.vocabulary import WARPGROUP


def sums_of(rows, records, number, h, b, build):
    """A query tile in the count of all of all heads, in which rows, sums and turns are."""
    heads, batch = cute.arch.grid_dim()[1], cute.arch.grid_dim()[2]
    tile = records[b, h, number, TILES_BEFORE] + records[b, h, number, 0] // build.tile.q
    return (b * heads + h) * (rows.shape[0] // (heads * batch)) + tile


@cute.kernel
def prepare(
    out: cute.Tensor, remainder: cute.Tensor, d_out: cute.Tensor, lse: cute.Tensor, d_lse: cute.Tensor,
    delta: cute.Tensor, rows: cute.Tensor, turns: cute.Tensor, records: cute.Tensor, build: cutlass.Constexpr,
):  # fmt: skip
    """0 delta = sum(d_out * (out + remainder)) - d_lse, and shift, which is -lse as an exponent of 2: by four threads a
    query, of which each has a quarter of the columns. And nobody had a turn yet."""
    number, h, b = cute.arch.block_idx()
    thread = cute.arch.thread_idx()[0]
    work = work_of(records, number, b, h, Int32(1))
    tile, row = sums_of(rows, records, number, h, b, build), thread // 4
    query, row_delta, row_shift = work.first + row, Float32(0.0), Float32(0.0)
    if query < work.n_q:
        of_query = [matrix(x, b, h, work.q_begin)[query, None] for x in (out, remainder, d_out)]
        for i in cutlass.range_constexpr(build.columns // (4 * AT_ONCE)):
            part = 4 * i + thread % 4
            if part * AT_ONCE < out.shape[3]:
                row_delta = row_delta + delta_of_part(*of_query, part)
        row_shift = -finite(lse[b, h, work.q_begin + query]) * LOG2_E
    row_delta = sum_of_quad(row_delta)
    if thread % 4 == 0:
        if query < work.n_q:
            row_delta = row_delta - d_lse[b, h, work.q_begin + query]
            delta[b, h, work.q_begin + query] = row_delta
        rows[tile, 0, row] = row_shift
        rows[tile, 1, row] = row_delta
    if thread == 0:
        turns[tile] = Int32(0)
        turns[turns.shape[0] - 1] = Int32(0)  # the next item; all blocks write the same


@cute.kernel
def d_query(
    sums: cute.Tensor, turns: cute.Tensor, d_q: cute.Tensor, records: cute.Tensor, scale: Float32,
    build: cutlass.Constexpr,
):  # fmt: skip
    """7 finish: d_q, of scores that were scaled. Each thread has the numbers that it would hold as a consumer."""
    number, h, b = cute.arch.block_idx()
    thread, size = cute.arch.thread_idx()[0], (build.tile.q, build.depth)
    work = work_of(records, number, b, h, Int32(1))
    tile = sums_of(sums, records, number, h, b, build)
    product, _ = product_of_d_q(d_q.element_type, build.tile, build.depth)
    acc = product.make_fragment_C(product.partition_shape_C(size))
    acc.fill(0.0)
    if turns[tile] > 0:  # else the query tile met no key tile, and nothing was stored
        held = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
        stored = cute.make_tensor(
            sums[tile, thread // WARPGROUP, None].iterator, cute.make_layout((4, WARPGROUP, cute.size(acc) // 4))
        )[None, thread % WARPGROUP, None]
        for i in cutlass.range_constexpr(cute.size(held, mode=[1])):
            cute.autovec_copy(stored[None, i], held[None, i])
    target = matrix(d_q, b, h, work.q_begin + work.first)
    store_rows(acc, target, work.n_q - work.first, product, thread, size, scale)


def product_of_d_q(element, size, depth):
    """d_q = d_s @ k, of tiles in shared memory: a warpgroup has 64 of 128 queries, or half of the columns of 64.

    As two: one that forgets what the result was before, and one that adds to it.
    """
    halves_queries = size.q == 128
    columns, warpgroups = (depth, (2, 1, 1)) if halves_queries else (depth // 2, (1, 2, 1))
    memory, across = warpgroup.OperandSource.SMEM, OperandMajorMode.MN
    op = warpgroup.MmaF16BF16Op(element, Float32, (64, columns, 16), memory, across, across)
    products = [cute.make_tiled_mma(op, warpgroups) for _ in range(2)]
    for adds, product in enumerate(products):
        product.set(warpgroup.Field.ACCUMULATE, bool(adds))
    return tuple(products)


@cute.jit
def store_rows(acc, rows, count, product, thread, size: cutlass.Constexpr, scale):
    """Each quad its numbers of a tile of that size, 16 bytes at a time, of the rows and columns that there are."""
    at = product.get_slice(thread).partition_C(cute.make_identity_tensor(size))
    result = cute.make_rmem_tensor_like(acc, rows.element_type)
    for i in range(cute.size(acc)):
        result[i] = (acc[i] * scale).to(rows.element_type)
    words, quarter = cute.recast_tensor(result, Int32), thread % 4
    for half in cutlass.range_constexpr(2):
        row = at[(0, half, 0), 0, 0][0]
        for n in cutlass.range_constexpr(0, cute.size(acc) // 4, 4):
            eight = cute.make_rmem_tensor((4,), Int32)
            for i, word in enumerate(transposed_in_quad([words[(0, half, n + j), 0, 0] for j in range(4)], quarter)):
                eight[i] = word
            column = at[(0, half, n), 0, 0][1] + 6 * quarter  # of the first of eight
            if (row < count) & (column < rows.shape[1]):
                cute.autovec_copy(
                    cute.recast_tensor(eight, rows.element_type), cute.local_tile(rows[row, None], (8,), (column // 8,))
                )


def transposed_in_quad(words, i):
    """Thread i of a quad has words i of four groups of four; after this it has group i."""
    words = list(words)
    for step in (1, 2):
        upper = (i & step) != 0
        for j in (0, 3 - step):  # pairs j, j + step
            low, high = words[j], words[j + step]
            given = cute.arch.shuffle_sync_bfly(where(upper, low, high), offset=step)
            words[j], words[j + step] = where(upper, given, low), where(upper, high, given)
    return words

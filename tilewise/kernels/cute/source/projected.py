"""Attention and what follows it in a model, in one kernel: y = out @ weight.T, out being the heads' results side by
side, and weight as torch.nn.Linear has it.

A block has 64 queries of all heads. Heads come one after the other, as in basic.py, and leave their results in shared
memory, never in global memory; then 64 columns of y at a time are summed over the heads, always in the same order. For
short queries and small models: there is a block for 64 queries, where basic.py has one for each head of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.memory import SmemAllocator

from tilewise.kernels.cute.source.basic import (
    TILE_Q,
    attend,
    load_tile,
    multiply,
    store_lse,
    store_tile,
    tiles_in,
    write_product,
)
from tilewise.kernels.cute.source.tiles import binary, finish, matrix, rows_of, work_of
from tilewise.kernels.cute.source.vocabulary import THREADS, loading_rows, product, tile_layout

TILE_Y = 64  # columns of y


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, y: cute.Tensor, lse: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple, scale: Float32, weight: cute.Tensor,
    build: cutlass.Constexpr, stream,
):  # fmt: skip
    """y: (batch, 1, n, model); weight: (model, heads * d_v). The others as in basic.py."""
    batch, tiles = records.shape[0], records.shape[2]
    attention(q, k, v, y, lse, records, runs, sinks, arrays, scale, weight, build).launch(
        grid=(tiles, batch, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
    )


@cute.kernel
def attention(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, y: cute.Tensor, lse: cute.Tensor,
    records: cute.Tensor, runs: cute.Tensor, sinks: cute.Tensor, arrays: tuple, scale: Float32, weight: cute.Tensor,
    build: cutlass.Constexpr,
):  # fmt: skip
    number, b, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    element, memory = q.element_type, SmemAllocator()
    tiles, mma = tiles_in(memory, element, build), product(element)
    out_tile = memory.allocate_tensor(element, tile_layout(TILE_Q, build.heads * build.columns, element), 16)
    w_tile = memory.allocate_tensor(element, tile_layout(TILE_Y, build.columns, element), 16)
    acc = mma.make_fragment_C(mma.partition_shape_C((TILE_Q, build.columns)))

    for h in cutlass.range(build.heads, unroll=1):
        work = work_of(records, number, b, h, q.shape[1] // k.shape[1])
        rows = rows_of(acc, binary(scale, build))
        attend(acc, rows, q, k, v, tiles, work, runs, arrays, scale, b, h, mma, thread, build)
        # 7 finish: acc / row_sum, lse
        done = finish(rows, acc, sinks[h] if build.has_sinks else None)
        store_lse(done, lse, work, b, h, mma, thread)
        write_product(cute.local_tile(out_tile, (TILE_Q, build.columns), (0, h)), acc, mma, thread)
        cute.arch.sync_threads()  # q is no longer read

    # 8 y = out @ weight.T
    work = work_of(records, number, b, 0, 1)
    project(out_tile, w_tile, tiles.p, weight, matrix(y, b, 0, work.q_begin + work.first), work.n_q - work.first,
            v.shape[3], mma, thread, build)  # fmt: skip


@cute.jit
def project(
    out_tile, w_tile, y_tile, weight, y_rows, count, d_v, mma: cutlass.Constexpr, thread, build: cutlass.Constexpr
):
    """A tile of y after the other; y_tile: a place for it in shared memory."""
    copy_w, copy_y = (loading_rows(weight.element_type, width, build.vector) for width in (build.columns, TILE_Y))
    acc = mma.make_fragment_C(mma.partition_shape_C((TILE_Q, TILE_Y)))
    for part in cutlass.range(cute.ceil_div(weight.shape[0], TILE_Y), unroll=1):
        first = cute.assume(part * TILE_Y, divby=TILE_Y)
        left = weight.shape[0] - first
        acc.fill(0.0)
        for h in cutlass.range(build.heads, unroll=1):
            cute.arch.sync_threads()  # the tile before is no longer read
            of_weight = cute.domain_offset((first, cute.assume(h * d_v, divby=build.vector)), weight)
            load_tile(w_tile, of_weight, left, d_v, copy_w, thread, None)
            cute.arch.sync_threads()
            of_head = cute.local_tile(out_tile, (TILE_Q, build.columns), (0, h))
            multiply(mma, acc, of_head, w_tile, thread, False)
        write_product(y_tile, acc, mma, thread)
        cute.arch.sync_threads()
        store_tile(y_tile, cute.domain_offset((0, first), y_rows), count, left, copy_y, thread)

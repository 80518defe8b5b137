"""Steps of the first kernel as functions of the host, a thread after the other. They run on a CPU, in float32."""

import cutlass
import cutlass.cute as cute

from tilewise.kernels.cute.source.basic import load_tile, multiply, store_tile, write_product
from tilewise.kernels.cute.source.vocabulary import THREADS, loading_rows, product, tile_layout, transposed


@cute.jit
def load_and_store(
    rows: cute.Tensor, room: cute.Tensor, out: cute.Tensor, size: cutlass.Constexpr, vector: cutlass.Constexpr,
    count: cutlass.Int32, factor: cutlass.Float32,
):  # fmt: skip
    """A tile of that size: from rows to room, as shared memory has it, and to out."""
    tile = cute.make_tensor(room.iterator, tile_layout(*size, rows.element_type))
    copy = loading_rows(rows.element_type, size[1], vector)
    for thread in cutlass.range(THREADS):
        load_tile(tile, rows, count, rows.shape[1], copy, thread, factor)
    for thread in cutlass.range(THREADS):
        store_tile(tile, out, count, out.shape[1], copy, thread)


@cute.jit
def products(
    a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, is_transposed: cutlass.Constexpr, size: cutlass.Constexpr
):
    """out = a @ b.T, or a @ b: tiles that lie as shared memory has them. size: rows, columns and depth."""
    rows, columns, depth = size
    a_tile = cute.make_tensor(a.iterator, tile_layout(rows, depth, a.element_type))
    if cutlass.const_expr(is_transposed):
        b_tile = transposed(cute.make_tensor(b.iterator, tile_layout(depth, columns, b.element_type)))
    else:
        b_tile = cute.make_tensor(b.iterator, tile_layout(columns, depth, b.element_type))
    out_tile = cute.make_tensor(out.iterator, tile_layout(rows, columns, out.element_type))
    mma = product(a.element_type)
    for thread in cutlass.range(THREADS):
        acc = mma.make_fragment_C(mma.partition_shape_C((rows, columns)))
        acc.fill(0.0)
        multiply(mma, acc, a_tile, b_tile, thread, is_transposed)
        write_product(out_tile, acc, mma, thread)

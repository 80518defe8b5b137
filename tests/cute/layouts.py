"""Functions of the host that write down which numbers of a tile a thread has. They run on a CPU."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32
from cutlass.cute.nvgpu import warp

from tilewise.kernels.cute.source.backward_sm90_rows import product_of_d_q
from tilewise.kernels.cute.source.items import Order, in_turns
from tilewise.kernels.cute.source.vocabulary import (
    by_rows,
    operand_of_product,
    product,
    products_sm90,
    read_cells,
    row_of_matrices,
    swizzled_tiles,
    table_tiles,
)


@cute.jit
def rows_and_columns(out: cute.Tensor, mma: cutlass.Constexpr, size: cutlass.Constexpr):
    """out: (threads, rows, columns, 2); where in a product of that size each number is that a thread has."""
    for thread in cutlass.range(out.shape[0]):
        at = by_rows(made(mma, size).get_slice(thread).partition_C(cute.make_identity_tensor(size)))
        for row in cutlass.range_constexpr(out.shape[1]):
            for column in cutlass.range_constexpr(out.shape[2]):
                for i in cutlass.range_constexpr(2):
                    out[thread, row, column, i] = Int32(at[row, column][i])


@cute.jit
def operands(of_product: cute.Tensor, of_operand: cute.Tensor, mma: cutlass.Constexpr, size: cutlass.Constexpr):
    """Both (threads, numbers, 2): where a thread's numbers are in q @ k.T, and in the first operand of p @ v."""
    for thread in cutlass.range(of_product.shape[0]):
        qk, pv = products_sm90(mma, size[0], size[1], 64)
        identity = cute.make_identity_tensor(size)
        product_at = qk[0].get_slice(thread).partition_C(identity)
        operand_at = pv[0].get_slice(thread).partition_A(identity)
        order = operand_of_product(product_at)
        for i in cutlass.range(of_product.shape[1], unroll_full=True):
            for j in cutlass.range_constexpr(2):
                of_product[thread, i, j] = Int32(product_at[i][j])
                of_operand[thread, order(i), j] = Int32(operand_at[i][j])


@cute.jit
def places(plain: cute.Tensor, transposed: cute.Tensor, element: cutlass.Constexpr):
    """Both (rows, columns, stages): where in shared memory each number of a tile is, of either view of it, before the
    swizzle, which is of addresses."""
    rows, columns, count = plain.shape
    one, other = (swizzled_tiles(element, rows, columns, count, flag) for flag in (False, True))
    assert str(one.inner) == str(other.inner) == "S<3,4,3>"
    for i in cutlass.range(rows):
        for j in cutlass.range(columns):
            for k in cutlass.range(count):
                plain[i, j, k] = Int32(one.outer((i, j, k)))
                transposed[i, j, k] = Int32(other.outer((j, i, k)))


@cute.jit
def in_registers(out: cute.Tensor, again: cutlass.Constexpr):
    """out: (threads, numbers, 2); where in a product of 64 rows each number is, in the order of a thread's registers:
    of wgmma, or of the instruction by which a warp computes the same once more."""
    size = 64, 2 * out.shape[1]
    for thread in cutlass.range(out.shape[0]):
        mma = made("bfloat16" if again else "wgmma bfloat16", size)
        at = mma.get_slice(thread).partition_C(cute.make_identity_tensor(size))
        order = mma.make_fragment_C(mma.partition_shape_C(size)).layout
        for i in cutlass.range(out.shape[1], unroll_full=True):
            for j in cutlass.range_constexpr(2):
                out[thread, order(i), j] = Int32(at[i][j])


@cute.jit
def cells(room: cute.Tensor, out: cute.Tensor, size: cutlass.Constexpr):
    """room: stages of a table's tiles of that size, of float32, as the copy engine left them; out: (stages, rows / 2,
    4, numbers), what each thread reads: of 16 rows the first 8, and those 8 below."""
    rows, columns = size
    tiles = cute.make_tensor(room.iterator, table_tiles(room.element_type, rows, columns, out.shape[0]).outer)
    for stage in cutlass.range(out.shape[0]):
        for i in cutlass.range(out.shape[1]):
            for quarter in cutlass.range(4):
                read = read_cells(tiles, stage, i // 8 * 16 + i % 8, quarter)
                write(out[stage, i, quarter, None], read)


@cute.jit
def turns(out: cute.Tensor, heads: Int32, section: Int32, sections: Int32):
    """out: (items, 2); the head and the tile of each."""
    count = out.shape[0]
    for index in cutlass.range(count):
        head, tile = in_turns(index, heads, count // heads, Order(out, section, sections))
        out[index, 0], out[index, 1] = head, tile


@cute.jit
def rows_of_matrices(out: cute.Tensor, width: cutlass.Constexpr):
    """out: where the row begins that each thread of a warpgroup has of the first matrices of a table's tile."""
    for thread in cutlass.range(out.shape[0]):
        out[thread] = row_of_matrices(thread, width)


def write(row, numbers):
    for j in range(cute.size(row)):
        row[j] = numbers[j]


def made(mma, size):
    """By the name of an element: mma or, for float32, multiplications and additions; with "wgmma" before it, wgmma."""
    from tilewise.kernels.cute.source.vocabulary import ELEMENTS

    name, _, kind = mma.rpartition(" ")
    return products_sm90(ELEMENTS[kind], *size, 64)[0][0] if name else product(ELEMENTS[kind])


@cute.jit
def matrices_written(out: cute.Tensor, size: cutlass.Constexpr):
    """out: (threads, numbers, 2); where in d_s, (keys, queries), the rows are that a thread tells stmatrix."""
    scores, _ = products_sm90(BFloat16, size[0], size[1], 64)
    writing = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), scores[0])
    for thread in cutlass.range(out.shape[0]):
        at = writing.get_slice(thread).partition_D(cute.make_identity_tensor(size))
        for i in cutlass.range(out.shape[1], unroll_full=True):
            for j in cutlass.range_constexpr(2):
                out[thread, i, j] = Int32(at[i][j])


@cute.jit
def sums_held(out: cute.Tensor, tile: cutlass.Constexpr, depth: cutlass.Constexpr):
    """out: (threads, numbers, 2); where in d_q, (queries, columns), each number is that a thread has."""
    for thread in cutlass.range(out.shape[0]):
        product, _ = product_of_d_q(BFloat16, tile, depth)
        at = product.get_slice(thread).partition_C(cute.make_identity_tensor((tile.q, depth)))
        for i in cutlass.range(out.shape[1], unroll_full=True):
            for j in cutlass.range_constexpr(2):
                out[thread, i, j] = Int32(at[i][j])

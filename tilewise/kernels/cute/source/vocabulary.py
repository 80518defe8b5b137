"""Our words in CuTe's, in one place.

tile        a cute.Tensor in shared memory, (rows, columns); how its numbers lie is a cute.Layout
product     a cute.TiledMma: which thread has which numbers of both operands and of the result
row         of a product: what a quad of neighbouring threads has, two rows of it at a time
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass.cute.nvgpu import CopyUniversalOp, MmaUniversalOp, warp

ELEMENTS = {"float16": Float16, "bfloat16": BFloat16, "float32": Float32}
THREADS = 128  # four warps
_PAD = 16  # bytes a row: eight rows of 16 bytes then lie in different banks of shared memory


def tile_layout(rows, columns, element):
    """Row by row, each a little apart from the next."""
    return cute.make_layout((rows, columns), stride=(columns + _PAD * 8 // element.width, 1))


def transposed(tile):
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, [1, 0]))


def slice_of(element):
    """How many columns of both operands a step of a product takes."""
    return 1 if element is Float32 else 16


def product(element):
    """64 rows of a product: by tensor cores, or by multiplications and additions where float32 is to stay float32.

    Either way each quad of threads has whole rows, so that what a row has in common is asked of three neighbours.
    """
    if element is Float32:
        quads = cute.make_layout((THREADS // 4, 4, 1), stride=(4, 1, 0))
        return cute.make_tiled_mma(MmaUniversalOp(Float32), quads)
    atom = warp.MmaF16BF16Op(element, Float32, (16, 8, slice_of(element)))
    return cute.make_tiled_mma(atom, (THREADS // 32, 1, 1), permutation_mnk=(64, 16, slice_of(element)))


def loading_rows(element, columns, vector):
    """Threads side by side along rows, each with `vector` numbers of one: from global to shared memory, and back."""
    across = min(columns // vector, THREADS // 8)
    atom = cute.make_copy_atom(CopyUniversalOp(), element, num_bits_per_copy=vector * element.width)
    threads = cute.make_layout((THREADS // across, across), stride=(across, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector)))


def loading_operand(element, transpose=False):
    """From shared memory to the registers of a product: four 8 x 8 matrices at once, or number by number."""
    if element is Float32:
        return cute.make_copy_atom(CopyUniversalOp(), element)
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), element)


def by_rows(fragment):
    """A thread's numbers of a product as (rows, columns)."""
    layout = fragment.layout
    if cutlass.const_expr(cute.rank(layout, mode=[0]) == 1):  # multiplications and additions: (1, rows, columns)
        rows, columns = (layout[1],), (layout[2],)
    elif cutlass.const_expr(cute.rank(layout, mode=[0]) == 2):  # mma: ((2 columns, 2 rows), rows, columns)
        rows, columns = (layout[0][1], layout[1]), (layout[0][0], layout[2])
    else:  # wgmma: ((2 columns, 2 rows, columns), rows, columns)
        rows, columns = (layout[0][1], layout[1]), (layout[0][0], layout[0][2], layout[2])
    return cute.make_tensor(
        fragment.iterator,
        cute.make_layout(tuple(map(_shape, (rows, columns))), stride=tuple(map(_stride, (rows, columns)))),
    )


def _shape(modes):
    return tuple(mode.shape for mode in modes)


def _stride(modes):
    return tuple(mode.stride for mode in modes)

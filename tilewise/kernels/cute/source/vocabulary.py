"""Our words in CuTe's, in one place.

tile        a cute.Tensor in shared memory, (rows, columns); how its numbers lie is a cute.Layout
product     a cute.TiledMma: which thread has which numbers of both operands and of the result
row         of a product: what a quad of neighbouring threads has, two rows of it at a time
role        of a warp: those of the first warpgroup have one each (PRODUCER, SCHEDULER ...), all others are consumers
stage       a place for a tile in a ring of them: the last mode of a tile's layout, and a pair of barriers, by which the
            producer tells that the tile is there, consumers that it was read: rings.Barriers where blocks go on from
            item to item, a pipeline.PipelineTmaAsync where they have but one
map         a cute.CopyAtom of the copy engine: where an array lies, and how its tiles are to lie in shared memory
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, BFloat16, Float16, Float32, Int16, Int32, Int64, pipeline
from cutlass.cute.nvgpu import CopyUniversalOp, MmaUniversalOp, OperandMajorMode, cpasync, warp, warpgroup

from tilewise.kernels.cute.source.operations import where

ELEMENTS = {"float16": Float16, "bfloat16": BFloat16, "float32": Float32}
THREADS = 128  # four warps
WARPGROUP = 128  # the same, as wgmma names them
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


# -- Hopper -----------------------------------------------------------------------------------------------------------


# Roles of the first warpgroup's warps, by their numbers.
PRODUCER = 0  # has the copy engine bring tiles
SCHEDULER = 1  # takes items, and tells what they are
TABLE_PRODUCER = 2  # has the copy engine bring tiles of a table, beside keys
FIRST_STORER = 2  # this one and the next hand the copy engine what is added to d_q


def role_of():
    """The numbers of this thread's warpgroup and of its warp, the same for all of a warp as compilers see it. The first
    warpgroup's warps have roles of their own, the others' consume."""
    warp_number = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp_number // 4, warp_number


def table_tiles(element, rows, columns, count):
    """Tiles as the copy engine writes them, in parts whose rows have 128 bytes, or 64 if that is what divides them."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.K_SW128 if row_bytes(element, columns) == 128 else kinds.K_SW64
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, element), (rows, columns, count), order=(0, 1, 2))


def row_bytes(element, columns):
    return 128 if columns * element.width // 8 % 128 == 0 else 64


def swizzled_tiles(element, rows, columns, count, transposed=False):
    """Tiles as the copy engine writes and wgmma reads them: parts of 64 columns, whose rows have 128 bytes.

    transposed: (columns, rows), for the second operand of a product over rows. They lie the same.
    """
    kind = warpgroup.SmemLayoutAtomKind.MN_SW128 if transposed else warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, element)
    if transposed:
        return cute.tile_to_shape(atom, (columns, rows, count), order=(1, 0, 2))
    return cute.tile_to_shape(atom, (rows, columns, count), order=(0, 1, 2))


def row_of_matrices(thread, width):
    """Where the row begins that a thread of a warpgroup has of each first four 8 x 8 matrices of 16 bits, two and two
    side by side, in bytes, of a tile of 64 rows of that width: chunks of 16 bytes changed places."""
    row, side = (thread & 96) >> 1 | thread & 15, thread >> 4 & 1
    turned = row & 7 if width == 128 else row >> 1 & 3
    return row * width + ((side ^ turned) << 4)


def load_cells(tiles, stage, first):
    """Numbers of 16 bits of a table's tile of 64 rows, at the places of those that a thread has of a product: four
    matrices at once. first: where it begins, as above; the next ones differ from it by two chunks."""
    element, (rows, columns) = tiles.element_type, (cute.size(tiles, mode=[i]) for i in range(2))
    width, begin = row_bytes(element, columns), tiles.iterator.toint() + stage * (rows * columns * 2) + first
    cells = cute.make_rmem_tensor((8, columns // 16), element)
    for i in range(columns // 16):
        part, chunk = divmod(32 * i, width)
        row = cute.make_ptr(element, (begin ^ chunk) + part * rows * width, AddressSpace.smem, assumed_align=16)
        cute.copy(loading_operand(element), cute.make_tensor(row, cute.make_layout(8)), cells[None, i])
    return Cells(cute.recast_tensor(cells, Int32).__getitem__, element)


def read_cells(tiles, stage, row, quarter):
    """Numbers of 32 bits of a table's tile, at the places of those that a thread has of a product, two at a time.

    row: its first; quarter: which thread of its quad it is: of each eight columns it has two. Chunks of 16 bytes
    changed places, in another way in each 128 bytes.
    """
    element, (rows, columns) = tiles.element_type, (cute.size(tiles, mode=[i]) for i in range(2))
    in_row, in_chunk = (size // 8 for size in (row_bytes(element, columns), 16))
    turned = row % 8 if row_bytes(element, columns) == 128 else row // 2 % 4
    pairs = cute.make_tensor(cute.recast_ptr(tiles.iterator, dtype=Int64), cute.make_layout(cute.size(tiles) // 2))
    first = stage * (rows * columns // 2) + row * in_row

    def pair(i):
        group, half = divmod(i, 2)
        part, number = divmod(4 * group, in_row)  # the group's first pair, of those of a part's row
        chunk = (number // in_chunk + quarter // in_chunk) ^ turned
        return pairs[first + (part * rows + 8 * half) * in_row + chunk * in_chunk + quarter % in_chunk]

    return Cells(pair, element)


@dataclass(frozen=True, eq=False)
class Cells:
    """Numbers as they were read, two at a time, of which each is widened when it is asked for."""

    pair: Callable
    element: type

    def __getitem__(self, i):
        both = self.pair(i // 2)
        if self.element is BFloat16:  # the upper half of a number of float32: one operation
            return (both & -65536 if i % 2 else both << 16).bitcast(Float32)
        bits = Int16 if self.element is Float16 else Int32
        return bits(both >> self.element.width * (i % 2)).bitcast(self.element).to(Float32)


def seen_across(tiles):
    """The same tiles, (rows, columns, stages), transposed."""
    rows, columns, count = (cute.size(tiles, mode=[i]) for i in range(3))
    return cute.make_tensor(
        tiles.iterator, swizzled_tiles(tiles.element_type, rows, columns, count, transposed=True).outer
    )


def copy_engine(x, tiles, transposed=False):
    """A map of x, (batch, heads, n, d), for such tiles; and x in the copy engine's coordinates, (n, d, heads, batch),
    or (d, n, heads, batch)."""
    modes = [3, 2, 1, 0] if transposed else [2, 3, 1, 0]
    rows = cute.make_tensor(x.iterator, cute.select(x.layout, modes))
    tile = cute.select(tiles, [0, 1])
    size = cute.product_each(tile.shape)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows, tile, size)


def stages(tiles, consumers):
    """The barriers of a ring of tiles, with so many warpgroups of consumers. A lane of each warp arrives."""
    group = pipeline.CooperativeGroup
    return pipeline.PipelineTmaAsync.create(
        num_stages=cute.size(tiles, mode=[2]),
        producer_group=group(pipeline.Agent.Thread),
        consumer_group=group(pipeline.Agent.Thread, 4 * consumers),
        tx_count=cute.size_in_bytes(tiles.element_type, cute.select(tiles.layout, [0, 1])),
    )


def products_sm90(element, rows, keys, columns, q_in_registers=False):
    """q @ k.T, of tiles in shared memory, or of q in registers; p @ v, of p in registers. A warpgroup has 64 rows.

    Each as two: one that forgets what the result was before, and one that adds to it.
    """
    warpgroups = (rows // 64, 1, 1)
    along, across = OperandMajorMode.K, OperandMajorMode.MN
    memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    qk = warpgroup.MmaF16BF16Op(element, Float32, (64, keys, 16), registers if q_in_registers else memory, along, along)
    pv = warpgroup.MmaF16BF16Op(element, Float32, (64, columns, 16), registers, along, across)
    return tuple(tuple(_adding(cute.make_tiled_mma(x, warpgroups), adds) for adds in (False, True)) for x in (qk, pv))


def _adding(mma, adds):
    mma.set(warpgroup.Field.ACCUMULATE, adds)
    return mma


def operand_of_product(fragment):
    """How numbers of a product lie as the first operand of another: two groups of eight columns are one step of it."""
    return first_operand(cute.size(fragment) // 8)


def first_operand(steps):
    """How a thread's numbers of so many steps of a product lie in registers, eight of each."""
    return cute.make_layout(((2, 2, 2), 1, steps), stride=((1, 2, 4), 0, 8))


def consumers_meet(threads):
    cute.arch.barrier(barrier_id=1, number_of_threads=threads)


@cute.jit
def store_in_quads(acc, rows, count, first_row):
    """A product's two rows of a thread, first_row and the eighth after it, of so many rows: a quad stores 64 bytes of
    one at once."""
    element, quarter = rows.element_type, cute.arch.lane_idx() % 4
    narrow = cute.make_rmem_tensor_like(acc, element)
    narrow.store(acc.load().to(element))
    words = cute.recast_tensor(cute.make_tensor(narrow.iterator, cute.make_layout(cute.size(narrow))), Int32)
    for row in cutlass.range_constexpr(2):
        for n in cutlass.range_constexpr(0, cute.size(acc) // 4, 4):
            four = cute.make_rmem_tensor((4,), Int32)
            for i in cutlass.range_constexpr(4):
                four[i] = words[2 * (n + i) + row]
            transpose_in_quad(four, quarter)
            place = first_row + 8 * row, n + quarter
            if (place[0] < count) & (8 * place[1] < rows.shape[1]):
                cute.autovec_copy(cute.recast_tensor(four, element), cute.local_tile(rows, (1, 8), place)[0, None])


def transpose_in_quad(words, i):
    """Thread i of a quad has words i of four groups of four; after this it has group i."""
    for step in (1, 2):
        is_upper, other = (i & step) != 0, 3 - step
        for j in (0, other):  # pairs j, j + step
            low, high = words[j], words[j + step]
            given = cute.arch.shuffle_sync_bfly(where(is_upper, low, high), offset=step)
            words[j], words[j + step] = where(is_upper, given, low), where(is_upper, high, given)

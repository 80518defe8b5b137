"""Which thread has which number: what kernels take for granted about CuTe's layouts, looked up in them on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")
from tilewise.spec import Tile


def _from(array: np.ndarray) -> object:
    from cutlass.cute.runtime import from_dlpack

    return from_dlpack(array, assumed_align=16)


@pytest.mark.parametrize(
    ("mma", "size", "threads", "rows"),
    [
        ("float16", (64, 64), 128, 2),
        ("bfloat16", (64, 128), 128, 2),
        ("float32", (64, 64), 128, 2),
        ("wgmma bfloat16", (128, 128), 256, 2),
        ("wgmma float16", (128, 64), 256, 2),
    ],
)
def test_a_quad_of_threads_has_whole_rows(mma: str, size: tuple[int, int], threads: int, rows: int) -> None:
    from tests.cute import layouts

    at = np.full((threads, rows, size[0] * size[1] // threads // rows, 2), -1, np.int32)
    layouts.rows_and_columns(_from(at), mma, size)
    assert (at[..., 0] == at[:, :, :1, 0]).all(), "a thread's numbers, by rows"
    quads = at[..., 0].reshape(threads // 4, 4, -1)
    assert (quads == quads[:, :1]).all(), "and a quad's"
    cells = at.reshape(-1, 2)
    assert len(np.unique(cells[:, 0] * size[1] + cells[:, 1])) == size[0] * size[1], "each number is somebody's"
    assert (at[::4, 0, 0, 1] == 0).all() and (at[1::4, 0, 0, 1] > 0).all(), "the first of a quad has column 0"


@pytest.mark.parametrize("keys", [32, 64, 96, 128])
def test_weights_are_where_the_next_product_wants_them(keys: int) -> None:
    from cutlass import BFloat16

    from tests.cute import layouts

    of_product, of_operand = (np.full((256, 128 * keys // 256, 2), -1, np.int32) for _ in range(2))
    layouts.operands(_from(of_product), _from(of_operand), BFloat16, (128, keys))
    assert np.array_equal(of_product, of_operand)


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (128, 128), (64, 256), (32, 256), (96, 128)])
def test_a_tile_is_the_same_seen_from_either_side(rows: int, columns: int) -> None:
    """As the copy engine writes it: parts of 64 columns, whose rows have 128 bytes."""
    from cutlass import BFloat16

    from tests.cute import layouts

    plain, transposed = (np.full((rows, columns, 2), -1, np.int32) for _ in range(2))
    layouts.places(_from(plain), _from(transposed), BFloat16)
    assert np.array_equal(plain, transposed)
    row, column, stage = np.ogrid[:rows, :columns, :2]
    part = (stage * (columns // 64) + column // 64) * rows + row
    assert np.array_equal(plain, part * 64 + column % 64)


@pytest.mark.parametrize("queries", [64, 128])
def test_d_s_is_written_by_rows_of_matrices(queries: int) -> None:
    """A warp has 16 keys; its lanes tell where the rows of four matrices of 8 x 8 begin, two and two side by side."""
    from tests.cute import layouts

    at = np.full((256, 128 * queries // 256, 2), -1, np.int32)
    layouts.matrices_written(_from(at), (128, queries))
    rows = at.reshape(8, 32, queries // 16, 8, 2)  # warps, lanes, 16 queries each, numbers of a row
    warp, lane, part, number = np.ogrid[:8, :32, : queries // 16, :8]
    assert np.array_equal(rows[..., 0], np.broadcast_to(warp * 16 + lane % 16, rows.shape[:-1]))
    assert np.array_equal(rows[..., 1], np.broadcast_to(part * 16 + lane // 16 * 8 + number, rows.shape[:-1]))


@pytest.mark.parametrize(("queries", "depth"), [(64, 64), (64, 128), (128, 64)])
def test_d_q_is_shared_by_two_warpgroups(queries: int, depth: int) -> None:
    """Half of the queries each, or half of the columns; in the order in which rows are stored by quads."""
    from tests.cute import layouts

    at = np.full((256, queries * depth // 256, 2), -1, np.int32)
    layouts.sums_held(_from(at), Tile(queries, 128), depth)
    thread, number = np.ogrid[:256, : at.shape[1]]
    warpgroup, lane = thread // 128, thread % 32
    row = thread % 128 // 32 * 16 + lane // 4 + number // 2 % 2 * 8
    column = number // 4 * 8 + lane % 4 * 2 + number % 2
    row, column = (row + warpgroup * 64, column) if queries == 128 else (row, column + warpgroup * depth // 2)
    assert np.array_equal(at[..., 0], np.broadcast_to(row, at.shape[:-1]))
    assert np.array_equal(at[..., 1], np.broadcast_to(column, at.shape[:-1]))


@pytest.mark.parametrize("keys", [48, 64, 96, 128])
def test_a_tile_that_is_computed_again_is_where_it_was(keys: int) -> None:
    from tests.cute import layouts

    first, again = (np.full((128, keys // 2, 2), -1, np.int32) for _ in range(2))
    layouts.in_registers(_from(first), False)
    layouts.in_registers(_from(again), True)
    assert np.array_equal(first, again) and (first >= 0).all()


def _as_copied(table: np.ndarray, size: int, width: int) -> np.ndarray:
    """Tiles, (stages, rows, columns), of numbers of that size as the copy engine leaves them: parts of so many bytes a
    row, whose chunks of 16 bytes change places."""
    stages, rows, _ = table.shape
    parts = table.reshape(stages, rows, -1, width // size).swapaxes(1, 2).reshape(-1)
    address = np.arange(parts.size) * size
    left = np.empty_like(parts)
    left[(address ^ ((address >> 7) % (width // 16) << 4)) // size] = parts
    return left


@pytest.mark.parametrize("columns", [128, 96, 64])
def test_wide_cells_of_a_table(columns: int) -> None:
    import torch
    from cutlass.cute.runtime import from_dlpack

    from tests.cute import layouts

    table = np.arange(2 * 64 * columns).reshape(2, 64, columns) % 251
    room = torch.zeros(table.size + 1024)
    room = room[-room.data_ptr() % 1024 // 4 :][: table.size]
    room[:] = torch.from_numpy(_as_copied(table, 4, 128))
    out = np.full((2, 32, 4, columns // 2), -1, np.float32)
    layouts.cells(from_dlpack(room, assumed_align=16), _from(out), (64, columns))
    blocks = table.reshape(2, 4, 2, 8, columns // 8, 4, 2)  # stage, block, half, row, group, quarter, number
    want = blocks.transpose(0, 1, 3, 5, 4, 2, 6).reshape(out.shape)
    assert np.array_equal(out, want)


@pytest.mark.parametrize(("columns", "width"), [(128, 128), (96, 64), (64, 128)])
def test_cells_of_a_table_are_loaded_by_rows_of_matrices(columns: int, width: int) -> None:
    """A warp has 16 rows; its lanes tell where the rows of four matrices of 8 x 8 begin, two and two side by side."""
    from tests.cute import layouts

    first = np.full(128, -1, np.int32)
    layouts.rows_of_matrices(_from(first), width)
    table = np.arange(64 * columns).reshape(1, 64, columns)
    chunks = _as_copied(table, 2, width).reshape(-1, 8)
    warp, lane = np.divmod(np.arange(128), 32)
    for i in range(columns // 16):
        part, chunk = divmod(32 * i, width)
        got = chunks[((first ^ chunk) + part * 64 * width) // 16]
        side = table[0, warp * 16 + lane % 16].reshape(128, -1, 8)
        assert np.array_equal(got, side[np.arange(128), 2 * i + lane // 16])

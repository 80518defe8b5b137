"""The first kernel's steps, run on a CPU by CuTe's compiler: tiles come and go, and products are NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")
from tests.cute.test_layouts import _from

PAD = 4  # numbers of float32 that rows of a tile are apart


def _tile(values: np.ndarray) -> np.ndarray:
    """As shared memory has it: whole rows, and room between them."""
    rows, columns = values.shape
    made = np.full((rows, columns + PAD), np.nan, np.float32)
    made[:, :columns] = values
    return made


@pytest.mark.parametrize(
    ("size", "vector", "count", "width"),
    [((64, 64), 4, 64, 64), ((64, 64), 4, 10, 40), ((64, 32), 1, 63, 31), ((64, 16), 1, 1, 1), ((128, 64), 4, 77, 60)],
)
def test_tiles_come_and_go(size: tuple[int, int], vector: int, count: int, width: int) -> None:
    """What is beyond the last row and column is 0 in the tile, and stays as it was where it goes."""
    from tests.cute import steps

    rng = np.random.default_rng(0)
    rows = np.full(size, np.nan, np.float32)[:, :width].copy()
    rows[:count] = rng.standard_normal((count, width))
    room, out = np.full((size[0], size[1] + PAD), np.nan, np.float32), np.full((size[0], width), 7, np.float32)
    steps.load_and_store(_from(rows), _from(room), _from(out), size, vector, count, 0.5)
    tile = room[:, : size[1]]
    assert np.array_equal(tile[:count, :width], rows[:count] * np.float32(0.5))
    assert not tile[count:].any() and not tile[:, width:].any()
    assert np.array_equal(out[:count], tile[:count, :width])
    assert (out[count:] == 7).all()


@pytest.mark.parametrize(("columns", "depth", "is_transposed"), [(64, 32, False), (128, 64, True), (16, 64, True)])
def test_products_are_numpys(columns: int, depth: int, is_transposed: bool) -> None:
    """float32, by multiplications and additions: tensor cores are a GPU's."""
    from tests.cute import steps

    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(size).astype(np.float32) for size in ((64, depth), (columns, depth)))
    out = np.full((64, columns + PAD), np.nan, np.float32)
    steps.products(
        *map(_from, (_tile(a), _tile(b.T if is_transposed else b), out)), is_transposed, (64, columns, depth)
    )
    np.testing.assert_allclose(out[:, :columns], a @ b.T, rtol=1e-5, atol=1e-5)

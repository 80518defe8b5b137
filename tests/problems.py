"""Arrays of random sizes, types and layouts; and how near two results must be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from tilewise import arrays
from tilewise.spec import Tile

# The relative error of one rounding on storing, and of the sums in the type computed with.
STORED = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def tolerance(dtype: str, terms: int = 64) -> float:
    """A rounding on storing, and about sqrt(terms) of them, with room for exp, in the type computed with."""
    wide = STORED["float64"] if dtype == "float64" else STORED["float32"]
    return STORED[dtype] + 16 * max(terms, 16) * wide


def assert_close(found: Any, expected: Any, dtype: str, terms: int = 64, what: str = "") -> None:
    found = arrays.widen(arrays.as_numpy(found), np.float64)
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape, what
    assert not np.isnan(found).any(), what
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite], err_msg=what)
    scale = np.abs(expected[finite]).max(initial=1.0)
    error = np.abs(found[finite] - expected[finite]).max(initial=0)
    assert error <= tolerance(dtype, terms) * scale, (
        f"{what}: off by {error:.3g}, allowed {tolerance(dtype, terms) * scale:.3g}"
    )


def bits(x: Any) -> bytes:
    x = arrays.as_numpy(x)
    return np.ascontiguousarray(x).tobytes()


LAYOUTS = ["plain", "heads inside", "sliced", "reversed", "broadcast"]


def store(values: np.ndarray, dtype: str, library: str) -> Any:
    if library == "torch":
        return torch.from_numpy(values).to(getattr(torch, dtype))
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _array(rng: Any, b: int, h: int, n: int, d: int, layout: str, dtype: str, library: str) -> Any:
    """A (b, h, n, d) array whose last dimension is contiguous and whose others lie as they like."""
    if layout == "heads inside":
        x = store(rng.standard_normal((b, n, h, d)), dtype, library)
        return x.transpose(1, 2) if library == "torch" else x.transpose(0, 2, 1, 3)
    if layout == "sliced":
        return store(rng.standard_normal((b + 1, h + 1, 2 * n + 1, d + 3)), dtype, library)[
            1:, :h, : 2 * n : 2, 1 : 1 + d
        ]
    x = store(rng.standard_normal((b, h, n, d)), dtype, library)
    if layout == "reversed" and library == "numpy":
        return x[:, ::-1, ::-1]
    if layout == "broadcast":
        return x[:1].expand(b, h, n, d) if library == "torch" else np.broadcast_to(x[:1], x.shape)
    return x


@st.composite
def problems(draw: Any, dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64"), low: int = 0) -> Any:
    """(q, k, v, dtype): arrays of random sizes, from none at all, and layouts."""
    hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    b, n_q, n_k = draw(st.integers(1, 2)), draw(st.integers(low, 20)), draw(st.integers(low, 20))
    d, d_v = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    dtype, library = draw(st.sampled_from(dtypes)), draw(st.sampled_from(["numpy", "torch"]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(3)]
    sizes = ((hk * group, n_q, d), (hk, n_k, d), (hk, n_k, d_v))
    return (*(_array(rng, b, *size, lay, dtype, library) for size, lay in zip(sizes, layouts, strict=True)), dtype)


TILES = st.builds(Tile, st.integers(1, 24), st.integers(1, 24))

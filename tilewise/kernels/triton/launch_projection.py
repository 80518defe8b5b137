"""The fused projection's kernels, launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton.arguments import suits_copy_engine
from tilewise.kernels.triton.fitting import LEAST, power_of_2, shared_memory
from tilewise.kernels.triton.modules import is_interpreted
from tilewise.kernels.triton.source import projection as kernels
from tilewise.kernels.triton.turning import as_argument
from tilewise.rope import Rotation

_STAGES = 4  # at most: tiles on their way while others are multiplied


@np.errstate(all="ignore")
def project(x: Any, w: Any, bias: Any, turn: Rotation | None, heads: int, turned_heads: int) -> Any:
    """(batch, heads, n, d) products of x, (batch, n, inner), and w, (inner, heads * d); the first heads are turned."""
    batch, n, inner = x.shape
    d = w.shape[1] // heads
    y = torch.empty((batch, heads, n, d), dtype=x.dtype, device=x.device)
    x = x if x.stride(2) == 1 else x.contiguous()
    w = w if 1 in w.stride() else w.contiguous()
    x_map, w_map = None, None
    is_mapped = _suit_copy_engine(x, w, d)
    rows, columns, depth = _tile(x, d, is_mapped)
    if is_mapped:
        x_map, w_map = _maps(x, w, rows, columns, depth)
    told, stage = _heads(d, columns, turn), (rows + columns) * depth * x.element_size()
    grid = _grid(batch * n, rows, heads, told)
    if 0 not in grid:
        kernels.project[grid](
            x, w, x if bias is None else bias.contiguous(), y, x_map, w_map, x.stride()[:2], w.stride(),
            None if turn is None else as_argument(turn), batch * n, n, inner, heads, turned_heads,
            HAS_BIAS=bias is not None, **told, BY_COLUMNS=_lies_by_columns(w), WHOLE=inner % depth == 0, ROWS=rows,
            INNER=depth, DOT=tl.float32 if is_interpreted() else getattr(tl, str(x.dtype).removeprefix("torch.")),
            num_warps=8 if rows * columns > 8192 else 4,
            num_stages=max(1, min(_STAGES, shared_memory(str(x.device)) // stage)),
        )  # fmt: skip
    return y


@np.errstate(all="ignore")
def gather(d_y: Any, turn: Rotation | None, turned_heads: int) -> Any:
    """Gradients of (batch, heads, n, d) as (batch, n, heads * d), turned back."""
    batch, heads, n, d = d_y.shape
    d_y = d_y if d_y.stride(-1) == 1 else d_y.contiguous()
    joined = torch.empty((batch, n, heads * d), dtype=d_y.dtype, device=d_y.device)
    told = _heads(d, max(128, d), turn)
    rows = max(1, 4096 // (told["HEADS"] * told["PADDED"]))
    grid = _grid(batch * n, rows, heads, told)
    if 0 not in grid:
        kernels.gather[grid](
            d_y, joined, d_y.stride()[:3], None if turn is None else as_argument(turn), batch * n, n, heads,
            turned_heads, **told, ROWS=rows,
        )  # fmt: skip
    return joined


def _tile(x: Any, d: int, is_mapped: bool) -> tuple[int, int, int]:
    """Rows, columns and depth of a tile, as large as registers hold: the larger, the fewer times x and w are loaded.

    float32 is multiplied without tensor cores. A few rows wait for w alone, and many programs load it sooner than few.
    """
    rows, is_narrow = x.shape[0] * x.shape[1], x.dtype != torch.float32
    if is_narrow:
        most, height, width = (32768, 256, 256) if is_mapped and rows > 64 else (16384, 128, 128)
    else:
        most, height, width = 8192, 64, 64
    columns = max(d, width) if _is_power_of_2(d) else power_of_2(d)
    height = max(LEAST, min(height, most // columns, power_of_2(rows)))
    return height, columns, 64 if is_narrow and columns <= 256 else 32


def _heads(d: int, columns: int, turn: Rotation | None) -> dict[str, Any]:
    """How heads share a tile's columns: those of a power of 2 lie side by side, of others one is padded."""
    padded, heads = (d, columns // d) if _is_power_of_2(d) else (power_of_2(d), 1)
    return {
        "D": d, "PADDED": padded, "HEADS": heads, "PAIRS": 0 if turn is None else turn.cos.shape[-1],
        "INTERLEAVED": turn is not None and turn.interleaved,
    }  # fmt: skip


def _is_power_of_2(d: int) -> bool:
    return d & (d - 1) == 0


def _grid(rows: int, size: int, heads: int, told: dict[str, Any]) -> tuple[int]:
    return (-(-rows // size) * -(-heads // told["HEADS"]),)


# -- for a GPU's copy engine ------------------------------------------------------------------------------------------


def _suit_copy_engine(x: Any, w: Any, d: int) -> bool:
    """Whether it takes both: rows of x equally far apart, heads that begin at multiples of 16 bytes."""
    if x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
        return False
    begin_well = _lies_by_columns(w) or d * w.element_size() % 16 == 0
    return begin_well and suits_copy_engine(x) and suits_copy_engine(w.T if _lies_by_columns(w) else w)


def _maps(x: Any, w: Any, rows: int, columns: int, depth: int) -> tuple[Any, Any]:
    """Of all rows of x, one below the other, and of w, or w.T where that is what lies row by row."""
    x_map = TensorDescriptor(x, [x.shape[0] * x.shape[1], x.shape[2]], [x.stride(1), 1], [rows, depth])
    if _lies_by_columns(w):
        return x_map, TensorDescriptor.from_tensor(w.T, [columns, depth])
    return x_map, TensorDescriptor.from_tensor(w, [depth, columns])


def _lies_by_columns(w: Any) -> bool:
    """As a linear layer's weight.T does."""
    return bool(w.stride(1) != 1)

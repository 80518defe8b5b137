"""The fused projection's kernels, launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl

from tilewise.kernels.triton.fitting import power_of_2
from tilewise.kernels.triton.modules import is_interpreted
from tilewise.kernels.triton.source import projection as kernels
from tilewise.kernels.triton.turning import as_argument
from tilewise.rope import Rotation

_LEAST = 32  # columns of a head: tensor cores take half of them at a time


@np.errstate(all="ignore")
def project(x: Any, w: Any, bias: Any, turn: Rotation | None, heads: int, turned_heads: int) -> Any:
    """(batch, heads, n, d) products of x, (batch, n, inner), and w, (inner, heads * d); the first heads are turned."""
    batch, n, inner = x.shape
    d = w.shape[1] // heads
    y = torch.empty((batch, heads, n, d), dtype=x.dtype, device=x.device)
    grid, told = _launch(x, batch * n, heads, d, turn)
    is_wide = is_interpreted() or x.dtype == torch.float32  # its interpreter has bfloat16 as whole numbers
    if 0 not in grid:
        kernels.project[grid](
            x, w, x if bias is None else bias.contiguous(), y, x.stride(), w.stride(), y.stride()[:3],
            None if turn is None else as_argument(turn), batch * n, n, inner, heads, turned_heads,
            HAS_BIAS=bias is not None, **told, INNER=32 if x.dtype == torch.float32 else 64,
            DOT=tl.float32 if is_wide else getattr(tl, str(x.dtype).removeprefix("torch.")),
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=8 if told["ROWS"] > 64 else 4,
            num_stages=3,
        )  # fmt: skip
    return y


@np.errstate(all="ignore")
def gather(d_y: Any, turn: Rotation | None, turned_heads: int) -> Any:
    """Gradients of (batch, heads, n, d) as (batch, n, heads * d), turned back."""
    batch, heads, n, d = d_y.shape
    d_y = d_y if d_y.stride(-1) == 1 else d_y.contiguous()
    joined = torch.empty((batch, n, heads * d), dtype=d_y.dtype, device=d_y.device)
    grid, told = _launch(d_y, batch * n, heads, d, turn)
    if 0 not in grid:
        kernels.gather[grid](
            d_y, joined, d_y.stride()[:3], None if turn is None else as_argument(turn), batch * n, n, heads,
            turned_heads, **told,
        )  # fmt: skip
    return joined


def _launch(x: Any, rows: int, heads: int, d: int, turn: Rotation | None) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and constants: large tiles where registers hold them."""
    padded = max(_LEAST, power_of_2(d))
    size = 64 if x.dtype == torch.float32 or padded > 128 else 128
    size = 16 if padded > 256 else min(size, power_of_2(rows))
    return (-(-rows // size) * heads,), {
        "TURNED": turn is not None, "D": d, "PADDED": padded, "ROWS": size,
        "PAIRS": padded // 2 if turn is None else turn.cos.shape[-1],
        "INTERLEAVED": turn is not None and turn.interleaved,
    }  # fmt: skip

"""The kernel that turns whole arrays by a rotary embedding, launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewise.kernels.triton.arguments import steps_of
from tilewise.kernels.triton.source import rope as kernels
from tilewise.kernels.triton.turning import as_argument
from tilewise.rope import Rotation

_NUMBERS = 4096  # of a head, that a program has at a time: enough loads under way, and few registers
_HEADS = 4  # of a program


@np.errstate(all="ignore")
def turned(x: Any, rotation: Rotation, back: bool = False) -> Any:
    """(batch, heads, n, d) numbers as Rotation.turned has them, contiguous; back: as gradients of those are."""
    batch, heads, n, d = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty((batch, heads, n, d), dtype=x.dtype, device=x.device)
    pairs = int(rotation.cos.shape[-1])
    rows = max(1, min(_NUMBERS // _power_of_2(d), _power_of_2(n)))
    grid = (-(-n // rows) * -(-heads // _HEADS) * batch,)
    if y.numel() > 0:
        kernels.turn[grid](
            x, y, steps_of(x), steps_of(y), as_argument(rotation), n, heads, BACK=back, WIDTH=d, PAIRS=pairs,
            INTERLEAVED=rotation.interleaved, HALF=_power_of_2(pairs), REST=_power_of_2(d - 2 * pairs), ROWS=rows,
            HEADS=_HEADS,
        )  # fmt: skip
    return y


def _power_of_2(n: int) -> int:
    """At least n; 0 of 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0

"""Attention and its gradients in float64 on the device, head by head: what every result is compared with.

Plain products and a softmax of PyTorch; nothing of the kernels, nor of their reference, which is NumPy's and takes
minutes for what a GPU computes in a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewise.bench.accuracy.cells import Cell, Drawn
from tilewise.saturated import SATURATED

LEAST_ROWS = 16  # saturated ones, of which an error is told
Results = dict[str, Any]  # out, lse, d_q, d_k, d_v, and d_slopes or d_sinks


@dataclass(frozen=True, eq=False)
class Exact:
    results: Results
    saturated: Any  # (heads, n): rows whose largest weight is at least SATURATED, and which see more than one key


def exact(cell: Cell, x: Drawn) -> Exact:
    import torch

    with torch.no_grad():
        heads = [_head(cell, x, h) for h in range(cell.heads)]
    names = heads[0]
    stacked = {what: torch.stack([head[what] for head in heads]) for what in names}
    saturated = stacked.pop("saturated")
    of_heads = ("d_slopes", "d_sinks")
    return Exact({what: y if what in of_heads else y[None] for what, y in stacked.items()}, saturated)


def _head(cell: Cell, x: Drawn, h: int) -> Results:
    import torch

    q, k, v, g = (y[0, h].double() for y in (x.q, x.k, x.v, x.d_out))
    scale, at = 1 / math.sqrt(cell.d), torch.arange(cell.n, device=q.device)
    apart = at[:, None] - at
    s = q @ k.T * scale
    if cell.learned == "slopes":
        s = s - x.learned[h].double() * apart.abs()
    if cell.mask == "causal":
        s = s.masked_fill(apart < 0, -math.inf)
    lse = s.logsumexp(-1)
    if cell.learned == "sinks":
        lse = torch.logaddexp(lse, x.learned[h].double())
    p = torch.exp(s - lse[:, None])
    out = p @ v
    delta = (g * out).sum(-1)
    d_s = p * (g @ v.T - delta[:, None])
    found = {"out": out, "lse": lse, "d_q": d_s @ k * scale, "d_k": d_s.T @ q * scale, "d_v": p.T @ g}
    if cell.learned == "slopes":
        found["d_slopes"] = -(d_s * apart.abs()).sum()
    if cell.learned == "sinks":
        found["d_sinks"] = -(torch.exp(x.learned[h].double() - lse) * delta).sum()
    return {**found, "saturated": (p.amax(-1) >= SATURATED) & ((p > 0).sum(-1) > 1)}


def rounded(cell: Cell, want: Results) -> Results:
    """The exact results, rounded once: what the format allows. lse and gradients of slopes and sinks are float32."""
    import torch

    half = getattr(torch, cell.dtype)
    return {what: x.to(half if what in ("out", "d_q", "d_k", "d_v") else torch.float32) for what, x in want.items()}


def errors(want: Exact, got: Results) -> dict[str, Any]:
    """Of each result: the norm of what is off over the norm of what is expected, and the largest that is off."""
    found = {what: _error(x, want.results[what]) for what, x in got.items()}
    if int(want.saturated.sum()) >= LEAST_ROWS and "d_q" in got:
        found["d_q saturated"] = _error(got["d_q"][0][want.saturated], want.results["d_q"][0][want.saturated])
    return found


def _error(got: Any, want: Any) -> tuple[float, float]:
    off, size = (got.double() - want), float(want.norm())
    return (float(off.norm()) / size if size else math.inf), float(off.abs().max())

"""Is it right: the relative error of a sample of rows against float32 attention, computed densely on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewise.bench.gpu.cases import VARIANTS, Case, Inputs

ALLOWED = 0.02  # about ten roundings of bfloat16, in the norm: far above an honest kernel's, far below a wrong mask's
ROWS = 2048  # of a sequence and head, at most


@dataclass(frozen=True, eq=False)
class Expected:
    """What the first and the last sequence's first and last head should give."""

    inputs: Inputs
    parts: list[tuple[int, int, Any, Any]]  # the sequence, the head, its rows, and their float32 output

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> Expected:
        places = sorted({(i, h) for i in (0, case.batch - 1) for h in (0, case.heads - 1)})
        return cls(inputs, [(i, h, *_reference(case, inputs, i, h)) for i, h in places])

    def error(self, out: Any) -> float:
        """The norm of what is off over the norm of what is expected; infinite if a number is not finite."""
        off = size = 0.0
        for i, h, rows, want in self.parts:
            found = self.inputs.sequence(out, i)[h][rows].float()
            off += float((found - want).square().sum())
            size += float(want.square().sum())
        return math.sqrt(off / size) if math.isfinite(off) else math.inf


def _reference(case: Case, inputs: Inputs, i: int, h: int) -> tuple[Any, Any]:
    import torch

    variant = VARIANTS[case.variant]
    q = inputs.sequence(inputs.q, i)[h].float()
    k, v = (inputs.sequence(x, i)[h // case.group].float() for x in (inputs.k, inputs.v))
    rows = torch.linspace(0, len(q) - 1, min(len(q), ROWS), device=q.device).long()
    at_q, at_k = rows[:, None], torch.arange(len(k), device=q.device)
    s = q[rows] @ k.T / math.sqrt(case.d)
    if variant.score is not None:
        s = variant.score(inputs.extras)(s, i, h, at_q, at_k)
    if variant.mask is not None:
        s = s.masked_fill(~variant.mask(inputs.extras)(i, h, at_q, at_k), -math.inf)
    return rows, s.softmax(-1) @ v

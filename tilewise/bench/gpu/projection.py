"""Attention and the output projection behind it: by one kernel, and as attention and a library's product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewise.bench.gpu.cases import VARIANTS, Case, Inputs

Step = Callable[[], Any]
Attend = Callable[[Any, Any, Any], Any]


def weight(case: Case, device: Any) -> Any:
    """(model, columns of all heads), as nn.Linear has it."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.randn((case.model, case.hidden), generator=generator, device=device) / math.sqrt(case.hidden)
    return drawn.to(getattr(torch, case.dtype))


def at_once(case: Case, sets: Sequence[Inputs]) -> list[Step]:
    from tilewise.kernels.cute.projection import projected_attention

    options, w_o = VARIANTS[case.variant].options(case, sets[0].extras), weight(case, sets[0].q.device).T

    def step(q: Any, k: Any, v: Any) -> Any:
        return projected_attention(q, k, v, w_o, **options).out

    return [partial(step, *as_projected(x)) for x in sets]


def one_by_one(case: Case, sets: Sequence[Inputs], attend: Attend) -> list[Step]:
    from torch.nn.functional import linear

    of_out = weight(case, sets[0].q.device)

    def step(q: Any, k: Any, v: Any) -> Any:
        return linear(attend(q, k, v).transpose(1, 2).flatten(2), of_out)

    return [partial(step, *as_projected(x)) for x in sets]


def as_projected(inputs: Inputs) -> tuple[Any, ...]:
    """q, k and v as the projection before leaves them, a token's heads side by side: out is so, too, and not copied."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))


@dataclass(frozen=True, eq=False)
class Expected:
    """What the first and the last sequence should give, in float64."""

    parts: list[tuple[int, Any]]

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> Expected:
        from torch.nn.functional import linear, scaled_dot_product_attention

        options, of_out = VARIANTS[case.variant].sdpa or {}, weight(case, inputs.q.device).double()
        parts = []
        for i in sorted({0, case.batch - 1}):
            q, k, v = (x[i : i + 1].double() for x in (inputs.q, inputs.k, inputs.v))
            out = scaled_dot_product_attention(q, k, v, **options)
            parts.append((i, linear(out.transpose(1, 2).flatten(2), of_out)[0]))
        return cls(parts)

    def error(self, found: Any) -> float:
        """The norm of what is off over the norm of what is expected; infinite if a number is not finite."""
        off, size = (sum(float(x.square().sum()) for x in given) for given in (
            [found[i].double() - want for i, want in self.parts], [want for _, want in self.parts]
        ))  # fmt: skip
        return math.sqrt(off / size) if math.isfinite(off) else math.inf

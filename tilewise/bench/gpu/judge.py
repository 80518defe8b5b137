"""Is it right: the relative error of a sample of rows against float64 attention, computed densely on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewise.bench.gpu import module, projection
from tilewise.bench.gpu.cases import VARIANTS, Case, Extras, Inputs

ALLOWED = 0.02  # about ten roundings of bfloat16, in the norm: far above an honest kernel's, far below a wrong mask's
ROWS = 2048  # of a sequence and head, at most


@dataclass(frozen=True, eq=False)
class Expected:
    """What the first and the last sequence's first and last head should give."""

    inputs: Inputs
    parts: list[tuple[int, int, Any, Any]]  # the sequence, the head, its rows, and their float64 output

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> Expected:
        places = sorted({(i, h) for i in (0, case.batch - 1) for h in (0, case.heads - 1)})
        return cls(inputs, [(i, h, *_reference(case, inputs, i, h)) for i, h in places])

    def error(self, out: Any) -> float:
        """The norm of what is off over the norm of what is expected; infinite if a number is not finite."""
        off = size = 0.0
        for i, h, rows, want in self.parts:
            found = self.inputs.sequence(out, i)[h][rows].double()
            off += float((found - want).square().sum())
            size += float(want.square().sum())
        return math.sqrt(off / size) if math.isfinite(off) else math.inf


@dataclass(frozen=True, eq=False)
class Gradients:
    """What the same heads' gradients should be; and of a bias, which all heads share, the sum over all of them."""

    parts: list[tuple[int, Any, Any]]  # which gradient, the head if it is of one, and what it should be

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> Gradients:
        chosen = {(i, h) for i in (0, case.batch - 1) for h in (0, case.heads - 1)}
        shared = [(3 + j, x) for j, x in enumerate(inputs.wanted[3:])]
        sums = [x.detach().float().zero_() for _, x in shared]
        parts: list[tuple[int, Any, Any]] = []
        for i, h in [(i, h) for i in range(case.batch) for h in range(case.heads) if shared or (i, h) in chosen]:
            found = _dense_gradients(case, inputs, i, h)
            for total, part in zip(sums, found[3:], strict=True):
                total += part
            parts += [(j, (i, h), want) for j, want in enumerate(found[:3]) if (i, h) in chosen]
        return cls(parts + [(j, (), total) for (j, _), total in zip(shared, sums, strict=True)])

    def error(self, found: tuple[Any, ...]) -> float:
        """The largest of all gradients': the norm of what is off over the norm of what is expected."""
        errors = []
        for j, at, want in self.parts:
            off = float((found[j][at].float() - want).norm())
            errors.append(off / float(want.norm()) if math.isfinite(off) else math.inf)
        return max(errors)


def expected(case: Case, inputs: Inputs) -> Expected | Gradients | module.Expected | projection.Expected:
    """Of what the case asks for."""
    if case.model:
        return projection.Expected.of(case, inputs)
    if case.step:
        return module.Expected.of(case, inputs)
    return Gradients.of(case, inputs) if case.backward else Expected.of(case, inputs)


def _dense_gradients(case: Case, inputs: Inputs, i: int, h: int) -> tuple[Any, ...]:
    """Of one head, in float32: of q, k, v and what the variant reads."""
    import torch

    wide = [x.detach()[i, h].float().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    extras = {name: x.detach().float().requires_grad_() if x.requires_grad else x for name, x in inputs.extras.items()}
    at = torch.arange(case.n, device=wide[0].device)
    q, k, v = wide
    out = _dense(case, q, k, v, extras, i, h, at[:, None], at)
    wanted = [*wide, *(x for x in extras.values() if x.requires_grad)]
    found: tuple[Any, ...] = torch.autograd.grad(out, wanted, inputs.d_out[i, h].float())
    return found


def _reference(case: Case, inputs: Inputs, i: int, h: int) -> tuple[Any, Any]:
    import torch

    q = inputs.sequence(inputs.q, i)[h].double()
    k, v = (inputs.sequence(x, i)[h // case.group].double() for x in (inputs.k, inputs.v))
    rows = torch.linspace(0, len(q) - 1, min(len(q), ROWS), device=q.device).long()
    return rows, _dense(case, q[rows], k, v, inputs.extras, i, h, rows[:, None], torch.arange(len(k), device=q.device))


def _dense(case: Case, q: Any, k: Any, v: Any, extras: Extras, i: int, h: int, at_q: Any, at_k: Any) -> Any:
    """Standard attention of one head's rows, by the variant's functions."""
    variant = VARIANTS[case.variant]
    s = q @ k.T / math.sqrt(case.d)
    if variant.score is not None:
        s = variant.score(extras)(s, i, h, at_q, at_k)
    if variant.mask is not None:
        s = s.masked_fill(~variant.mask(extras)(i, h, at_q, at_k), -math.inf)
    return s.softmax(-1) @ v

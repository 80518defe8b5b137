"""A training step of multi-head attention: from x to the gradients of x and of all weights, by our module, and by one
with the same weights on PyTorch's attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewise.bench.gpu.cases import DTYPE, VARIANTS, Case, Inputs
from tilewise.bench.refusal import RefusedError

Step = Callable[[], tuple[Any, ...]]
Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Weights:
    """Of the projection to q, k and v, and of the one back: (columns, features), as nn.Linear has them."""

    qkv: Any
    out: Any

    @classmethod
    def drawn(cls, case: Case, device: Any) -> Weights:
        import torch

        generator = torch.Generator(device).manual_seed(0)
        sizes, dtype = ((3 * case.hidden, case.hidden), (case.hidden, case.hidden)), getattr(torch, DTYPE)
        drawn = (torch.randn(size, generator=generator, device=device) / math.sqrt(case.hidden) for size in sizes)
        return cls(*(x.to(dtype).requires_grad_() for x in drawn))

    def wide(self) -> Weights:
        return Weights(*(x.detach().float().requires_grad_() for x in (self.qkv, self.out)))


def ours(case: Case, sets: Sequence[Inputs]) -> list[Step]:
    import torch

    from tilewise.nn import MultiHeadAttention

    weights = Weights.drawn(case, sets[0].q.device)
    options = VARIANTS[case.variant].options(case, sets[0].extras)
    module = MultiHeadAttention(case.hidden, case.heads, bias=False, device="meta", **options)
    module.qkv.weight, module.out.weight = torch.nn.Parameter(weights.qkv), torch.nn.Parameter(weights.out)
    return [partial(_gradients, module, (module.qkv.weight, module.out.weight), *_x_and_d(x)) for x in sets]


def on_sdpa(case: Case, sets: Sequence[Inputs]) -> list[Step]:
    weights = Weights.drawn(case, sets[0].q.device)
    module = partial(_projected, case, weights, _sdpa(case))
    return [partial(_gradients, module, (weights.qkv, weights.out), *_x_and_d(x)) for x in sets]


def _sdpa(case: Case) -> Attend:
    from torch.nn.functional import scaled_dot_product_attention

    options = VARIANTS[case.variant].sdpa
    if options is None:
        raise RefusedError("cannot express", "SDPA has no argument for it")
    return partial(scaled_dot_product_attention, **options)


def _projected(case: Case, weights: Weights, attend: Attend, x: Any) -> Any:
    from torch.nn.functional import linear

    parts = linear(x, weights.qkv).view(case.batch, case.n, 3, case.heads, case.d)
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    return linear(attend(q, k, v).transpose(1, 2).flatten(2), weights.out)


def _x_and_d(inputs: Inputs) -> tuple[Any, Any]:
    """(batch, n, features) each: the numbers of q, and of v."""
    x, d_out = (y.detach().transpose(1, 2).flatten(2) for y in (inputs.q, inputs.v))
    return x.requires_grad_(), d_out


def _gradients(module: Callable[[Any], Any], weights: tuple[Any, ...], x: Any, d_out: Any) -> tuple[Any, ...]:
    import torch

    found: tuple[Any, ...] = torch.autograd.grad(module(x), (x, *weights), d_out)
    return found


@dataclass(frozen=True, eq=False)
class Expected:
    """The same gradients in float32."""

    gradients: tuple[Any, ...]

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> Expected:
        weights = Weights.drawn(case, inputs.q.device).wide()
        x, d_out = (y.detach().float() for y in _x_and_d(inputs))
        module = partial(_projected, case, weights, _sdpa(case))
        return cls(_gradients(module, (weights.qkv, weights.out), x.requires_grad_(), d_out))

    def error(self, found: tuple[Any, ...]) -> float:
        """The largest of all: the norm of what is off over the norm of what is expected."""
        off = [float((x.float() - want).norm() / want.norm()) for x, want in zip(found, self.gradients, strict=True)]
        return max(off) if all(map(math.isfinite, off)) else math.inf

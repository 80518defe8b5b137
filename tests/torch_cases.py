"""Cases for tensors: the conformance suite's variants on small shapes, every float array a tensor with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import tilewise as tw
from tilewise import cases
from tilewise.expr import Expr, Loaded, from_records, records
from tilewise.spec import Shape

SHAPE = Shape(batch=2, heads=2, heads_k=1, n_q=4, n_k=5, d=2, d_v=3)
LENGTHS = (torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 4, 7]))
NAMES = [*cases.VARIANTS, *(f"packed {name}" for name in cases.PACKED_VARIANTS)]


@dataclass
class Example:
    """A call on tensors, and the tensors its gradients are asked for: q, k, v, and those of the variant."""

    call: Callable[..., Any]
    operands: list[torch.Tensor]
    options: dict[str, Any]
    learned: list[torch.Tensor] = field(default_factory=list)

    def run(self, *operands: torch.Tensor, **more: Any) -> Any:
        return self.call(*(operands or self.operands), **self.options, **more)

    def results(self, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse, and 0 for the lse of rows that see nothing, which no difference can be taken of."""
        out, lse = self.run(return_lse=True)
        return out, torch.where(lse > -torch.inf, lse, 0)


def example(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Example:
    """The case of this name; "packed ..." ones are packed sequences."""
    rng = np.random.default_rng(seed)
    packed = name.startswith("packed ") and name.removeprefix("packed ") in cases.PACKED_VARIANTS
    learned: list[torch.Tensor] = []

    def tensor(values: Any) -> torch.Tensor:
        made = torch.from_numpy(np.array(values))
        if made.is_floating_point():
            made = made.to(dtype).requires_grad_()
            learned.append(made)
        return made

    def drawn(*size: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(size)).to(dtype).requires_grad_()

    s = SHAPE
    if packed:
        (n_q, n_k), batch = (int(x[-1]) for x in LENGTHS), len(LENGTHS[0]) - 1
        given = cases.PACKED_VARIANTS[name.removeprefix("packed ")](rng, Shape(batch, s.heads, 1, n_q, n_k, s.d, s.d_v))
        operands = [drawn(n_q, s.heads, s.d), drawn(n_k, s.heads_k, s.d), drawn(n_k, s.heads_k, s.d_v)]
    else:
        given = cases.VARIANTS[name](rng, s)
        operands = [
            drawn(s.batch, s.heads, s.n_q, s.d), drawn(s.batch, 1, s.n_k, s.d), drawn(s.batch, 1, s.n_k, s.d_v)
        ]  # fmt: skip
    options = {key: with_tensors(value, tensor) for key, value in given.items()}
    return Example(_packed if packed else tw.attention, operands, options, learned)


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return tw.attention_varlen(q, k, v, *LENGTHS, **options)


def with_tensors(value: Any, tensor: Callable[[Any], torch.Tensor]) -> Any:
    if isinstance(value, np.ndarray):
        return tensor(value)
    if not isinstance(value, Expr):
        return value
    made: dict[int, Loaded] = {}

    def slot(old: Loaded) -> Loaded:
        if id(old.array) not in made:
            made[id(old.array)] = old if old.constant else Loaded(tensor(old.array))
        return made[id(old.array)]

    return from_records(
        (op, args, kind, slot(payload) if op == "load" else payload) for op, args, kind, payload in records(value)
    )

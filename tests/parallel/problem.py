"""A conformance case in one process and over several: its tensors, its results, and how near they must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tilewise as tw
from tests.parallel.pool import mesh
from tests.torch_cases import with_tensors
from tilewise import arrays, parallel
from tilewise.cases import Case
from tilewise.contract import ROUNDING
from tilewise.parallel.mesh import ranks_of
from tilewise.rope import Rope

Change = Callable[[torch.Tensor], torch.Tensor]
ALLOWED = {"float64": 1e-12, "float32": 1e-5, "bfloat16": ROUNDING["bfloat16"], "float16": ROUNDING["float16"]}


def check(case: Case, ways: list[tuple[str, Any, str]], device: str = "cpu", kernel: str = "auto") -> None:
    """In a process of the pool: out, lse and every gradient are those of one process, on each mesh, with each layout
    and method, as far as the case's type can tell."""
    d_out, d_lse = _drawn(case)
    rounds = device != "cpu" or kernel != "auto"  # gradients of parts, before they are added up
    is_exact = not rounds and case.dtype in ("float32", "float64")
    expected = exact = None
    wrong = []
    for where, layout, method in ways:
        if mesh(where).get_coordinate() is None:
            continue
        found = _shared(case, where, layout, method, kernel, d_out.to(device), d_lse.to(device))
        if dist.get_rank() != 0:  # all have the whole result: one looks at it
            continue
        if expected is None:
            expected = _alone(case, d_out, d_lse, device, kernel)
            exact = expected if is_exact else _alone(case, d_out, d_lse, "cpu", "auto", torch.float64)
        for what in expected.keys() | found.keys():
            roundings = 3 if rounds and what.startswith("d_") else 1  # one for each of two parts more
            why = _wrong(found[what], expected[what], exact[what], case.dtype, roundings)
            if why is not None:
                wrong.append(f"{case.name}, {where} ranks, {layout}, {method}: {what} {why}")
    assert not wrong, "\n".join(wrong)  # at last: other ranks go on to the next way, and would wait for this one


def _drawn(case: Case) -> list[torch.Tensor]:
    """Gradients of out and lse, the same on every rank."""
    q, _, v = Problem(case).operands
    rows, generator = q.shape[:-1], torch.Generator().manual_seed(1)
    kinds = (((*rows, v.shape[-1]), q.dtype), (rows, torch.promote_types(q.dtype, torch.float32)))
    return [torch.randn(size, dtype=dtype, generator=generator) for size, dtype in kinds]


def _alone(
    case: Case, d_out: torch.Tensor, d_lse: torch.Tensor, device: str, kernel: str, dtype: Any = None
) -> dict[str, Any]:
    """In one process; dtype: of the same numbers in another type."""
    whole = Problem(case, device)
    whole.operands = [x.detach().to(dtype).requires_grad_() for x in whole.operands]
    out, lse = whole.run(tw.attention if whole.lengths is None else tw.attention_varlen, kernel=kernel)
    return whole.results(out, lse, d_out.to(out), d_lse.to(lse))


def _wrong(found: Any, alone: Any, exact: Any, dtype: str, roundings: int) -> str | None:
    """What is wrong with a result, or None. As the contract has it: at most twice the error of one process, and a
    rounding, or several. What one process of the CPU finds is taken for exact but in half precision."""
    if found is None or alone is None:
        return None if found is alone else f"is {found}, alone {alone}"
    if (found.shape, found.dtype) != (alone.shape, alone.dtype):
        return f"is {found.dtype}, {tuple(found.shape)}, alone {alone.dtype}, {tuple(alone.shape)}"
    band = roundings * max(ALLOWED[dtype], ALLOWED[arrays.dtype_name(alone)])  # an array may be of a coarser type
    finite = exact.isfinite()
    found, alone, exact = (x.cpu().double() for x in (found, alone, exact))
    if not torch.equal(found[~finite], exact[~finite]):
        return f"is {found[~finite]} where {exact[~finite]} is right"
    error, own, largest = (_most(x[finite]) for x in (found - exact, alone - exact, exact))
    is_near = error <= 2 * own + band * max(largest, 1)
    return None if is_near else f"is off by {error:.2g}, alone {own:.2g}, of {largest:.2g}"


def _most(x: torch.Tensor) -> float:
    return float(x.abs().amax()) if x.numel() else 0.0


def _shared(
    case: Case, where: str, layout: Any, method: str, kernel: str, d_out: torch.Tensor, d_lse: torch.Tensor
) -> Any:
    whole = Problem(case, d_out.device)
    dim, ranks = (2 if whole.lengths is None else 0), mesh(where)

    def part(x: torch.Tensor, dim: int = dim) -> torch.Tensor:
        return parallel.shard(x, ranks, dim=dim, layout=layout)

    def joined(x: torch.Tensor) -> torch.Tensor:
        return parallel.unshard(x, ranks, dim=dim, layout=layout)

    shard = whole.sharded(part)
    call = parallel.attention if shard.lengths is None else parallel.attention_varlen
    out, lse = shard.run(call, mesh=ranks, layout=layout, method=method, kernel=kernel)
    return shard.results(out, lse, part(d_out), part(d_lse), joined, ranks_of(ranks).sum)


class Problem:
    """The tensors of a case, each with a gradient if it can have one."""

    def __init__(self, case: Case, device: Any = "cpu") -> None:
        inputs = case.inputs()
        self.device, self.learned = device, []
        self.operands = [
            arrays.as_tensor(x).to(device, copy=True).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)
        ]
        self.options = {name: with_tensors(value, self._tensor) for name, value in inputs.options.items()}
        self.lengths = inputs.lengths

    def _tensor(self, values: Any) -> torch.Tensor:
        made = torch.from_numpy(np.array(values)).to(self.device)
        if made.is_floating_point():
            self.learned.append(made.requires_grad_())
        return made

    def sharded(self, part: Any) -> Problem:
        """This rank's q, k, v and positions."""
        self.operands = [part(x.detach()).clone().requires_grad_() for x in self.operands]
        rope = self.options.get("rope")
        if isinstance(rope, Rope):
            given = {name: x for name, x in rope.arrays.items() if name.startswith("positions")}
            self.options["rope"] = replace(
                rope, **{name: part(torch.as_tensor(x, device=self.device), -1) for name, x in given.items()}
            )
        return self

    def run(self, call: Any, **how: Any) -> Any:
        return call(*self.operands, *(self.lengths or ()), **self.options, **how, return_lse=True)

    def results(
        self, out: Any, lse: Any, d_out: Any, d_lse: Any, joined: Change = lambda x: x, total: Change = lambda x: x
    ) -> dict[str, Any]:
        """lse may be -inf, and has no slope there."""
        ((out * d_out).sum() + (torch.where(lse > -torch.inf, lse, 0) * d_lse).sum()).backward()
        made = {"out": joined(out.detach()), "lse": joined(lse.detach())}
        made |= {f"d_{name}": joined(x.grad) for name, x in zip("qkv", self.operands, strict=True)}
        return made | {f"d_array {i}": None if x.grad is None else total(x.grad) for i, x in enumerate(self.learned)}

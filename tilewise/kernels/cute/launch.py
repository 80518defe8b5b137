"""A call's kernel: which, on what, and with which arguments."""

from __future__ import annotations

from typing import Any

import torch

from tilewise import arrays
from tilewise.kernels.cute import library
from tilewise.kernels.cute.rungs import Rung
from tilewise.kernels.cute.wanted import Wanted, unaligned, wanted
from tilewise.kernels.uploads import loaded_on, plan_on, tensor
from tilewise.spec import Attention, Partial, Shape

_ALIGNED = 16  # bytes that are loaded at once


def forward(rung: Rung, spec: Attention, q: Any, k: Any, v: Any, arch: str) -> Partial:
    """Attention on (batch, heads, n, d) tensors of a GPU."""
    shape = Shape.of(spec, q, k, v)
    out = torch.empty_strided(*arrays.stored_as(q, v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    plan = plan_on(q.device, spec, shape, rung.tile(shape), by_key=False)
    if 0 in (plan.records.shape[2], shape.heads, shape.batch):
        return Partial(out, lse)
    records = plan.records.expand(shape.batch, shape.heads, -1, -1)
    sinks = lse if spec.sinks is None else tensor(spec.sinks, q.device).float()
    loaded = tuple(map(as_kernels_take, loaded_on(spec, q.device))) or (lse.view(-1),)
    rows = [q.detach(), k.detach(), v.detach(), out]
    kernel = chosen(rung, spec, shape, rows)
    told = (*(_steps_in_order(x, kernel.vector) for x in rows), lse, records, plan.runs, sinks.reshape(-1), loaded)
    library.kernel(kernel, arch)(*told, spec.scale)
    return Partial(out, lse)


def chosen(rung: Rung, spec: Attention, shape: Shape, rows: list[Any]) -> Wanted:
    """The kernel for arrays that lie as these."""
    kernel = wanted(rung, spec, shape)
    return kernel if all(map(is_aligned, rows)) else unaligned(kernel)


def is_aligned(x: Any) -> bool:
    """Whether its rows begin at multiples of 16 bytes, and are as many bytes long."""
    steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return all(n * x.element_size() % _ALIGNED == 0 for n in (x.shape[-1], *steps)) and x.data_ptr() % _ALIGNED == 0


def _steps_in_order(x: Any, vector: int) -> Any:
    """With steps that are multiples of `vector`: of a dimension of size 1 PyTorch may tell any."""
    if all(step % vector == 0 for step in x.stride()[:-1]):
        return x
    steps = [step if size > 1 else vector for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return x.as_strided(x.shape, (*steps, 1))


def as_kernels_take(x: Any) -> Any:
    """An array of a variant: of one dimension at least, conditions as bytes."""
    x = x if arrays.is_torch(x) else arrays.as_tensor(x)
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return x if x.ndim else x.reshape(1)

"""A call's kernel: which, on what, and with which arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewise import arrays
from tilewise.dispatch import Unsupported
from tilewise.kernels import gpus
from tilewise.kernels.cute import library, support
from tilewise.kernels.cute.ordering import items, never_without_keys
from tilewise.kernels.cute.rungs import BASIC, Rung
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.kernels.uploads import Plan, brought, loaded_on, plan_on, planned_on, tensor
from tilewise.spec import Attention, Partial, Shape


def forward(rung: Rung, spec: Attention, q: Any, k: Any, v: Any, arch: str) -> Partial:
    """Attention on (batch, heads, n, d) tensors of a GPU."""
    shape = Shape.of(spec, q, k, v)
    out = torch.empty_strided(*arrays.stored_as(q, v), dtype=q.dtype, device=q.device)
    rows = [x.detach() for x in (q, k, v, out)]
    kernel = library.granted(kernel_of(rung, spec, shape, aligned=all(map(is_aligned, rows))), arch)
    remainder = torch.empty_like(out) if kernel.remainder else None
    more = () if not kernel.persistent else (steps_in_order(out if remainder is None else remainder, kernel.vector),)
    return Partial(out, run(kernel, spec, shape, rows, more, arch), remainder)


def run(kernel: Wanted, spec: Attention, shape: Shape, rows: Sequence[Any], more: Sequence[Any], arch: str) -> Any:
    """Launch it on q, k, v and the output, and what else it takes at the end; the lse that it leaves."""
    device = rows[0].device
    lse = torch.empty((shape.batch, shape.heads, shape.n_q), dtype=torch.float32, device=device)
    plan = _plan(kernel, device, spec, shape)
    if 0 in (plan.records.shape[2], shape.heads, shape.batch):
        return lse
    records = plan.records.expand(shape.batch, shape.heads, -1, -1)
    sinks = (lse if spec.sinks is None else tensor(spec.sinks, device).float().contiguous()).view(-1)
    loaded = tuple(map(as_kernels_take, loaded_on(spec, device))) or (sinks,)  # never empty
    given = (steps_in_order(x, kernel.vector) for x in rows)
    launch = library.kernel(kernel, arch)
    if kernel.table is not None:
        loaded = (*loaded, _as_copied(loaded[kernel.table.slot]))
    if kernel.persistent:
        shares_rows = kernel.table is not None and kernel.table.is_shared
        more = (*items(device, shape, plan, shares_rows), *more)
    launch(*given, lse, records, plan.runs, sinks, loaded, spec.scale, *more)
    return lse


def _plan(kernel: Wanted, device: Any, spec: Attention, shape: Shape) -> Plan:
    if not kernel.persistent:
        return plan_on(device, spec, shape, kernel.tile, by_key=False)
    return planned_on(
        device, spec, shape, kernel.tile, False, "items", lambda made: brought(device, never_without_keys(made))
    )


def chosen(
    named: Rung | None, spec: Attention, shape: Shape, capability: tuple[int, int], q: Any, k: Any, v: Any
) -> Rung:
    """The rung for arrays that lie as these: the one that was named, or that suits the shape, if it can load them; if
    not, the first one, which takes them however they lie."""
    suited = named or support.suited(shape, capability)
    reason = cannot_be_copied({"q": q, "k": k, "v": v}) if suited.maps else None
    if reason is None:
        return suited
    other = support.unsupported(spec, shape, BASIC, capability)
    if named is None and other is None:
        return BASIC
    instead = "kernel='cute/basic' takes it" if other is None else f"cute/basic neither: {other}; make them contiguous"
    raise Unsupported(f"the kernel {suited.name!r} cannot compute this call: {reason}; {instead}")


def cannot_be_copied(given: dict[str, Any]) -> str | None:
    """Why the copy engine does not take these arrays, or None."""
    reasons = (gpus.not_copied(name, x.data_ptr(), _steps(x)) for name, x in given.items())
    return next((reason for reason in reasons if reason is not None), None)


def is_aligned(x: Any) -> bool:
    """Whether its rows begin at multiples of 16 bytes, and are as many bytes long."""
    numbers = (x.data_ptr(), x.shape[-1] * x.element_size(), *_steps(x))
    return all(n % gpus.COPIED == 0 for n in numbers)


def _steps(x: Any) -> list[int]:
    """From row to row, head to head and batch to batch, in bytes. That of a dimension of size 1 is never taken."""
    sizes = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return [step * x.element_size() for size, step in sizes if size > 1]


def steps_in_order(x: Any, vector: int) -> Any:
    """With steps that are multiples of `vector`: of a dimension of size 1 PyTorch may tell any."""
    sizes = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.as_strided(x.shape, (*(step if size > 1 else vector for size, step in sizes), 1))


def _as_copied(table: Any) -> Any:
    """Of four dimensions, the last of them queries and keys, as the copy engine takes it."""
    return steps_in_order(table[(None,) * (4 - table.ndim)], gpus.COPIED // table.element_size())


def as_kernels_take(x: Any) -> Any:
    """An array of a variant: of one dimension at least, conditions as bytes."""
    x = x if arrays.is_torch(x) else arrays.as_tensor(x)
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return x if x.ndim else x.reshape(1)

"""DTensors in, DTensors out: the shards that they hold, and results as what q was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def mesh_of(mesh: Any, *given: Any) -> Any:
    """The mesh that a caller names, or that of DTensors."""
    named = (x.device_mesh for x in given if isinstance(x, DTensor))
    return mesh if mesh is not None else next(named, None)


def local(q: Any, k: Any, v: Any, mesh: Any, dim: int) -> tuple[Any, Any, Any]:
    """This rank's shards, if DTensors lie as they must: split along the sequence, over this mesh."""
    if not any(isinstance(x, DTensor) for x in (q, k, v)):
        return q, k, v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name}: expected a DTensor as the others are, got {type(x).__name__}")
        split = _split(x, dim)
        if tuple(x.placements) != split:
            raise ValueError(
                f"{name}: expected placements {split}, the sequence split, got {tuple(x.placements)}; "
                "change them with .redistribute(...)"
            )
        if x.device_mesh != mesh:
            raise ValueError(f"{name}: expected a DTensor of the mesh {mesh}, got one of {x.device_mesh}")
    return q.to_local(), k.to_local(), v.to_local()


def like(q: Any, x: Tensor, dim: int) -> Any:
    """A result for rows of q, as a DTensor if q is one. Shards may be of unequal sizes, so it is told the whole's."""
    if not isinstance(q, DTensor):
        return x
    shape = (*q.shape[:-1], *x.shape[q.dim() - 1 :])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, q.device_mesh, _split(q, dim), run_check=False, shape=torch.Size(shape), stride=stride)


def _split(x: Any, dim: int) -> tuple[Any, ...]:
    return tuple(Shard(dim % x.dim()) for _ in x.placements)

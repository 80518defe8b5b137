"""Rotary embedding: what rows of tensors are turned by, on the device where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import arrays
from tilewise.pytorch.constants import constant_on
from tilewise.rope import Rope, Rotation, as_rotation, check_rows, counted_tables, joined, places
from tilewise.spec import Lengths, Shape


def rotations_on(device: Any, rope: Rope, shape: Shape, lengths: Lengths | None) -> tuple[Rotation, Rotation]:
    """What the queries and the keys of a call are turned by, in float32."""
    q, k = (rotation_on(device, rope, where, shape.d) for where in places(rope, shape, lengths))
    return q, k


def rotation_on(device: Any, rope: Rope, where: Any, d: int, wide: bool = False) -> Rotation:
    """where: given positions, or ranges. wide: in float64."""
    dtype = torch.float64 if wide else torch.float32
    if rope.cos is not None:
        return as_rotation(_given(rope, where, device, dtype), rope)
    if not isinstance(where, tuple):
        return as_rotation(_computed(_tensor(where, device), rope, d, dtype), rope)
    if arrays.compiling():  # which has no tables to keep, and may hold lengths open
        counted = torch.cat([torch.arange(r.start, r.stop, device=device) for r in where])
        return as_rotation(_computed(counted, rope, d, dtype), rope)
    tables = counted_tables(rope, where, d, "float64" if wide else "float32")
    cos, sin = (arrays.as_tensor(x) if device.type == "cpu" else constant_on(x, device) for x in tables)
    return as_rotation(joined((cos, sin), where), rope)


def _given(rope: Rope, where: Any, device: Any, dtype: Any) -> tuple[Tensor, Tensor]:
    """Rows of a caller's tables. Positions on a GPU are not waited for: they are clamped to the tables."""
    cos, sin = (_tensor(x, device).to(dtype) for x in (rope.cos, rope.sin))
    if isinstance(where, tuple):
        check_rows(where, cos.shape[0])
        return joined((cos, sin), where)
    if device.type == "cpu" and not arrays.compiling():
        check_rows(where, cos.shape[0])
    index = _tensor(where, device).long().clamp(0, cos.shape[0] - 1)
    return cos[index], sin[index]


def _computed(positions: Tensor, rope: Rope, d: int, dtype: Any) -> tuple[Tensor, Tensor]:
    """In float64 on the way, as NumPy has it: see rope.cos_and_sin."""
    pairs = rope.pairs(d)
    exponents = torch.arange(pairs, dtype=torch.float64, device=positions.device) / -pairs
    angles = positions.to(torch.float64)[..., None] * float(rope.base) ** exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _tensor(x: Any, device: Any) -> Tensor:
    return (x.detach() if arrays.is_torch(x) else arrays.as_tensor(x)).to(device)

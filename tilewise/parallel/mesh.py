"""The ranks that a mesh names, in its order, and what they do all together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from tilewise.parallel.groups import carrier, finish, line
from tilewise.parallel.team import Team


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a mesh of one or two dimensions, in its order. Neighbours along the last share heads, if it has
    two."""

    groups: tuple[Any, ...]  # a process group a dimension
    sizes: tuple[int, ...]
    place: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def me(self) -> int:
        return self.place[0] if len(self.place) == 1 else self.place[0] * self.sizes[1] + self.place[1]

    def told(self, x: Tensor) -> Tensor:
        """x of every rank, (ranks, ...), from host to host: they are of one size."""
        for group in reversed(self.groups):
            x = line(group).gather(x)
        return x.flatten(0, len(self.groups) - 1)

    def agree_on(self, number: int) -> bool:
        """Whether every rank has it, told by the least of both signs."""
        least = torch.tensor([number, -number])
        for group in self.groups:
            least = line(group).least(least)
        found: list[int] = least.tolist()
        return found == [number, -number]

    def begin(self, device: torch.device) -> None:
        """Before tensors of this device travel."""
        for group in self.groups:
            line(group).begin(device)

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, (ranks, ...): they are of one size."""
        device = x.device
        for group in reversed(self.groups):
            by = carrier(group, device)
            sent = x.contiguous().to(by)
            parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
            finish([dist.all_gather(parts, sent, group=group, async_op=True)], group, by)
            x = torch.stack(parts)
        return x.flatten(0, len(self.groups) - 1).to(device)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        total = x.contiguous().clone()
        for group in self.groups:
            by = carrier(group, x.device)
            total = total.to(by)
            finish([dist.all_reduce(total, group=group, async_op=True)], group, by)
        return total.to(x.device)

    def teams(self, heads: int) -> tuple[Team, Team]:
        """(those that share heads, `heads` neighbours; those that share the sequence, one of each such team)."""
        if len(self.groups) == 2:
            across, along = (Team(group, tuple(range(n)), i) for group, n, i in self._dimensions)
            return along, across
        group, me = self.groups[0], self.me
        first = me // heads * heads
        near = Team(group, tuple(range(first, first + heads)), me - first)
        far = Team(group, tuple(range(me % heads, self.size, heads)), me // heads)
        return near, far

    @property
    def _dimensions(self) -> list[tuple[Any, int, int]]:
        return list(zip(self.groups, self.sizes, self.place, strict=True))


def ranks_of(mesh: Any) -> Ranks:
    """mesh: a DeviceMesh of one or two dimensions, or a process group."""
    if isinstance(mesh, dist.ProcessGroup):
        return Ranks((mesh,), (dist.get_world_size(mesh),), (dist.get_rank(mesh),))
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to others
        raise ValueError(f"mesh: rank {dist.get_rank()} is not in this process group; only its members call")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a DeviceMesh or a process group, got {type(mesh).__name__}; "
            "torch.distributed.device_mesh.init_device_mesh(device, (ranks,)) makes one"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh: expected one dimension, or two (sequence, heads), got {mesh.ndim}; take those that share the "
            "sequence: mesh['name']"
        )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not in it: {mesh}")
    groups = tuple(mesh.get_group(i) for i in range(mesh.ndim))
    return Ranks(groups, tuple(mesh.size(i) for i in range(mesh.ndim)), tuple(place))

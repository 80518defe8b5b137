"""The processes that share a sequence, and what they send each other: one exchange serves every method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

Sizes = Sequence[tuple[int, ...]]


class PeerError(RuntimeError):
    """Another rank did not answer, or made a call that does not go with this one. Raised on every rank."""


@dataclass
class Traffic:
    """Bytes and messages that this process sent to others for attention."""

    bytes: int = 0
    messages: int = 0


_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """What is sent in the block, backward passes included."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


@dataclass(frozen=True, eq=False)
class Team:
    """Ranks of a process group that work on something together; `me` is this process's place among them."""

    group: Any
    members: tuple[int, ...]  # their ranks in the group
    me: int

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def others(self) -> list[int]:
        return [i for i in range(self.size) if i != self.me]

    def exchange(self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sizes], like: Tensor) -> Pending:
        """Begin to send tensors to members and to receive others of these sizes. Nothing to send is no message, which
        the receiver must know as well."""
        going = {peer: _packed(tensors) for peer, tensors in sends.items() if _count(t.shape for t in tensors)}
        coming = {peer: like.new_empty(_count(sizes)) for peer, sizes in receives.items() if _count(sizes)}
        for traffic in _counting:
            traffic.bytes += sum(x.nbytes for x in going.values())
            traffic.messages += len(going)
        return Pending(self, going, coming, receives, like)


@dataclass(eq=False)
class Pending:
    """An exchange under way. What is sent is held until it is done."""

    team: Team
    going: dict[int, Tensor]
    coming: dict[int, Tensor]
    sizes: Mapping[int, Sizes]
    like: Tensor
    work: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        group, ranks = self.team.group, self.team.members
        moves = [(dist.isend, self.going), (dist.irecv, self.coming)]
        operations = [
            dist.P2POp(move, x, dist.get_global_rank(group, ranks[peer]), group)
            for move, tensors in moves
            for peer, x in tensors.items()
        ]
        with _reported(self.team, self._peers):
            self.work = dist.batch_isend_irecv(operations) if operations else []

    @property
    def _peers(self) -> list[int]:
        return sorted(self.going.keys() | self.coming.keys())

    def wait(self) -> dict[int, list[Tensor]]:
        """What came, from each member; on a GPU the stream waits, not the host."""
        with _reported(self.team, self._peers):
            for work in self.work:
                work.wait()
        self.going.clear()
        empty = self.like.new_empty(0)
        return {peer: _unpacked(self.coming.get(peer, empty), sizes) for peer, sizes in self.sizes.items()}


@contextmanager
def _reported(team: Team, peers: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        ranks = ", ".join(str(team.members[peer]) for peer in peers)
        raise PeerError(
            f"rank {team.members[team.me]} of {dist.get_world_size(team.group)} waited for rank {ranks} in vain: it "
            f"ended, or makes another call; look for its own error first ({error})"
        ) from error


def _count(sizes: Any) -> int:
    return sum(torch.Size(size).numel() for size in sizes)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(flat: Tensor, sizes: Sizes) -> list[Tensor]:
    parts = flat.split([torch.Size(size).numel() for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


# -- meshes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a mesh of one or two dimensions, in its order. Neighbours along the last share heads, if it has
    two."""

    groups: tuple[Any, ...]  # a process group a dimension
    sizes: tuple[int, ...]
    place: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.sizes[0] * (self.sizes[1] if len(self.sizes) == 2 else 1)

    @property
    def me(self) -> int:
        return self.place[0] if len(self.place) == 1 else self.place[0] * self.sizes[1] + self.place[1]

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, (ranks, ...): they are of one size."""
        for group in reversed(self.groups):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            with _reported(_whole(group), range(len(parts))):
                dist.all_gather(parts, x.contiguous(), group=group)
            x = torch.stack(parts)
        return x.flatten(0, len(self.groups) - 1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        x = x.contiguous().clone()
        for group in self.groups:
            with _reported(_whole(group), range(dist.get_world_size(group))):
                dist.all_reduce(x, group=group)
        return x

    def teams(self, heads: int) -> tuple[Team, Team]:
        """(those that share heads, `heads` neighbours; those that share the sequence, one of each such team)."""
        if len(self.groups) == 2:
            along, across = _whole(self.groups[1]), _whole(self.groups[0])
            return along, across
        group, me = self.groups[0], self.me
        first = me // heads * heads
        near = Team(group, tuple(range(first, first + heads)), me - first)
        far = Team(group, tuple(range(me % heads, self.size, heads)), me // heads)
        return near, far


def _whole(group: Any) -> Team:
    return Team(group, tuple(range(dist.get_world_size(group))), dist.get_rank(group))


def ranks_of(mesh: Any) -> Ranks:
    """mesh: a DeviceMesh of one or two dimensions, or a process group."""
    if isinstance(mesh, dist.ProcessGroup):
        return Ranks((mesh,), (dist.get_world_size(mesh),), (dist.get_rank(mesh),))
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

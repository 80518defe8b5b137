"""The processes that share a sequence, and what they send each other: one exchange serves every method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.parallel.groups import carrier, finish, reported

Sizes = Sequence[tuple[int, ...]]


@dataclass(eq=False)
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
        by = carrier(self.group, like.device)
        going = {peer: _packed(tensors).to(by) for peer, tensors in sends.items() if _count(t.shape for t in tensors)}
        coming = {peer: like.new_empty(_count(sizes), device=by) for peer, sizes in receives.items() if _count(sizes)}
        for traffic in _counting:
            traffic.bytes += sum(x.nbytes for x in going.values())
            traffic.messages += len(going)
        return Pending(self, going, coming, receives, like, by)


@dataclass(eq=False)
class Pending:
    """An exchange under way. What is sent is held until it is done."""

    team: Team
    going: dict[int, Tensor]
    coming: dict[int, Tensor]
    sizes: Mapping[int, Sizes]
    like: Tensor
    by: torch.device  # where what travels lies meanwhile
    work: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        group, ranks = self.team.group, self.team.members
        operations = [
            dist.P2POp(move, x, dist.get_global_rank(group, ranks[peer]), group)
            for move, tensors in ((dist.isend, self.going), (dist.irecv, self.coming))
            for peer, x in tensors.items()
        ]
        with reported(group, self._peers):
            self.work = dist.batch_isend_irecv(operations) if operations else []

    @property
    def _peers(self) -> list[int]:
        """Their ranks in the group."""
        return sorted(self.team.members[peer] for peer in self.going.keys() | self.coming.keys())

    def wait(self) -> dict[int, list[Tensor]]:
        """What came, from each member; on a GPU the stream waits, not the host."""
        finish(self.work, self.team.group, self.by, self._peers)
        self.going.clear()
        empty = self.like.new_empty(0)
        came = {peer: self.coming.get(peer, empty).to(self.like.device) for peer in self.sizes}
        return {peer: _unpacked(came[peer], sizes) for peer, sizes in self.sizes.items()}


def _count(sizes: Any) -> int:
    return sum(torch.Size(size).numel() for size in sizes)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(flat: Tensor, sizes: Sizes) -> list[Tensor]:
    parts = flat.split([torch.Size(size).numel() for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

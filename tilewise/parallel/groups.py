"""What process groups leave open: how long their ranks wait, which tensors they can send, and a line between hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_process_group_store

HOST = torch.device("cpu")


class PeerError(RuntimeError):
    """Another rank did not answer, or made a call that does not go with this one. Raised on every rank."""


@contextmanager
def reported(group: Any, peers: Iterable[int] | None = None) -> Iterator[None]:
    """What the group raises as a PeerError. peers: those that were waited for, of all."""
    try:
        yield
    except RuntimeError as error:
        me, size = dist.get_rank(group), dist.get_world_size(group)
        others = (rank for rank in (range(size) if peers is None else peers) if rank != me)
        raise PeerError(
            f"rank {me} of {size} waited for rank {', '.join(map(str, others))} in vain: it ended, or makes another "
            f"call; look for its own error first ({error})"
        ) from error


def patience(group: Any) -> timedelta:
    """How long to wait. The groups of a DeviceMesh over a part of the world have PyTorch's half an hour, whatever the
    world's timeout: the shorter of the two counts."""
    return min(_timeout(group), _timeout(dist.group.WORLD))


def _timeout(group: Any) -> timedelta:
    backends = (group._get_backend(torch.device(kind)) for kind in _backends(group))
    waits: Iterator[timedelta] = (getattr(each.options, "_timeout", default_pg_timeout) for each in backends)
    return min(waits)


def _backends(group: Any) -> dict[str, str]:
    """By the type of device whose tensors they send."""
    return dict(each.split(":") for each in dist.get_backend_config(group).split(","))


def carrier(group: Any, device: torch.device) -> torch.device:
    """Where tensors of a device must lie to be sent: there, or on the host, as Gloo sends from nowhere else."""
    backends = _backends(group)
    if backends.get(device.type, "gloo") != "gloo":
        return device
    if HOST.type not in backends:
        raise ValueError(
            f"mesh: its processes have {dist.get_backend_config(group)}, which sends no tensors of {device.type}; move "
            'q, k and v, or begin with init_process_group("cpu:gloo,cuda:nccl")'
        )
    return HOST


def finish(work: Iterable[Any], group: Any, by: torch.device, peers: Iterable[int] | None = None) -> None:
    """Wait for what was sent and received, on a GPU in its stream: there the group itself looks after its timeout."""
    with reported(group, peers):
        for each in work:
            if by == HOST:
                each.wait(patience(group))
            else:
                each.wait()


class Line:
    """Between the hosts of a group's ranks: what they tell each other waits for no GPU, and a rank that ended shows."""

    def __init__(self, group: Any) -> None:
        self._group = ref(group)  # one that is destroyed takes its line along
        self.size = dist.get_world_size(group)
        store = dist.PrefixStore("tilewise", _get_process_group_store(group))
        with reported(group):
            self._hosts = dist.ProcessGroupGloo(store, dist.get_rank(group), self.size, patience(group))
        self._begun: set[torch.device] = set()

    @property
    def group(self) -> Any:
        return self._group()

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, (ranks, ...)."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with reported(self.group):
            self._hosts.allgather([parts], [x]).wait()
        return torch.stack(parts)

    def least(self, x: Tensor) -> Tensor:
        """The least of every rank's, number by number."""
        options, found = dist.AllreduceOptions(), x.clone()
        options.reduceOp = dist.ReduceOp.MIN
        with reported(self.group):
            self._hosts.allreduce([found], options).wait()
        return found

    def begin(self, device: torch.device) -> None:
        """NCCL connects at a group's first call, which all ranks must make: an exchange may be of some alone."""
        if device not in self._begun:
            by = carrier(self.group, device)
            if by != HOST:
                dist.all_reduce(torch.zeros(1, device=by), group=self.group)
            self._begun.add(device)


_lines: WeakKeyDictionary[Any, Line] = WeakKeyDictionary()


def line(group: Any) -> Line:
    """The group's line, made when it is first asked for, by all of its ranks."""
    if group not in _lines:
        _lines[group] = Line(group)
    return _lines[group]

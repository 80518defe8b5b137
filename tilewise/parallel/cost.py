"""What each method would send, hold and take: the small model that `auto` chooses by and `explain` prints.

It counts the bytes of what travels as the methods do, so that these are exact; seconds are bytes over a bandwidth and
operations over a speed, good enough to tell methods apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.explanation import count, size
from tilewise.parallel import heads, needs
from tilewise.parallel.layout import Layout
from tilewise.parallel.needs import Needs
from tilewise.schedule import itemsize
from tilewise.sharing import Kept
from tilewise.spec import Attention, Shape

METHODS = ("auto", "ring", "gather", "heads", "mix")


@dataclass(frozen=True)
class Machine:
    """What a rank computes and sends: operations a second, bytes a second to the `node` ranks of its machine and to
    others, seconds a message and a call; and bytes that a gather may hold of others' keys."""

    flops: float
    near: float
    far: float
    node: int
    latency: float
    call: float
    spare: float = math.inf

    def bandwidth(self, ranks: int) -> float:
        """Among so many neighbours."""
        return self.near if ranks <= self.node else self.far


# Published: NVLink 4 has 450 GB/s a direction, InfiniBand NDR 50 GB/s; of an H100's 989 TFLOP/s attention reaches half.
H100 = Machine(flops=4.5e14, near=4.5e11, far=5e10, node=8, latency=1e-5, call=1e-5, spare=2**30)
# Two cores, and Gloo on one machine.
CPU = Machine(flops=5e10, near=1e9, far=1e9, node=1, latency=1e-4, call=1e-4, spare=2**28)


@dataclass(frozen=True)
class Way:
    """How ranks share the work: teams of `heads` neighbours share heads, and the teams share the sequence."""

    sequence: str  # ring or gather
    heads: int = 1

    def named(self, ranks: int) -> str:
        if self.heads == ranks > 1:
            return "heads"
        return self.sequence if self.heads == 1 else f"{self.sequence} x {self.heads} heads"


@dataclass(frozen=True)
class Cost:
    """Of the busiest rank: bytes and messages sent, forward and backward; bytes of keys held; seconds forward."""

    way: Way
    needs: Needs  # of teams that share the sequence
    forward: int
    backward: int
    messages: int
    held: int
    compute: float
    seconds: float


def ways(ranks: int, dims: Sequence[int], shape: Shape, method: str) -> list[Way]:
    """Those that the mesh, the heads and the method asked for allow. Raises if none does."""
    possible = [n for n in range(1, ranks + 1) if ranks % n == 0] if len(dims) == 1 else [dims[1]]
    refusals = {n: heads.refusal(shape.heads, shape.heads_k, n) for n in possible}
    able = [n for n in possible if refusals[n] is None]
    sequences = ("gather",) if method == "gather" else ("ring",) if method in ("ring", "mix") else ("ring", "gather")
    made = [Way(each, n) for n in able for each in (sequences if n < ranks else sequences[-1:])]
    sizes = {"heads": [ranks], "mix": possible[1:-1], "ring": [1], "gather": [1], "auto": possible}[method]
    found = [way for way in made if way.heads in sizes or (len(dims) == 2 and method != "heads")]
    if not found:
        told = "; ".join(f"{n}: {why or 'not what was asked for'}" for n, why in refusals.items())
        raise ValueError(
            f"method: {method!r} cannot be had with {shape.heads} heads (keys: {shape.heads_k}) on a mesh of "
            f"{' x '.join(map(str, dims))}; ranks that share heads: {told}; "
            "method='ring' on a mesh of one dimension takes any"
        )
    return found


def costs(
    ways: Sequence[Way], spec: Attention, shape: Shape, queries: Layout, keys: Layout, machine: Machine
) -> list[Cost]:
    """What each would cost, kept as their needs are. Those with as many heads a team have the same needs."""
    sizes = {way.heads for way in ways}
    found = {n: needs.find(spec, shape, queries.joined(n), keys.joined(n)) for n in sizes}
    given = [(way, found[way.heads], shape, queries, keys, machine) for way in ways]
    return [_known.found(each, functools.partial(_cost, *each)) for each in given]


_known: Kept[Cost] = Kept(64)


def _cost(way: Way, found: Needs, shape: Shape, queries: Layout, keys: Layout, machine: Machine) -> Cost:
    n = way.heads
    own_q, own_k = (each[0] for each in heads.shares(shape.heads, shape.heads_k, n))
    unit = shape.batch * len(own_k) * (shape.d + shape.d_v) * itemsize(shape.dtype)
    swapped = _swapped(shape, queries, keys, n)
    sends, returns = _sends(found, way.sequence), found.rows  # what a rank needed, it sends gradients of
    sent = int(sends.sum(1).max()) * unit
    back = int((sends.sum(1) + returns.sum(1)).max()) * unit
    messages = int(np.count_nonzero(sends, 1).max()) + 5 * (n - 1)
    compute = 2 * max(found.work) * shape.batch * len(own_q) * (shape.d + shape.d_v) / machine.flops
    moving = sent / machine.bandwidth(queries.ranks)
    seconds = swapped / machine.bandwidth(n) + messages * machine.latency
    if way.sequence == "ring":  # keys travel while those before them are computed with
        seconds += max(compute, moving) + (1 + int(np.count_nonzero(returns, 1).max())) * machine.call
    else:
        seconds += compute + moving + machine.call
    held = _held(found, way.sequence) * unit
    return Cost(way, found, sent + swapped, back + swapped, messages, held, compute, seconds)


def _swapped(shape: Shape, queries: Layout, keys: Layout, n: int) -> int:
    """Bytes that a rank sends to exchange rows for heads: q, k and v, and of other rows out and lse."""
    if n == 1:
        return 0
    heads_q, heads_k = heads.shares(shape.heads, shape.heads_k, n)
    own_q, own_k = (np.array([len(x) for x in each]) for each in (heads_q, heads_k))
    unit, wide = itemsize(shape.dtype), arrays.compute_dtype(shape.dtype).itemsize
    rows_q, rows_k = (each.sizes.reshape(-1, n) for each in (queries, keys))  # of the ranks of each team
    given = rows_q * (shape.heads - own_q) * shape.d * unit
    given += rows_k * (own_k.sum() - own_k) * (shape.d + shape.d_v) * unit
    given += (rows_q.sum(1, keepdims=True) - rows_q) * own_q * (shape.d_v * unit + wide)
    return int(given.max()) * shape.batch


def _sends(found: Needs, sequence: str) -> Array:
    """(ranks, messages): rows of keys in each message that a rank sends; 0: there is none."""
    if sequence == "gather":
        return np.transpose(found.rows)
    me, hops = np.arange(found.ranks)[:, None], np.arange(found.ranks - 1)
    around: Array = found.rows_beyond[hops + 1, (me - hops) % found.ranks]
    return around


def _held(found: Needs, sequence: str) -> int:
    """Rows of keys that a rank has at a time beside its own: three blocks of a ring (one that goes, one that is
    computed with, one that comes), or all it needs."""
    if sequence == "ring":
        return min(3, found.ranks) * int(found.rows_beyond[1].max())
    return int(found.rows.sum(1).max())


def least(costs: Sequence[Cost], machine: Machine) -> Cost:
    """The quickest; of equals the one that holds least. A gather's memory grows with the sequence, however many ranks
    share it: beyond what there is to spare it is taken only if there is nothing else."""
    able = [each for each in costs if fits(each, machine)]
    return min(able or costs, key=lambda each: (each.seconds, each.held))


def fits(cost: Cost, machine: Machine) -> bool:
    """Whether its memory is a few parts of the sequence of a rank's own size, or what there is to spare."""
    return cost.way.sequence == "ring" or cost.held <= machine.spare


@dataclass(frozen=True, eq=False)
class Explanation:
    """Which method a call would take, and what each would cost the busiest rank. Print it."""

    taken: Cost
    costs: list[Cost]
    machine: Machine
    ranks: int
    shape: Shape

    def __str__(self) -> str:
        s = self.shape
        lines = [
            f"attention over {self.ranks} ranks: batch {s.batch}, heads {s.heads} (keys: {s.heads_k}), "
            f"queries {s.n_q}, keys {s.n_k}, head dim {s.d}, {s.dtype} on {s.device}",
            f"method: {self.taken.way.named(self.ranks)}",
            f"  {'':16}{'sent forward':>14}{'backward':>12}{'keys held':>12}{'messages':>10}{'seconds':>10}",
        ]
        for each in self.costs:
            lines.append(
                f"  {each.way.named(self.ranks):16}{size(each.forward):>14}{size(each.backward):>12}"
                f"{size(each.held):>12}{each.messages:>10}{each.seconds:>10.2g}"
            )
        if not all(fits(each, self.machine) for each in self.costs):
            lines.append(f"auto takes no gather that holds more than {size(int(self.machine.spare))} if it can")
        work = self.taken.needs.work
        even = max(work) * len(work) / max(sum(work), 1)
        lines.append(f"scores: {count(sum(work))} a head; the busiest rank has {even:.2f} times its even share")
        return "\n".join(lines)

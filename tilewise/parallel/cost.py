"""What each method would send, hold and take: the small model that `auto` chooses by and `explain` prints.

It counts the bytes of what travels as the methods do, so that these are exact; seconds are bytes over a bandwidth and
operations over a speed, good enough to tell methods apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewise import arrays
from tilewise.explanation import count, size
from tilewise.parallel import heads, needs
from tilewise.parallel.layout import Layout
from tilewise.parallel.needs import Needs, Ranges
from tilewise.schedule import itemsize
from tilewise.spec import Attention, Shape

METHODS = ("auto", "ring", "gather", "heads", "mix")


@dataclass(frozen=True)
class Machine:
    """What a rank computes and sends: operations a second, bytes a second to others, seconds a message and a call."""

    flops: float
    bandwidth: float
    latency: float
    call: float


# Published: NVLink 4 has 450 GB/s a direction; of the tensor cores' 989 TFLOP/s attention reaches about half.
GPU = Machine(flops=4.5e14, bandwidth=4.5e11, latency=1e-5, call=1e-5)
CPU = Machine(flops=5e10, bandwidth=1e9, latency=1e-4, call=1e-4)  # two cores, Gloo on one machine


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


def cost(way: Way, spec: Attention, shape: Shape, queries: Layout, keys: Layout, machine: Machine) -> Cost:
    n = way.heads
    found = needs.find(spec, shape, queries.joined(n), keys.joined(n))
    own_q, own_k = (each[0] for each in heads.shares(shape.heads, shape.heads_k, n))
    row = shape.batch * len(own_k) * (shape.d + shape.d_v) * itemsize(shape.dtype)
    swapped = _swapped(shape, queries, keys, n)
    travel, returned = _travels(found, way.sequence), _returned(found)
    teams = range(found.ranks)
    sent = max((travel[i] * row for i in teams), default=0)
    back = max(((travel[i] + returned[i]) * row for i in teams), default=0)
    compute = 2 * max(found.work) * shape.batch * len(own_q) * (shape.d + shape.d_v) / machine.flops
    steps = (found.ranks - 1 if sent else 0) + (4 * (n - 1))
    moving = sent / machine.bandwidth
    seconds = swapped / machine.bandwidth + steps * machine.latency
    if way.sequence == "ring":  # keys travel while those before them are computed with
        seconds += max(compute, moving) + found.ranks * machine.call
    else:
        seconds += compute + moving + machine.call
    blocks = _held(found, way.sequence)
    return Cost(way, found, sent + swapped, back + swapped, steps, blocks * row, compute, seconds)


def _swapped(shape: Shape, queries: Layout, keys: Layout, n: int) -> int:
    """Bytes that a rank sends to exchange rows for heads: q, k and v, and of other rows out and lse."""
    if n == 1:
        return 0
    heads_q, heads_k = heads.shares(shape.heads, shape.heads_k, n)
    unit, wide = itemsize(shape.dtype), arrays.compute_dtype(shape.dtype).itemsize
    most = 0
    for rank in range(queries.ranks):
        me, first = rank % n, rank - rank % n
        away_k = sum(len(each) for peer, each in enumerate(heads_k) if peer != me)
        given = queries.rows(rank) * (shape.heads - len(heads_q[me])) * shape.d * unit
        given += keys.rows(rank) * away_k * (shape.d + shape.d_v) * unit
        rows = sum(queries.rows(first + peer) for peer in range(n) if peer != me)
        given += rows * len(heads_q[me]) * (shape.d_v * unit + wide)
        most = max(most, given * shape.batch)
    return most


def _travels(found: Needs, sequence: str) -> list[int]:
    """Rows of keys that each rank sends."""
    every = range(found.ranks)
    if sequence == "gather":
        return [sum(_rows(found.of[r][s]) for r in every if r != s) for s in every]
    return [sum(_rows(found.beyond((me - hop) % found.ranks, hop + 1)) for hop in every[:-1]) for me in every]


def _returned(found: Needs) -> list[int]:
    """Rows of gradients that each rank sends back."""
    every = range(found.ranks)
    return [sum(_rows(found.of[me][s]) for s in every if s != me) for me in every]


def _held(found: Needs, sequence: str) -> int:
    """Rows of keys of others that a rank has at a time: two blocks of a ring, or all it needs."""
    every = range(found.ranks)
    if sequence == "ring":
        return 2 * max((_rows(found.beyond(s, 1)) for s in every), default=0) if found.ranks > 1 else 0
    return max((sum(_rows(found.of[r][s]) for s in every if s != r) for r in every), default=0)


def _rows(ranges: Ranges) -> int:
    return sum(map(len, ranges))


def least(costs: Iterable[Cost]) -> Cost:
    """The quickest; of equals the one that holds least."""
    return min(costs, key=lambda each: (each.seconds, each.held))


@dataclass(frozen=True, eq=False)
class Explanation:
    """Which method a call would take, and what each would cost the busiest rank. Print it."""

    taken: Cost
    costs: list[Cost]
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
        work = self.taken.needs.work
        even = max(work) * len(work) / max(sum(work), 1)
        lines.append(f"scores: {count(sum(work))} a head; the busiest rank has {even:.2f} times its even share")
        return "\n".join(lines)

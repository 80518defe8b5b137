"""Who waits for whom in the Hopper kernel: the CUDA simulator's trace of the real source, as spans of its roles."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tilewise.explainer import sources
from tilewise.kernels.cuda.rungs import ForwardSm90
from tilewise.kernels.cuda.simulator import Did, Event, Order
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Attention, Shape, Tile
from tilewise.steps import STEPS
from tilewise.walking import nodes

RUNG = "forward_sm90"
MOST_SCORES = 1 << 18  # of a call that is simulated: a second or two
MOST_NODES = 300
MOST_SPANS = 900
COPIES = "copy engine"
_BARRIERS_AT = 1008  # bytes that simulated shared memory is off the kernel's alignment by
_ITEMS = 4  # as in sm90.h
_BEGINNINGS = {
    Did.GOES_ON: Did.WAITS, Did.COPY_LANDED: Did.COPY_ISSUED, Did.PRODUCT_TAKEN: Did.PRODUCT_ISSUED,
}  # fmt: skip

Names = dict[int, str]  # of what is waited for, by its number


class Span(NamedTuple):
    """From one round to another. kind: "works", "waits", "copy" or "product"; step: of the source, if known."""

    role: str
    kind: str
    start: int
    end: int
    label: str
    step: str = ""


def timeline(spec: Attention, shape: Shape, tile: Tile, seed: int = 0) -> dict[str, Any]:
    """What the roles of block 0 did, for the page; or {"missing": why there is nothing to show}."""
    trace: list[Event] = []
    kernel = CudaSimKernel(RUNG, Order.RANDOM, seed=1, trace=trace)
    half = replace(shape, dtype="float16")
    missing = kernel.unavailable() or kernel.unsupported(spec, half) or _too_long(spec, half)
    if missing is None:
        try:
            _run(kernel, spec, half, tile, seed)
        except RuntimeError as error:  # a compiler that is there, but fails
            missing = str(error).splitlines()[0]
    if missing is not None:
        return {"missing": f"The timeline is the CUDA simulator's, which did not run: {missing}."}
    first_block = (event for event in trace if event.block == 0)
    made = sorted(spans(first_block, _names(half, tile)), key=lambda span: span.start)
    shown = made[:MOST_SPANS]
    end = max(span.start for span in shown)
    cut = [span._replace(end=min(span.end, end)) for span in shown] if len(made) > len(shown) else made
    return {"spans": cut, "roles": _roles(made), "cut": len(made) > len(shown)}


def _too_long(spec: Attention, shape: Shape) -> str | None:
    """Why nobody wants to wait for it: a new variant is compiled, and then every thread takes its turns."""
    if shape.heads * shape.n_q * shape.n_k > MOST_SCORES:
        return f"it would take long, and is asked for {MOST_SCORES:,} scores at most"
    if len(nodes(*spec.expressions)) > MOST_NODES:
        return f"to compile the variant would take long, and is tried for {MOST_NODES} operations at most"
    return None


def _run(kernel: CudaSimKernel, spec: Attention, shape: Shape, tile: Tile, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = (shape.n_q, shape.n_k, shape.n_k)
    q, k, v = (rng.standard_normal((1, shape.heads, n, shape.d)).astype(np.float16) for n in lengths)
    kernel.forward(spec, q, k, v, tile)


def spans(trace: Iterable[Event], names: Names) -> Iterator[Span]:
    """Each beginning with its end. Lanes that meet within a warp are left out: that is how warps work, no waiting."""
    told = [event for event in trace if role_of(event.warp) and not event.what.startswith("the other lanes")]
    begun: dict[tuple[Did, int], deque[Event]] = defaultdict(deque)
    for event in told:
        where = event.number if event.did in (Did.COPY_ISSUED, Did.COPY_LANDED) else event.warp
        if event.did in _BEGINNINGS:
            yield _span(begun[_BEGINNINGS[event.did], where].popleft(), event, names)
        else:
            begun[event.did, where].append(event)
    yield from _work(told)


def _span(first: Event, last: Event, names: Names) -> Span:
    role = str(role_of(last.warp))
    if first.did == Did.COPY_ISSUED:
        label = f"copies a tile for {names.get(last.number, 'a barrier')}"
        return Span(COPIES, "copy", first.round, last.round, label)
    if first.did == Did.PRODUCT_ISSUED:
        step = _step_of(first)
        label = f"{step} {STEPS[step]}" if step else "a product"
        return Span(f"products of {role}", "product", first.round, last.round, label, step)
    waited_for = names.get(last.number, last.what.removesuffix(" at byte"))
    return Span(role, "waits", first.round, last.round, f"waits for {waited_for}")


def _work(told: Iterable[Event]) -> Iterator[Span]:
    """What is between the waits of a warp."""
    since: dict[int, int] = {}
    for event in told:
        begin = since.setdefault(event.warp, event.round)
        if event.did in (Did.WAITS, Did.ENDED):
            yield Span(str(role_of(event.warp)), "works", begin, event.round, "works")
        if event.did in (Did.WAITS, Did.GOES_ON):
            since[event.warp] = event.round


def role_of(warp: int) -> str | None:
    """Of the producer's warpgroup two warps work; each warpgroup of consumers is told of by its first warp."""
    if warp < 4:
        return {0: "loader", 1: "scheduler"}.get(warp)
    return f"consumer {warp // 4}" if warp % 4 == 0 else None


def _roles(made: list[Span]) -> list[str]:
    """In the order in which data flows."""
    found = {span.role for span in made}
    consumers = sorted(role for role in found if role.startswith("consumer"))
    ordered = ["scheduler", "loader", COPIES, *(x for role in consumers for x in (role, f"products of {role}"))]
    return [role for role in ordered if role in found]


def _names(shape: Shape, asked: Tile) -> Names:
    """As in sm90.h: mbarriers by the byte that the simulator calls them, named ones by their number."""
    rung = ForwardSm90()
    tile = rung.fitting(asked, shape)
    constants, warpgroups = rung.constants(tile, shape), tile.q // 64
    begin = _BARRIERS_AT + constants["SHARED_BYTES"] - rung.AROUND
    rings = [f"{name}[{i}]" for name in ("k_full", "k_free", "v_full", "v_free") for i in range(constants["STAGES"])]
    mbarriers = ["q_full", "q_free", "v_tail", "item_begun", *rings, *(f"item_full[{i}]" for i in range(_ITEMS))]
    turns = dict.fromkeys(range(1, warpgroups + 1), "its turn")
    free = {warpgroups + 1 + i: f"item {i} to be free" for i in range(_ITEMS)}
    return {begin + 8 * i: name for i, name in enumerate(mbarriers)} | turns | free


def _step_of(event: Event) -> str:
    """The step label under which a line of the source stands."""
    inside = [x for x in sources.sections(f"cuda/{RUNG}") if x.file == event.file and x.line <= event.line]
    return inside[-1].step if inside else ""

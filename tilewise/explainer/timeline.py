"""Who waits for whom in the Hopper kernel: the CUDA simulator's trace of the real source, as spans of its roles."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tilewise.explainer import sources
from tilewise.kernels.cuda.rungs import ForwardSm90
from tilewise.kernels.cuda.simulator import Did, Event, Order
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.spec import Attention, Shape, Tile

RUNG = "forward_sm90"
MOST_SCORES = 1 << 18  # of a call that is simulated: a second or two
MOST_SPANS = 900
COPIES = "copy engine"
_BARRIERS_AT = 1008  # bytes that simulated shared memory is off the kernel's alignment by
_ITEMS = 4  # as in sm90.h

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
    half = Shape(1, shape.heads, shape.heads, shape.n_q, shape.n_k, shape.d, shape.d_v, "float16")
    missing = kernel.unavailable() or kernel.unsupported(spec, half)
    if missing is None and shape.heads * shape.n_q * shape.n_k > MOST_SCORES:
        missing = f"the simulator would take long: it is asked for {MOST_SCORES:,} scores at most"
    if missing is not None:
        return {"missing": f"The timeline is the CUDA simulator's, which did not run: {missing}."}
    rng = np.random.default_rng(seed)
    lengths = (shape.n_q, shape.n_k, shape.n_k)
    q, k, v = (rng.standard_normal((1, shape.heads, n, shape.d)).astype(np.float16) for n in lengths)
    kernel.forward(spec, q, k, v, tile)
    rung = ForwardSm90()
    fitting = rung.fitting(tile, half)
    constants = rung.constants(fitting, half)
    names = _names(fitting.q // 64, constants["STAGES"], constants["SHARED_BYTES"] - rung.AROUND)
    made = sorted(spans([event for event in trace if event.block == 0], names), key=lambda span: span.start)
    shown = made[:MOST_SPANS]
    end = max(span.start for span in shown)
    cut = [span._replace(end=min(span.end, end)) for span in shown]
    return {"spans": cut, "roles": _roles(made), "cut": len(made) > len(shown)}


def spans(trace: Iterable[Event], names: Names) -> Iterator[Span]:
    """Each beginning with its end. Lanes that meet within a warp are left out: that is how warps work, no waiting."""
    issued: dict[tuple[Did, int], deque[Event]] = defaultdict(deque)
    since: dict[int, int] = {}
    for event in trace:
        role = role_of(event.warp)
        if role is None or event.what.startswith("the other lanes"):
            continue
        begun = since.setdefault(event.warp, event.round)
        if event.did in (Did.WAITS, Did.ENDED):
            yield Span(role, "works", begun, event.round, "works")
            since[event.warp] = event.round
        if event.did == Did.WAITS:
            issued[Did.WAITS, event.warp].append(event)
        elif event.did == Did.GOES_ON:
            first = issued[Did.WAITS, event.warp].popleft()
            yield Span(role, "waits", first.round, event.round, f"waits for {names.get(event.number, event.what)}")
            since[event.warp] = event.round
        elif event.did == Did.COPY_ISSUED:
            issued[event.did, event.number].append(event)
        elif event.did == Did.COPY_LANDED:
            first = issued[Did.COPY_ISSUED, event.number].popleft()
            label = f"copies a tile for {names.get(event.number, 'a barrier')}"
            yield Span(COPIES, "copy", first.round, event.round, label)
        elif event.did == Did.PRODUCT_ISSUED:
            issued[event.did, event.warp].append(event)
        elif event.did == Did.PRODUCT_TAKEN:
            first = issued[Did.PRODUCT_ISSUED, event.warp].popleft()
            step = _step_of(first)
            label = f"{step} {sources.STEPS[step]}" if step else "a product"
            yield Span(f"products of {role}", "product", first.round, event.round, label, step)


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


def _names(warpgroups: int, stages: int, begin: int) -> Names:
    """As in sm90.h: mbarriers by the byte that the simulator calls them, named ones by their number."""
    rings = [f"{name}[{i}]" for name in ("k_full", "k_free", "v_full", "v_free") for i in range(stages)]
    mbarriers = ["q_full", "q_free", "v_tail", "item_begun", *rings, *(f"item_full[{i}]" for i in range(_ITEMS))]
    turns = dict.fromkeys(range(1, warpgroups + 1), "its turn")
    free = {warpgroups + 1 + i: f"item {i} to be free" for i in range(_ITEMS)}
    return {_BARRIERS_AT + begin + 8 * i: name for i, name in enumerate(mbarriers)} | turns | free


def _step_of(event: Event) -> str:
    """The step label under which a line of the source stands."""
    inside = [x for x in sources.sections(f"cuda/{RUNG}") if x.file == event.file and x.line <= event.line]
    return inside[-1].step if inside else ""

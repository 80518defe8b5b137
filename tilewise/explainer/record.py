"""What the NumPy kernel did on small inputs, tile by tile: what the page shows of the algorithm is recorded here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewise.arrays import Array
from tilewise.explainer.traffic import Memory, memory
from tilewise.kernels.numpy import NumpyKernel
from tilewise.kernels.numpy.forward import TileStep
from tilewise.schedule import Kind, Plan, plan
from tilewise.spec import Attention, Partial, Shape, Tile

BARE_TYPES = ("float16", "float32")  # in which exponents without the running maximum are shown


@dataclass(frozen=True, eq=False)
class Numbers:
    """What a visited tile computed, and its query tile's state after it. Rows are the tile's queries."""

    s: Array  # (rows, keys): scores, -inf where masked
    p: Array  # (rows, keys)
    rescale: Array  # (rows,), and so are the next three
    row_max: Array
    row_sum: Array
    moved: Array  # whether the maximum did
    acc: Array  # (rows, d_v)
    bare_sums: dict[str, Array]  # by type: the sums of exp(s), with nothing subtracted


@dataclass(frozen=True, eq=False)
class Step:
    """One tile of the grid, in the order in which the kernel comes by it; an EMPTY one is skipped: no numbers."""

    query_tile: int
    key_tile: int
    kind: Kind
    memory: Memory  # so far, this step included
    numbers: Numbers | None


@dataclass(frozen=True, eq=False)
class Recording:
    """Every step of one head, what came out, and the plan that was followed."""

    plan: Plan
    head: int
    v: Array  # (n_k, d_v)
    steps: list[Step]
    done: Partial  # of that head: out (n_q, d_v), lse (n_q,)


def record(
    spec: Attention, shape: Shape, tile: Tile, *, head: int = 0, seed: int = 0, magnitude: float = 1.0
) -> Recording:
    """Run the kernel on normal random numbers, q's times `magnitude`, and keep what the tiles of one head did."""
    rng = np.random.default_rng(seed)
    sizes = (
        (shape.heads, shape.n_q, shape.d),
        (shape.heads_k, shape.n_k, shape.d),
        (shape.heads_k, shape.n_k, shape.d_v),
    )
    q, k, v = (rng.standard_normal((1, *size), dtype=np.float32) for size in sizes)
    watcher = _Watcher(head)
    done = NumpyKernel().forward(spec, q * np.float32(magnitude), k, v, tile, watcher)
    schedule = plan(spec, shape, tile)
    grid = np.ndindex(*schedule.grid)
    steps = [
        Step(i, j, Kind(int(kind)), used, watcher.seen.get((i, j)))
        for (i, j), kind, used in zip(grid, schedule.kinds(0, head).ravel(), memory(schedule, head), strict=True)
    ]
    return Recording(schedule, head, v[0, head // shape.group], steps, Partial(done.out[0, head], done.lse[0, head]))


class _Watcher:
    """Keeps the steps of one head. A state's arrays are replaced in each step, never changed: none is copied."""

    def __init__(self, head: int) -> None:
        self.head = head
        self.seen: dict[tuple[int, int], Numbers] = {}
        self._query_tile = -1

    def __call__(self, step: TileStep) -> None:
        if step.head != self.head:
            return
        if step.query_tile != self._query_tile:
            self._query_tile = step.query_tile
            self._row_max = np.full_like(step.state.row_max, -np.inf)
            self._bare = {name: np.zeros(len(step.s), name) for name in BARE_TYPES}
        self._bare = {name: _bare_sum(total, step.s) for name, total in self._bare.items()}
        state = step.state
        self.seen[step.query_tile, step.key_tile] = Numbers(
            np.asarray(step.s), step.p, step.rescale, state.row_max, state.row_sum,
            state.row_max > self._row_max, state.acc, self._bare,
        )  # fmt: skip
        self._row_max = state.row_max


def _bare_sum(total: Array, s: Array) -> Array:
    """exp(s) added to the sums, all in the sums' type: what overflows is what would without the running maximum."""
    with np.errstate(over="ignore"):
        added: Array = total + np.exp(s.astype(total.dtype)).sum(axis=-1, dtype=total.dtype)
    return added

"""The tile steps of a small attention as text: what is loaded, and what becomes of row_max, row_sum and rescale."""

from __future__ import annotations

import numpy as np

from tilewise import reference
from tilewise.arrays import Array
from tilewise.kernels.numpy import NumpyKernel
from tilewise.kernels.numpy.forward import TileStep
from tilewise.schedule import Plan, plan
from tilewise.spec import Tile
from tilewise.validate import prepare

N, D = 8, 4
TILE = Tile(4, 4)


def text() -> str:
    """Causal attention of 8 queries over 8 keys, in tiles of 4 x 4."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((N, D)) for _ in range(3))
    call = prepare(q, k, v, causal=True)
    schedule = plan(call.spec, call.shape, TILE)
    steps: list[str] = []
    row: list[int] = []

    def watch(step: TileStep) -> None:
        if row != [step.query_tile]:
            row[:] = [step.query_tile]
            steps.append(_begin(schedule, step.query_tile))
        steps.append(_step(schedule, step))

    done = NumpyKernel().forward(call.spec, call.q, call.k, call.v, TILE, watch)
    error = np.abs(done.out - reference.forward(call.spec, call.q, call.k, call.v).out).max()
    return "\n".join(
        [
            f"Causal attention of {N} queries over {N} keys (d = {D}), in tiles of {TILE.q} x {TILE.k}: every step.",
            "row_max: the largest score so far. row_sum: the sum of exp(score - row_max) so far.",
            "rescale: what the sums so far are multiplied by when row_max grows, exp(old row_max - new row_max).",
            *steps,
            "\nat the end of each query tile: out = acc / row_sum, lse = row_max + log(row_sum)",
            f"largest error against dense attention: {error:.1e}",
        ]
    )


def _begin(schedule: Plan, i: int) -> str:
    rows = schedule.queries(i)
    visited = [j for j, _ in schedule.by_query.tiles(0, 0, i)]
    skipped = [j for j in range(schedule.grid[1]) if j not in visited]
    lines = [f"\nquery tile {i}: load q[{rows.start}:{rows.stop}]; row_max = -inf, row_sum = 0, acc = 0"]
    lines += [f"  key tile {j}: EMPTY, skipped: nothing is loaded" for j in skipped]
    return "\n".join(lines)


def _step(schedule: Plan, step: TileStep) -> str:
    cols = schedule.keys(step.key_tile)
    loaded = f"k[{cols.start}:{cols.stop}] and v[{cols.start}:{cols.stop}]"
    scores = "\n".join(f"      {_numbers(row)}" for row in step.s)
    return "\n".join(
        [
            f"  key tile {step.key_tile}: {step.kind.name}, load {loaded}",
            f"    scores q @ k.T * scale, -inf where masked:\n{scores}",
            f"    row_max  {_numbers(step.state.row_max)}",
            f"    rescale  {_numbers(step.rescale)}",
            f"    row_sum  {_numbers(step.state.row_sum)}",
        ]
    )


def _numbers(x: Array) -> str:
    return "  ".join(f"{value:7.3f}" for value in x)

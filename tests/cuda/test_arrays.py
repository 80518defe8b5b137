"""Gradients of arrays that a score reads, by the CUDA kernels on the simulator, and mistakes planted in these."""

from __future__ import annotations

import pytest

from tests.cuda.array_problems import PROBLEMS, check
from tests.cuda.mistakes import WRONG, Mistake, expect_told, plant
from tests.cuda.test_ops import needs_compiler
from tilewise.kernels.cuda.simulator import Order
from tilewise.spec import Tile

pytestmark = needs_compiler

SMALL = Tile(16, 16)
MEET = "__syncthreads();"


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sums_of_small_tiles(problem: str) -> None:
    check(problem, SMALL)


@pytest.mark.parametrize("problem", ["rows", "columns", "pairs", "distances"])
def test_threads_in_any_order(problem: str) -> None:
    for order in (Order.BACKWARD, Order.RANDOM):
        check(problem, SMALL, order=order)


def test_tiles_that_divide_nothing() -> None:
    check("pairs", Tile(13, 17))
    check("distances", Tile(17, 13))


# Each is one kind of mistake.
MISTAKES: dict[str, Mistake] = {
    "a mask left out": Mistake(WRONG, "columns", {"walk.place.kind == PARTIAL": "false"}),
    "slices written too early": Mistake("race", "rows", {f"{MEET}  // the slices before are no longer read": ""}),
    "totals written too early": Mistake("race", "rows", {f"{MEET}  // slices are no longer read": ""}),
    "only the last run": Mistake(WRONG, "rows", {"tile = run.first;": "tile = run.last - 1;"}),
    "the run before": Mistake(WRONG, "pairs", {"runs[middle].last <= k_tile": "runs[middle].last < k_tile"}),
    "one head only": Mistake(WRONG, "pairs of heads", {" + shared % sums.summed_heads": ""}),
    "the first tile of a diagonal left out": Mistake(WRONG, "distances", {"max(apart, 0) - 1;": "max(apart, 0);"}),
    "one range for two diagonals": Mistake(WRONG, "distances", {"range = i / TILE_Q;": "range = 0;"}),
    "a sequence's rows where the first's are": Mistake(WRONG, "packed rows", {"begin + first + i": "first + i"}),
    "packed sequences that are all the first": Mistake(WRONG, "packed pairs", {"packed ? sequence : 0": "0"}),
    "lanes left out": Mistake(WRONG, "distances", {"apart > 0;": "apart > 1;"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, problem, edits = MISTAKES[name]
    plant(monkeypatch, ("tiled_arrays.cu", "arrays.h", "cells.cu"), edits)
    expect_told(told, lambda order, seed: check(problem, SMALL, order=order, seed=seed))

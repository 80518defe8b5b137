"""Gradients of arrays that a score reads, by the CUDA kernels on the simulator, and mistakes planted in these."""

from __future__ import annotations

import pytest

from tests.cuda import every_lane
from tests.cuda.array_problems import PROBLEMS, check
from tests.cuda.mistakes import EARLY, ISSUED, UNFENCED, WRONG, Mistake, expect_told, plant
from tests.cuda.test_ops import needs_compiler
from tilewise.kernels.cuda.array_rungs import suited
from tilewise.kernels.cuda.rungs import PLAIN
from tilewise.kernels.cuda.simulator import Order
from tilewise.kernels.reads import Sharing
from tilewise.spec import Shape, Tile

pytestmark = needs_compiler

SMALL = Tile(16, 16)
MEET = "__syncthreads();"
WAIT, WAIT_TABLE = "        wait_together(shared.full(", "wait_together(shared.table_"
AWAIT_FREE = "            wait_together(shared.free(ring.stage), ring.parity);\n"
AWAIT_S = "        hw::wgmma_wait<1>();\n        hw::pin(s);\n"
AWAIT_D_P = "        hw::wgmma_wait<0>();\n        hw::pin(d_p);\n"
ADVANCE = "        ring.advance();\n        const int second"
FREE = "        arrive(shared.free(first));\n"
TELL = "            if (lane == 0) shared.told(steps++)"
PLACE = "shared.memory)};\n"
MEETING = "        hw::barrier_sync(Shared::CONSUMERS_MEET, CONSUMERS);\n"
TABLES = "large, pairs beside another table"


@pytest.mark.parametrize("problem", [name for name in PROBLEMS if not name.startswith("large")])
def test_sums_of_small_tiles(problem: str) -> None:
    check(problem, SMALL)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sums_by_hopper(problem: str) -> None:
    check(problem, None, "float16" if "capped" in problem else "bfloat16")


@pytest.mark.parametrize("problem", ["rows", "columns", "pairs", "distances"])
def test_threads_in_any_order(problem: str) -> None:
    for order in (Order.BACKWARD, Order.RANDOM):
        check(problem, SMALL, order=order)
        check(f"large, {problem}", None, "bfloat16", order)


def test_a_version_that_racecheck_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ("arrays_sm90.cu",), dict(every_lane.EDITS["arrays_sm90.cu"]))
    check(TABLES, None, "bfloat16")


def test_which_kernel_sums_up() -> None:
    """Hopper's, where the backward pass was Hopper's; wide heads have fewer keys a tile."""
    kinds = (192, "float16"), (256, "bfloat16"), (64, "float32")
    narrow, wide, single = (Shape(1, 1, 1, 64, 64, d, d, dtype) for d, dtype in kinds)
    for sharing in Sharing:
        assert suited(sharing, narrow, hopper=False).name == suited(sharing, single, hopper=True).name == "tiled_arrays"
        for shape, tile in ((narrow, Tile(128, 128)), (wide, Tile(128, 64))):
            rung = suited(sharing, shape, hopper=True)
            assert rung.name == "arrays_sm90" and rung.default_tile(PLAIN, shape) == tile


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
    "a split that begins again": Mistake(WRONG, "few pairs", {"* split / sums.splits": "* 0 / sums.splits"}),
    "one head only": Mistake(WRONG, "pairs of heads", {" + shared % sums.summed_heads": ""}),
    "the first tile of a diagonal left out": Mistake(WRONG, "distances", {"STEPS) - 1;": "STEPS);"}),
    "one range for two diagonals": Mistake(WRONG, "distances", {"range = i / TILE_K;": "range = 0;"}),
    "a sequence's rows where the first's are": Mistake(WRONG, "packed rows", {"begin + first + i": "first + i"}),
    "packed sequences that are all the first": Mistake(WRONG, "packed pairs", {"packed ? sequence : 0": "0"}),
    "lanes left out": Mistake(WRONG, "distances", {"apart > 0;": "apart > 1;"}),
}  # fmt: skip


# In Hopper's kernel.
MISTAKES_SM90: dict[str, Mistake] = {
    "no wait for q and k": Mistake("more often|deadlock", "pairs", {f"    {WAIT}ring.stage), ring.parity);\n": ""}),
    "no wait for d_out and v": Mistake("more often|deadlock", "pairs", {f"{WAIT}second), ring.parity);\n": ""}),
    "q and k overwritten too early": Mistake(WRONG, "pairs", {f"{AWAIT_FREE}{TELL}": TELL}),
    "q and k freed too early": Mistake(EARLY, "pairs", {f"{AWAIT_S}{FREE}": AWAIT_S, ADVANCE: f"{FREE}{ADVANCE}"}),
    "no wait for d_p": Mistake(f"{WRONG}|{ISSUED}|still", "pairs", {AWAIT_D_P: ""}),
    "no wait for a table": Mistake(WRONG, TABLES, {f"{WAIT_TABLE}full(), tables++ % 2);": "tables++;"}),
    "a table overwritten": Mistake(
        f"{WRONG}|more often", TABLES, {f"{WAIT_TABLE}free(), tables++ % 2 ^ 1);": "tables++;"}
    ),
    "one table for all": Mistake("deadlock", TABLES, {"tables < shared.told(steps).tables": "tables < 1"}),
    "a mask left out": Mistake(WRONG, "large, columns", {"place.kind == PARTIAL || place": "place"}),
    "delta left out": Mistake(WRONG, "pairs", {"(d_p[i] - saved[i / 2 % 2].delta)": "d_p[i]"}),
    "rows of the other half": Mistake(WRONG, "rows", {"saved[half].shift": "saved[1 - half].shift"}),
    "totals over operands": Mistake(f"{WRONG}|{UNFENCED}", "large, rows", {f"{PLACE}{MEETING}": PLACE}),
    "totals read too early": Mistake(WRONG, "large, rows", {f"= total[i];\n{MEETING}": "= total[i];\n"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES_SM90)
def test_a_mistake_in_hoppers_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, problem, edits = MISTAKES_SM90[name]
    plant(monkeypatch, ("arrays_sm90.cu",), edits)
    expect_told(told, lambda order, seed: check(problem, None, "bfloat16", order, seed))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, problem, edits = MISTAKES[name]
    plant(monkeypatch, ("tiled_arrays.cu", "arrays.h", "cells.cu"), edits)
    expect_told(told, lambda order, seed: check(problem, SMALL, order=order, seed=seed))

"""Who adds to a sum, and when: the plan of the backward pass with five products, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import tilewise as tw
from tilewise.expr import K, Q
from tilewise.kernels.cute import turns
from tilewise.kernels.tables import FIRST_RUN, N_RUNS, tables
from tilewise.spec import Attention, Lengths, Shape, Tile

SHAPE = Shape(2, 4, 2, 700, 900, 64, 64, "bfloat16")
PACKED = Lengths(np.array([0, 60, 60, 350, 700]), np.array([0, 410, 430, 430, 900]))
SPECS = {
    "full": Attention(0.125),
    "causal": Attention(0.125, tw.causal()),
    "window": Attention(0.125, tw.window(90, 130)),
    "heads differ": Attention(0.125, abs(Q - K) < 120 * (tw.H + 1) + tw.B),
    "scattered": Attention(0.125, (Q // 64 + 3 * (K // 128)) % 5 < 2),
    "packed": Attention(0.125, tw.causal(), lengths=PACKED),
    "packed, full": Attention(0.125, lengths=PACKED),
}
TILES = (Tile(64, 128), Tile(128, 128))


def _visits(spec: Attention, shape: Shape, tile: Tile, at: tuple[int, int]) -> list[tuple[int, int, int, int, int]]:
    """(record, first key, query tile of all, kind, turn), in the order of records, as the kernel reads them."""
    made = turns.in_turns(tables(spec, shape, tile, by_key=True), shape, spec.lengths, tile.q)
    found = []
    for number, record in enumerate(made.records[at]):
        before = len(found)
        for last, count, kind, turn in made.runs[record[FIRST_RUN] :][: record[N_RUNS]]:
            for i in range(count):
                place = int(record[-2] + last - i)
                found.append((number, int(record[2] + record[0]), place, int(kind), int(turn)))
        assert len(found) - before == record[-1], "visits"
    return found


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_each_visit_has_its_turn(name: str, tile: Tile) -> None:
    """Turns of a query tile go 0, 1, 2 in the order in which blocks take records; nothing is left out."""
    spec = SPECS[name]
    shape = SHAPE if spec.lengths is None else replace(SHAPE, batch=1)
    made = tables(spec, shape, tile, by_key=True)
    for at in np.ndindex(*made.records.shape[:2]):
        visits = _visits(spec, shape, tile, at)
        had: dict[int, int] = {}
        for _, _, place, _, turn in visits:
            assert turn == had.get(place, 0)
            had[place] = turn + 1
        assert all(0 <= place < turns.tiles_of_queries(shape, spec.lengths, tile.q) for place in had)
        want = []
        for record in made.records[at]:
            (before,) = turns.numbered(record[None, None, None], shape, spec.lengths, tile.q)[0, 0, :, -2]
            for first, last, kind in made.runs[record[FIRST_RUN] :][: record[N_RUNS]]:
                want += [(int(record[2] + record[0]), int(before) + t, int(kind)) for t in range(first, last)]
        assert sorted(want) == sorted((key, place, kind) for _, key, place, kind, _ in visits)


def test_the_order_is_the_same_in_every_batch() -> None:
    """Where masks differ by batch index, other indices make no difference to the order in which sums are added."""
    spec, tile = Attention(0.125, abs(Q - K) < 300 * (2 - tw.B)), TILES[0]
    assert tables(spec, SHAPE, tile, by_key=True).records.shape[0] == 2
    alone, both = (_visits(spec, replace(SHAPE, batch=n), tile, (0, 0)) for n in (1, 2))
    assert alone == both
    assert _visits(spec, SHAPE, tile, (1, 0)) != both


@pytest.mark.parametrize("name", ["full", "causal", "packed"])
def test_tiles_are_visited_from_the_last_to_the_first(name: str) -> None:
    """So that each key tile comes to a query tile after those before it did."""
    spec = SPECS[name]
    shape = SHAPE if spec.lengths is None else replace(SHAPE, batch=1)
    visits = _visits(spec, shape, TILES[0], (0, 0))
    for one, other in pairwise(visits):
        assert one[0] != other[0] or one[2] > other[2]


def test_query_tiles_have_numbers_of_their_own() -> None:
    spec, shape, tile = SPECS["packed"], replace(SHAPE, batch=1), TILES[0]
    by_query = turns.numbered(tables(spec, shape, tile).records, shape, PACKED, tile.q)
    numbers = by_query[0, 0, :, -2] + by_query[0, 0, :, 0] // tile.q
    assert sorted(numbers) == list(range(turns.tiles_of_queries(shape, PACKED, tile.q)))


def test_long_runs_stay_whole() -> None:
    """A full row of tiles is one run, whatever its length: the plan is as small as forward's."""
    shape = replace(SHAPE, n_q=1 << 14, n_k=1 << 14)
    for mask, most in ((None, 1), (tw.causal(), 3)):
        made = turns.in_turns(tables(Attention(1.0, mask), shape, TILES[0], by_key=True), shape, None, 64)
        assert made.records[0, 0, :, N_RUNS].max() <= most


@pytest.mark.parametrize(("n", "heads", "least"), [(512, 1024, 24), (16384, 16, 1), (200, 3, 3)])
def test_so_many_heads_take_turns(n: int, heads: int, least: int) -> None:
    shape = Shape(1, heads, heads, n, n, 128, 128, "bfloat16")
    assert least <= turns.section(shape, n / 64, 132) <= heads

"""Judges the package's plans: no EMPTY tile has a key that counts, no FULL one a key that does not.

Which keys count is found by the judge's own walk of the texts, score by score. What is judged is tilewise.schedule: its
runs in both orders, query-major for forward passes and key-major for backward ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tests.fuzzing.judging.attended import Attended
from tests.fuzzing.judging.parts import Part, Problem
from tests.fuzzing.question import Numbers, Question
from tilewise import schedule
from tilewise.schedule import Kind, Plan, Runs
from tilewise.spec import Attention, Shape, Tile

# Those of kernels, and odd ones. Of the smallest there are so many that blocks of them are looked at first.
TILES = (
    (128, 128), (64, 64), (128, 64), (64, 128), (64, 16), (16, 128), (32, 32), (17, 61), (100, 3), (7, 16), (3, 5),
    (1, 1),
)  # fmt: skip

# Warpgroups that share what they load have so many rows each, and may leave out so many of the last tiles.
WARPGROUP, MOST_SKIPPED = 64, 1


class WrongPlan(AssertionError):  # noqa: N818 - it names a state
    """A plan by which a kernel would leave out a key that counts, or count one that does not."""


def tiles_for(question: Question, odd: int) -> list[tuple[int, int]]:
    """The question's own tile, if it has one, and another: which, `odd` decides. A plan costs as much as the answer."""
    own = [] if question.tile is None else [question.tile]
    return [*own, TILES[odd % len(TILES)]]


def check(question: Question, spec: Attention, shape: Shape, tiles: Sequence[tuple[int, int]]) -> int:
    """Judge the plan of every sequence of a call of the question, for each of these tiles; how many there were.

    spec, shape: the package's of that call. WrongPlan tells the first tile that is wrong.
    """
    count = 0
    problem = Problem(question)
    with np.errstate(all="ignore"):
        for part, part_shape in _parts(problem, spec, shape):
            if 0 in part.shape:
                continue
            attended = Attended(problem, part, np.float64)
            counts = attended.score != -np.inf
            for tile in tiles:
                check_plan(schedule.plan(spec, part_shape, Tile(*tile)), counts, attended.seen)
                count += 1
    return count


def _parts(problem: Problem, spec: Attention, shape: Shape) -> Iterator[tuple[Part, Shape]]:
    """The sequences, as the judge and as the package knows them."""
    if problem.question.cache is None:
        shapes = [part for part, _, _ in shape.sequences(spec.lengths)]
    else:
        lengths = problem.question.cache.lengths
        shapes = [
            replace(shape, batch=1, n_k=length, total_k=length, first_batch=b) for b, length in enumerate(lengths)
        ]
    yield from zip(problem.parts, shapes, strict=True)


def check_plan(plan: Plan, counts: Numbers, seen: Numbers) -> None:
    """counts: whether a key counts, (batch, heads, queries, keys). seen: whether the mask alone lets it: a FULL tile's
    scores are computed, so that those of -inf hide their keys there too."""
    tile, (rows, columns) = plan.tile, plan.grid
    many, open_ = (_by_tiles(x, plan) for x in (counts, seen))
    by_query = _kinds(plan.by_query, rows, columns, "query-major")
    by_key = _kinds(plan.by_key, columns, rows, "key-major").swapaxes(-1, -2)
    orders = [(by_query, "query-major"), (by_key, "key-major")]
    if tile.q == WARPGROUP:
        orders += [(_joined_kinds(plan, count), f"{count} joined") for count in (2, 3)]
    for kinds, order in orders:
        _refuse(order, "EMPTY, and has keys that count", plan, (kinds == Kind.EMPTY) & (many > 0), many)
        # A tile that is not whole is never FULL: there are no keys at its end.
        hides = (kinds == Kind.FULL) & (open_ < tile.q * tile.k)
        _refuse(order, "FULL, and has keys that the mask hides", plan, hides, open_)
    if not np.array_equal(*np.broadcast_arrays(by_query, by_key)):
        raise WrongPlan(f"{_told(plan)}: the two orders have other kinds of tiles")


def _by_tiles(keys: Numbers, plan: Plan) -> Numbers:
    """How many there are in each tile."""
    tile, (rows, columns) = plan.tile, plan.grid
    many = np.add.reduceat(keys, np.arange(rows) * tile.q, axis=2, dtype=np.int64)
    return np.add.reduceat(many, np.arange(columns) * tile.k, axis=3)


def _joined_kinds(plan: Plan, count: int) -> Numbers:
    """The kind that each warpgroup is told of its own query tile, where `count` of them load keys together."""
    rows, columns = plan.grid
    told = _kinds(plan.joined(count, MOST_SKIPPED), -(-rows // count), columns, f"{count} joined", 4**count - 1)
    parts = told[..., None, :] >> 2 * np.arange(count)[:, None] & 3
    skipped = (told[..., None, :] > 0) & (parts == Kind.EMPTY)
    taken_later = np.flip(np.logical_or.accumulate(np.flip(parts != Kind.EMPTY, -1), axis=-1), -1)
    if np.any(skipped & taken_later) or skipped.sum(-1).max(initial=0) > MOST_SKIPPED:
        raise WrongPlan(
            f"{_told(plan)}: {count} joined, a warpgroup leaves out other tiles than its last {MOST_SKIPPED}"
        )
    return parts.reshape(*told.shape[:2], -1, columns)[:, :, :rows]


def _kinds(runs: Runs, rows: int, columns: int, order: str, most: int = Kind.FULL) -> Numbers:
    """The kind of every tile, (batch or 1, heads or 1, rows, columns), each of which is told at most once."""
    batch, heads, _ = runs.offsets.shape
    kinds = np.full((batch, heads, rows, columns), Kind.EMPTY, np.int64)
    for b, h, i in np.ndindex(batch, heads, rows):
        end = 0
        for first, last, kind in runs.table[runs.offsets[b, h, i] : runs.offsets[b, h, i + 1]].tolist():
            if not (end <= first < last <= columns and Kind.EMPTY < kind <= most):
                raise WrongPlan(f"{order} row {i} of ({b}, {h}) has the run ({first}, {last}, {kind}) after {end}")
            kinds[b, h, i, first:last] = kind
            end = last
    return kinds


def _refuse(order: str, why: str, plan: Plan, wrong: Numbers, many: Numbers) -> None:
    if wrong.any():
        b, h, i, j = (int(x[0]) for x in np.nonzero(wrong))
        told = f"query tile {i}, key tile {j} of batch {b}, head {h} is {why} ({int(many[b, h, i, j])} do)"
        raise WrongPlan(f"{_told(plan)}: {told}, {order}")


def _told(plan: Plan) -> str:
    return f"the plan of {plan.live!r} for {plan.shape.n_q} x {plan.shape.n_k}, tile ({plan.tile.q}, {plan.tile.k})"

"""Before a kernel whose mask reads arrays that the host has not seen: the mask is evaluated for every score of the
PARTIAL tiles, and the records are written again with what was found. A score takes a few operations here, where
attention takes hundreds; nothing waits for the host, and the arrays may change from call to call.

First programs look at tiles, then one for each record joins what they found to runs.
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.source.tiles import (
    EMPTY,
    FIELDS,
    FIRST_RUN,
    FULL,
    N_RUNS,
    PARTIAL,
    at_scores,
    tile_at,
)

KINDS: tl.constexpr = tl.constexpr(4)  # what is found of a tile is its number times this, and its kind


@triton.jit
def program_number():
    """Programs counted through, those of a head one after the other."""
    return (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)


@triton.jit(do_not_specialize=["most"])
def look(
    records, runs, loaded, found, group, most,
    MASK: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """One tile of those that a record visits, `most` at most."""
    h, b = tl.program_id(1), tl.program_id(2)
    first, _, _, n_q, n_k, first_run, last_run, place = tile_at(
        records, tl.program_id(0) // most, b, h, group, TILE_K if BY_KEY else TILE_Q
    )
    tile, kind = visited(runs, first_run, last_run, tl.program_id(0) % most)
    if kind == PARTIAL:
        passing = tile * (TILE_Q if BY_KEY else TILE_K)
        query = (passing if BY_KEY else first) + tl.arange(0, TILE_Q)[:, None]
        key = (first if BY_KEY else passing) + tl.arange(0, TILE_K)[None, :]
        counts = (query < n_q) & (key < n_k) & at_scores(MASK, 0.0, query, key, place, loaded)
        count = tl.sum(counts.to(tl.int32))
        kind = tl.where(count == 0, EMPTY, tl.where(count == TILE_Q * TILE_K, FULL, PARTIAL))
    tl.store(found + program_number(), tile * KINDS + kind)


@triton.jit
def visited(runs, first_run, last_run, index):
    """The tile that is visited as the index-th, and its kind; EMPTY if there are not so many."""
    tile, kind = 0, EMPTY
    for run in range(first_run, last_run):
        first, last = tl.load(runs + run * 3), tl.load(runs + run * 3 + 1)
        is_here = (index >= 0) & (index < last - first)
        tile = tl.where(is_here, first + index, tile)
        kind = tl.where(is_here, tl.load(runs + run * 3 + 2), kind)
        index -= last - first
    return tile, kind


@triton.jit(do_not_specialize=["most"])
def join(records, found, refined, runs, most, AT_ONCE: tl.constexpr):
    """Tiles of one kind side by side become a run."""
    number = program_number()
    found += number * most
    first_run, n_runs = number * most, 0
    for first in range(0, most, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
        here = tl.load(found + at, mask=at < most, other=EMPTY)
        before = tl.load(found + at - 1, mask=(at > 0) & (at < most), other=EMPTY)
        after = tl.load(found + at + 1, mask=at + 1 < most, other=EMPTY)
        counts = here % KINDS != EMPTY
        begins, ends = counts & (here != before + KINDS), counts & (after != here + KINDS)
        begun = n_runs + tl.cumsum(begins.to(tl.int32), 0)
        run = runs + (first_run + begun - 1) * 3
        tl.store(run, here // KINDS, mask=begins)
        tl.store(run + 1, here // KINDS + 1, mask=ends)
        tl.store(run + 2, here % KINDS, mask=begins)
        n_runs += tl.sum(begins.to(tl.int32), 0)
    field = tl.arange(0, 16)
    values = tl.load(records + number * FIELDS + field, mask=field < FIELDS, other=0)
    values = tl.where(field == FIRST_RUN, first_run, tl.where(field == N_RUNS, n_runs, values))
    tl.store(refined + number * FIELDS + field, values, mask=field < FIELDS)

"""How sequences lie over ranks, which keys travel, and what that costs: arithmetic, without any process."""

from __future__ import annotations

import runpy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tests.strategies import profile
from tilewise import validate
from tilewise.parallel import Layout, balanced, contiguous, cost, layout, needs, zigzag
from tilewise.parallel.cost import Explanation, Machine, Way
from tilewise.spec import Attention, Shape


@profile(100)
@given(st.integers(0, 40), st.integers(1, 7), st.sampled_from([contiguous, zigzag]))
def test_every_row_is_on_one_rank(n: int, ranks: int, make: Any) -> None:
    made = make(n, ranks)
    assert made.ranks == ranks
    assert made.n == n
    assert sorted(made.positions(*range(ranks))) == list(range(n))
    rows = [made.rows(rank) for rank in range(ranks)]
    assert max(rows) - min(rows) <= 2
    assert made.joined(ranks).ranges == (((range(n),),) if n else ((),))


@pytest.mark.parametrize("ranges", [((range(2),), (range(3, 5),)), ((range(3),), (range(2, 5),)), ((range(1, 4),),)])
def test_layouts_with_holes_are_refused(ranges: Any) -> None:
    with pytest.raises(ValueError, match="each place once"):
        Layout(ranges)


def test_shards_that_do_not_fit_a_layout_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gives the ranks \[4, 4\] of them, and their shards have \[5, 3\]"):
        layout.found("zigzag", [5, 3], "q")
    with pytest.raises(ValueError, match="it is for 2 ranks, and the mesh has 3"):
        layout.named(zigzag(8, 2), 8, 3)
    with pytest.raises(ValueError, match=r"'contiguous', 'zigzag' or a parallel\.Layout"):
        layout.named("striped", 8, 2)


def _call(n: int, **options: Any) -> validate.Call:
    whole = np.broadcast_to(np.zeros(8, np.float32), (1, 2, n, 8))
    return validate.prepare(whole, whole, whole, **options)


def _needs(made: Layout, **options: Any) -> needs.Needs:
    call = _call(made.n, **options)
    return needs.find(call.spec, call.shape, made, made)


MASKS = [tw.causal(), tw.window(70), tw.causal() & tw.window(30), tw.causal() | tw.prefix(10), tw.K < 0, tw.K >= 0]


@profile(60)
@given(st.integers(1, 500), st.integers(1, 5), st.sampled_from([contiguous, zigzag]), st.sampled_from(MASKS))
def test_what_a_rank_needs_has_every_key_that_it_sees(n: int, ranks: int, make: Any, mask: Any) -> None:
    made = make(n, ranks)
    found = _needs(made, mask=mask)
    seen = tw.picture(mask, n, n).replace(" ", "").splitlines()
    for r in range(ranks):
        keys = {k for q in made.positions(r) for k in range(n) if seen[q][k] == "■"}
        for s in range(ranks):
            inside = {k for rows in found.of(r, s) for k in rows}
            assert keys & set(made.positions(s).tolist()) <= inside <= set(made.positions(s).tolist())


@profile(40)
@given(st.integers(0, 700), st.integers(1, 6), st.sampled_from([*layout.NAMES, "balanced"]), st.sampled_from(MASKS))
def test_what_goes_on_around_a_ring_is_what_those_ahead_need(n: int, ranks: int, name: str, mask: Any) -> None:
    """And of all pairs of ranks at once, how much that is."""
    made = balanced(n, ranks, pieces=3, mask=mask) if name == "balanced" else layout.named(name, n, ranks)
    found = _needs(made, mask=mask)
    of = [[{k for rows in found.of(r, s) for k in rows} for s in range(ranks)] for r in range(ranks)]
    assert found.rows.tolist() == [[len(of[r][s]) if r != s else 0 for s in range(ranks)] for r in range(ranks)]
    for owner in range(ranks):
        for hops in range(ranks + 1):
            ahead = set().union(*(of[(owner + hop) % ranks][owner] for hop in range(hops, ranks)))
            rows = found.beyond(owner, hops)
            assert sorted(ahead) == [k for each in rows for k in each]
            assert found.rows_beyond[hops, owner] == len(ahead)
            for needed in found.of((owner + hops) % ranks, owner) if hops < ranks else ():
                assert any(set(needed) <= set(each) for each in rows)  # a piece of one, to cut it from


def test_a_thousand_ranks_are_soon_looked_at() -> None:
    """What every method would cost them, the first time; and the next layer asks again."""
    shape = Shape(1, 64, 8, 2**20, 2**20, 128, 128, "bfloat16", "cuda:0")
    made, spec = zigzag(2**20, 1024), Attention(1.0, tw.causal())
    ways, begun = cost.ways(1024, (1024,), shape, "auto"), time.process_time()
    cost.costs(ways, spec, shape, made, made, cost.H100)
    first = time.process_time()
    again = cost.costs(ways, spec, shape, zigzag(2**20, 1024), made, cost.H100)
    assert first - begun < 4  # 0.8 here
    assert time.process_time() - first < 0.05
    assert cost.least(again, cost.H100).way == Way("ring", 16)


def test_empty_tiles_do_not_travel() -> None:
    causal = _needs(contiguous(1024, 4), mask=tw.causal())
    assert [[len(causal.of(r, s)) for s in range(4)] for r in range(4)] == np.tri(4).tolist()
    near = _needs(contiguous(1024, 4), mask=tw.causal() & tw.window(63))
    assert [near.of(2, s) for s in range(4)] == [(), (range(448, 512),), (range(512, 768),), ()]
    assert near.beyond(1, 1) == (range(448, 512),)
    assert near.beyond(1, 2) == ()


def test_tiles_tell_which_parts_see_nothing_of_each_other() -> None:
    found = _needs(zigzag(1024, 2), mask=tw.causal())
    assert found.is_empty(range(256), range(256, 768))
    assert not found.is_empty(range(768, 1024), range(256, 768))
    heads = _needs(contiguous(2**16, 2), mask=(tw.H == 1) & (tw.K < 64))
    assert [heads.of(r, 0) for r in range(2)] == [(range(heads.of(0, 0)[0].stop),)] * 2
    assert heads.of(0, 1) == heads.of(1, 1) == ()


def test_what_is_needed_is_kept_by_what_arrays_hold() -> None:
    """A mask that is made anew for each layer costs nothing; one whose ids changed is looked at again."""
    ids = np.arange(1024) // 256
    found = [_needs(contiguous(1024, 4), mask=tw.document(each)) for each in (ids, ids.copy(), torch.from_numpy(ids))]
    assert found[1] is found[0]
    assert found[0].of(1, 0) == ()
    ids[:] = 0
    assert _needs(contiguous(1024, 4), mask=tw.document(ids)).of(1, 0) == (range(256),)


def test_zigzag_shares_causal_work_evenly() -> None:
    uneven, even = (_needs(make(4096, 4), mask=tw.causal()).work for make in (contiguous, zigzag))
    assert max(uneven) > 1.7 * sum(uneven) / 4
    assert max(even) == min(even)


def test_documents_are_balanced_by_their_tiles() -> None:
    ids = np.repeat(np.arange(5), [2048, 128, 1024, 640, 256])
    options = {"mask": tw.causal() & tw.document(ids)}
    made = balanced(4096, 4, **options)
    assert {made.rows(rank) for rank in range(4)} == {1024}
    work = [np.array(_needs(each, **options).work) for each in (contiguous(4096, 4), zigzag(4096, 4), made)]
    uneven = [max(each) / each.mean() for each in work]
    assert uneven[2] < 1.1 < min(uneven[:2])


def _costs(
    method: str, heads: tuple[int, int] = (8, 8), ranks: int = 4, machine: Machine = cost.CPU
) -> list[cost.Cost]:
    n, (h, hk) = 1024, heads
    q, k = (np.broadcast_to(np.zeros(16, np.float32), (1, each, n, 16)) for each in (h, hk))
    call = validate.prepare(q, k, k)
    lay = contiguous(n, ranks)
    ways = cost.ways(ranks, (ranks,), call.shape, method)
    return cost.costs(ways, call.spec, call.shape, lay, lay, machine)


def test_the_model_knows_what_is_sent() -> None:
    """Without a mask, in theory: (ranks - 1) / ranks of all keys and values by ring and gather, and a share of q, k, v,
    out and lse by heads."""
    keys = 1024 * 8 * 32 * 4
    for method in ("ring", "gather"):
        (found,) = _costs(method)
        assert found.forward == keys * 3 // 4
        assert found.backward == 2 * found.forward
    (found,) = _costs("heads")
    assert found.forward == (256 * 8 * (4 * 16 + 1) * 4) * 3 // 4


def test_only_ways_that_there_are_heads_for_are_offered() -> None:
    assert {each.way.heads for each in _costs("auto", (8, 8), 8)} == {1, 2, 4, 8}
    assert {each.way.heads for each in _costs("auto", (6, 2), 4)} == {1, 2}
    with pytest.raises(ValueError, match="6 heads cannot be shared evenly by 4 ranks"):
        _costs("heads", (6, 2), 4)


def test_auto_takes_the_ring_where_work_hides_it_and_few_messages_where_each_takes_long() -> None:
    call = _call(65536, mask=tw.causal())
    lay = zigzag(65536, 2)

    def quickest(machine: Machine) -> Way:
        ways = cost.ways(2, (2,), call.shape, "auto")
        return cost.least(cost.costs(ways, call.spec, call.shape, lay, lay, machine), machine).way

    assert quickest(Machine(flops=1e9, near=1e9, far=1e9, node=8, latency=1e-6, call=0)).sequence == "ring"
    assert quickest(Machine(flops=1e15, near=1e12, far=1e12, node=8, latency=1.0, call=0)).heads == 1


def test_auto_takes_no_gather_whose_memory_grows_with_the_sequence() -> None:
    """Where calls take long a gather, which has one, is the quickest, as long as there is room for what it holds."""
    slow = Machine(flops=1e15, near=1e12, far=1e12, node=8, latency=0, call=1.0)
    found = _costs("auto", (3, 3), machine=slow)
    ring, gather = (next(each for each in found if each.way == Way(name)) for name in ("ring", "gather"))
    assert gather.held == 768 * 3 * 32 * 4
    assert ring.held == gather.held  # three blocks of four: of more ranks it is less
    assert cost.least(found, replace(slow, spare=gather.held)) is gather
    assert cost.least(found, replace(slow, spare=gather.held - 1)) is ring
    assert cost.least([gather], replace(slow, spare=0)) is gather
    shape = Shape(1, 3, 3, 1024, 1024, 16, 16, "float32", "cpu")
    assert "no gather that holds more than 0 B" in str(Explanation(ring, found, replace(slow, spare=0), 4, shape))


@pytest.mark.slow
def test_the_page_quotes_the_model() -> None:
    """What stands in docs/scaling.md is what docs/scaling.py makes."""
    docs = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "scaling.py"))
    text = docs["PAGE"].read_text()
    assert docs["fill"](text) == text

"""A mistake on one rank, or a rank that dies, is told on every rank, and nobody waits for ever."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

import tilewise as tw
from tests.parallel.pool import ENDED, Failure, Pool, mesh
from tilewise import parallel
from tilewise.parallel import agreement
from tilewise.parallel.team import Team


def _attend(where: str, arguments: Any, **options: Any) -> None:
    ranks = mesh(where)
    if ranks.get_coordinate() is None:
        return
    heads, rows, more = arguments(dist.get_rank())
    x = torch.randn(1, heads, rows, 8)
    parallel.attention(x, x, x, mesh=ranks, **options, **more)


def _other_heads(rank: int) -> Any:
    return (4 if rank < 2 else 2), 8, {}


def _other_rows(rank: int) -> Any:
    return 4, 8 + (rank == 1), {"layout": "zigzag"}


def _bad_scale(rank: int) -> Any:
    return 4, 8, {"scale": float("nan")} if rank == 2 else {}


def _other_mask(rank: int) -> Any:
    return 4, 8, {"mask": tw.window(3 if rank else 4)}


def _other_ids(rank: int) -> Any:
    return 4, 100, {"mask": tw.document(torch.arange(400) // (100 if rank else 300))}


def _no_such_kernel(rank: int) -> Any:
    return 4, 8, {"kernel": "cuda"}


def _too_few_heads(rank: int) -> Any:
    return 3, 8, {"method": "heads"}


def _layout_of_another_mesh(rank: int) -> Any:
    return 4, 8, {"layout": parallel.zigzag(32, 2)}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (_other_heads, "heads: expected the same on every rank of the mesh, got 4 on rank 0 and 2 on rank 2"),
        (_other_rows, "their shards have [8, 9, 8, 8]"),
        (_bad_scale, "scale: expected a finite number, got nan"),
        (_other_mask, "variant: expected the same on every rank"),
        (
            _other_ids,
            "mask, its arrays or lengths, by a number for the keys that travel: expected the same on every rank",
        ),
        (_no_such_kernel, "kernel 'cuda' cannot compute this call"),
        (_too_few_heads, "3 heads cannot be shared evenly by 4 ranks"),
        (_layout_of_another_mesh, "it is for 2 ranks, and the mesh has 4"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_mistake_is_told_on_every_rank(pool: Pool, arguments: Any, told: str) -> None:
    outcomes = pool.outcomes(_attend, "4", arguments)
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert all(told in outcome.message for outcome in outcomes), [outcome.message for outcome in outcomes]


def _join(what: str) -> None:
    ranks, odd = mesh("4"), dist.get_rank() == 3
    x: Any = torch.randn(1, 2, 6, 8)
    options: dict[str, Any] = {"dim": 2}
    if odd and what == "dtype of x":
        x = x.half()
    if odd and what == "sizes of x":
        x = x[..., :4]
    if odd and what == "expected a PyTorch tensor":
        x = x.numpy()
    if odd and what in ("dim", "layout"):
        options |= {"dim": 1} if what == "dim" else {"layout": "zigzag"}
    parallel.unshard(x, ranks, **options)


@pytest.mark.parametrize("what", ["dtype of x", "sizes of x", "dim", "layout", "expected a PyTorch tensor"])
def test_parts_that_do_not_fit_are_not_joined(pool: Pool, what: str) -> None:
    outcomes = pool.outcomes(_join, what)
    assert all(isinstance(outcome, Failure) and what in outcome.message for outcome in outcomes), outcomes


def _replicate_others() -> None:
    parallel.replicated(torch.zeros(3 + (dist.get_rank() == 1)), mesh("4"))


def test_what_is_replicated_has_one_size(pool: Pool) -> None:
    outcomes = pool.outcomes(_replicate_others)
    assert all("sizes of x: expected the same on every rank" in outcome.message for outcome in outcomes), outcomes


def _outside_of_a_group() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not in this process group"):
            parallel.positions(8, group)


def test_a_process_outside_of_a_group_is_told_so(pool: Pool) -> None:
    pool.run(_outside_of_a_group)


def _only_one_trains(what: str) -> None:
    given = {name: torch.randn(1, 1, 4, 8) for name in "qkv"} | {"sinks": torch.zeros(1)}
    given[what].requires_grad_(dist.get_rank() == 3)
    parallel.attention(**given, mesh=mesh("4"))


@pytest.mark.parametrize(("what", "told"), [("v", "q, k and v"), ("sinks", "arrays and sinks")])
def test_all_ranks_train_or_none(pool: Pool, what: str, told: str) -> None:
    """One that waits for gradients would wait in vain."""
    for outcome in pool.outcomes(_only_one_trains, what):
        assert f"gradients of {told}: expected the same on every rank" in outcome.message


def _other_sizes(ranks: Any) -> None:
    torch.manual_seed(0)
    for rows in ([8, 8], [8, 8], [8, 9], [8, 8]):
        whole = torch.randn(1, 1, sum(rows), 8)
        own = whole.split(rows, dim=2)[ranks.get_local_rank()].contiguous()
        out = parallel.attention(own, own, own, mesh=ranks, causal=True)
        want = tw.attention(whole, whole, whole, causal=True)
        assert torch.allclose(parallel.unshard(out, ranks, dim=2), want, atol=1e-5)


def _sizes_that_do_not_fit(ranks: Any) -> None:
    for longer in (False, True):
        x = torch.randn(1, 1, 4 + (longer and ranks.get_local_rank() == 1), 8)
        told = pytest.raises(ValueError, match=r"their shards have \[4, 5\]") if longer else nullcontext()
        with told:
            parallel.attention(x, x, x, mesh=ranks, layout="zigzag")


def _one_call_after_the_other() -> None:
    if mesh("2").get_coordinate() is not None:
        _other_sizes(mesh("2"))
        _sizes_that_do_not_fit(mesh("2"))


def test_a_rank_whose_own_shard_is_as_before_learns_of_others(pool: Pool) -> None:
    pool.run(_one_call_after_the_other)


def _told_twice() -> None:
    """What ranks said before they need not say again: a number tells that all would."""
    x, told = torch.randn(1, 1, 5, 8), agreement._told
    ranks, said = mesh("4"), []
    agreement._latest.clear()  # else what other tests agreed on may fill it between the two calls
    agreement._told = lambda *given: said.append(given) or told(*given)
    try:
        parallel.attention(x, x, x, mesh=ranks)
        assert len(said) == 2
        parallel.attention(x, x, x, mesh=ranks)
        assert len(said) == 2
    finally:
        agreement._told = told


def test_ranks_that_agreed_before_tell_a_number_alone(pool: Pool) -> None:
    pool.run(_told_twice)


def _unforeseen() -> None:
    ranks = parallel.mesh.ranks_of(mesh("4"))
    with pytest.raises(ZeroDivisionError if ranks.me == 2 else parallel.PeerError, match="by zero"):
        agreement.agree(ranks, lambda: {"number": 1 // (2 - ranks.me)})


def test_whatever_is_raised_on_one_rank_is_told_on_all(pool: Pool) -> None:
    pool.run(_unforeseen)


def _bad_meshes() -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh or a process group, got NoneType"):
        parallel.attention(x, x, x)
    if mesh("2").get_coordinate() is None:
        with pytest.raises(ValueError, match="is not in it"):
            parallel.attention(x, x, x, mesh=mesh("2"))


def test_meshes_that_this_rank_is_not_in_are_refused(pool: Pool) -> None:
    pool.run(_bad_meshes)


def _long_error() -> None:
    ranks = parallel.mesh.ranks_of(mesh("2")) if mesh("2").get_coordinate() is not None else None

    def fail() -> Any:
        raise ValueError("x" * 5000)

    if ranks is not None:
        make = fail if ranks.me else dict
        with pytest.raises((ValueError, parallel.PeerError), match="x" * 500):
            agreement.agree(ranks, make)


def test_long_errors_are_cut(pool: Pool) -> None:
    pool.run(_long_error)


def _one_dies() -> float | None:
    """Rank 1 ends midway around the ring, when it has handed on its own keys alone. The mesh has groups of its own,
    which know nothing of the world's timeout; rank 3 waits for rank 2, which lives but will not answer."""
    ranks = DeviceMesh("cpu", [0, 1, 2, 3])
    if ranks.get_coordinate() is None:
        return None
    x = torch.randn(1, 3, 16, 8)
    exchange, begun = Team.exchange, []

    def die_at_the_second(*given: Any) -> Any:
        begun.append(given)
        return os._exit(1) if len(begun) == 2 else exchange(*given)

    if dist.get_rank() == 1:
        Team.exchange = die_at_the_second
    began = time.monotonic()
    with pytest.raises(parallel.PeerError, match="look for its own error first"):
        parallel.attention(x, x, x, mesh=ranks, method="ring")
    return time.monotonic() - began


def test_a_dead_peer_is_reported_and_not_waited_for() -> None:
    pool = Pool(5, timeout=5, meshes=False)
    try:
        first, second, third, fourth, _ = pool.outcomes(_one_dies)
        assert second == ENDED
        assert max(first, third) < 5 <= fourth < 15
    finally:
        pool.close()

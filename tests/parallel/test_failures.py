"""A mistake on one rank, or a rank that dies, is told on every rank, and nobody waits for ever."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
        (_other_ids, "keys that the mask lets travel: expected the same on every rank"),
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


def _only_one_trains() -> None:
    x = torch.randn(1, 1, 4, 8, requires_grad=dist.get_rank() == 3)
    parallel.attention(x, x, x, mesh=mesh("4"))


def test_all_ranks_train_or_none(pool: Pool) -> None:
    """One that waits for gradients would wait for ever."""
    for outcome in pool.outcomes(_only_one_trains):
        assert "gradients: expected the same on every rank" in outcome.message


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


def _one_dies() -> float:
    """Rank 1 ends midway around the ring, when it has handed on its own keys alone."""
    x = torch.randn(1, 3, 16, 8)
    group, exchange, begun = dist.group.WORLD, Team.exchange, []

    def die_at_the_second(*given: Any) -> Any:
        begun.append(given)
        return os._exit(1) if len(begun) == 2 else exchange(*given)

    if dist.get_rank() == 1:
        Team.exchange = die_at_the_second
    began = time.monotonic()
    with pytest.raises(parallel.PeerError, match="look for its own error first"):
        parallel.attention(x, x, x, mesh=group, method="ring")
    return time.monotonic() - began


def test_a_dead_peer_is_reported_and_not_waited_for() -> None:
    pool = Pool(3, timeout=5, meshes=False)
    try:
        first, second, third = pool.outcomes(_one_dies)
        assert second == ENDED
        assert max(first, third) < 15
    finally:
        pool.close()

"""Bytes that are sent are those that the cost model says; shards, DTensors and words travel as they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tilewise as tw
from tests.parallel.pool import Pool, mesh
from tilewise import parallel


def _sent(method: str, layout: str, where: str, masked: Any) -> Any:
    ranks, n = mesh(where), 512
    if ranks.get_coordinate() is None:
        return None
    q, k, v = (parallel.shard(torch.randn(2, 4, n, 8), ranks, dim=2, layout=layout).requires_grad_() for _ in "qkv")
    options = {"mesh": ranks, "layout": layout, "method": method, "mask": masked}
    told = parallel.explain(q, k, v, **options)
    with parallel.count_traffic() as forward:
        out = parallel.attention(q, k, v, **options)
    with parallel.count_traffic() as backward:
        out.sum().backward()
    assert f"method: {told.taken.way.named(ranks.size())}" in str(told)
    return forward.bytes, backward.bytes, told.taken.forward, told.taken.backward


@pytest.mark.parametrize("masked", [None, tw.causal(), tw.causal() & tw.window(50)], ids=["full", "causal", "window"])
@pytest.mark.parametrize(
    ("where", "method"), [("3", "ring"), ("3", "gather"), ("4", "heads"), ("2 x 2", "ring"), ("4", "mix")]
)
def test_the_model_tells_the_bytes_of_the_busiest_rank(pool: Pool, where: str, method: str, masked: Any) -> None:
    for layout in ("contiguous", "zigzag"):
        found = [each for each in pool.run(_sent, method, layout, where, masked) if each is not None]
        assert max(forward for forward, *_ in found) == found[0][2]
        most = max(backward for _, backward, *_ in found)
        assert most <= found[0][3]
        assert most >= 0.6 * found[0][3]


def _moved() -> None:
    for where, layout in (("2", "zigzag"), ("3", "contiguous"), ("4", "zigzag"), ("2 x 2", "zigzag")):
        ranks = mesh(where)
        if ranks.get_coordinate() is None:
            continue
        words = torch.arange(22).expand(3, 22) * 2
        own = parallel.shard(words, ranks, dim=1, layout=layout)
        assert torch.equal(own[0], 2 * parallel.positions(22, ranks, layout=layout))
        assert torch.equal(parallel.unshard(own, ranks, dim=-1, layout=layout), words)
        x = torch.randn(5, 3, requires_grad=True)
        parallel.unshard(parallel.shard(x, ranks, dim=0), ranks, dim=0).sum().backward()
        total = parallel.mesh.ranks_of(ranks).sum(x.grad)
        assert torch.equal(total, torch.full_like(x, ranks.size()))
        with pytest.raises(ValueError, match="dim: expected a dimension of x, which has 2, got 2"):
            parallel.shard(words, ranks, dim=2)
        with pytest.raises(TypeError, match="x: expected a PyTorch tensor, got list"):
            parallel.shard([1, 2], ranks, dim=0)


def test_words_labels_and_positions_move_with_shards(pool: Pool) -> None:
    pool.run(_moved)


def _replicated() -> None:
    ranks = mesh("4")
    x = torch.ones(3, requires_grad=True)
    (parallel.replicated(x, ranks) * (1 + ranks.get_local_rank())).sum().backward()
    assert x.grad.tolist() == [10.0] * 3


def test_gradients_of_what_all_ranks_have_are_added_up(pool: Pool) -> None:
    pool.run(_replicated)


def _as_dtensors() -> None:
    ranks = mesh("3")
    if ranks.get_coordinate() is None:
        return
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8, dtype=torch.float64) for _ in "qkv")
    given = [distribute_tensor(x, ranks, [Shard(2)]).requires_grad_() for x in (q, k, v)]
    out, lse = parallel.attention(*given, causal=True, return_lse=True)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(2),)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])  # shards have 7, 7 and 6 rows
    out.to_local().sum().backward()
    want, want_lse = tw.attention(q, k, v, causal=True, return_lse=True)
    assert torch.allclose(out.detach().full_tensor(), want)
    assert torch.allclose(lse.detach().full_tensor(), want_lse)
    assert isinstance(given[0].grad, DTensor)
    with pytest.raises(TypeError, match="k: expected a DTensor as the others are, got Tensor"):
        parallel.attention(given[0], k, given[2])
    wrong = DTensor.from_local(q, ranks, [Shard(1)])
    with pytest.raises(ValueError, match=r"q: expected placements .* the sequence split"):
        parallel.attention(wrong, wrong, wrong)


def _one_has_no_dtensor() -> None:
    ranks = mesh("4")
    x = torch.randn(1, 2, 4, 8)
    given = DTensor.from_local(x, ranks, [Shard(2)])
    parallel.attention(given, x if ranks.get_local_rank() == 1 else given, given)


def test_a_mistake_with_dtensors_is_told_on_every_rank(pool: Pool) -> None:
    for outcome in pool.outcomes(_one_has_no_dtensor):
        assert "k: expected a DTensor as the others are, got Tensor" in outcome.message


def _counted() -> None:
    x = torch.randn(1, 2, 4, 8)
    with parallel.count_traffic() as outer:
        with parallel.count_traffic() as inner:
            pass
        parallel.attention(x, x, x, mesh=mesh("4"), method="ring")
    assert (inner.bytes, outer.bytes) == (0, 3 * 2 * x.nbytes)


def test_counts_may_be_within_counts(pool: Pool) -> None:
    pool.run(_counted)


def test_dtensors_come_out_as_dtensors(pool: Pool) -> None:
    pool.run(_as_dtensors)


def _the_same_bits() -> None:
    ranks = mesh("4")
    torch.manual_seed(ranks.get_local_rank())
    x = torch.randn(1, 4, 40, 8, requires_grad=True)
    found = []
    for _ in range(2):
        out = parallel.attention(x, x, x, mesh=ranks, causal=True, method="ring")
        found.append((out, *torch.autograd.grad(out.square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_same_call_gives_the_same_bits(pool: Pool) -> None:
    pool.run(_the_same_bits)


def _in_half_precision() -> None:
    ranks = mesh("2")
    if ranks.get_coordinate() is None:
        return
    x = torch.randn(1, 2, 16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert parallel.attention(x, x, x, mesh=ranks).dtype == torch.bfloat16


def test_autocast(pool: Pool) -> None:
    pool.run(_in_half_precision)

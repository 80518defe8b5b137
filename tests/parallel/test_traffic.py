"""Bytes that are sent are those that the cost model says; shards, DTensors and words travel as they should."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tilewise as tw
from tests.parallel.pool import Pool, mesh
from tilewise import parallel
from tilewise.parallel.team import Pending


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


def _most_held(method: str) -> float:
    """How many blocks of a rank's keys and values travel at a time, or are held after, in either pass: memory of
    messages that go and that came, as long as anything has it."""
    begin, known, most = Pending.__post_init__, [], []

    def noted(self: Pending) -> None:
        known.extend(weakref.ref(x.untyped_storage()) for x in (*self.going.values(), *self.coming.values()))
        alive = {x.data_ptr(): x.nbytes() for x in (each() for each in known) if x is not None}
        most.append(sum(alive.values()))
        begin(self)

    q, k, v = (torch.randn(1, 4, 64, 8, requires_grad=True) for _ in "qkv")
    Pending.__post_init__ = noted
    try:
        parallel.attention(q, k, v, mesh=dist.group.WORLD, method=method).sum().backward()
    finally:
        Pending.__post_init__ = begin
    return max(most) / (k.nbytes + v.nbytes)


def test_a_ring_of_more_ranks_holds_no_more_of_each(pool: Pool) -> None:
    """A block that goes, one that is computed with, one that comes, and in a backward pass as many of gradients."""
    larger = Pool(6, meshes=False)
    try:
        assert set(pool.run(_most_held, "ring") + larger.run(_most_held, "ring")) == {6}
        assert pool.run(_most_held, "gather") == [9] * 4
        assert larger.run(_most_held, "gather") == [15] * 6
    finally:
        larger.close()


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
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 32, 8, requires_grad=True)
    own = parallel.shard(whole.detach(), ranks, dim=2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, want = parallel.attention(own, own, own, mesh=ranks), tw.attention(whole, whole, whole)
    assert out.dtype == want.dtype == torch.bfloat16
    assert torch.equal(parallel.unshard(out.detach(), ranks, dim=2), want)
    for result in (out, want):
        result.float().square().sum().backward()
    assert own.grad.dtype == torch.float32
    assert torch.allclose(parallel.unshard(own.grad, ranks, dim=2), whole.grad, atol=0.02)


def test_autocast(pool: Pool) -> None:
    pool.run(_in_half_precision)

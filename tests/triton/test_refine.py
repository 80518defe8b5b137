"""Plans that Triton's kernels look up where the arrays of a mask are, as the host has not seen them. Here tensors are
taken for such arrays, NumPy's for those that the host sees. By Triton's interpreter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.triton.test_ops import needs_triton
from tilewise import arrays, dispatch
from tilewise.arrays import Array
from tilewise.expr import KP, QP, B, Expr, H, K, Q, load
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.schedule import Kind
from tilewise.spec import Attention, Lengths, Shape, Tile
from tilewise.walking import evaluate

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tilewise.kernels.triton import launch_plan  # noqa: E402 - only with both of them

pytestmark = [needs_triton, pytest.mark.usefixtures("unseen")]

RNG = np.random.default_rng(0)
SHAPE, TILE = Shape(2, 2, 1, 40, 70, 16, 16), Tile(16, 32)
IDS_Q, IDS_K = (np.sort(RNG.integers(0, 5, (2, n))) for n in (40, 70))
MASKS = {
    "document": tw.document(torch.from_numpy(IDS_Q), torch.from_numpy(IDS_K)),
    "dense": tw.dense(torch.from_numpy(RNG.random((40, 70)) < 0.002)),
    "dense of heads": tw.causal() & tw.dense(torch.from_numpy(RNG.random((2, 2, 40, 70)) < 0.01)),
    "heads": load(torch.tensor([0, 40]), H) > K,
    "padding, or near": load(torch.arange(70) < torch.tensor([[20], [70]]), B, K) | tw.window(3),
    "a gap that the host knows": load(torch.ones(70, dtype=torch.bool), K) & ((K < 32) | (K >= 64)),
    "a tile a row": load(torch.ones(70, dtype=torch.bool), K) & (Q // TILE.q == K // TILE.k),
    "nothing": load(torch.zeros(40, dtype=torch.int32), Q) > 0,
    "everything": load(torch.ones(70, dtype=torch.int32), K) > 0,
}


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "is_elsewhere", arrays.is_torch)
    monkeypatch.setattr(launch_plan, "_LEAST_VISITS", 0)
    monkeypatch.setattr(launch_plan, "_AT_ONCE", 2)  # so that a row's tiles are joined bit by bit


def visits_of(spec: Attention, shape: Shape, tile: Tile, by_key: bool = False) -> dict[tuple[int, ...], list[Any]]:
    """The runs of each batch index, head and tile, as kernels get them; of packed sequences, by where those begin."""
    _, (records, *_), runs, _ = launch_plan.planned(spec, shape, tile, torch.zeros(1, device=shape.device), by_key)
    records, runs = records.cpu(), runs.cpu()
    return {
        (b, h, *(int(records[b, h, i, field]) for field in (1, 2, 0))): runs[start : start + count].tolist()
        for b, h, i in np.ndindex(records.shape[:3])
        for start, count in [records[b, h, i, 5:7].tolist()]
    }


def count_of(visits: dict[tuple[int, ...], list[Any]]) -> int:
    return sum(last - first for runs in visits.values() for first, last, _ in runs)


@pytest.mark.parametrize("by_key", [False, True], ids=["by query", "by key"])
@pytest.mark.parametrize("name", MASKS)
def test_kinds_are_those_of_the_scores(name: str, by_key: bool) -> None:
    visits = visits_of(Attention(1.0, MASKS[name]), SHAPE, TILE, by_key)
    want = _kinds(MASKS[name])
    for (b, h, *_, first), runs in visits.items():
        row = want[b, h, :, first // TILE.k] if by_key else want[b, h, first // TILE.q]
        assert runs == _runs(row), (b, h, first)


def _kinds(mask: Expr) -> Array:
    """(batch, heads, query tiles, key tiles), score by score."""
    size = (SHAPE.batch, SHAPE.heads, SHAPE.n_q, SHAPE.n_k)
    env = SHAPE.env(*np.ix_(*map(np.arange, size)))
    holds = np.broadcast_to(evaluate(mask, env, numpy_ops(np.float32)), size)
    padded = np.pad(holds, ((0, 0), (0, 0), (0, -SHAPE.n_q % TILE.q), (0, -SHAPE.n_k % TILE.k)))
    tiles = padded.reshape(*size[:2], padded.shape[2] // TILE.q, TILE.q, padded.shape[3] // TILE.k, TILE.k)
    some, every = tiles.any((3, 5)), tiles.all((3, 5))
    return np.where(every, Kind.FULL, np.where(some, Kind.PARTIAL, Kind.EMPTY))


def _runs(kinds: Array) -> list[list[int]]:
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    return [[first, last, int(kinds[first])] for first, last in pairwise(edges) if kinds[first] != Kind.EMPTY]


@pytest.mark.parametrize("by_key", [False, True], ids=["by query", "by key"])
def test_documents_have_the_plan_of_those_that_the_host_sees(by_key: bool) -> None:
    n, tile = 192, Tile(16, 16)
    ids, shape = np.arange(n) // 25, Shape(1, 1, 1, n, n, 16, 16)
    found, want = (
        visits_of(Attention(1.0, tw.causal() & tw.document(x)), shape, tile, by_key)
        for x in (torch.from_numpy(ids), ids)
    )
    assert found == want
    assert count_of(found) < count_of(visits_of(Attention(1.0, tw.causal()), shape, tile, by_key)) / 2


@pytest.mark.parametrize("by_key", [False, True], ids=["by query", "by key"])
def test_packed_sequences_have_it_too(by_key: bool) -> None:
    ends, shape, tile = np.array([0, 40, 40, 45, 130]), Shape(1, 2, 1, 130, 130, 16, 16), Tile(16, 16)
    ids, counts = np.arange(130) // 25, np.array([True, True, False, True])

    def visits(ids: Any, counts: Any) -> Any:
        mask = tw.causal() & (load(ids, QP) == load(ids, KP)) & load(counts, B)
        return visits_of(Attention(1.0, mask, lengths=Lengths(ends, ends)), shape, tile, by_key)

    assert visits(torch.from_numpy(ids), torch.from_numpy(counts)) == visits(ids, counts)


# -- results ----------------------------------------------------------------------------------------------------------


def _results(spec: Attention, n: int = 40, n_k: int = 70, batch: int = 2) -> list[Any]:
    """out, lse, and the gradients of q, k, v and arrays."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, rows, 16) for heads, rows in ((2, n), (1, n_k), (1, n_k)))
    kernel = dispatch.kernel("triton")
    saved = kernel.forward(spec, q, k, v, TILE)
    grads = kernel.backward(spec, q, k, v, saved, torch.randn(saved.out.shape), tile=TILE)
    return [saved.out, saved.lse, grads.q, grads.k, grads.v, *grads.arrays]


@pytest.mark.parametrize("name", ["heads", "padding, or near"])
def test_the_same_bits_as_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_bits(Attention(0.3, MASKS[name]), monkeypatch)


def test_gradients_of_arrays_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    by_query, by_key = (torch.from_numpy(RNG.standard_normal(n).astype(np.float32)) for n in (40, 70))
    score = tw.S + load(by_query, Q, grad=True) * load(by_key, K, grad=True)
    _check_bits(Attention(0.3, MASKS["document"], score), monkeypatch)


def _check_bits(spec: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _results(spec)
    monkeypatch.setattr(launch_plan, "is_unseen", lambda spec: False)
    assert all(torch.equal(a, b) for a, b in zip(found, _results(spec), strict=True))


def test_rows_that_no_key_counts_for() -> None:
    out, lse, d_q, d_k, d_v = _results(Attention(0.3, MASKS["nothing"]))
    assert torch.all(lse == -torch.inf)
    assert not any(x.any() for x in (out, d_q, d_k, d_v))


def test_packed_sequences_have_the_same_bits() -> None:
    ends, ids = np.array([0, 40, 40, 70]), np.arange(70) // 25
    specs = [
        Attention(0.3, tw.causal() & (load(x, QP) == load(x, KP)), lengths=Lengths(ends, ends))
        for x in (ids, torch.from_numpy(ids))
    ]
    seen, unseen = (_results(spec, n=70, batch=1) for spec in specs)
    assert all(torch.equal(a, b) for a, b in zip(seen, unseen, strict=True))


def test_arrays_may_change_between_calls() -> None:
    ids = torch.zeros(70, dtype=torch.int64)
    spec, shape = Attention(0.3, tw.document(ids)), Shape(1, 1, 1, 70, 70, 16, 16)
    for step in (40, 15, 70):
        ids.copy_(torch.arange(70) // step)
        assert visits_of(spec, shape, TILE) == visits_of(Attention(0.3, tw.document(ids.numpy())), shape, TILE)


def test_decoding_is_as_it_was() -> None:
    k, v = (torch.randn(2, 2, 40, 16) for _ in range(2))
    cache = tw.KVCache.like(k, v, capacity=64)
    cache.append(k, v)
    counts = torch.arange(64) % 3 > 0
    out = tw.decode(torch.ones(2, 4, 1, 16), cache, mask=load(counts, K), kernel="triton")
    want = tw.attention(torch.ones(2, 4, 1, 16), k, v, mask=load(counts[:40], K), kernel="numpy")
    torch.testing.assert_close(out, want)


# -- when -------------------------------------------------------------------------------------------------------------


def _is_refined(monkeypatch: pytest.MonkeyPatch, spec: Attention, shape: Shape) -> bool:
    calls: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(launch_plan, "refined", lambda plan, *_: calls.append(plan) or plan)
        launch_plan.planned(spec, shape, TILE, torch.zeros(1))
    return bool(calls)


def test_only_masks_of_arrays_that_nobody_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = tw.S + load(torch.zeros(40, 70), Q, K)
    assert _is_refined(monkeypatch, Attention(1.0, MASKS["document"]), SHAPE)
    for mask in (None, tw.causal(), tw.document(IDS_Q, IDS_K)):
        assert not _is_refined(monkeypatch, Attention(1.0, mask, bias), SHAPE)


def test_only_where_it_pays_and_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Attention(1.0, load(torch.ones(70, dtype=torch.bool), K))
    monkeypatch.setattr(launch_plan, "_LEAST_VISITS", 37)  # there are 3 x 3 tiles, of 2 heads of 2 batch indices
    assert not _is_refined(monkeypatch, spec, SHAPE)
    assert _is_refined(monkeypatch, Attention(1.0, spec.mask, batch_invariant=True), SHAPE)
    monkeypatch.setattr(launch_plan, "_LEAST_VISITS", 36)
    assert _is_refined(monkeypatch, spec, SHAPE)
    monkeypatch.setattr(launch_plan, "_AT_MOST", 300)
    assert not _is_refined(monkeypatch, spec, SHAPE)


def test_nothing_to_visit() -> None:
    spec = Attention(1.0, MASKS["everything"], batch_invariant=True)
    for shape in (Shape(1, 0, 0, 40, 70, 16, 16), Shape(0, 2, 1, 40, 70, 16, 16), Shape(1, 2, 1, 40, 0, 16, 16)):
        grid, *_ = launch_plan.planned(spec, shape, TILE, torch.zeros(1))
        assert grid == (3, shape.heads, shape.batch)

"""Decoding in Triton: shares of keys, pages read where they are, keys that no query sees skipped; appending."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.decode_problems import ROPES, VARIANTS, Problem, random_problems
from tests.problems import bits
from tests.triton.test_ops import needs_triton
from tilewise import arrays, contract
from tilewise.expr import NK, NQ, H, K, Q
from tilewise.kernels.triton import tuning
from tilewise.kernels.triton.reach import Reach, reach
from tilewise.spec import Attention, Shape, Tile


@pytest.fixture
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a sequence has several, and some pages have more keys than a tile, others fewer."""
    from tilewise.kernels.triton import launch_decode

    small = tuning.Choice(Tile(16, 32), 4, 2)
    monkeypatch.setattr(launch_decode, "chosen", lambda kind, spec, shape: small)


@pytest.fixture
def several_splits(several_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that one sequence does not fill; short sequences have fewer tiles than there are shares."""
    from tilewise.kernels.triton import launch_decode

    monkeypatch.setattr(launch_decode, "splits_of", lambda programs, tiles, room: 3)


def _decoded(problem: Problem, device: str = "cpu") -> tuple[Any, Any]:
    """By Triton alone: what was appended, too."""
    call = {"q": problem.q, "k": problem.k, "v": problem.v}
    options = dict(problem.options)
    if device != "cpu":
        call = {name: arrays.as_tensor(x).to(device) for name, x in call.items()}
        options = _on_device(options, device)
    cache = problem.cache(call["k"], call["v"])
    cache.append(call["k"], call["v"], problem.lengths, rope=problem.turning, kernel="triton")
    out, lse = tw.decode(call["q"], cache, **options, rope=problem.turning, kernel="triton", return_lse=True)
    return contract.on_host(out), contract.on_host(lse)


def _on_device(options: dict[str, Any], device: str) -> dict[str, Any]:
    from tilewise.contract import on_device
    from tilewise.validate import Call

    x = np.zeros((1, 1, 1, 1), np.float32)
    exprs = {name: e for name, e in options.items() if isinstance(e, tw.Expr)}
    moved = on_device(Call(Attention(1.0, exprs.get("mask"), exprs.get("score")), x, x, x, 4), device).spec
    made = {name: getattr(moved, name) if name in exprs else e for name, e in options.items()}
    return {name: arrays.as_tensor(e).to(device) if isinstance(e, np.ndarray) else e for name, e in made.items()}


PROBLEMS = [
    *(Problem(name, n_q=4, page=page) for name, page in zip(VARIANTS, [None, 16, 128] * 6, strict=False)),
    *(Problem(name, dtype=dtype, page=page, d=40, d_v=24) for name, dtype, page in (
        ("causal", "float16", None), ("all at once", "bfloat16", 32), ("window", "bfloat16", None),
    )),
    *(Problem("sinks", lengths=(65, 3), group=group, heads_k=1, page=16) for group in (1, 3, 8)),
    Problem("causal", lengths=(140,), n_q=16, group=8, heads_k=1),  # more rows than a tile has
    *(Problem("causal", n_q=4, dtype=dtype, page=page, rope=rope) for rope, dtype, page in zip(
        ROPES, ("float32", "bfloat16", "float16", "float32"), (None, 16, None, 32), strict=True,
    )),
]  # fmt: skip


@needs_triton
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problems(problem: Problem) -> None:
    problem.check(*_decoded(problem))


@needs_triton
@pytest.mark.usefixtures("several_splits")
@pytest.mark.parametrize("problem", PROBLEMS[::3], ids=str)
def test_keys_that_are_shared(problem: Problem) -> None:
    problem.check(*_decoded(problem))


@needs_triton
@pytest.mark.parametrize("problem", random_problems(12), ids=str)
def test_random_calls(problem: Problem) -> None:
    problem.check(*_decoded(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [*PROBLEMS, *random_problems(40)], ids=str)
def test_on_a_gpu(problem: Problem) -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is no GPU")
    problem.check(*_decoded(problem, "cuda:0"))


@needs_triton
@pytest.mark.parametrize("page", [None, 16])
def test_appending_writes_what_indexing_writes(page: int | None) -> None:
    """Some rows a sequence, across the borders of pages, and nothing else."""
    problem = Problem(lengths=(70, 70, 70), page=page, d=5, d_v=3, dtype="bfloat16")
    ours, theirs = (problem.cache(problem.k, problem.v) for _ in range(2))
    for counts in ([0, 33, 15], [1, 1, 1], [16, 0, 17], [2, 2, 2]):
        n = max(counts)
        k, v = problem.k[:, :, :n], problem.v[:, :, :n]
        ours.append(k, v, counts, kernel="triton")
        theirs.append(k, v, counts, kernel="numpy")
    assert list(ours.lengths) == list(theirs.lengths) == [19, 36, 35]
    assert bits(ours.k) == bits(theirs.k)
    assert bits(ours.v) == bits(theirs.v)


@needs_triton
@pytest.mark.usefixtures("several_tiles")
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("lengths", [(-3, 70), (2**31 - 1, -(2**31)), (64, 0)], ids=str)
def test_whatever_lengths_and_tables_hold_kernels_stay_within_the_cache(
    lengths: tuple[int, int], page: int | None
) -> None:
    """They are numbers on a GPU, which nobody looks at before: around the cache lies what no result may have."""
    from tilewise.kernels.triton.launch_decode import append

    sizes = (2, 2, 64, 8) if page is None else (8, 2, page, 8)
    around = [np.full((sizes[0] + 16, *sizes[1:]), np.nan, np.float32) for _ in "kv"]
    k, v = (x[8:-8] for x in around)
    k[...], v[...] = 1, 1
    cache = tw.KVCache(k, v) if page is None else tw.PagedKVCache(k, v, batch=2, capacity=64)
    new = np.ones((2, 2, 60, 8), np.float32)
    cache.append(new, new, kernel="triton")
    cache.lengths[:] = lengths
    if page is not None:
        cache.table[:] = [[-5, 9, 12, -1], [8, -8, 15, 0]]
    out = tw.decode(np.ones((2, 4, 1, 8), np.float32), cache, kernel="triton")
    assert np.isin(out, [0, 1]).all(), "of the cache every row is 1"
    more = arrays.as_tensor(2 * new)
    append(cache, more, more, np.array([60, 99], np.int32), None)
    assert all(np.isnan(x[:8]).all() and np.isnan(x[-8:]).all() for x in around)
    assert not np.isnan(k).any()


@needs_triton
def test_appended_and_asked_at_given_positions() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 3, 8)).astype(np.float32) for _ in range(3))
    for rope in (
        tw.Rope(positions=np.array([[5, 9, 2], [0, 1, 7]]), interleaved=True),
        tw.Rope(6, positions=np.array([4, 5, 6]), positions_k=np.array([[1, 2, 3], [6, 5, 4]])),
    ):
        found = tw.decode(q, tw.KVCache.like(k, v, capacity=8), k=k, v=v, rope=rope, kernel="triton")
        np.testing.assert_allclose(found, tw.attention(q, k, v, rope=rope, kernel="numpy"), rtol=1e-5, atol=1e-5)


@needs_triton
def test_new_keys_are_appended_first() -> None:
    problem = Problem("causal", lengths=(50, 50), n_q=2, page=16)
    cache = problem.cache(problem.k, problem.v)
    old, new = (slice(None), slice(None), slice(48)), (slice(None), slice(None), slice(48, None))
    cache.append(problem.k[old], problem.v[old], kernel="triton")
    problem.check(
        *tw.decode(problem.q, cache, k=problem.k[new], v=problem.v[new], causal=True, kernel="triton", return_lse=True)
    )


@needs_triton
def test_a_sequence_has_the_same_bits_in_any_batch(several_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where fewer sequences would have their keys shared by more programs."""
    from tilewise.kernels.triton import launch_decode

    monkeypatch.setattr(launch_decode, "splits_of", lambda programs, tiles, room: max(1, 4 // programs))
    many = Problem("causal", lengths=(130, 130, 130, 130, 20, 7, 99), n_q=2, heads_k=1)
    one = Problem("causal", lengths=(130,), n_q=2, heads_k=1)
    out = []
    for problem in (many, one):
        cache = problem.cache(problem.k, problem.v)
        cache.append(many.k[: problem.batch], many.v[: problem.batch], problem.lengths)
        q = many.q[: problem.batch]
        out.append(tw.decode(q, cache, causal=True, kernel="triton", batch_invariant=True))
    assert bits(out[0][:1]) == bits(out[1])


@needs_triton
@pytest.mark.usefixtures("several_tiles")
def test_keys_outside_a_window_are_not_read() -> None:
    """NaN there would be seen: in a masked key's value it makes the result NaN."""
    problem = Problem("window", lengths=(140, 120), n_q=2)
    for name in ("k", "v"):
        getattr(problem, name)[0, :, :64] = np.nan  # tiles that lie before the window of the first sequence
    out, _ = _decoded(problem)
    assert np.isfinite(out).all()


@needs_triton
def test_float64_is_refused() -> None:
    problem = Problem(dtype="float64")
    with pytest.raises(tw.Unsupported, match="it computes float16, bfloat16, float32"):
        tw.decode(problem.q, problem.cache(problem.k, problem.v), kernel="triton")


@needs_triton
def test_the_first_kernel_decodes_by_its_forward_pass() -> None:
    problem = Problem("alibi", lengths=(20, 3), n_q=2, page=16)
    cache = problem.cache(problem.k, problem.v)
    cache.append(problem.k, problem.v, problem.lengths)
    problem.check(*tw.decode(problem.q, cache, **problem.options, kernel="triton/basic", return_lse=True))


# -- which keys are visited, and with how many programs ---------------------------------------------------------------

SHAPE = Shape(1, 4, 2, 4, 1000, 16, 16)
ALL = 1000


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, Reach(ALL, ALL, 0)),
        (tw.causal(), Reach(1008, 1008, 16)),  # in steps of 16: the last 3 keys are not all queries'
        (tw.causal() & tw.window(100), Reach(112, 96, 16)),
        (tw.window(100, 0) & tw.document(np.zeros(4, np.int32), np.zeros(1000, np.int32)), Reach(112, 0, 0)),
        (tw.window(100) | tw.prefix(4), Reach(ALL, 0, 0)),
        (K >= NK - 64 * (H + 1), Reach(256, 0, 0)),
        (NK - K <= 32 + NQ * 0 + Q * 0, Reach(32, 32, 0)),
        (K * 2 > NK, Reach(ALL, 0, 0)),
    ],
)
def test_reach(mask: Any, expected: Reach) -> None:
    assert reach(Attention(1.0, mask), SHAPE) == expected


@pytest.mark.parametrize(
    "mask", [tw.causal(), tw.causal() & tw.window(50), tw.window(30, 2) & tw.dilated(2), K >= NK - 40]
)
@pytest.mark.parametrize("n_q", [1, 3])
def test_reach_is_right_for_every_length(mask: Any, n_q: int) -> None:
    from tilewise.reference import values

    told = reach(Attention(1.0, mask), Shape(1, 1, 1, n_q, 128, 4, 4))
    for length in (1, 16, 50, 127, 128):
        shape = Shape(1, 1, 1, n_q, length, 4, 4)
        key = np.arange(length)
        counts = np.broadcast_to(values(mask, shape.env(0, 0, np.arange(n_q)[:, None], key)), (n_q, length))
        distance = length - key
        assert not counts[:, distance > told.far].any()
        assert counts[:, (distance <= told.far_full) & (distance > told.near_full)].all()


@pytest.mark.parametrize("room", [132, 264, 396])
def test_splits_fill_the_gpu(room: int) -> None:
    for batch, n in ((1, 65536), (16, 8192), (64, 4096)):
        programs = batch * 8 * tuning.splits_of(batch * 8, n // 32, room)
        assert programs / (-(-programs // room) * room) > 0.95
    assert tuning.splits_of(8, 3, room) == 1  # too few keys to share
    assert tuning.splits_of(1, 10**6, room) <= room


@needs_triton
def test_rows_fit_their_tile() -> None:
    for group, n_q, rows in ((1, 1, 16), (4, 4, 16), (5, 4, 32), (8, 16, 64)):
        shape = Shape(1, group, 1, n_q, 100, 64, 64, "float16")
        assert tuning.fitting_rows(tuning.chosen(tuning.Pass.DECODE, Attention(1.0), shape), shape).tile.q == rows

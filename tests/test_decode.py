"""Decoding with a cache, on arrays in main memory: numbers against the reference, pages, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.decode_problems import ROPES, VARIANTS, Problem, random_problems
from tests.problems import bits
from tilewise import arrays, decoding, dispatch, reference
from tilewise.cache.base import Numbers
from tilewise.cache.paged import NO_PAGE

needs_engine = pytest.mark.skipif(dispatch.kernel("cpu").unavailable() is not None, reason="there is no engine")
KERNELS = [pytest.param("cpu", marks=needs_engine), "numpy"]


def _decoded(problem: Problem, kernel: str, library: str = "numpy") -> tuple[Any, Any]:
    q, k, v = (arrays.as_tensor(x) if library == "torch" else x for x in (problem.q, problem.k, problem.v))
    options = {
        name: torch.from_numpy(x) if library == "torch" and isinstance(x, np.ndarray) else x
        for name, x in problem.options.items()
    }
    cache = problem.cache(k, v)
    cache.append(k, v, problem.lengths, rope=problem.turning)
    return tw.decode(q, cache, **options, rope=problem.turning, kernel=kernel, return_lse=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, page: int | None, kernel: str) -> None:
    for n_q in (1, 4):
        problem = Problem(variant, n_q=n_q, page=page)
        problem.check(*_decoded(problem, kernel))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rope", ROPES)
def test_keys_are_turned_as_they_are_appended_and_queries_as_they_come(rope: str, kernel: str, library: str) -> None:
    for n_q, page in ((1, None), (4, 16)):
        problem = Problem("causal", n_q=n_q, page=page, rope=rope)
        problem.check(*_decoded(problem, kernel, library))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rotary_embedding_at_given_positions(kernel: str) -> None:
    """Queries and new keys at the same ones, or at others."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 3, 8)).astype(np.float32) for _ in range(3))
    for rope in (
        tw.Rope(positions=np.array([[5, 9, 2], [0, 1, 7]])),
        tw.Rope(positions=np.array([4, 5, 6]), positions_k=np.array([[1, 2, 3], [6, 5, 4]])),
    ):
        cache = tw.KVCache.like(k, v, capacity=8)
        found = tw.decode(q, cache, k=k, v=v, rope=rope, kernel=kernel)
        np.testing.assert_allclose(found, tw.attention(q, k, v, rope=rope), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"rope: positions_k must be \(3,\) or \(2, 3\), one a row, got shape \(1,\)"):
        tw.decode(q[:, :, :1], cache, k=k, v=v, rope=tw.Rope(positions=np.array([4])), kernel=kernel)
    assert list(cache.lengths) == [3, 3]  # what is refused is not appended


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", arrays.FLOAT_DTYPES)
def test_types_of_either_library(dtype: str, library: str) -> None:
    for page in (None, 32):
        problem = Problem("all at once", n_q=3, dtype=dtype, page=page, d=24, d_v=40)
        out, lse = _decoded(problem, "auto", library)
        assert arrays.is_torch(out) == (library == "torch")
        problem.check(out, lse)


@pytest.mark.parametrize("group", range(1, 9))
def test_groups(group: int) -> None:
    problem = Problem(group=group, n_q=2)
    problem.check(*_decoded(problem, "auto"))


@pytest.mark.parametrize("problem", random_problems(40), ids=str)
def test_random_calls(problem: Problem) -> None:
    problem.check(*_decoded(problem, "auto"))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("variant", ["causal", "sinks"])
@pytest.mark.parametrize("lengths", [(40, 0), (0, 0)])
def test_a_kernel_that_needs_keys_decodes_a_sequence_without(
    lengths: tuple[int, ...], variant: str, library: str
) -> None:
    kernel = "cuda-sim/forward_sm90"
    if (reason := dispatch.kernel(kernel).unavailable()) is not None:
        pytest.skip(f"{kernel} cannot run on this machine: {reason}")
    problem = Problem(variant, lengths, dtype="float16", d=64, d_v=64)
    problem.check(*_decoded(problem, kernel, library))


@pytest.mark.parametrize("page", [None, 16])
def test_the_reference_decodes(page: int | None) -> None:
    problem = Problem("alibi", n_q=2, page=page)
    cache = problem.cache(problem.k, problem.v)
    cache.append(problem.k, problem.v, problem.lengths)
    call = decoding.prepare(problem.q, cache, **problem.options)
    done = decoding.by_sequences(reference.forward, call.spec, call.q, cache)
    problem.check(done.out.astype(np.float32), done.lse.astype(np.float32))


@pytest.mark.parametrize("page", [None, 16])
def test_generating_is_causal_attention_row_by_row(page: int | None) -> None:
    """A prompt at once, then a token or some at a time, across the borders of pages."""
    problem = Problem("full", lengths=(90, 90), page=page)
    q = np.random.default_rng(3).standard_normal((2, problem.heads, 90, problem.d)).astype(np.float32)
    k, v = problem.k, problem.v
    want = tw.attention(q, k, v, mask=tw.causal() & tw.window(40))
    cache = problem.cache(k, v)
    cache.append(k[:, :, :30], v[:, :, :30])
    at = 30
    for n in (1, 1, 1, 4, 16, 1, 36):
        new = slice(at, at + n)
        out = tw.decode(q[:, :, new], cache, k=k[:, :, new], v=v[:, :, new], mask=tw.causal() & tw.window(40))
        np.testing.assert_allclose(out, want[:, :, new], rtol=1e-5, atol=1e-6)
        at += n
        assert list(cache.lengths) == [at, at]
    assert at == 90


@needs_engine
def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    problem = Problem("all at once", lengths=(100, 100, 100), n_q=2)
    together, lse = _decoded(problem, "auto")
    cache = problem.cache(problem.k, problem.v)
    cache.append(problem.k, problem.v, [100, 100, 40])  # which takes them one by one
    apart, apart_lse = tw.decode(problem.q, cache, **problem.options, return_lse=True)
    assert bits(together[:2]) == bits(apart[:2])
    assert bits(lse[:2]) == bits(apart_lse[:2])


def test_a_cache_takes_a_callers_arrays_as_they_lie() -> None:
    """(batch, capacity, heads, d) in memory, the last key of some sequences there already."""
    problem = Problem(lengths=(60, 60), n_q=2)
    k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (problem.k, problem.v))
    cache = tw.KVCache(k, v, lengths=[60, 60])
    problem.check(*tw.decode(problem.q, cache, causal=True, return_lse=True))
    again = tw.KVCache(k, v, lengths=59)
    again.append(problem.k[:, :, 59:], problem.v[:, :, 59:])
    assert again.k is k
    problem.check(*tw.decode(problem.q, again, causal=True, return_lse=True))


def test_what_was_in_a_cache_before_does_not_matter() -> None:
    """Not even NaN, behind the keys that count."""
    problem = Problem("causal", n_q=2)
    for page in (None, 16):
        storage = [x if page is None else x[:, :, :page] for x in (problem.k, problem.v)]
        size = (4, 2, 150) if page is None else (40, 2, page)
        k, v = (np.full((*size, x.shape[3]), np.nan, np.float32) for x in storage)
        cache = tw.KVCache(k, v) if page is None else tw.PagedKVCache(k, v, batch=4)
        cache.append(problem.k, problem.v, problem.lengths)
        problem.check(*tw.decode(problem.q, cache, causal=True, return_lse=True))


# -- pages ------------------------------------------------------------------------------------------------------------


def test_pages_are_taken_at_borders_and_given_back() -> None:
    k = np.ones((3, 1, 40, 8), np.float32)
    cache = tw.PagedKVCache.like(k, k, pages=7, page_size=16)
    cache.append(k, k, [16, 17, 0])
    assert cache.free_pages == 4
    assert [int(n) for n in (cache.table != NO_PAGE).sum(axis=1)] == [1, 2, 0]
    cache.append(k[:, :, :1], k[:, :, :1], [1, 1, 0])  # only the first crosses a border
    assert cache.free_pages == 3
    held = set(cache.table[cache.table != NO_PAGE].tolist())
    cache.release(0, 1)
    assert cache.free_pages == 7
    assert list(cache.lengths) == [0, 0, 0]
    assert np.all(cache.table == NO_PAGE)
    cache.append(k, k, [0, 0, 40])
    assert set(cache.table[2, :3].tolist()) <= held  # those given back are taken again


def test_no_two_sequences_share_a_page() -> None:
    """Sequences come, grow and go at random; each has its own keys at the end."""
    rng = np.random.default_rng(5)
    kept: list[list[float]] = [[] for _ in range(4)]
    cache = tw.PagedKVCache.like(np.zeros((4, 1, 1, 2), np.float32), np.zeros((4, 1, 1, 1), np.float32), pages=20)
    for _ in range(200):
        counts = rng.integers(0, 9, 4)
        new = rng.standard_normal((4, 1, 8, 2)).astype(np.float32)
        needed = sum(-(-(len(rows) + n) // 16) for rows, n in zip(kept, counts, strict=True))
        if needed > 20:
            b = int(rng.integers(4))
            cache.release(b)
            kept[b] = []
            continue
        cache.append(new, new[..., :1], counts)
        for b, n in enumerate(counts):
            kept[b] += new[b, 0, :n, 0].tolist()
        used = cache.table[cache.table != NO_PAGE]
        assert len(set(used.tolist())) == used.size == 20 - cache.free_pages
    for b, rows in enumerate(kept):
        k, v = cache.sequence(b)
        assert k[0, 0, :, 0].tolist() == rows == v[0, 0, :, 0].tolist()


def test_numbers_on_another_device_follow_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = torch.zeros(1)
    monkeypatch.setattr(arrays, "device_name", lambda x: "cuda:0")
    numbers = Numbers(np.zeros((3,), np.int32), beside)
    table = Numbers(np.zeros((2, 3), np.int32), beside)
    monkeypatch.undo()
    assert not numbers.is_shared
    for counts in ([1, 1, 1], [0, 2, 5]):
        numbers.add(np.array(counts, np.int32))
    numbers.put((1,), 0)
    table.put((np.array([0, 1]), np.array([2, 0])), np.array([7, 8], np.int32))
    table.put((1, slice(0, 1)), NO_PAGE)
    assert numbers.array.tolist() == numbers.host.tolist() == [1, 0, 6]
    assert table.array.tolist() == table.host.tolist() == [[0, 0, 7], [-1, 0, 0]]


# -- what is refused --------------------------------------------------------------------------------------------------

X = np.zeros((2, 2, 5, 8), np.float32)
WIDE, PAGES = np.zeros((2, 2, 5, 576), np.float32), np.zeros((4, 2, 16, 576), np.float32)
Q1 = np.zeros((2, 4, 1, 8), np.float32)


def _cache() -> tw.KVCache:
    return tw.KVCache.like(X, X, capacity=8)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda: tw.decode(Q1, X), TypeError, r"cache: expected a tw.KVCache .* got ndarray; tw.KVCache.like"),
        (lambda: tw.decode(Q1[:, :, 0], _cache()), ValueError, r"q: expected \(2, heads, queries, 8\)"),
        (lambda: tw.decode(Q1[:1], _cache()), ValueError, r"q: expected \(2, heads, queries, 8\)"),
        (lambda: tw.decode(Q1[..., :4], _cache()), ValueError, r"q: expected \(2, heads, queries, 8\)"),
        (lambda: tw.decode(Q1[:, :3], _cache()), ValueError, "q: its heads must be a multiple of the cache's 2"),
        (lambda: tw.decode(Q1.astype(np.float64), _cache()), TypeError, "q: expected type float32 .* got float64"),
        (lambda: tw.decode(torch.from_numpy(Q1), _cache()), TypeError, "q: expected a NumPy array .* got Tensor"),
        (lambda: tw.decode(Q1, _cache(), k=X), ValueError, "k, v: give both"),
        (lambda: tw.decode(Q1, _cache(), k=X, v=X[:, :, :4]), ValueError, "v: expected 5 rows as k has, got 4"),
        (lambda: tw.decode(Q1, _cache(), k=X[:, :1], v=X), ValueError, r"k: expected \(2, 2, n, 8\) as the cache"),
        (lambda: tw.decode(Q1, _cache(), kernel="fast"), ValueError, "kernel: expected one of auto"),
        (lambda: tw.decode(Q1, _cache(), kernel="cuda"), tw.Unsupported, "kernel 'cuda' cannot compute this call"),
        (lambda: tw.decode(Q1, _cache(), score=tw.bias(X[0, 0])), ValueError, "values must be for 1 queries, got 5"),
        (lambda: tw.decode(Q1, _cache(), score=tw.bias(X[0, 0, :1, :6])), ValueError, "must be for 8 keys, got 6"),
        (lambda: tw.decode(Q1, _cache(), mask=X[0, 0] > 0), ValueError, r"mask: .* broadcasts .* \(2, 4, 1, 8\)"),
        (lambda: tw.decode(Q1, _cache(), mask=(tw.NK - 9) * 2**30 > 0), ValueError, "beyond 32 bits"),
        (lambda: tw.decode(Q1, _cache(), sinks=np.ones(2, np.float32)), ValueError, r"sinks: expected shape \(4,\)"),
        (lambda: _cache().append(X, X, [5, 6]), ValueError, r"counts: .* from 0 to 5, one for each of 2 .* \[5, 6\]"),
        (lambda: _cache().append(X, X, [5]), ValueError, "counts: expected whole numbers"),
        (lambda: _cache().append(X, X, [0.5, 1]), ValueError, "counts: expected whole numbers"),
        (lambda: _cache().append(X.astype(np.float16), X), TypeError, "k: expected type float32 .* got float16"),
        (lambda: _cache().release(2), ValueError, "release: expected numbers of sequences from 0 to 1, got 2"),
        (lambda: tw.KVCache(X, X, lengths=6), ValueError, "lengths: expected whole numbers from 0 to 5"),
        (lambda: tw.KVCache(X, X[:, :, :3]), ValueError, r"v: expected \(2, 2, 5\) and a head dimension"),
        (lambda: tw.KVCache(X[0], X[0]), ValueError, r"k: expected \(batch, heads, capacity, d\)"),
        (lambda: tw.KVCache(X[:, :, ::-1], X), ValueError, "k: expected rows side by side and positive strides"),
        (lambda: tw.KVCache(np.broadcast_to(X, X.shape), X), ValueError, "k: new keys are written in place"),
        (lambda: tw.KVCache.like(X, X, capacity=0), ValueError, "capacity: expected a positive whole number, got 0"),
        (lambda: tw.KVCache.like(X[0], X[0], capacity=9), ValueError, r"k: expected \(batch, heads, n, d\)"),
        (lambda: tw.KVCache.like([1], X, capacity=9), TypeError, "k: expected a NumPy array or a PyTorch tensor"),
        (lambda: tw.KVCache.like(WIDE, X, capacity=9), ValueError, "k: expected a head dimension .* 512, got 576"),
        (lambda: tw.KVCache.like(X, WIDE, capacity=9), ValueError, "v: expected a head dimension .* 512, got 576"),
        (lambda: tw.KVCache(WIDE, WIDE), ValueError, "k: expected a head dimension .* 512, got 576"),
        (lambda: tw.PagedKVCache.like(WIDE, X, pages=4), ValueError, "k: expected a head dimension .* 512, got 576"),
        (lambda: tw.PagedKVCache(PAGES, PAGES, batch=2), ValueError, "k: expected a head dimension .* 512, got 576"),
        (lambda: tw.PagedKVCache.like(X, X, pages=4, page_size=24), ValueError, "page size: expected a power of 2"),
        (lambda: tw.PagedKVCache.like(X, X, pages=4, page_size=8), ValueError, "page size: expected a power of 2"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        call()


def test_a_full_cache_says_so_and_stays_as_it_was() -> None:
    cache = _cache()
    cache.append(X + 1, X, [5, 4])
    before = bits(cache.k)
    with pytest.raises(ValueError, match=r"sequence 0 has 5 keys, and 5 more are beyond the cache's capacity of 8"):
        tw.decode(Q1, cache, k=X, v=X)
    paged = tw.PagedKVCache.like(X, X, pages=1, batch=2)
    with pytest.raises(ValueError, match=r"2 more pages of 16 keys are needed, and 1 of 1 are free; make .* pages$"):
        paged.append(X, X)
    paged.append(X[:, :, :1], X[:, :, :1], [1, 0])
    with pytest.raises(ValueError, match=r"1 more pages .* 0 of 1 are free; .*, or end sequences with cache.release"):
        paged.append(X, X)
    paged.release(0)
    with pytest.raises(ValueError, match=r"sequence 1 has 0 keys, and 9 more .*; make a larger cache, or append fewer"):
        _cache().append(np.repeat(X, 2, 2), np.repeat(X, 2, 2), [0, 9])
    assert bits(cache.k) == before
    assert list(cache.lengths) == [5, 4]
    assert list(paged.lengths) == [0, 0]
    assert paged.free_pages == 1


def test_gradients_are_refused() -> None:
    q, x = torch.zeros(2, 4, 1, 8, requires_grad=True), torch.from_numpy(X)
    cache = tw.KVCache.like(x, x, capacity=8)
    with pytest.raises(ValueError, match=r"q: decoding has no gradients.*torch.no_grad"):
        tw.decode(q, cache)
    with torch.no_grad():
        assert not tw.decode(q, cache, k=x, v=x).requires_grad

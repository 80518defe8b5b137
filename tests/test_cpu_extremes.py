"""Integer arguments at their extremes, on NumPy arrays and the native engine: sanitizers see what becomes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.extremes import VALUES, Case, check
from tilewise import dispatch
from tilewise.kernels.cpu import library
from tilewise.spec import Attention, Tile
from tilewise.validate import prepare

KERNEL = "cpu" if dispatch.kernel("cpu").unavailable() is None else "numpy"
N_Q, N_K, D = 5, 7, 4
MOST = 2**31 - 1
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 4, N_Q, D))
KEYS = RNG.standard_normal((2, 2, N_K, D))
V = RNG.standard_normal((2, 2, N_K, 3))
P = np.arange(N_Q)[:, None] + (N_K - N_Q)  # each query's position among the keys
AT = np.arange(N_K)


def attend(**options: Any) -> np.ndarray:
    return tw.attention(Q, KEYS, V, kernel=KERNEL, **options)


def masked(seen: Any) -> np.ndarray:
    return tw.attention(Q, KEYS, V, mask=np.broadcast_to(seen, (N_Q, N_K)), kernel="numpy")


def biased(bias: Any) -> np.ndarray:
    return tw.attention(Q, KEYS, V, mask=np.broadcast_to(bias, (N_Q, N_K)).astype(float), kernel="numpy")


def table(n: int = 8) -> np.ndarray:
    return np.linspace(-1, 1, n)


def cache(**options: Any) -> tw.KVCache:
    return tw.KVCache(np.zeros((2, 2, 9, D)), np.zeros((2, 2, 9, D)), **options)


WIDE = np.zeros((2, 64, 1, 512))  # so that 2^31 keys are beyond any machine


def large(capacity: Any) -> tw.KVCache:
    return tw.KVCache.like(WIDE, WIDE, capacity=capacity)


def paged(batch: Any = 2, **options: Any) -> tw.PagedKVCache:
    return tw.PagedKVCache.like(KEYS, V, pages=3, batch=batch, **options)


def appended(counts: Any, into: Any) -> Any:
    new = np.ones((2, 2, 6, D)), np.ones((2, 2, 6, into.v.shape[3]))
    into.append(*new, counts=counts)
    return into.lengths


def turned(position: Any, rope: tw.Rope | None = None) -> np.ndarray:
    return tw.apply_rope(np.ones((1, D)), rope or tw.Rope(), positions=np.array([position]))


def angles(position: int) -> np.ndarray:
    wide = np.longdouble(position) * np.longdouble(10000.0) ** (np.arange(2, dtype=np.longdouble) / -2)
    return np.concatenate([np.cos(wide) - np.sin(wide), np.cos(wide) + np.sin(wide)])[None].astype(np.float64)


def divided(n: int, k: np.ndarray) -> np.ndarray:
    return np.where(k == 0, 0, n // np.where(k == 0, 1, k))


def by_tile(tile: Tile) -> np.ndarray:
    call = prepare(Q, KEYS, V, mask=tw.causal())
    return np.asarray(dispatch.kernel(KERNEL).forward(call.spec, call.q, call.k, call.v, tile=tile).out)


def projected(**sizes: Any) -> np.ndarray:
    given = {"heads": 1, "heads_k": 1, "d": 4} | sizes
    return np.concatenate(tw.fused_qkv_projection(Q[0], np.ones((D, 12)), **given), -1)


CASES: dict[str, Case] = {
    # -- variants
    "window: left": Case(
        lambda n: attend(mask=tw.window(n)), lambda n: masked(abs(P - AT) <= n), 0, 2**30, "window: left"
    ),
    "window: right": Case(
        lambda n: attend(mask=tw.window(1, n)), lambda n: masked((P - AT <= 1) & (AT - P <= n)),
        0, 2**30, "window: right",
    ),
    "prefix: n": Case(lambda n: attend(mask=tw.prefix(n)), lambda n: masked(n > AT), 0, MOST, "prefix: n"),
    "dilated: step": Case(
        lambda n: attend(mask=tw.dilated(n)), lambda n: masked((P - AT) % n == 0), 1, MOST, "dilated: step"
    ),
    "alibi: heads": Case(
        lambda n: tw.attention(Q[:, :1], KEYS[:, :1], V[:, :1], score=tw.alibi(n), kernel=KERNEL),
        lambda _: tw.attention(Q[:, :1], KEYS[:, :1], V[:, :1], mask=-abs(P - AT) / 256.0, kernel="numpy"),
        1, 1, "alibi:",
    ),
    "t5: max_distance": Case(lambda n: attend(score=tw.t5(table(4), n)), None, 2, 2**20, "t5: max_distance"),
    "load: index": Case(
        lambda n: attend(score=tw.S + tw.load(table(), n)), lambda n: biased(table()[n]),
        0, 7, "load(array, ...): index",
    ),
    "an index that is computed": Case(
        lambda n: attend(score=tw.S + tw.load(table(), tw.load(np.array([n] * N_Q), tw.Q))),
        lambda n: biased(table()[min(max(n, 0), 7)]), -MOST - 1, MOST, "load", may_take_more=True, arrays=True,
    ),
    # -- positions and tiles
    "Rope: dim": Case(lambda n: attend(rope=tw.Rope(n)), None, 2, 2, " dim"),
    "Rope: positions": Case(turned, angles, -(2**63), 2**63 - 1, "positions", arrays=True),
    "Rope: positions in a table": Case(
        lambda n: turned(n, rope=tw.Rope(cos=np.ones((3, 2)), sin=np.zeros((3, 2)))), lambda _: np.ones((1, D)),
        0, 2, "position", arrays=True,
    ),
    "Tile: q": Case(lambda n: by_tile(Tile(q=n)), lambda _: masked(P >= AT), 1, MOST, "Tile: q"),
    "Tile: k": Case(lambda n: by_tile(Tile(k=n)), lambda _: masked(P >= AT), 1, MOST, "Tile: k"),
    "weights: rows": Case(
        lambda n: tw.weights(Q, KEYS, V, rows=n), lambda n: tw.weights(Q, KEYS, V, rows=range(N_Q))[:, :, [n]],
        -N_Q, N_Q - 1, "rows:",
    ),
    "picture: n_q": Case(lambda n: tw.picture(tw.causal(), n, 2).count("\n"), lambda n: n - 1, 1, 100, "n_q:"),
    "picture: n_k": Case(lambda n: len(tw.picture(tw.causal(), 1, n)), lambda n: 2 * n - 1, 1, 100, "n_k:"),
    "picture: head": Case(lambda n: tw.picture(tw.H > 0, 1, 1, head=n) == "■", lambda n: n > 0, 0, 7, "head:"),
    # -- caches
    "KVCache: lengths": Case(lambda n: cache(lengths=n).lengths, lambda n: [n, n], 0, 9, "lengths:"),
    "KVCache.like: capacity": Case(lambda n: large(capacity=n).capacity, lambda n: n, 1, 1, "capacity:"),
    "KVCache.append: counts": Case(lambda n: appended(n, cache()), lambda n: [n, n], 0, 6, "counts:"),
    "KVCache.release": Case(lambda n: cache(lengths=3).release(n), None, 0, 1, "release:"),
    "PagedKVCache.like: pages": Case(
        lambda n: len(tw.PagedKVCache.like(WIDE, WIDE, pages=n).k), lambda n: n, 1, 1, "pages"
    ),
    "PagedKVCache.like: page_size": Case(
        lambda n: tw.PagedKVCache.like(WIDE, WIDE, pages=1, page_size=n).page_size, lambda n: n, 16, 16, "page"
    ),
    "PagedKVCache.like: batch": Case(lambda n: paged(n).batch, lambda n: n, 1, 100, "batch:"),
    "PagedKVCache.like: capacity": Case(
        lambda n: paged(capacity=n).capacity, lambda n: min(n, 48), 1, MOST, "capacity:"
    ),
    "PagedKVCache.append: counts": Case(lambda n: appended(n, paged()), lambda n: [n, n], 0, 6, "counts:"),
    "PagedKVCache.release": Case(lambda n: paged().release(n), None, 0, 1, "release:"),
    # -- the rest
    "projection: heads": Case(lambda n: projected(heads=n), lambda _: projected(), 1, 1, "heads"),
    "projection: heads_k": Case(lambda n: projected(heads_k=n), lambda _: projected(), 1, 1, "heads"),
    "projection: d": Case(lambda n: projected(d=n), lambda _: projected(), 4, 4, "d"),
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", CASES)
def test_integers_at_their_extremes(case: str, value: str) -> None:
    check(CASES[case], VALUES[value])


# -- integers in arrays -----------------------------------------------------------------------------------------------

# How conditions read ids of queries and of keys. In the second a difference may leave the type, and 32 or 64 bits.
READ: dict[str, Any] = {
    "equal": lambda q, k: q == k,
    "near": lambda q, k: abs(q - k) < 2,
    "less": lambda q, k: q < k,
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("read", READ)
def test_ids_at_the_extremes_of_their_type(read: str, dtype: str) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    ids = np.array([least, most, 0, least, most - 1, 1, most], dtype)
    mask = READ[read](tw.load(ids[:N_Q], tw.Q), tw.load(ids, tw.K))
    wide = ids.astype(np.int64)
    seen = READ[read](wide[:N_Q, None], wide)  # beyond 64 bits integers wrap, NumPy's too
    try:
        found = attend(mask=mask)
    except tw.Unsupported as refusal:  # where 32 bits do not hold what the arrays could make
        assert dtype == "int64" or (dtype == "int32" and read == "near")
        assert "reaches" in str(refusal)
        return
    np.testing.assert_allclose(found, masked(seen), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint64"])
@pytest.mark.parametrize("place", ["lengths", "counts"])
def test_counts_at_the_extremes_of_their_type(place: str, dtype: str) -> None:
    """Of sequences in a cache: one that cannot be leaves the cache as it was."""
    for wrong in {np.iinfo(dtype).min, np.iinfo(dtype).max} - {0}:
        counts, kept = np.array([3, wrong], dtype), cache()
        with pytest.raises(ValueError, match=f"^{place}: expected whole numbers from 0 to"):
            cache(lengths=counts) if place == "lengths" else appended(counts, kept)
        np.testing.assert_array_equal(kept.lengths, [0, 0])


# -- constants of expressions -----------------------------------------------------------------------------------------

# Expressions with a constant in them: where all integers on the way fit 32 bits, they are what NumPy makes in 64.
FORMS: dict[str, Any] = {
    "K < n": lambda n, q, k: k < n,
    "K + n > Q": lambda n, q, k: k + n > q,
    "K - n > Q": lambda n, q, k: k - n > q,
    "K * n > Q": lambda n, q, k: k * n > q,
    "K // n == 0": lambda n, q, k: k // n == 0,
    "K % n == 0": lambda n, q, k: k % n == 0,
    "(Q - K) // n < 0": lambda n, q, k: (q - k) // n < 0,
    "(Q - K) % n < 2": lambda n, q, k: (q - k) % n < 2,
    "n // (K - 3) > Q": lambda n, q, k: (divided(n, k - 3) if isinstance(k, np.ndarray) else n // (k - 3)) > q,
    "-(K + n) < Q": lambda n, q, k: -(k + n) < q,
    "abs(K + n) > Q": lambda n, q, k: abs(k + n) > q,
}


@pytest.mark.parametrize("value", [-(2**31), -(2**31) + 1, -(2**30), -1, 0, 1, 2**30, 2**31 - 6, 2**31 - 1])
@pytest.mark.parametrize("form", FORMS)
def test_constants_at_the_edge_of_32_bits(form: str, value: int) -> None:
    make = FORMS[form]
    try:
        out = attend(mask=make(value, tw.Q, tw.K))
    except (ValueError, ZeroDivisionError) as refusal:
        assert "beyond 32 bits" in str(refusal) or value == 0
        return
    np.testing.assert_allclose(out, masked(make(value, np.arange(N_Q)[:, None], AT)), rtol=1e-6, atol=1e-7)


# -- the engine by itself ---------------------------------------------------------------------------------------------

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
needs_engine = pytest.mark.skipif(KERNEL != "cpu", reason="the native engine is not here")
# Integers that leave 32 bits, which the front refuses: the engine wraps them, in words that C++ defines.
WRAPPED: dict[str, Any] = {
    "K + most": lambda q, k: k + INT_MAX,
    "Q - most - K": lambda q, k: q - INT_MAX - k * 2,
    "K * most": lambda q, k: (k + 2) * INT_MAX,
    "-(least + K)": lambda q, k: -(k + INT_MIN),
    "abs(least + K)": lambda q, k: abs(k + INT_MIN),
    "(least + K) // -1": lambda q, k: (k + INT_MIN) // (k * 0 - 1),
    "(least + K) % -1": lambda q, k: (k + INT_MIN) % (k * 0 - 1),
    "(least + Q) // (K - 3)": lambda q, k: (q + INT_MIN) // (k - 3),
    "(most - Q) % (K - 3)": lambda q, k: (INT_MAX - q) % (k - 3),
}


@needs_engine
@pytest.mark.parametrize("form", WRAPPED)
def test_integers_wrap_in_the_engine(form: str) -> None:
    score = tw.S + WRAPPED[form](tw.Q, tw.K) * 2.0**-31
    q, k, v = (x.astype(np.float32) for x in (Q, KEYS, V))
    found = dispatch.kernel("cpu").forward(Attention(0.5, score=score), q, k, v).out
    with np.errstate(all="ignore"):  # NumPy complains of what it, too, makes 0 or wraps
        wrapped = WRAPPED[form](np.arange(N_Q, dtype=np.int32)[:, None], AT.astype(np.int32)[None])
    bias = (wrapped * 2.0**-31).astype(np.float32)
    np.testing.assert_allclose(found, tw.attention(q, k, v, mask=bias, scale=0.5, kernel="numpy"), rtol=1e-5, atol=1e-6)


@needs_engine
@pytest.mark.parametrize("index", [INT_MIN, -1, 0, 7, 8, INT_MAX - 6, INT_MAX])
@pytest.mark.parametrize("by", ["K", "Q"])
def test_the_engine_clamps_any_index(by: str, index: int) -> None:
    """An index that wraps begins again at the least integer."""
    held = table().astype(np.float32)
    read = tw.load(held, index + (tw.K if by == "K" else tw.Q))
    q, k, v = (x.astype(np.float32) for x in (Q, KEYS, V))
    found = dispatch.kernel("cpu").forward(Attention(0.5, score=tw.S + read), q, k, v).out
    places = (AT if by == "K" else np.arange(N_Q)[:, None]).astype(np.int32) + np.array([index], np.int32)
    bias = np.broadcast_to(held[np.clip(places, 0, len(held) - 1)], (N_Q, N_K))
    np.testing.assert_allclose(found, tw.attention(q, k, v, mask=bias, scale=0.5, kernel="numpy"), rtol=1e-5, atol=1e-6)


@needs_engine
@pytest.mark.parametrize("count", [INT_MIN, -1, 0, 1, 1024, 1025, INT_MAX])
def test_the_engine_has_threads_whatever_it_is_told(count: int) -> None:
    before = library.get_num_threads()
    try:
        library._usable().tilewise_set_threads(count)
        assert library.get_num_threads() == min(max(count, 1), library.MOST_THREADS)
    finally:
        library.set_num_threads(before)


@needs_engine
@pytest.mark.parametrize("number", [INT_MIN, -2, 1000, INT_MAX])
def test_the_engine_has_no_such_path(number: int) -> None:
    assert library._usable().tilewise_isa(number) == (library.isa().encode() if number < 0 else None)

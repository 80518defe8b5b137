"""Between a caller and TileLang's kernels: plans, libraries, and what cannot be computed. On a CPU, by the C target."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.conformance.test_conformance import _check_heavy_keys
from tilewise import dispatch, validate
from tilewise.cases import Case
from tilewise.contract import gradients_to_pull
from tilewise.kernels.tables import tables
from tilewise.kernels.tilelang import architecture, support
from tilewise.kernels.tilelang.choices import (
    LEAST_SHARED_MEMORY,
    SHARED_MEMORY,
    Pass,
    chosen,
    heads_first,
    shared_bytes,
)
from tilewise.kernels.tilelang.compiler import C
from tilewise.schedule import Kind, plan
from tilewise.spec import Attention, Lengths, Shape, Tile

_reason = dispatch.kernel("tilelang-c").unavailable()
PACKED = Lengths(np.array([0, 77, 4096]), np.array([0, 77, 4096]))
needs_tilelang = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": tw.window(9)}, {"mask": tw.K < 0}], ids=str)
def test_visits_are_the_plans_tiles(options: dict[str, Any], by_key: bool) -> None:
    pytest.importorskip("torch")
    from tilewise.kernels.tilelang.visits import written_out

    call = validate.prepare(*(np.zeros((2, 3, n, 8), np.float32) for n in (77, 131, 131)), **options)
    made = plan(call.spec, call.shape, Tile(16, 32))
    records, visits = written_out(tables(call.spec, call.shape, Tile(16, 32), by_key))
    rows = made.by_key if by_key else made.by_query
    for record in records[0, 0]:
        first, begin, count = record[0] // (32 if by_key else 16), record[5], record[6]
        wanted = [2 * j + (kind == Kind.PARTIAL) for j, kind in rows.tiles(0, 0, first)]
        assert visits[begin : begin + count].tolist() == (wanted or [1]), "one to be masked, if there is none"


@needs_tilelang
def test_a_first_compilation_is_announced_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from tilewise.kernels.tilelang import library

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    q = np.random.default_rng(0).standard_normal((20, 7)).astype(np.float32)
    with caplog.at_level(logging.INFO, "tilewise"):
        first = tw.attention(q, q, q, kernel="tilelang-c/simple")
        monkeypatch.setattr(library, "_loaded", {})  # as in another process
        second = tw.attention(q, q, q, kernel="tilelang-c/simple")
    assert [m.split(" kernel")[0] for m in caplog.messages if "compiling" in m] == ["compiling the TileLang"]
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, tw.attention(q, q, q, kernel="numpy"), atol=1e-6)


@needs_tilelang
def test_a_row_with_its_weight_on_one_key_has_its_value() -> None:
    _check_heavy_keys("tilelang-c", "float16")


@needs_tilelang
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("step", [0.5, 3.0, 40.0, -3.0])
def test_scores_that_rise_from_tile_to_tile(step: float, dtype: type) -> None:
    """row_max follows them late: weights may outgrow 1, and are rescaled when they would by too much."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 170, 8)).astype(dtype) for _ in range(3))
    q[..., 0], k[..., 0] = 1, step * (np.arange(170) // 32)
    got, lse = tw.attention(q, k, v, scale=1.0, kernel="tilelang-c", return_lse=True)
    wide = (x.astype(np.float64) for x in (q, k, v))
    want, want_lse = tw.attention(*wide, scale=1.0, kernel="numpy", return_lse=True)
    np.testing.assert_allclose(got, want, atol=1e-4 if dtype is np.float32 else 4e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


@needs_tilelang
def test_a_row_keeps_its_shift_where_another_grows() -> None:
    """All values are the same, so results are: a weight that was rounded counts as it was, whatever another row's do.
    Another row grows by 2^28 in the last tile, these have grown by up to 2^7 before."""
    n, gains = 200, np.linspace(0.3, 1.0, 15)
    q, k = np.zeros((1, 1, 16, 8), np.float16), np.full((1, 1, n, 8), -30, np.float16)
    q[0, 0, :15, 0], q[0, 0, 15, 1] = gains, 1
    k[0, 0, 0], k[0, 0, 70, 0], k[0, 0, 190, 1] = 0, 5, 20
    v = np.full((1, 1, n, 8), 2 - 2**-10, np.float16)
    assert (tw.attention(q, k, v, scale=1.0, kernel="tilelang-c") == v[0, 0, 0, 0]).all()


@needs_tilelang
def test_an_infinite_value_is_infinite_and_not_nan() -> None:
    q, k, v = (np.random.default_rng(i).normal(size=(1, 1, 70, 16)).astype(np.float32) for i in range(3))
    v[0, 0, 3, 5] = np.inf
    assert (tw.attention(q, k, v, kernel="tilelang-c")[..., 5] == np.inf).all()


@needs_tilelang
def test_strides_of_all_that_is_given() -> None:
    """Results of the same bits, wherever numbers lie; and a gradient that is wider is not narrowed."""
    case, kernel = Case("sinks", "grouped"), dispatch.kernel("tilelang-c")
    call = case.inputs().call()
    d_out, d_lse = gradients_to_pull(call)

    def strange(x: Any) -> Any:
        return np.asfortranarray(np.repeat(x, 2, axis=-1))[..., ::2]

    def computed(sinks: Any, d_out: Any, d_lse: Any) -> list[Any]:
        spec = replace(call.spec, sinks=sinks)
        saved = kernel.forward(spec, call.q, call.k, call.v)
        grads = kernel.backward(spec, call.q, call.k, call.v, saved, d_out, d_lse)
        return [*saved, grads.q, grads.k, grads.v, grads.sinks]

    given = (call.spec.sinks, d_out, d_lse)
    wanted = computed(*given)
    for got in (computed(*map(strange, given)), computed(given[0], d_out.astype(np.float64), d_lse)):
        assert [np.array_equal(a, b) for a, b in zip(got, wanted, strict=True)] == [True] * len(wanted)


def test_what_it_cannot_is_told() -> None:
    call = Case("rope", "ragged").inputs().call()
    shape = replace(call.shape, dtype="float32", device="cuda:0")
    assert "TF32" in str(support.unsupported(call.spec, shape, "sm_90a"))
    half = replace(shape, dtype="bfloat16")
    assert "tw.apply_rope" in str(support.unsupported(call.spec, half, "sm_90a"))
    assert "no bfloat16" not in str(support.unsupported(replace(call.spec, rope=None), half, "sm_90a"))
    assert "up to 256" in str(support.unsupported(call.spec, replace(half, d=512), "sm_90a"))
    nine = sum((tw.load(np.ones(3, np.float32), tw.K % 3) for _ in range(9)), tw.S)
    spec = replace(call.spec, rope=None, score=nine)
    assert "up to 8 arrays, and this one reads 9" in str(support.unsupported(spec, half, "sm_90a"))
    with pytest.raises(tw.Unsupported, match="kernel 'tilelang' cannot compute this call"):
        dispatch.resolve("tilelang", call.spec, call.shape)
    for options in ({"mask": tw.window(3)}, {"score": tw.softcap(2.0)}):
        spec = validate.prepare(*(np.zeros((4, 8), np.float32) for _ in range(3)), **options).spec
        assert "first exercise" in str(support.too_much(spec, call.shape))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("kind", Pass)
@pytest.mark.parametrize("d", [1, 64, 128, 256])
def test_tiles_fit_shared_memory(arch: str, kind: Pass, d: int) -> None:
    shape = Shape(1, 2, 1, 500, 500, d, d, dtype="bfloat16")
    for wish in (None, Tile(32, 48), Tile(61, 16), Tile(999, 999)):
        choice = chosen(kind, Attention(1.0), shape, arch, wish)
        assert choice.tile.q % 32 == choice.tile.k % 16 == 0  # one number a row takes 128 bytes of queries at a time
        if arch == "sm_90a" or d <= 64:  # for others `unsupported` tells that there is no room
            assert shared_bytes(choice, kind, shape) <= SHARED_MEMORY.get(arch, LEAST_SHARED_MEMORY)
    assert architecture((9, 0)) == "sm_90a"
    assert architecture((8, 9)) == "sm_89"


def test_wide_tiles_are_for_products_that_the_copy_engine_feeds() -> None:
    """Scores of a variant, and threads that load, take the registers of what would be more keys."""
    shape = Shape(1, 2, 2, 4096, 4096, 128, 128, dtype="bfloat16")
    plain, capped = Attention(1.0), Attention(1.0, score=tw.softcap(30.0))
    wide, narrow = (chosen(Pass.FORWARD, spec, shape, "sm_90a").tile for spec in (plain, capped))
    assert wide.k > narrow.k == 128
    assert chosen(Pass.FORWARD, plain, shape, "sm_90a", aligned=False).tile.k == 64
    for kind, d in ((Pass.D_QUERY, 64), (Pass.D_QUERY, 128), (Pass.D_KEYS, 64)):
        wide, narrow = (chosen(kind, spec, replace(shape, d=d, d_v=d), "sm_90a").tile for spec in (plain, capped))
        assert wide.q * wide.k > narrow.q * narrow.k


def test_the_first_kernel_has_tiles_of_two_warpgroups_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tilewise.kernels.tilelang.call import builds_of

    shape = Shape(1, 2, 2, 4096, 4096, 64, 64, dtype="bfloat16", device="cuda:0")
    (build,) = builds_of(Attention(1.0), shape, "sm_90a", simple=True)
    assert (build.kernel, build.tile, build.threads) == ("simple", Tile(128, 128), 256)
    monkeypatch.setattr("tilewise.kernels.gpus.capability", lambda device: (9, 0))
    assert dispatch.kernel("tilelang/simple").default_tile(Attention(1.0), shape) == build.tile


def test_warpgroups_take_turns_where_scores_are_products_alone() -> None:
    shape = Shape(1, 2, 2, 4096, 4096, 64, 64, dtype="bfloat16")
    plain, capped = Attention(1.0), Attention(1.0, score=tw.softcap(30.0))
    assert chosen(Pass.FORWARD, plain, shape, "sm_90a").turns
    assert not chosen(Pass.FORWARD, plain, shape, "sm_90a", Tile(64, 64)).turns, "there is one warpgroup"
    assert not chosen(Pass.FORWARD, capped, shape, "sm_90a").turns
    assert not chosen(Pass.FORWARD, replace(plain, lengths=PACKED), shape, "sm_90a").turns
    assert not chosen(Pass.FORWARD, plain, shape, "sm_90a", aligned=False).turns


def test_heads_come_first_where_a_mask_makes_tiles_differ_and_the_cache_holds_them_all() -> None:
    pytest.importorskip("torch")
    from tilewise.kernels.tilelang.call import builds_of

    shape = Shape(4, 16, 16, 4096, 4096, 128, 128, dtype="bfloat16")
    full, causal = Attention(1.0), Attention(1.0, tw.causal())
    assert heads_first(causal, shape, "sm_90a")
    assert not heads_first(full, shape, "sm_90a")
    assert not heads_first(causal, replace(shape, n_k=16384), "sm_90a")
    assert not heads_first(causal, shape, C)
    assert not heads_first(replace(causal, lengths=PACKED), shape, "sm_90a")
    by_name = {x.kernel: x.heads_first for x in builds_of(causal, replace(shape, backward=True), "sm_90a")}
    assert by_name == {"rows": False, "d_query": True, "d_keys": True}


def test_what_the_tests_on_a_gpu_take_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tests.tilelang import prebuild
    from tilewise.kernels.tilelang.call import Call
    from tilewise.linear.kernels.tilelang import launch as linear

    for owner, name in ((Call, "launch"), (linear.LinearCall, "launch"), (linear, "blocks_wanted")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # which it replaces
    monkeypatch.setattr(prebuild, "calls", lambda: [(Case("causal", "grouped", "float16").inputs().call(), (None,))])
    packed = [case for case in prebuild.LINEAR_CASES if case.name == "long, packed"]
    monkeypatch.setattr(prebuild, "LINEAR_CASES", packed)
    builds = {build.name.rsplit("-", 1)[0]: build for build in prebuild.kernels("sm_90a")}
    assert {"forward", "simple", "rows", "d_query", "d_keys", "linear-outputs", "linear-d_keys"} <= builds.keys()
    assert not builds["linear-outputs"].aligned, "arrays of that test lie head by head"
    assert (builds["simple"].tile, builds["simple"].threads) == (Tile(128, 128), 256)


def test_a_kernel_compiled_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A machine without TileLang or nvcc takes what the cache folder has, and names what it has not."""
    pytest.importorskip("torch")
    from tilewise.kernels.tilelang import TileLangKernel, compiler, library
    from tilewise.kernels.tilelang.call import builds_of

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "not_installed", lambda target: "it needs nvcc")
    monkeypatch.setattr("tilewise.kernels.gpus.capability", lambda device: (9, 0))
    call = Case("softcap", "grouped", "float16").inputs().call()
    for backward in (False, True):
        shape = replace(call.shape, device="cuda:0", backward=backward)
        builds = builds_of(call.spec, shape, "sm_90a")
        told = TileLangKernel().unsupported(call.spec, shape)
        assert told == f"no kernel for it was compiled before ({builds[0]}), and to compile one it needs nvcc"
        for build in builds:
            library._files("sm_90a").add(build.name, b"a library")
        assert TileLangKernel().unsupported(call.spec, shape) is None

"""Kernels are compiled ahead of time, for a GPU that need not be there: nothing spills, and what comes is a library."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.cuda.test_ops import EXPRESSIONS
from tests.cute import launched
from tilewise import cli, dispatch
from tilewise.choosing import TABLE
from tilewise.cli import build
from tilewise.expr import Expr
from tilewise.kernels import disk, gpus
from tilewise.kernels.cute import compiler, library, projected, support
from tilewise.kernels.cute.rungs import RUNGS, Rung, backward_rung
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.spec import Attention, Lengths, Shape, Tile

needs_compiler = pytest.mark.skipif(compiler.not_installed() is not None, reason=str(compiler.not_installed()))
LENGTHS = Lengths(np.array([0, 9, 100]), np.array([0, 70, 100]))
HOPPER, AMPERE, RUNTIME = (9, 0), (8, 0), "cu13"


def _wanted(
    rung: str, dtype: str, d: int, mask: Expr | None = None, score: Expr | None = None, **options: Any
) -> Wanted:
    """rung: by its name, or "backward": the one whose gradients they are."""
    aligned = options.pop("aligned", True)
    spec, shape = Attention(0.1, mask, score, **options), Shape(1, 4, 2, 100, 100, d, d, dtype)
    return kernel_of(backward_rung(spec, shape) if rung == "backward" else RUNGS[rung], spec, shape, aligned)


def _long(dtype: str, d: int, mask: Expr | None = None, score: Expr | None = None, **options: Any) -> Wanted:
    spec = Attention(0.1, mask, score, **options)
    return kernel_of(RUNGS["forward_sm90"], spec, Shape(1, 4, 2, 4096, 4096, d, d, dtype))


ALL = EXPRESSIONS["functions"] + EXPRESSIONS["division"] + EXPRESSIONS["clamped"]
BIAS = tw.bias(np.zeros((1, 4, 100, 100), np.float32))
ODD = tw.bias(np.zeros((1, 4, 101, 101), np.float32))  # whose rows the copy engine does not take
DOCUMENT, DENSE = tw.document(np.zeros(100, np.int32)), tw.dense(np.ones((100, 100), bool))
KERNELS = {
    "basic, float16": ("sm_80", _wanted("basic", "float16", 64, tw.causal())),
    "basic, float32": ("sm_90a", _wanted("basic", "float32", 128, tw.causal())),
    "basic, not aligned": ("sm_90a", _wanted("basic", "bfloat16", 30, aligned=False)),
    "basic, all": ("sm_90a", _wanted("basic", "bfloat16", 64, tw.causal(), ALL, sinks=np.zeros(4, np.float32))),
    "scaled q": ("sm_90a", _wanted("scaled_q", "bfloat16", 64, tw.causal())),
    "scaled k": ("sm_80", _wanted("scaled_k", "float32", 64, tw.causal(), tw.softcap(30.0))),
    "sm90, 64": ("sm_90a", _wanted("forward_sm90", "float16", 64, tw.causal())),
    "sm90, 128": ("sm_90a", _wanted("forward_sm90", "bfloat16", 128)),
    "sm90, 256": ("sm_90a", _wanted("forward_sm90", "bfloat16", 256, tw.causal())),
    "sm90, packed": ("sm_90a", _wanted("forward_sm90", "bfloat16", 128, tw.causal(), lengths=LENGTHS)),
    "sm90, bias": ("sm_90a", _wanted("forward_sm90", "bfloat16", 128, tw.causal(), BIAS)),
    "sm90, bias by cells": ("sm_90a", _wanted("forward_sm90", "bfloat16", 128, tw.causal(), ODD)),
    "sm90, long": ("sm_90a", _long("bfloat16", 64, tw.causal())),
    "sm90, long bias": ("sm_90a", _long("float16", 64, None, tw.bias(np.zeros((4096, 4096), np.float16)))),
    "sm90, kept": ("sm_90a", _wanted("forward_sm90", "float16", 128, tw.causal(), keeps_remainder=True)),
    "sm90, kept of 256": ("sm_90a", _wanted("forward_sm90", "bfloat16", 256, keeps_remainder=True)),
    "sm90, long, kept": ("sm_90a", _long("bfloat16", 64, tw.causal(), keeps_remainder=True)),
    "sm90, gradients of 64": ("sm_90a", _wanted("backward", "bfloat16", 64, tw.causal())),
    "sm90, gradients of 128": ("sm_90a", _wanted("backward", "bfloat16", 128, tw.causal())),
    "sm90, packed gradients": ("sm_90a", _wanted("backward", "float16", 64, tw.causal(), tw.alibi(4), lengths=LENGTHS)),
    "sm90, gradients of 256": (
        "sm_90a",
        _wanted("backward", "float16", 256, tw.causal(), tw.softcap(30.0), lengths=LENGTHS),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills(name: str) -> None:
    arch, kernel = KERNELS[name]
    made = compiler.compile(kernel, arch)
    assert made.resources.stack == 0
    assert 32 < made.resources.registers <= 255


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_no_head_of_the_first_kernel_spills(arch: str, dtype: str, d: int) -> None:
    for mask in (None, tw.causal()):
        assert compiler.compile(_wanted("basic", dtype, d, mask), arch).resources.stack == 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "score",
    [None, tw.softcap(30.0), tw.alibi(4), BIAS, ODD],
    ids=["none", "softcap", "alibi", "bias", "bias by cells"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("rung", ["forward_sm90", "backward"])
def test_no_variant_of_hoppers_kernels_spills(rung: str, d: int, packed: bool, score: Expr | None) -> None:
    lengths = LENGTHS if packed else None
    kernel = _wanted(rung, "bfloat16", d, tw.causal() & tw.window(64), score, lengths=lengths, keeps_remainder=True)
    assert compiler.compile(kernel, "sm_90a").resources.stack == 0
    if kernel.remainder:
        assert compiler.compile(replace(kernel, remainder=False), "sm_90a").resources.stack == 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("mask", [DOCUMENT, DENSE], ids=["document", "dense"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("rung", ["forward_sm90", "backward"])
def test_no_mask_of_arrays_spills(rung: str, d: int, mask: Expr) -> None:
    kernel = _wanted(rung, "bfloat16", d, tw.causal() & mask)
    assert compiler.compile(kernel, "sm_90a").resources.stack == 0


def test_tiles_are_smaller_where_keys_have_cells() -> None:
    tiles = {name: _wanted("forward_sm90", "bfloat16", 128, mask, score).tile.k for name, mask, score in (
        ("plain", None, None), ("slopes", None, tw.alibi(4)), ("bias", None, BIAS), ("read cell by cell", None, ODD),
        ("document", DOCUMENT, None),
    )}  # fmt: skip
    assert tiles == {"plain": 128, "slopes": 128, "bias": 128, "read cell by cell": 64, "document": 64}


@needs_compiler
def test_warpgroups_ask_for_no_more_registers_than_there_are() -> None:
    """They would wait for them for ever."""
    from tilewise.kernels.cute.source import forward_sm90

    for consumers, given in forward_sm90.REGISTERS.items():
        at_first = (1 << 16) // (128 * (consumers + 1)) // 8 * 8
        assert given[0] + consumers * given[1] <= (consumers + 1) * at_first, f"{consumers} warpgroups"


def test_gradients_go_by_tiles_of_their_own() -> None:
    """Scores are gone over twice where registers have no room for all sums: where heads are large, a slope keeps
    products, which forward need not, or keys have cells."""
    for d, mask, score, tile in (
        (64, tw.causal(), None, Tile(128, 128)),
        (64, tw.K < 9 * tw.H, None, Tile(64, 128)),
        (64, None, tw.alibi(4), Tile(64, 128)),
        (128, None, None, Tile(64, 128)),
    ):
        kernel = _wanted("backward", "bfloat16", d, mask, score)
        assert (kernel.rung, kernel.tile, kernel.by_key) == ("backward_sm90", tile, tile)
    for score in (tw.softcap(30.0), BIAS):
        kernel = _wanted("backward", "bfloat16", 128, None, score)
        assert (kernel.rung, kernel.tile, kernel.by_key) == ("backward_sm90_twice", Tile(128, 64), Tile(32, 128))
    kernel = _wanted("backward", "bfloat16", 256)
    assert (kernel.rung, kernel.tile, kernel.by_key) == ("backward_sm90_twice", Tile(128, 48), Tile(48, 128))
    assert _wanted("forward_sm90", "bfloat16", 128).by_key is None
    with_sinks = _wanted("backward", "bfloat16", 128, sinks=np.zeros(4, np.float32))
    assert with_sinks == _wanted("backward", "bfloat16", 128), "lse has them in it already"


@needs_compiler
def test_a_folder_is_built_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    if compiler.c_compiler() is None:
        pytest.skip("there is no C compiler")
    command = ["build", "cute", "--arch", "sm_90a", "--out", str(tmp_path / "kernels"), "--d", "64"]
    assert cli.main([*command, "--variants", "causal", "--dtype", "bfloat16", "--backward"]) == 0
    told = capsys.readouterr().out
    for name in ("forward_sm90", "backward_sm90"):
        assert f"causal, {name}, bfloat16, heads up to 64, sm_90a: 168 registers" in told
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "empty"))
    kernel = _wanted("forward_sm90", "bfloat16", 64, tw.causal())
    assert not library.is_built(kernel, "sm_90a")
    monkeypatch.setenv(library.FOLDER, str(tmp_path / "kernels"))
    assert library.is_built(kernel, "sm_90a")
    assert library.is_built(_wanted("backward", "bfloat16", 64, tw.causal()), "sm_90a")
    trained = _wanted("forward_sm90", "bfloat16", 64, tw.causal(), keeps_remainder=True)
    assert trained.remainder and library.is_built(trained, "sm_90a")
    assert not library.is_built(kernel, "sm_80")
    assert not library.is_built(_wanted("forward_sm90", "bfloat16", 64), "sm_90a")
    path = library._built(kernel.name("sm_90a", RUNTIME))
    assert path is not None and path.stat().st_size < 200_000


def _asked(*options: str) -> set[Wanted]:
    """What `tilewise build cute` would compile."""
    command = argparse.ArgumentParser()
    build.add_parser(command.add_subparsers())
    return {
        x.kernel for x in build._asked(command.parse_args(["build", "cute", "--arch", "sm_90a", "--out", "", *options]))
    }


def test_a_built_folder_serves_the_bench() -> None:
    pytest.importorskip("torch")
    from tilewise import validate
    from tilewise.bench.gpu import cases, suite

    asked = _asked("--variants", "full,causal,bias", "--d", "64,128,256", "--dtype", "bfloat16", "--backward")
    exercises = _asked("--variants", "full", "--dtype", "bfloat16,float32", "--scaled")
    for name in ("cute", "cute_gradients", "scaling"):
        for case in (replace(case, tokens=case.n, hidden=case.d) for case in suite.SECTIONS[name].cases):
            x = cases.draw(case, 0, "cpu")
            call = validate.prepare(x.q, x.k, x.v, **cases.VARIANTS[case.variant].options(case, x.extras))
            for who in suite.SECTIONS[name].who("cuda", case)[: 3 if name == "scaling" else 1]:
                rung = RUNGS[who.split("/")[1]]
                assert kernel_of(rung, call.spec, call.shape) in (exercises if name == "scaling" else asked)
            if case.backward:
                assert kernel_of(backward_rung(call.spec, call.shape), call.spec, call.shape) in asked
                trained = replace(call.spec, keeps_remainder=True)
                assert kernel_of(RUNGS["forward_sm90"], trained, call.shape) in asked


def test_a_built_folder_serves_the_benchs_projections() -> None:
    from tilewise.bench.gpu import suite

    asked = {d: _asked("--variants", "full", "--d", str(d), "--dtype", "bfloat16", "--projection", heads)
             for d, heads in ((32, "4"), (64, "8,16"))}  # fmt: skip
    for case in suite.SECTIONS["projection"].cases:
        shape = Shape(case.batch, case.heads, case.heads, case.queries, case.n, case.d, case.d, case.dtype)
        assert projected.kernel_for(Attention(case.d**-0.5), shape) in asked[case.d]
    assert not {x for x in _asked("--d", "128", "--projection", "64") if x.heads}, "there is no room for them"


def test_a_remainder_is_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that have gradients; and where no kernel is built that stores it, the one without it serves."""
    kept = _wanted("forward_sm90", "bfloat16", 64, keeps_remainder=True)
    plain = _wanted("forward_sm90", "bfloat16", 64)
    assert kept.remainder and replace(kept, remainder=False) == plain
    for rung in ("basic", "scaled_q", "backward"):
        assert not _wanted(rung, "bfloat16", 64, keeps_remainder=True).remainder
    assert library.granted(kept, "sm_90a") == kept or compiler.not_installed() is not None
    built: list[Wanted] = [plain]
    monkeypatch.setattr(compiler, "not_installed", lambda: "it needs cutlass")
    monkeypatch.setattr(library, "is_built", lambda kernel, arch: kernel in built)
    assert library.granted(kept, "sm_90a") == plain
    built.append(kept)
    assert library.granted(kept, "sm_90a") == kept and library.granted(plain, "sm_90a") == plain


def test_a_bias_is_built_for_all_heads_and_for_each() -> None:
    asked = _asked("--variants", "bias", "--d", "64", "--dtype", "bfloat16")
    tables = {x.table.others for x in asked if x.table is not None}
    assert tables == {(), ("H",)}


def test_what_the_gpu_tests_and_the_demo_take_is_prebuilt() -> None:
    pytest.importorskip("torch")
    from tests.cute import prebuild

    found, hopper = set(prebuild.kernels(HOPPER)), RUNGS["forward_sm90"]
    long = Shape(1, 8, 8, 2100, 2100, 64, 64, "bfloat16")
    for shape in (long, replace(long, n_q=512, n_k=512), replace(long, n_q=131072, n_k=131072)):
        for mask in (None, tw.window(300, 40)):
            assert kernel_of(hopper, Attention(0.125, mask), shape) in found
    biased = {(x.columns, x.table.dtype, x.tile.q) for x in found if x.table is not None}
    assert {(d, dtype, 128) for d in (64, 128, 256) for dtype in ("bfloat16", "float16", "float32")} <= biased
    assert (64, "bfloat16", 192) in biased


@needs_compiler
def test_a_compiled_kernel_is_found_by_the_next_process(tmp_path: Path) -> None:
    """The first one compiles and keeps it; where the next looks, nothing is compiled."""
    if compiler.c_compiler() is None:
        pytest.skip("there is no C compiler")
    environment = {**os.environ, "TILEWISE_CACHE": str(tmp_path), "CUTE_DSL_ARCH": "sm_90a"}
    environment.pop(library.FOLDER, None)
    told = []
    for _ in range(2):
        command = [sys.executable, "-m", "tests.cute.compiled_once"]
        root = Path(__file__).parents[2]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    (first, again), kept = told, list(tmp_path.rglob("basic-*.so"))
    assert [x["compiled"] for x in told] == [1, 0] and len(kept) == 1
    assert first["loaded"] == again["loaded"] == [kept[0].name]


@needs_compiler
def test_a_library_tells_what_it_expects(tmp_path: Path) -> None:
    """It is loaded without a GPU, and refuses arrays in main memory."""
    torch = pytest.importorskip("torch")
    if compiler.c_compiler() is None:
        pytest.skip("there is no C compiler")
    try:
        ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        pytest.skip("there is no CUDA runtime")
    path = tmp_path / "kernel.so"
    path.write_bytes(compiler.compile(*reversed(KERNELS["basic, float16"])).library(RUNTIME))
    x, rows = torch.zeros(1, 4, 100, 64, dtype=torch.float16), torch.zeros(1, 4, 100)
    tables = torch.zeros(1, 4, 2, 14, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    ctypes.CDLL(str(path), mode=os.RTLD_NOW)  # or a name that nothing defines would be missed by the first call alone
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        library.load(path)(x, x, x, x, rows, *tables, rows.view(-1), (rows.view(-1),), 0.1)


@needs_compiler
def test_a_library_is_called_up_to_its_launch(tmp_path: Path) -> None:
    """By the host code that a call goes through, where a stand-in is CUDA: arguments are of the number and types that
    the library has them in, and what it asks of a GPU is there."""
    torch, linker = pytest.importorskip("torch"), compiler.c_compiler()
    if linker is None or torch.version.cuda is not None:
        pytest.skip("there is no C compiler, or PyTorch has CUDA, for which nothing can stand in")
    stand_in = tmp_path / "libcudart.so.13"  # by its soname it is found when a kernel is loaded
    source, soname = Path(__file__).with_name("stand_in.c"), f"-Wl,-soname,{stand_in.name}"
    subprocess.run([linker, "-shared", "-fPIC", "-w", soname, "-o", str(stand_in), str(source)], check=True)
    (tmp_path / "kernels").mkdir()
    files = disk.Files(tmp_path / "kernels")
    for batch, heads, n, d in launched.SHAPES.values():
        kernel = kernel_of(RUNGS["forward_sm90"], Attention(0.1), Shape(batch, heads, heads, n, n, d, d, "bfloat16"))
        files.add(kernel.name("sm_90a", RUNTIME), compiler.compile(kernel, "sm_90a").library(RUNTIME))
    command = [sys.executable, "-m", "tests.cute.launched", str(stand_in), str(files.folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    arrays, (blocks, threads, shared, maps), long_arrays, (*long, long_maps) = map(json.loads, done.stdout.splitlines())
    assert (blocks, threads) == (2 * 4 * 3, 384) and long[:2] == [2 * 22, 512]
    assert maps == arrays and long_maps == long_arrays, "of q, k and v, in this order"
    assert max(shared, long[2]) <= gpus.SHARED


def test_what_a_kernel_depends_on_is_in_its_name() -> None:
    kernels = [kernel for _, kernel in KERNELS.values()]
    assert len({kernel.name("sm_90a", RUNTIME) for kernel in kernels}) == len(kernels)
    assert kernels[0].name("sm_90a", RUNTIME) != kernels[0].name("sm_80", RUNTIME)
    assert kernels[0].name("sm_90a", RUNTIME) != kernels[0].name("sm_90a", "cu12")
    again = _wanted("basic", "float16", 64, tw.causal())
    assert again.name("sm_80", RUNTIME) == kernels[0].name("sm_80", RUNTIME)
    other = _wanted("forward_sm90", "bfloat16", 128, tw.causal(), tw.bias(np.ones((1, 4, 12, 12), np.float32)))
    assert other == KERNELS["sm90, bias"][1], "new arrays of the same kind compile nothing"


@pytest.mark.parametrize(
    "word",
    ["warp_idx", "PipelineTmaAsync", "make_smem_layout_atom", "make_tiled_tma_atom", "role == [0-9]", "role >= [0-9]"],
)
def test_our_words_are_in_one_place(word: str) -> None:
    """What a warp's role, a stage, a tile and a map are in CuTe's words is for vocabulary.py to say."""
    sources = Path(compiler.__file__).with_name("source")
    found = [path.name for path in sorted(sources.glob("*.py")) if re.search(word, path.read_text())]
    assert set(found) <= {"vocabulary.py"}


# -- the output projection --------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(("dtype", "d", "heads"), [("bfloat16", 64, 8), ("float32", 32, 4)])
def test_the_projection_does_not_spill(dtype: str, d: int, heads: int) -> None:
    kernel = projected.kernel_for(Attention(0.1, tw.causal()), Shape(1, heads, heads, 9, 9, d, d, dtype))
    assert compiler.compile(kernel, "sm_90a").resources.stack == 0


def test_the_projection_of_large_models_has_no_room() -> None:
    spec, small = Attention(0.1), Shape(1, 8, 8, 9, 9, 64, 64, "bfloat16", "cuda:0")
    large = Shape(1, 32, 8, 9, 9, 128, 128, "bfloat16", "cuda:0")
    assert projected.unsupported(spec, small, HOPPER) is None
    assert "bytes of shared memory, and a block of cuda:0 has 232448" in str(projected.unsupported(spec, large, HOPPER))


def test_a_projection_elsewhere_is_refused() -> None:
    pytest.importorskip("torch")
    from tilewise.kernels.cute import projection

    assert "arrays are on cpu" in str(projection.unsupported(Attention(0.1), Shape(1, 8, 8, 9, 9, 64, 64)))


def test_steps_of_a_projection_are_those_of_a_block_and_of_blocks_that_wait() -> None:
    """Tiles of 64 keys and of 64 columns, of each head."""
    shape = Shape(1, 4, 4, 1, 64, 32, 32, "bfloat16", "cuda:0")
    assert projected.steps(shape, 128) == 4 * (1 + 2)
    assert projected.steps(replace(shape, n_k=65, n_q=64), 129) == 4 * (2 + 3)
    for batch, n_q, rounds in ((132, 64, 1), (133, 64, 2), (66, 65, 1), (67, 65, 2)):
        assert projected.steps(replace(shape, batch=batch, n_q=n_q), 128) == rounds * 12


def test_auto_takes_a_projection_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 4, 4, 1, 64, 32, 32, "bfloat16", "cuda:0")
    monkeypatch.setattr(projected, "MOST_STEPS", 12)
    assert projected.pays(shape, 128) and projected.pays(replace(shape, batch=132), 128)
    for larger in ({"n_k": 65}, {"heads": 8, "heads_k": 8}, {"batch": 133}, {"batch": 0}):
        assert not projected.pays(replace(shape, **larger), 128)
    assert not projected.pays(shape, 129)
    monkeypatch.setattr(projected, "MOST_STEPS", 0)
    assert not projected.pays(shape, 128), "nowhere"


def test_a_wrong_w_o_is_named() -> None:
    torch = pytest.importorskip("torch")
    from tilewise.kernels.cute.projection import projected_attention

    q = torch.zeros(1, 4, 9, 16)
    with pytest.raises(ValueError, match=r"w_o: expected \(64, model\), got \(63, 9\)"):
        projected_attention(q, q, q, torch.zeros(63, 9))
    with pytest.raises(TypeError, match="w_o: expected a tensor of float32 on cpu, as q is, got float16 on cpu"):
        projected_attention(q, q, q, torch.zeros(64, 9).half())


# -- who takes what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "shape", "capability", "reason"),
    [
        ("forward_sm90", {"dtype": "float32"}, HOPPER, "float16 and bfloat16, and the arrays are float32"),
        ("forward_sm90", {"d": 60}, HOPPER, "multiples of 8 up to 256, and they are 60 and 64"),
        ("forward_sm90", {"n_k": 0}, HOPPER, "nothing to load"),
        ("forward_sm90", {}, AMPERE, "compute capability 9.0, and cuda:0 has 8.0"),
        ("basic", {}, (7, 5), "compute capability 8.0 or newer, and cuda:0 has 7.5"),
        ("basic", {"d": 256}, HOPPER, "up to 128, and they are 256 and 64"),
        ("basic", {"d": 128, "d_v": 128, "dtype": "float32"}, (8, 9), "bytes of shared memory"),
        (None, {"dtype": "float64"}, HOPPER, "the arrays are float64"),
        ("basic", {"backward": True}, HOPPER, "no backward pass; kernel='cute/forward_sm90' has one"),
        ("forward_sm90", {"backward": True, "d": 60}, HOPPER, "backward_sm90: it takes head dimensions that are"),
        (None, {"backward": True, "dtype": "float32"}, HOPPER, "backward_sm90: it multiplies float16 and bfloat16"),
        (None, {"backward": True}, AMPERE, "kernel='triton' has gradients, too"),
    ],
)
def test_reasons(rung: str | None, shape: dict[str, Any], capability: tuple[int, int], reason: str) -> None:
    given = Shape(**({"batch": 1, "heads": 4, "heads_k": 2, "n_q": 9, "n_k": 9, "d": 64, "d_v": 64,
                      "dtype": "bfloat16", "device": "cuda:0"} | shape))  # fmt: skip
    told = support.unsupported(Attention(1.0), given, None if rung is None else RUNGS[rung], capability)
    assert told is not None and reason in told


def test_who_has_gradients() -> None:
    shape = Shape(1, 4, 2, 9, 9, 64, 64, "bfloat16", "cuda:0", backward=True)
    for rung in (None, RUNGS["forward_sm90"]):
        assert support.unsupported(Attention(1.0, tw.causal(), tw.softcap(2.0)), shape, rung, HOPPER) is None
        learned = Attention(1.0, None, tw.alibi(np.ones(4, np.float32), grad=True))
        told = support.unsupported(learned, shape, rung, HOPPER)
        assert told is not None and "no gradients of the arrays that a score reads" in told


def test_explain_tells_whose_gradients_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "capability", lambda device: HOPPER)
    monkeypatch.setattr(compiler, "not_installed", lambda: None)
    system, shape = dispatch.kernel("cute"), Shape(1, 4, 2, 9, 9, 128, 128, "bfloat16", "cuda:0")
    assert isinstance(system, dispatch.Chooses)
    told = system.choice(Attention(1.0), shape)
    assert told == "forward_sm90; gradients by backward_sm90: scores are computed once"
    for spec, other in ((Attention(1.0, None, tw.softcap(2.0)), shape), (Attention(1.0), replace(shape, d=256))):
        told = system.choice(spec, other)
        assert told.startswith("forward_sm90; gradients by backward_sm90_twice: scores are computed twice")
    assert system.choice(Attention(1.0), replace(shape, dtype="float32")) == "basic, without gradients"


def test_a_wider_gradient_is_not_narrowed() -> None:
    torch = pytest.importorskip("torch")
    from tilewise.kernels.cute.launch_backward import backward
    from tilewise.spec import Partial

    x = torch.zeros(1, 2, 9, 64, dtype=torch.bfloat16)
    with pytest.raises(tw.Unsupported, match="d_out is float32, and it takes q's type, bfloat16; kernel='triton'"):
        backward(Attention(1.0), x, x, x, Partial(x, x[..., 0].float()), x.float(), None, "sm_90a")


def test_the_fastest_is_taken_that_can() -> None:
    shape = Shape(1, 4, 2, 9, 9, 64, 64, "bfloat16", "cuda:0")
    assert support.suited(shape, HOPPER).name == "forward_sm90"
    assert support.suited(shape, AMPERE).name == "basic"
    assert support.suited(Shape(1, 4, 2, 9, 9, 64, 64, "float32", "cuda:0"), HOPPER).name == "basic"


def test_auto_takes_what_was_built_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU, with apache-tvm-ffi and a folder of kernels, and no compiler of CUDA, Triton or CuTe."""
    kernel, shape = (
        _wanted("forward_sm90", "bfloat16", 64, tw.causal()),
        Shape(1, 4, 2, 9, 9, 64, 64, "bfloat16", "cuda:0"),
    )
    disk.Files(tmp_path / "kernels").add(kernel.name("sm_90a", RUNTIME), b"a library")
    monkeypatch.setattr(gpus, "none_here", lambda: None)
    monkeypatch.setattr(gpus, "capability", lambda device: HOPPER)
    monkeypatch.setattr(compiler, "not_installed", lambda: "it needs cutlass")
    monkeypatch.setattr(library, "find_spec", lambda name: name)
    monkeypatch.setattr(library, "runtime", lambda: RUNTIME)
    for name in ("cuda", "triton"):
        monkeypatch.setattr(type(dispatch.kernel(name)), "unavailable", lambda self: "it is not installed")
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "empty"))
    with pytest.raises(tw.Unsupported, match=r"cute/forward_sm90.*: it needs cutlass"):
        dispatch.resolve("auto", Attention(0.1, tw.causal()), shape)
    monkeypatch.setenv(library.FOLDER, str(tmp_path / "kernels"))
    assert dispatch.resolve("auto", Attention(0.1, tw.causal()), shape).name == "cute/forward_sm90"
    with pytest.raises(tw.Unsupported, match="cute/forward_sm90: no kernel for it was built ahead of time"):
        dispatch.resolve("auto", Attention(0.1), shape)


def test_auto_comes_to_cutes_gradients_last() -> None:
    """They refuse an output gradient of another type than q's, which no shape tells."""
    for row in TABLE:
        assert all(name == row.backward[-1] for name in row.backward if name.startswith("cute"))


def test_without_a_compiler_only_what_was_built_is_supported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(gpus, "capability", lambda device: HOPPER)
    monkeypatch.setattr(compiler, "not_installed", lambda: "it needs cutlass")
    shape = Shape(1, 4, 2, 9, 9, 64, 64, "bfloat16", "cuda:0")
    told = dispatch.kernel("cute").unsupported(Attention(1.0), shape)
    assert told is not None and "no kernel for it was built ahead of time (forward_sm90, bfloat16" in told
    told = dispatch.kernel("cute").unsupported(Attention(1.0), replace(shape, backward=True))
    assert told is not None and "no kernel for it was built ahead of time (backward_sm90, bfloat16" in told


# -- how arrays lie ---------------------------------------------------------------------------------------------------


def test_arrays_that_lie_anyhow_are_left_to_the_first_kernel() -> None:
    torch = pytest.importorskip("torch")
    from tilewise.kernels.cute import launch

    def rung(named: Rung | None, v: torch.Tensor) -> str:
        spec, shape = Attention(1.0), Shape(2, 4, 4, 32, 32, x.shape[-1], v.shape[-1], "bfloat16", "cuda:0")
        return launch.chosen(named, spec, shape, HOPPER, x, x, v).name

    hopper, x = RUNGS["forward_sm90"], torch.zeros(2, 4, 32, 72, dtype=torch.bfloat16)
    assert rung(None, x[..., 8:]) == "forward_sm90"
    for strange in (x[..., 1:65], x.expand(2, 4, 32, 72)[:, :1].expand(2, 4, 32, 72)):
        assert rung(None, strange) == "basic"
        with pytest.raises(tw.Unsupported, match=r"v .*; kernel='cute/basic' takes it"):
            rung(hopper, strange)
    x = torch.zeros(2, 4, 32, 257, dtype=torch.bfloat16)[..., 1:]
    with pytest.raises(tw.Unsupported, match=r"cute/basic neither: .* up to 128, .*; make them contiguous"):
        rung(None, x)


def test_a_kernel_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where arrays need another kernel than the shape told."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "not_installed", lambda: "it needs cutlass")
    with pytest.raises(tw.Unsupported, match="'cute' cannot compute this call: no kernel for it was built ahead"):
        library.kernel(_wanted("basic", "float16", 64), "sm_89")


def test_steps_of_dimensions_of_size_1_mean_nothing() -> None:
    torch = pytest.importorskip("torch")
    from tilewise.kernels.cute import launch

    x = torch.zeros(1, 1, 32, 64).as_strided((1, 1, 32, 64), (3, 5, 64, 1))
    assert launch.is_aligned(x)
    assert launch.steps_in_order(x, 4).stride() == (4, 4, 64, 1)
    assert not launch.is_aligned(torch.zeros(1, 1, 32, 62))
    assert launch.as_kernels_take(np.array(True)).dtype == torch.uint8


def test_what_the_backward_pass_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compiler was told: nine arrays by rows, the fifth of them the output's remainder, four of a number a row,
    the plan both ways round. With five products: room for what is known of each query tile, the plan with turns, how
    many heads take turns, and blocks."""
    torch = pytest.importorskip("torch")
    from tilewise.kernels.cute import launch_backward
    from tilewise.spec import Partial

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch_backward.library, "kernel", lambda kernel, arch: lambda *given: calls.append(given))
    q, k = torch.zeros(2, 4, 100, 64).half(), torch.zeros(2, 2, 70, 64).half()
    d_out, lse = torch.ones((), dtype=torch.float16).expand(q.shape), torch.zeros(2, 4, 100)
    spec = Attention(0.1, tw.causal(), BIAS, sinks=torch.zeros(4))
    grads = launch_backward.backward(spec, q, k, k, Partial(q, lse), d_out, None, "sm_90a")
    assert [x.shape for x in (grads.q, grads.k, grads.v, grads.sinks)] == [q.shape, k.shape, k.shape, (4,)]
    ((*given, arrays, scale),) = calls
    assert [tuple(x.shape) for x in given[:9]] == [tuple(x.shape) for x in (q, k, k, q, q, q, q, k, k)]
    remainder = given.pop(4)
    assert remainder.stride() == (0, 0, 0, 1) and not remainder.any(), "forward kept none"
    assert all(x.stride(-1) == 1 and launch_backward.cannot_be_copied({"x": x}) is None for x in given[:8])
    assert [(x.shape, x.dtype) for x in given[8:12]] == [(lse.shape, torch.float32)] * 4
    by_query, runs, by_key, runs_by_key = given[12:]
    assert by_query.shape == (2, 4, 1, 14) and by_key.shape == (2, 4, 1, 14), "for every query head"
    assert runs.shape[1] == runs_by_key.shape[1] == 3
    assert len(arrays) == 1 and scale == 0.1

    machine = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)
    kept = torch.ones_like(q)
    launch_backward.backward(Attention(0.1, tw.causal()), q, k, k, Partial(q, lse, kept), d_out, None, "sm_90a")
    (*given, _, _) = calls[1]
    assert torch.equal(given.pop(4), kept)
    assert [x.shape for x in given[8:11]] == [lse.shape] * 3
    rows, sums, turns, by_query, by_key, runs, section, blocks = given[11:]
    assert (rows.shape, sums.shape, turns.shape) == ((8, 2, 128), (8, 2, 64 * 64), (9,)), "a tile a head, and the item"
    assert by_query.shape == by_key.shape == (2, 4, 1, 16) and runs.shape[1] == 4
    assert (section, blocks) == (4, 4), "of four key heads, each with one tile"

"""Linear attention in TileLang: by its C target, compiled for Hopper, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.linear.cases_on_gpu import AGAIN
from tests.linear.cases_on_gpu import CASES as ON_GPU
from tilewise import arrays
from tilewise.contract import check_results, on_host
from tilewise.dispatch import Unsupported
from tilewise.kernels.tilelang import compiler, library
from tilewise.linear import contract, dispatch
from tilewise.linear.cases import CASES, LinearCase
from tilewise.linear.features import FEATURE_MAPS
from tilewise.linear.kernels.operands import tensors_of
from tilewise.linear.kernels.tilelang import not_compiled, refused
from tilewise.linear.kernels.tilelang.build import KERNELS, build_of, written
from tilewise.linear.spec import Linear
from tilewise.spec import Shape

SHAPE = Shape(1, 2, 2, 9, 9, 64, 64, dtype="bfloat16")
ON_C = dispatch.kernel("tilelang-c")
needs_c = pytest.mark.skipif(ON_C.unavailable() is not None, reason=str(ON_C.unavailable()))
needs_tilelang = pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed")
needs_nvcc = pytest.mark.skipif(compiler.not_installed("sm_90a") is not None, reason="TileLang or nvcc is missing")


def slow(name: str) -> Any:
    """One of what takes a compiler seconds; another stands for it."""
    return pytest.param(name, marks=pytest.mark.slow)


@needs_c
@pytest.mark.parametrize("name", ["packed", slow("all of a sequence")])
def test_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chunks each, as a GPU would have them in a long sequence."""
    from tilewise.linear.kernels.tilelang import launch

    monkeypatch.setattr(launch, "segment_rows", lambda n, wanted, chunk: 2 * chunk)
    case = next(case for case in CASES if case.name == name)
    contract.check(ON_C, case.problem(), chunk=16)


@pytest.mark.slow
@needs_c
@pytest.mark.parametrize("rows", [32, 512])
@pytest.mark.parametrize("group", [1, 2])
def test_rows_that_are_features_as_they_are(rows: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several segments, and in one, which has no scan."""
    from tilewise.linear.kernels.tilelang import launch

    monkeypatch.setattr(launch, "segment_rows", lambda n, wanted, chunk: rows)
    case = LinearCase("raw", 2, 2 * group, 2, n=100, normalize=False, feature_map="identity", carried=True)
    contract.check(ON_C, case.problem(), chunk=16)


def test_segments_keep_a_gpu_busy() -> None:
    pytest.importorskip("torch")
    from tilewise.linear.kernels.tilelang.launch import segment_rows

    assert segment_rows(16384, wanted=132 // 16, chunk=64) == 2048
    assert segment_rows(2048, wanted=132 // 128, chunk=64) == 2048
    assert segment_rows(2048, wanted=0, chunk=64) == 2048
    assert segment_rows(100, wanted=132, chunk=64) == 512


def test_what_it_cannot_is_told() -> None:
    assert refused(SHAPE) is None
    assert "leave the range of float16" in str(refused(replace(SHAPE, dtype="float16")))
    assert "bfloat16, and the arrays are float32" in str(refused(replace(SHAPE, dtype="float32")))
    assert "room for 128 x 128, and they are 200 and 64" in str(refused(replace(SHAPE, d=200)))


def test_kernels_that_are_kept_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call that would need another one says so."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "not_installed", lambda target: "it needs tilelang")
    assert not_compiled("sm_90a") == "it needs tilelang"
    build = build_of("scan", Linear(FEATURE_MAPS["elu"]), SHAPE, False, "sm_90a", 64, True)
    library._files("sm_90a").add(build.name, b"a library")
    assert not_compiled("sm_90a") is None
    with pytest.raises(Unsupported, match=r"no kernel for this call was compiled before .*outputs.* it needs tilelang"):
        library.kernel(replace(build, kernel="outputs"), lambda: None)


def test_it_is_taken_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Able:
        def unavailable(self) -> None:
            return None

        def unsupported(self, shape: Shape) -> None:
            return None

    class Unable(Able):
        def unavailable(self) -> str:  # type: ignore[override]
            return "it is not here"

    monkeypatch.setattr(dispatch, "kernel", lambda name: Able() if name.startswith("tilelang") else Unable())
    with pytest.raises(Unsupported, match=r"(?s)cpu: it is not here.*triton: it is not here$"):
        dispatch.resolve("auto", SHAPE)
    assert isinstance(dispatch.resolve("tilelang", SHAPE), Able)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("is_raw", [False, True], ids=["all", "raw"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_compiles(kernel: str, is_raw: bool, d: int) -> None:
    """With products of warpgroups, tiles that come by the copy engine, and nothing that does not fit registers."""
    spec = Linear(FEATURE_MAPS["identity"], normalize=False) if is_raw else Linear(FEATURE_MAPS["elu"])
    build = build_of(
        kernel, spec, Shape(1, 4, 4, 300, 300, d, d, dtype="bfloat16"), not is_raw, "sm_90a", 64, True
    )  # fmt: skip
    with compiler.as_target(build.target):
        text = written(kernel)(build, spec)
    if kernel not in ("scan", "row_weights"):
        source = compiler.source(text, build.target)
        assert all(word in source for word in ("tl::wgmma_ss", "tl::tma_load", "warpgroup_reg_dealloc"))
    assert compiler.library(text, build.target).spilled == 0


@needs_tilelang
@pytest.mark.parametrize("decay", [None, "token"])
@pytest.mark.parametrize("normalize", [False, True])
def test_kernels_are_told_all_that_they_ask_for(
    decay: str | None, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU arrays have steps, those too of which a kernel reads nothing."""
    torch = pytest.importorskip("torch")
    from tilewise.linear.kernels.tilelang import launch

    missing: dict[str, set[str]] = {}

    class Asking:
        def __init__(self, build: Any, text: Any) -> None:
            steps = (step for buffer in text.buffer_map.values() for step in buffer.strides)
            self.kernel, self.names = build.kernel, {step.name for step in steps if hasattr(step, "name")}

        def launch(self, values: dict[str, Any], device: Any) -> None:
            missing[self.kernel] = self.names - values.keys()

    def asking(build: Any, write: Any) -> Asking:
        with compiler.as_target(build.target):
            return Asking(build, write())

    monkeypatch.setattr(library, "kernel", asking)
    monkeypatch.setattr(launch, "blocks_wanted", lambda device, target: 132)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    case = LinearCase("any", n=700, d=64, d_v=64, dtype="bfloat16", decay=decay, normalize=normalize)
    problem = tensors_of(case.problem(), arrays.as_tensor)
    done = launch.forward(problem, None, "sm_90a")
    launch.backward(problem, done, torch.zeros_like(done.out), None, None, "sm_90a")
    assert {"outputs", "segment_states", "scan", "d_query", "d_keys"} <= missing.keys()
    assert not any(missing.values()), missing


@needs_tilelang
@pytest.mark.parametrize("kernel", ["segment_states", *map(slow, ("outputs", "d_query", "d_keys", "d_segment_states"))])
def test_packed_sequences_with_decay_are_lowered(kernel: str) -> None:
    """Their numbers of rows are loaded by threads: no asynchronous copy that TileLang cannot wait for."""
    spec = Linear(FEATURE_MAPS["elu"], lengths=np.array([0, 100, 300]))
    build = build_of(kernel, spec, Shape(1, 4, 2, 300, 300, 64, 64, dtype="bfloat16"), True, "sm_90a", 64, True)
    assert build.packed
    with compiler.as_target(build.target):
        text = written(kernel)(build, spec)
    assert "cp_async" not in compiler.source(text, build.target)


@needs_tilelang
@pytest.mark.parametrize("kernel", ["outputs", *map(slow, ("segment_states", "d_query", "d_keys", "d_segment_states"))])
def test_what_needs_no_features_is_multiplied_as_it_comes(kernel: str) -> None:
    """Nothing goes from tiles to registers and back, and threads add up what they have before they ask each other."""
    spec = Linear(FEATURE_MAPS["identity"], normalize=False)
    build = build_of(kernel, spec, Shape(1, 4, 4, 300, 300, 128, 128, dtype="bfloat16"), False, "sm_90a", 64, True)
    with compiler.as_target(build.target):
        source = compiler.source(written(kernel)(build, spec), build.target)
    allocated = source[source.index("buf_dyn_shmem[]") :]
    assert "narrow_k =" not in allocated or kernel == "d_query"  # a tile for what is stored
    assert "narrow_q =" not in allocated or kernel == "d_keys"
    loop, behind = source.rsplit("tl::wgmma_ss", 1)
    assert "AllReduce" not in loop and behind.count("AllReduce") == (kernel in ("outputs", "segment_states"))


def _there(x: Any) -> Any:
    return None if x is None else arrays.as_tensor(np.ascontiguousarray(x)).cuda()


def _results(case: LinearCase) -> dict[str, Any]:
    problem, kernel = case.problem(), dispatch.kernel("tilelang")
    initial = None if problem.initial is None else problem.initial.map(_there)
    rows = {name: _there(getattr(problem, name)) for name in ("q", "k", "v", "decay")}
    d_out, d_state = contract.gradients_to_pull(problem)
    given = replace(problem, **rows, initial=initial)
    done = kernel.forward(given)
    grads = kernel.backward(given, done, _there(d_out), d_state.map(_there))
    return {**contract.forward_results(done), **contract.backward_results(grads)}


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    reason = dispatch.reason("tilelang", replace(SHAPE, device="cuda:0"))
    if reason is not None:
        pytest.skip(f"tilelang cannot run on this machine: {reason}")
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_case_on_a_gpu(torch: Any, case: LinearCase) -> None:
    got = _results(case)
    check_results(contract.expected_of(case.problem()), {name: on_host(x.contiguous()) for name, x in got.items()})


@pytest.mark.gpu
def test_the_same_bits_again(torch: Any) -> None:
    first, second = _results(AGAIN), _results(AGAIN)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name

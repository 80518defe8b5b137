"""Linear attention in TileLang: by its C target, compiled for Hopper, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from tests.linear.cases_on_gpu import AGAIN
from tests.linear.cases_on_gpu import CASES as ON_GPU
from tilewise import arrays
from tilewise.contract import check_results, on_host
from tilewise.kernels.tilelang import compiler
from tilewise.linear import contract, dispatch
from tilewise.linear.cases import CASES, LinearCase
from tilewise.linear.features import FEATURE_MAPS
from tilewise.linear.kernels.tilelang import refused
from tilewise.linear.kernels.tilelang.build import KERNELS, build_of, written
from tilewise.linear.spec import Linear
from tilewise.spec import Shape

ON_C = dispatch.kernel("tilelang-c")
needs_c = pytest.mark.skipif(ON_C.unavailable() is not None, reason=str(ON_C.unavailable()))
needs_tilelang = pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed")
needs_nvcc = pytest.mark.skipif(compiler.not_installed("sm_90a") is not None, reason="TileLang or nvcc is missing")


@needs_c
@pytest.mark.parametrize("name", ["packed", "all of a sequence"])
def test_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chunks each, as a GPU would have them in a long sequence."""
    from tilewise.linear.kernels.tilelang import launch

    monkeypatch.setattr(launch, "segment_rows", lambda n, wanted, chunk: 2 * chunk)
    case = next(case for case in CASES if case.name == name)
    contract.check(ON_C, case.problem(), chunk=16)


def test_segments_keep_a_gpu_busy() -> None:
    pytest.importorskip("torch")
    from tilewise.linear.kernels.tilelang.launch import segment_rows

    assert segment_rows(16384, wanted=132 // 16, chunk=64) == 2048
    assert segment_rows(2048, wanted=132 // 128, chunk=64) == 2048
    assert segment_rows(2048, wanted=0, chunk=64) == 2048
    assert segment_rows(100, wanted=132, chunk=64) == 512


def test_what_it_cannot_is_told() -> None:
    shape = Shape(1, 2, 2, 9, 9, 64, 64, dtype="bfloat16")
    assert refused(shape) is None
    assert "leave the range of float16" in str(refused(replace(shape, dtype="float16")))
    assert "bfloat16, and the arrays are float32" in str(refused(replace(shape, dtype="float32")))
    assert "room for 128 x 128, and they are 200 and 64" in str(refused(replace(shape, d=200)))


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_compiles(kernel: str, d: int) -> None:
    """With products of warpgroups, tiles that come by the copy engine, and nothing that does not fit registers."""
    spec, shape = Linear(FEATURE_MAPS["elu"]), Shape(1, 4, 4, 300, 300, d, d, dtype="bfloat16")
    build = build_of(kernel, spec, shape, True, "sm_90a", 64, True)
    with compiler.as_target(build.target):
        text = written(kernel)(build, spec)
    if kernel not in ("scan", "row_weights"):
        source = compiler.source(text, build.target)
        assert all(word in source for word in ("tl::wgmma_ss", "tl::tma_load", "warpgroup_reg_dealloc"))
    assert compiler.library(text, build.target).spilled == 0


@needs_tilelang
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ("scan", "row_weights")])
def test_packed_sequences_with_decay_are_lowered(kernel: str) -> None:
    """Their numbers of rows are loaded by threads: no asynchronous copy that TileLang cannot wait for."""
    spec = Linear(FEATURE_MAPS["elu"], lengths=np.array([0, 100, 300]))
    build = build_of(kernel, spec, Shape(1, 4, 2, 300, 300, 64, 64, dtype="bfloat16"), True, "sm_90a", 64, True)
    assert build.packed
    with compiler.as_target(build.target):
        text = written(kernel)(build, spec)
    assert "cp_async" not in compiler.source(text, build.target)


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
    reason = dispatch.kernel("tilelang").unavailable() or compiler.not_installed("sm_90a")
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

"""Real compilers, on a CPU and on a GPU, where no cache can be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilewise.kernels.disk import Files

ROOT = Path(__file__).parent.parent.parent
_CALL = """
import numpy as np, tilewise as tw
q = np.random.default_rng(0).standard_normal((1, 2, 9, 8)).astype(np.float32)
for _ in range(2):
    got = tw.attention(q, q, q, causal=True, kernel={kernel!r})
    assert abs(got - tw.attention(q, q, q, causal=True, kernel="numpy")).max() < 1e-5
"""
_REAL = {"cuda-sim/naive": "c++", "tilelang-c/simple": "tilelang", "cute": "cutlass"}


@pytest.mark.parametrize(
    "kernel", ["cuda-sim/naive", *(pytest.param(x, marks=pytest.mark.slow) for x in list(_REAL)[1:])]
)
def test_real_compilers_where_no_cache_can_be_written(tmp_path: Path, kernel: str) -> None:
    """In a container that is read-only but for its temporary folder, of which nothing is left."""
    needed = _REAL[kernel]
    if (shutil.which(needed) if needed == "c++" else find_spec(needed)) is None:
        pytest.skip(f"{kernel} needs {needed}")
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    environment = {
        **os.environ, "TILEWISE_CACHE": str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": str(ROOT), "CUTE_DSL_ARCH": "sm_90a",
    }  # fmt: skip
    what = ["-m", "tests.cute.compiled_once"] if kernel == "cute" else ["-c", _CALL.format(kernel=kernel)]
    done = subprocess.run(
        [sys.executable, *what], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the compiled kernel is not kept" in done.stderr
    assert kernel != "cute" or '"compiled": 1' in done.stdout
    assert not list((tmp_path / "temporary").glob("tilewise-*"))


_ON_GPU = """
import torch, tilewise as tw
q, k, v = (torch.randn(1, 2, 200, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
options = dict(causal=True, score=tw.softcap(9.25))
got = tw.attention(q, k, v, kernel={kernel!r}, **options)
got.float().sum().backward()
want = tw.attention(*(x.detach().cpu().float() for x in (q, k, v)), kernel="numpy", **options)
assert (got.detach().cpu().float() - want).abs().max() < 0.05
assert q.grad.isfinite().all()
"""


def _on_gpu(kernel: str, **environment: str) -> str:
    """What it tells, of a process of its own."""
    from tilewise import dispatch

    pytest.importorskip("torch")  # which is asked for GPUs
    reason = dispatch.kernel(kernel).unavailable() or _without_compiler(kernel)
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-c", _ON_GPU.format(kernel=kernel)]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def _without_compiler(kernel: str) -> str | None:
    """Why nothing can be compiled: these two also run what was compiled elsewhere, which an empty cache has not."""
    from tilewise.kernels.cute import compiler as cute
    from tilewise.kernels.tilelang import compiler as tilelang

    reasons = {"cute": cute.not_installed, "tilelang": lambda: tilelang.not_installed("sm_90a")}
    return reasons.get(kernel, lambda: None)()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cuda", "triton", "cute", "tilelang"])
def test_gpu_kernels_where_no_cache_can_be_written(tmp_path: Path, kernel: str) -> None:
    (tmp_path / "file").touch()
    told = _on_gpu(kernel, TILEWISE_CACHE=str(tmp_path / "file" / "cache"))
    assert ("is not kept" in told) == (kernel != "triton"), told


@pytest.mark.gpu
def test_a_cubin_that_the_driver_refuses_is_compiled_again(tmp_path: Path) -> None:
    for turn, (refused, told) in enumerate([(False, False), (True, True), (False, False)]):
        if refused:
            for path in list((tmp_path / "cuda").iterdir()):
                Files(path.parent).add(path.name, b"\x7fELF of another architecture")
        assert ("does not load, and is made again" in _on_gpu("cuda", TILEWISE_CACHE=str(tmp_path))) == told, turn

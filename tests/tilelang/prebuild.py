"""Every kernel that the tests on a GPU take, compiled ahead by as many processes as there are cores.

python -m tests.tilelang.prebuild        fills the cache (TILEWISE_CACHE names another folder), with or without a GPU
pytest -m gpu -k tilelang                then compiles nothing

What a test would launch is found out by launching it on tensors in main memory, and taking note instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.conformance.test_conformance import tiles_on_a_gpu
from tests.linear.cases_on_gpu import CASES as LINEAR_CASES
from tilewise import arrays, validate
from tilewise.cases import conformance
from tilewise.kernels.tilelang import call, compiler, launch, library, support
from tilewise.linear.cases import LinearCase
from tilewise.linear.kernels import tilelang as linear
from tilewise.linear.kernels.operands import tensors_of
from tilewise.linear.kernels.tilelang import launch as linear_launch
from tilewise.linear.kernels.tilelang.build import written as linear_written
from tilewise.spec import Partial, Tile
from tilewise.validate import Call

TILES = (None, Tile(32, 48))  # of tests/conformance; its others make the same kernels
Kernels = dict[Any, Callable[[], Any]]  # how to write each build down


def kernels(target: str) -> Kernels:
    found: Kernels = {}
    _take_note(found)
    for made, tiles in calls():
        shape = replace(made.shape, device="cuda:0")
        operands = [_as_on_a_gpu(x) for x in (made.q, made.k, made.v)]
        for tile in tiles:
            if support.unsupported(made.spec, shape, target) is None:
                launch.forward(made.spec, *operands, tile, target)
                if support.too_much(made.spec, shape) is None:
                    launch.simple(made.spec, *operands, tile, target)
            if support.unsupported(made.spec, replace(shape, backward=True), target) is None:
                _backward(made, operands, tile, target)
    for case in LINEAR_CASES:
        _linear(case, target)
    return found


def calls() -> Iterator[tuple[Call, tuple[Tile | None, ...]]]:
    """Of the conformance suite and of test_gpu.py, with the tiles that they are computed by."""
    for case in conformance():
        yield case.inputs().call(), tiles_on_a_gpu("tilelang", case, TILES)
    yield from ((made, (None,)) for made in _others())


def _others() -> Iterator[Call]:
    heads = [torch.zeros(1, heads, 8, 128, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    yield from (validate.prepare(*heads[:1] * 3), validate.prepare(*heads, causal=True))
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.zeros(1, 2, 8, 64, dtype=dtype)
        yield validate.prepare(x, x, x)
    lengths, x = torch.tensor([0, 8], dtype=torch.int32), torch.zeros(8, 2, 64, dtype=torch.bfloat16)
    yield validate.prepare_varlen(x, x, x, lengths, lengths)
    for d in (40, 64, 128):
        x = torch.zeros(1, 2, 8, d + 3, dtype=torch.bfloat16)
        yield from (validate.prepare(*[y] * 3, causal=True) for y in (x[..., :d].contiguous(), x[..., 1:-2]))


def _take_note(found: Kernels) -> None:
    """Launches compute nothing from here on."""

    def noted(self: Any, kernel: str) -> None:
        build = call.build_of(kernel, self.spec, self.shape, self.target, self.choice, self.variant, self.aligned)
        found.setdefault(build, lambda: call.written(kernel)(build, self.variant))

    def noted_linear(
        self: Any, kernel: str, table: Any, rows: dict[str, Any], results: dict[str, Any], **others: Any
    ) -> None:
        build = self.build_for(kernel, (*rows.values(), *results.values()))
        found.setdefault(build, lambda: linear_written(kernel)(build, self.problem.spec))

    call.Call.launch = noted  # type: ignore[method-assign]
    linear_launch.LinearCall.launch = noted_linear  # type: ignore[method-assign]
    linear_launch.blocks_wanted = lambda device, target: 132  # type: ignore[assignment]


def _backward(made: Call, operands: list[torch.Tensor], tile: Tile | None, target: str) -> None:
    q, _, v = operands
    out = torch.empty_strided(*arrays.stored_as(q, v), dtype=q.dtype)
    saved = Partial(out, torch.zeros(q.shape[:3]))
    launch.backward(made.spec, *operands, saved, torch.zeros(out.shape, dtype=q.dtype), None, tile, target)


def _linear(case: LinearCase, target: str) -> None:
    """Tests copy arrays to a GPU head by head, those of packed sequences, too."""
    problem = tensors_of(case.problem(), torch.Tensor.contiguous)
    if linear.refused(problem.shape) is None:
        done = linear_launch.forward(problem, None, target)
        linear_launch.backward(problem, done, torch.zeros_like(done.out), None, None, target)


def _as_on_a_gpu(given: object) -> torch.Tensor:
    """With its steps; an array is copied there, to a multiple of many bytes, and a tensor lies where it lay."""
    x = given if isinstance(given, torch.Tensor) else arrays.as_tensor(given)
    offset = x.data_ptr() % 16 // x.element_size() if isinstance(given, torch.Tensor) else 0
    places = offset + 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True) if size)
    return torch.empty(places, dtype=x.dtype)[offset:].as_strided(x.shape, x.stride(), offset)


_wanted: list[tuple[Any, Callable[[], Any]]] = []  # which processes that are forked find here


def _keep(i: int) -> tuple[bool, float, str]:
    started = time.perf_counter()
    try:
        return library.keep(*_wanted[i]), time.perf_counter() - started, ""
    except Exception as error:  # told of, and then the others
        return False, time.perf_counter() - started, f"{type(error).__name__}: {error}"


def build(found: Kernels, jobs: int) -> int:
    """Compile them all; how many failed."""
    _wanted[:] = found.items()
    failed = 0
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for i, (was_new, seconds, error) in enumerate(pool.imap(_keep, range(len(_wanted)))):
            told = error or (f"{seconds:.1f} s" if was_new else "was there")
            failed += bool(error)
            sys.stdout.write(f"{i + 1} of {len(_wanted)}: {_wanted[i][0]}: {told}\n")
            sys.stdout.flush()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--match", default="", help="only those whose description has this, such as 'linear attention'")
    parser.add_argument("--list", action="store_true", help="tell which, and compile nothing")
    options = parser.parse_args()
    reason = compiler.not_installed(options.arch)
    if reason is not None and not options.list:
        sys.stderr.write(f"{reason}\n")
        return 2
    found = {build: write for build, write in kernels(options.arch).items() if options.match in str(build)}
    if options.list:
        sys.stdout.write("".join(f"{build}\n" for build in found))
        return 0
    return 1 if build(found, options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())

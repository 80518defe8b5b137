"""Every kernel that the tests on a GPU take, compiled ahead of time, for a machine that has no compiler.

python -m tests.cute.prebuild FOLDER --arch sm_90a          here, in some minutes
TILEWISE_CUTE_KERNELS=FOLDER pytest -m gpu -k cute          there, with apache-tvm-ffi alone

--fuzz 1000 compiles what so many random calls take instead: tests/fuzz.py --kernel cute --cases 1000

With TILEWISE_EVERY_LANE=1 they are those that racecheck understands: every_lane.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

import tilewise as tw
from tests.cute import every_lane
from tests.cute.simulated import biased
from tests.fuzzing.question import Question
from tests.fuzzing.running import systems
from tests.fuzzing.running.asking import ask
from tests.fuzzing.running.memory import Memory
from tests.fuzzing.running.put import question_of
from tilewise import arrays, validate
from tilewise.cases import Case, conformance
from tilewise.cli import demo
from tilewise.cli.build import _capability
from tilewise.kernels.cute import architecture, compiler, support
from tilewise.kernels.cute.cubin import Resources
from tilewise.kernels.cute.launch import cannot_be_copied, is_aligned
from tilewise.kernels.cute.projected import kernel_for
from tilewise.kernels.cute.rungs import LADDER, LONG, RUNGS, SCALED, backward_rung
from tilewise.kernels.cute.wanted import Wanted, kernel_of
from tilewise.kernels.disk import Files
from tilewise.validate import Call

RUNTIME = "cu13"
BIASED = {  # d, queries, keys, and the type of the table: where sequences are long, small heads have larger tiles
    **{f"{d}, {dtype}".replace("torch.", ""): (d, 304, 304, dtype)
       for d in (64, 128, 256) for dtype in (torch.bfloat16, torch.float16, torch.float32)},
    "long": (64, 2112, 304, torch.bfloat16),
}  # fmt: skip
PROJECTED = (4, 32), (8, 64)  # heads and their dimension


def calls() -> Iterator[Call]:
    """Of the conformance suite, of the demo, and of test_gpu.py."""
    yield from (case.inputs().call() for case in conformance())
    yield from (Case(variant, "ragged").inputs().call() for variant in demo.VARIANTS)
    for n in (8, LONG):  # the demo's lengths are of both kinds
        x = torch.zeros(1, 2, n, 64, dtype=torch.bfloat16)
        yield from (validate.prepare(x, x, x), validate.prepare(x, x, x, mask=tw.window(300, 40)))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for d in (64, 128, 256):
            x = torch.zeros(1, 2, 8, d, dtype=dtype)
            yield from (validate.prepare(x, x, x, causal=causal) for causal in (False, True))
    lengths, x = torch.tensor([0, 8], dtype=torch.int32), torch.zeros(8, 2, 64, dtype=torch.bfloat16)
    yield validate.prepare_varlen(x, x, x, lengths, lengths, causal=True)
    odd = torch.zeros(1, 2, 8, 65, dtype=torch.bfloat16)[..., 1:]
    yield validate.prepare(odd, odd, odd, causal=True)
    heavy = torch.zeros(1, 2, 90, 64, dtype=torch.bfloat16)
    yield from (validate.prepare(x, x, x) for x in (heavy, heavy.half()))
    yield validate.prepare(heavy.float(), heavy.float(), heavy.float(), mask=tw.window(256))


def fuzzed_calls(count: int) -> Iterator[Call]:
    """Of the fuzz, on tensors that lie as they will on a GPU. Decoding's are of lengths that it finds by itself."""
    wanted, memory = systems.wanted("cute"), Memory()
    for seed in range(count):
        question = question_of(seed, wanted)
        if isinstance(question, Question) and question.cache is None:
            memory.clear()
            yield ask(question, memory, "cpu:0").call


def call_of(x: torch.Tensor, causal: bool) -> Call:
    return validate.prepare(x, x, x, causal=causal)


def kernels_of(calls: Iterable[Call], capability: tuple[int, int]) -> dict[Wanted, None]:
    found: dict[Wanted, None] = {}
    for call in calls:
        shape = replace(call.shape, device="cuda:0")
        q, k, v = (_as_on_a_gpu(x) for x in (call.q, call.k, call.v))
        out = torch.empty_strided(*arrays.stored_as(q, v), dtype=q.dtype)
        has_gradients = support.unsupported(call.spec, replace(shape, backward=True), None, capability) is None
        specs = [call.spec, replace(call.spec, keeps_remainder=True)][: 2 if has_gradients else 1]
        for rung in LADDER:
            copied = not rung.maps or cannot_be_copied({"q": q, "k": k, "v": v}) is None
            if copied and support.unsupported(call.spec, shape, rung, capability) is None:
                aligned = all(map(is_aligned, (q, k, v, out)))
                for spec in specs:
                    found[kernel_of(rung, spec, call.shape, aligned)] = None
        if has_gradients:
            found[kernel_of(backward_rung(call.spec, call.shape), call.spec, call.shape)] = None
    return found


def kernels(capability: tuple[int, int]) -> list[Wanted]:
    found = kernels_of(calls(), capability)
    for call in (biased(*given) for given in BIASED.values()):
        found[kernel_of(RUNGS["forward_sm90"], call.spec, call.shape)] = None
    scaled = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    for x in (scaled, scaled.float()):
        call = validate.prepare(x, x, x, causal=True)
        found |= dict.fromkeys(kernel_of(rung, call.spec, call.shape) for rung in SCALED)
        for (heads, d), causal in product(PROJECTED, (False, True)):
            call = call_of(torch.zeros(1, heads, 8, d, dtype=x.dtype), causal)
            found[kernel_for(call.spec, call.shape)] = None
    return list(found)


def _as_on_a_gpu(x: object) -> torch.Tensor:
    """With its steps, but at a multiple of many bytes."""
    x = x if isinstance(x, torch.Tensor) else arrays.as_tensor(x)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def _build(kernel: Wanted, arch: str, folder: str) -> tuple[Resources | None, float]:
    files, started = Files(Path(folder), most=None), time.perf_counter()
    name = kernel.name(arch, RUNTIME)
    if files.path(name) is not None:
        return None, 0.0
    made = compiler.compile(kernel, arch)
    files.add(name, made.library(RUNTIME))
    return made.resources, time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fuzz", type=int, metavar="N", help="the kernels of so many random calls, not of the tests")
    options = parser.parse_args()
    capability = _capability(options.arch)
    arch = architecture(capability)
    os.environ.setdefault("CUTE_DSL_ARCH", arch)
    fuzzed = options.fuzz and list(kernels_of(fuzzed_calls(options.fuzz), capability))
    wanted, spilling = fuzzed or kernels(capability), 0
    with every_lane.installed(), ProcessPoolExecutor(options.jobs) as pool:
        made = pool.map(_build, wanted, [arch] * len(wanted), [options.folder] * len(wanted))
        for i, (kernel, (taken, seconds)) in enumerate(zip(wanted, made, strict=True), start=1):
            told = "was there" if taken is None else f"{taken}, {seconds:.1f} s"
            spilling += taken is not None and taken.stack > 0
            sys.stdout.write(f"{i} of {len(wanted)}: {kernel}: {told}\n")
            sys.stdout.flush()
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())

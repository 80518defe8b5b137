"""A stage without a GPU: tensors in main memory, a wall clock, and contestants that a benchmark must survive."""

from __future__ import annotations

import math
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise.bench.gpu.cases import VARIANTS, Case, Inputs
from tilewise.bench.gpu.contestants import Contestant, Entry, Sets
from tilewise.bench.gpu.first import Answer, Caller
from tilewise.bench.gpu.stage import Stage
from tilewise.bench.gpu.timing import IN_A_ROW, Loop, Settings, in_order, run_all

MACHINE = {
    "cpu": "abacus", "cores": 2, "os": "Linux 6", "python": "3.12", "numpy": "2", "blas": "none", "torch": "2.11",
    "torch_threads": 1, "gpu": "Fake H200", "cuda": "13.0", "cudnn": 91000, "driver": "580", "power_limit_w": "700",
    "max_sm_mhz": "1980", "max_memory_mhz": "3201", "versions": {"triton": "3.6.0", "flash-attn-4": None},
}  # fmt: skip
LIMITS = {"matmul_tflops": 700.0, "copy_gbs": 4000.0, "read_gbs": 4000.0, "exp_gops": 3500.0}
broken: list[str] = []  # who broke the device


class WallClock:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def sync(self) -> None:
        if broken:
            raise RuntimeError("an illegal memory access")

    def loop(self, entry: Entry) -> Loop:
        run_all(entry.calls)
        order = in_order(entry.calls, 3)
        return Loop(entry, lambda: run_all(order), 3, IN_A_ROW, 1e-3)

    def turn(self, loop: Loop) -> float:
        begin = time.perf_counter()
        loop.run()
        return (time.perf_counter() - begin) / loop.calls


class FakeStage(Stage):
    clock = WallClock
    device = "cpu"

    def machine(self) -> dict[str, Any]:
        return MACHINE

    def limits(self) -> dict[str, float | None]:
        return {**LIMITS}


class FakeCaller(Caller):
    """Its first call compiles something, if its cache has nothing; and tells what it had imported by then."""

    device = "cpu"

    def call(self, name: str, case: Case) -> Answer:
        # Not cuda.bindings: where it is installed, PyTorch itself imports it.
        assert not {"triton", "cuda.core"} & set(sys.modules), "what a first call imports is part of its time"
        made = Path(os.environ["TILEWISE_CACHE"], "cuda", "kernel.cubin")
        took = 2.0 if made.exists() else 3.0
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch()
        return took, super().call(name, case)[1]

    def sync(self) -> None:
        pass


def dense(case: Case, x: Inputs) -> Any:
    """Standard attention by a variant's functions, as a peer would compute it."""
    variant, (q, k, v) = VARIANTS[case.variant], (y.float() for y in (x.q, x.k, x.v))
    k, v = (y.repeat_interleave(case.group, 1) for y in (k, v))
    h, at_q, at_k = torch.arange(case.heads)[:, None, None], torch.arange(case.n)[:, None], torch.arange(case.n)
    s = q @ k.mT / math.sqrt(case.d)
    if variant.score is not None:
        s = variant.score(x.extras)(s, 0, h, at_q, at_k)
    if variant.mask is not None:
        s = s.masked_fill(~variant.mask(x.extras)(0, h, at_q, at_k), -math.inf)
    return (s.softmax(-1) @ v).to(x.q.dtype)


def _enter(case: Case, sets: Sets) -> Entry:
    return Entry([partial(dense, case, x) for x in sets])


def _off(case: Case, sets: Sets) -> Entry:
    return Entry([lambda x=x: 1.1 * dense(case, x) for x in sets])


def _lazy(case: Case, sets: Sets) -> Entry:
    """Writes once and never again."""
    out = dense(case, sets[0])
    return Entry([lambda: out for _ in sets])


def _failing(case: Case, sets: Sets) -> Entry:
    raise RuntimeError("it broke at /home/someone/x.py")


def _tiring(case: Case, sets: Sets) -> Entry:
    """Right until it is timed: a call for each set, and three for each of the two runs that are judged."""
    left = iter(range(len(sets) + 6))

    def call(x: Inputs) -> Any:
        if next(left, None) is None:
            raise RuntimeError("tired")
        return dense(case, x)

    return Entry([partial(call, x) for x in sets])


def _breaking(case: Case, sets: Sets) -> Entry:
    if case.variant != "full":
        return _enter(case, sets)
    broken.append("breaking")
    raise RuntimeError("an illegal memory access")


right = Contestant(f"{__name__}:right", _enter)
off = Contestant(f"{__name__}:off", _off)
lazy = Contestant(f"{__name__}:lazy", _lazy)
failing = Contestant(f"{__name__}:failing", _failing)
tiring = Contestant(f"{__name__}:tiring", _tiring)
breaking = Contestant(f"{__name__}:breaking", _breaking)  # in full attention only
absent = Contestant(f"{__name__}:absent", _enter, lambda: "not installed")

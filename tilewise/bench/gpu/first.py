"""The first call of a process: with an empty cache, where kernels must be compiled, and with what that left there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tilewise.bench.gpu import cases, judge
from tilewise.bench.gpu.cases import Case, Inputs
from tilewise.bench.gpu.contestants import Entry, find
from tilewise.bench.gpu.stage import Record, blank, judged
from tilewise.bench.gpu.timing import Settings
from tilewise.bench.process import Child
from tilewise.bench.refusal import RefusedError

FIRST = "first call"
CALLER = "tilewise.bench.gpu.first:Caller"
MOST_ROUNDS = 2  # each is two processes, and PyTorch alone takes seconds to import
_TIMEOUT = 120.0

Answer = tuple[float, float]  # seconds, and the error


class Caller:
    """What a process does that is asked once: PyTorch, its autograd, the GPU and inputs are there before the clock."""

    device = "cuda"

    def call(self, name: str, case: Case) -> Answer:
        inputs = cases.draw(case, 0, self.device)
        entry = find(name).enter(case, [inputs])
        _import_autograd(self.device)
        self.sync()
        begin = time.perf_counter()
        out = _out(entry, case, inputs)
        self.sync()
        took = time.perf_counter() - begin
        return took, judge.expected(case, inputs).error(out)

    def sync(self) -> None:
        import torch

        torch.cuda.synchronize()


def _import_autograd(device: str) -> None:
    """What PyTorch imports for the first gradient that it is given is the same for everyone."""
    import torch

    x = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.grad(x * 2, x, torch.ones_like(x))


def _out(entry: Entry, case: Case, inputs: Inputs) -> Any:
    """Of forward; or the gradients, after it."""
    import torch

    out = entry.calls[0]()
    return torch.autograd.grad(out, inputs.wanted, inputs.d_out) if case.backward else out


def rounds(settings: Settings) -> int:
    return min(settings.rounds, MOST_ROUNDS)


def measured(case: Case, name: str, count: int) -> Record:
    """median_ms is of the empty cache, warm_ms of the filled one. A process that fails is a result, too."""
    try:
        tries = [_cold_and_warm(case, name) for _ in range(count)]
    except RefusedError as error:
        return blank(case, name, find(name).ours, error)
    cold, warm = ([pair[i][0] for pair, _ in tries] for i in (0, 1))
    return {
        **blank(case, name, find(name).ours, None),
        "how": FIRST, "calls": 1, "median_ms": median(cold) * 1e3, "rounds_ms": [x * 1e3 for x in cold],
        "spread": (max(cold) - min(cold)) / median(cold),
        "warm_ms": median(warm) * 1e3, "warm_rounds_ms": [x * 1e3 for x in warm],
        "compiled": max(compiled for _, compiled in tries),
        **judged(max(error for pair, _ in tries for _, error in pair)),
    }  # fmt: skip


def _cold_and_warm(case: Case, name: str) -> tuple[Sequence[Answer], int]:
    """Both answers, and how many kernels the first one compiled."""
    with TemporaryDirectory() as folder:
        cold = _answer(case, name, Path(folder))
        compiled = len(list(Path(folder).rglob("*.cubin")))
        return (cold, _answer(case, name, Path(folder))), compiled


def _answer(case: Case, name: str, folder: Path) -> Answer:
    env = {"TILEWISE_CACHE": str(folder / "tilewise"), "TRITON_CACHE_DIR": str(folder / "triton")}
    with Child(CALLER, env=env) as child:
        found: Answer = child.ask("call", name, case, timeout=_TIMEOUT)
        return found

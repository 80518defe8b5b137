"""Random calls on one kernel system, judged by the contract: `python tests/fuzz.py --kernel numpy --cases 10000`.

Case i is made from the seed SEED + i alone, so `--only SEED` makes one of them again. A case is a call of random sizes,
strides, types, magnitudes, variant and tile, forward and perhaps backward. Its results must be within the contract, the
same bits the second time, and its inputs untouched; many arrays end at a page that no one may touch.

Kernels for tensor cores get calls that they can compute (--half-share). On a GPU, where each kernel compiles for
seconds, calls share them (--pool): `python tests/fuzz.py --kernel cuda --cases 2000 --jobs 12`.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the reference's matrices are too small to share
if __name__ == "__main__":  # the project's folder, not the script's own, where `cuda` is something else
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tests.fuzzing.draw import Wanted
from tests.fuzzing.judge import Verdict, judge
from tests.fuzzing.memory import Memory
from tilewise import dispatch
from tilewise.cli.terminal import progress
from tilewise.dispatch import Kernel
from tilewise.kernels.triton.modules import is_interpreted

MOST_FAILURES = 10
MOST_LUCK, MOST_LUCK_OF_A_KIND = 0.05, 0.15  # the share of results that may need the bound of rounding ...
LUCK_SPARES = 5  # ... once there are some
# Gradients of an array are often one number, whose error is held against one draw of the same distribution: if both are
# normal, it is beyond twice the other with probability 1 - atan(2) * 2 / pi, 3 times in 10, in a kernel as good.
OF_ONE_NUMBER, MOST_LUCK_OF_ONE_NUMBER = "d_array", 0.15
PATIENCE = 120.0  # seconds for one case, after which it is taken to hang
POOL = 72  # kinds of calls on a GPU: a number that most numbers of jobs divide, so that few compile the same
ENVIRONMENT = ("TILEWISE_CPU_ISA", "OMP_NUM_THREADS")  # what a replay needs as well
_fork = multiprocessing.get_context("fork")  # kernels need not be picklable; nothing has been computed before


# -- processes --------------------------------------------------------------------------------------------------------


class Worker:
    """A process that judges one seed after the other. It may crash or hang: the seed it is at is known outside."""

    def __init__(self, kernel: Kernel, seeds: range, wanted: Wanted) -> None:
        self.kernel, self.seeds, self.wanted = kernel, seeds, wanted
        self._at: Any = _fork.RawArray("d", [seeds.start, time.monotonic()])  # the seed, and when it was begun
        self.receive, send = _fork.Pipe(duplex=False)
        self._ended = False
        self._process = _fork.Process(target=self._run, args=(send, os.getpid()), daemon=True)
        self._process.start()
        send.close()

    def _run(self, send: Connection, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
        faulthandler.enable(sys.__stderr__)
        memory = Memory()
        for seed in self.seeds:
            if os.getppid() != parent:  # no one listens any more
                return
            self._at[:] = [seed, time.monotonic()]
            send.send((seed, judge(self.kernel, seed, memory, self.wanted)))
        send.send(None)

    def results(self) -> Iterator[tuple[int, Verdict] | None]:
        """What has arrived; None: it is done."""
        while self.receive.poll():
            try:
                yield self.receive.recv()
            except EOFError:
                self._ended = True
                return

    def trouble(self) -> str | None:
        """Why no more is to be expected of it, or None."""
        if self._ended:
            self._process.join()
            code = self._process.exitcode or 0
            return f"crashed: {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if time.monotonic() - self._at[1] > PATIENCE:
            return f"no answer within {PATIENCE:g} s"
        return None

    def next(self) -> Worker:
        """Another process for the seeds after the one it is at."""
        self.stop()
        rest = range(int(self._at[0]) + self.seeds.step, self.seeds.stop, self.seeds.step)
        return Worker(self.kernel, rest, self.wanted)

    @property
    def seed(self) -> int:
        return int(self._at[0])

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.receive.close()


def run(kernel: Kernel, seeds: range, wanted: Wanted, jobs: int) -> Report:
    """Judge every seed, or until there are enough failures, or the user has seen enough."""
    report = Report()
    workers = [Worker(kernel, seeds[i::jobs], wanted) for i in range(min(jobs, len(seeds)))]
    try:
        while workers and len(report.failures) < MOST_FAILURES:
            wait([worker.receive for worker in workers], timeout=1.0)
            workers = [left for worker in workers for left in _collect(worker, report)]
            progress(report.progress(len(seeds)))
    except KeyboardInterrupt:
        report.interrupted = True
    for worker in workers:
        worker.stop()
    progress()
    return report


def _collect(worker: Worker, report: Report) -> list[Worker]:
    """Take in what a worker has sent; the worker to go on with, if there is more to do."""
    for result in worker.results():
        if result is None:
            worker.stop()
            return []
        report.add(*result)
        if len(report.failures) == MOST_FAILURES:
            return [worker]
    trouble = worker.trouble()
    if trouble is None:
        return [worker]
    report.failures.append((worker.seed, trouble))
    return [worker.next()]


# -- the report -------------------------------------------------------------------------------------------------------


def _most_luck(name: str) -> float:
    """Of results of that name, or of those of one kind of call."""
    if name.startswith(OF_ONE_NUMBER):
        return MOST_LUCK_OF_ONE_NUMBER if " of " not in name else 2 * MOST_LUCK_OF_ONE_NUMBER
    return MOST_LUCK_OF_A_KIND if " of " in name else MOST_LUCK


@dataclass
class Report:
    """What came of all cases."""

    cases: int = 0
    backward: int = 0
    results: Counter[str] = field(default_factory=Counter)
    lucky: Counter[str] = field(default_factory=Counter)
    worst: tuple[float, int] = (0.0, 0)  # error as a share of its limit, and the seed
    dtypes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    variants: Counter[str] = field(default_factory=Counter)
    redrawn: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    interrupted: bool = False
    began: float = field(default_factory=time.monotonic)

    def add(self, seed: int, verdict: Verdict) -> None:
        self.cases += 1
        self.backward += verdict.backward
        for counts, more in ((self.results, verdict.results), (self.lucky, verdict.lucky)):
            counts.update(more)
            counts.update({f"{name} of {verdict.kind}": count for name, count in more.items()})
        self.worst = max(self.worst, (verdict.ratio, seed))
        self.dtypes[verdict.dtype] += 1
        self.kinds[verdict.kind] += 1
        self.variants.update(set(verdict.names))
        self.redrawn += verdict.redrawn
        if verdict.refused is not None:
            self.refused[verdict.refused] += 1
        if verdict.failure is not None:
            self.failures.append((seed, verdict.failure))

    @property
    def rate(self) -> float:
        return self.cases / max(time.monotonic() - self.began, 1e-9)

    @property
    def too_lucky(self) -> str | None:
        """Which results were beyond the contract's limit too often for luck: each within what rounding can do, and yet
        a kernel that rounds more than the contract has it."""
        often = [x for x, n in self.lucky.most_common() if n > LUCK_SPARES and n > _most_luck(x) * self.results[x]]
        return None if not often else f"beyond the contract's limit more often than by luck: {', '.join(often)}"

    def _luck(self) -> str:
        told = (f"{name} {count:,} of {self.results[name]:,}" for name, count in self.lucky.most_common())
        return ", ".join(told) or "none"

    def progress(self, total: int) -> str:
        return f"{self.cases:,} of {total:,} cases, {len(self.failures)} failures, {self.rate:.0f} a second"

    def summary(self) -> str:
        seconds = time.monotonic() - self.began
        ratio, seed = self.worst
        lines = [
            f"{self.cases:,} cases in {seconds:.0f} s ({self.rate:.0f} a second), {len(self.failures)} failures",
            f"  forward {self.cases:,}, backward as well {self.backward:,}",
            f"  types: {_counts(self.dtypes)}",
            f"  calls: {_counts(self.kinds)}",
            f"  variants: {_counts(self.variants)}",
            f"  redrawn, since their results would say nothing: {_counts(self.redrawn)}",
            f"  largest error: {ratio:.3f} of its limit (seed {seed})",
            f"  results beyond the contract's limit but within the bound of rounding: {self._luck()}",
        ]
        if self.refused:
            lines += [f"  refused by the kernel, {count:,} times: {why}" for why, count in self.refused.most_common()]
        return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    wanted = _wanted(options)
    if wanted.device == "cuda":
        _import_torch()
    kernel = dispatch.kernel(options.kernel)
    reason = kernel.unavailable()
    if reason is not None:
        print(f"--kernel {options.kernel}: {reason}", file=sys.stderr)
        return 2
    if options.kernel.startswith("triton") and is_interpreted():
        from tests.triton import quick_interpreter

        quick_interpreter.install()
    seeds = range(options.seed, options.seed + options.cases)
    if options.only is not None:
        seeds = range(options.only, options.only + 1)
    report = run(kernel, seeds, wanted, options.jobs)
    for seed, failure in report.failures:
        print(f"FAILED: {failure}\n  again: {_replay(options.kernel, wanted, seed)}\n")
    print(report.summary())
    if report.too_lucky is not None:
        print(f"FAILED: {report.too_lucky}")
    return 1 if report.failures or report.too_lucky else 130 if report.interrupted else 0


def _wanted(options: argparse.Namespace) -> Wanted:
    """What the options say, and where they say nothing what suits the kernel."""
    system, _, rung = options.kernel.partition("/")
    on_a_gpu = system in ("cuda", "cute", "tilelang") or (system == "triton" and not is_interpreted())
    half_share, pool, device = options.half_share, options.pool, "cuda" if on_a_gpu else "cpu"
    if half_share is None:
        has_tensor_cores = on_a_gpu or system.startswith("cuda")
        half_share = {"forward_sm90": 1.0, "": 0.5}.get(rung, 0.0) if has_tensor_cores else 0.0
    if pool is None and device == "cuda":
        pool = POOL
    return Wanted(options.backward_share, half_share, pool, device)


def _import_torch() -> None:
    """So that it finds the GPU without a word to the driver: no process that has begun CUDA may fork."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with suppress(ImportError):  # the kernel will tell
        import torch  # noqa: F401


def _replay(kernel: str, wanted: Wanted, seed: int) -> str:
    environment = [f"{name}={shlex.quote(os.environ[name])}" for name in ENVIRONMENT if name in os.environ]
    shares = f"--backward-share {wanted.backward_share:g} --half-share {wanted.half_share:g}"
    pool = [] if wanted.pool is None else [f"--pool {wanted.pool}"]
    return " ".join([*environment, f"python tests/fuzz.py --kernel {kernel} --only {seed} {shares}", *pool])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Random calls on one kernel system, judged by the contract.")
    parser.add_argument(
        "--kernel", type=_kernel, required=True, metavar="NAME", help="the kernel system, or a rung of it (cuda/tiled)"
    )
    parser.add_argument("--cases", type=_at_least(1), default=10_000, metavar="N", help="how many (default: 10000)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of the first case; others follow (default: 0)")
    parser.add_argument("--only", type=_at_least(0), metavar="SEED", help="one case again, by its own seed")
    parser.add_argument("--jobs", type=_at_least(1), default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument(
        "--backward-share", type=_share, default=0.3, metavar="P", help="of cases with a backward pass (default: 0.3)"
    )
    parser.add_argument(
        "--half-share", type=_share, metavar="P",
        help="of cases that tensor cores can compute (default: 1 for forward_sm90, 0.5 for cuda and cuda-sim, else 0)",
    )  # fmt: skip
    parser.add_argument(
        "--pool", type=_at_least(1), metavar="N",
        help=f"about so many kinds of calls, each a kernel to compile (default: {POOL} on a GPU, else any number)",
    )  # fmt: skip
    return parser


def _kernel(name: str) -> str:
    try:
        dispatch.check_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if name == "auto":
        raise argparse.ArgumentTypeError("expected the name of one kernel system, got 'auto'")
    return name


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return number


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return share


if __name__ == "__main__":
    sys.exit(main())

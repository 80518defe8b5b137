"""The fuzz on every kernel system that runs here, for a short time; and what it must see: mistakes, crashes, hangs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import numpy as np
import pytest

from tests import fuzz
from tests.conformance.paths import paths
from tests.conformance.wrong_kernels import BACKWARD_MISTAKES, SPEC_MISTAKES, STATE_MISTAKES, Wrong
from tests.fuzzing.drawing.draw import Wanted, draw
from tests.fuzzing.question import Question
from tests.fuzzing.running import systems
from tests.fuzzing.running.asking import ask
from tests.fuzzing.running.memory import Memory
from tests.fuzzing.running.put import Put, judge_seed, question_of
from tests.fuzzing.running.report import Report
from tests.fuzzing.running.systems import System
from tests.fuzzing.running.trial import Verdict
from tests.fuzzing.running.workers import Trouble
from tests.fuzzing.running.written import read, written
from tilewise import arrays, dispatch
from tilewise.kernels.cuda.marshal import View, cannot_be_copied
from tilewise.kernels.cuda.rungs import RUNGS
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel
from tilewise.kernels.numpy import NumpyKernel
from tilewise.linear.kernels.numpy import Kernel as LinearNumpyKernel
from tilewise.spec import Attention, Grads, Partial, Tile

ROOT = Path(__file__).parent.parent
MEMORY = Memory()
WANTED = Wanted()


def _numpy(kernel: Any = None, device: str = "cpu") -> System:
    return System("numpy", kernel or NumpyKernel(), LinearNumpyKernel(), device=device)


def _fuzz(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "tests/fuzz.py", *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)


# -- every system -----------------------------------------------------------------------------------------------------

SIMULATED = ("cuda-sim/naive", "cuda-sim/tiled", "cuda-sim/forward_sm90", "cuda-sim/unordered")
COMPILED = ("--seconds", "30", "--shapes", "3")  # as many as there is time for, each kind compiled for three of them
RUNS: dict[str, tuple[str, ...]] = {
    "numpy": ("--cases", "300"), "cpu": ("--cases", "300"), "triton": ("--seconds", "30"),
    **dict.fromkeys(SIMULATED, COMPILED), "tilelang-c": ("--cases", "3", "--shapes", "3"),
}  # fmt: skip
LONG = {"numpy": ("--cases", "5000"), "cpu": ("--cases", "10000"), "tilelang-c": ("--cases", "20")}


def _check_run(kernel: str, *arguments: str) -> None:
    reason = systems.unavailable(kernel)
    if reason is not None:
        pytest.skip(f"{kernel} cannot run on this machine: {reason}")
    done = _fuzz("--kernel", kernel, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = re.search(r"^([\d,]+) cases in .* 0 failures$", done.stdout, re.MULTILINE)
    assert cases is not None and int(cases[1].replace(",", "")) > 0, done.stdout
    assert done.stderr == ""  # quiet where no one looks


@pytest.mark.parametrize("kernel", RUNS)
def test_random_calls(kernel: str) -> None:
    _check_run(kernel, *RUNS[kernel])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", RUNS)
def test_many_random_calls(kernel: str) -> None:
    _check_run(kernel, "--seed", "1000", *LONG.get(kernel, ("--seconds", "120")))


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in paths("cpu") if isa is not None])
def test_random_calls_on_each_instruction_set(isa: str) -> None:
    _check_run("cpu", "--isa", isa, "--cases", "3000", "--seed", "20000")


def test_every_system_has_a_target_and_is_run() -> None:
    """Whatever is registered has long runs; what runs without a GPU is in the quick suite."""
    systems_there = {name for name in dispatch.NAMED if "/" not in name} - {"cuda-sim"}
    targets = {name.partition(" ")[0] for name in systems.TARGETS}
    assert systems_there | set(SIMULATED) <= targets
    assert set(RUNS) == {name for name in targets if systems.device(name) == "cpu"} | {"triton"}
    assert {f"cuda-sim/{name}" for name in RUNGS} <= set(SIMULATED)


def test_a_case_is_its_seed() -> None:
    """The same seed gives the same call and the same results, whatever was drawn before it."""
    alone = judge_seed(_numpy(), 7, Memory(), WANTED)
    for seed in (5, 6):
        judge_seed(_numpy(), seed, MEMORY, WANTED)
    assert judge_seed(_numpy(), 7, MEMORY, WANTED) == alone


def test_calls_for_tensor_cores_are_such() -> None:
    """Hardly one is refused: by types and sizes, or by how arrays lie."""
    rung, reasons = RUNGS["forward_sm90"], Counter[str | None]()
    wanted = replace(systems.wanted("cuda-sim/forward_sm90"), shapes=1, cache_share=0.0)
    for seed in range(40):
        MEMORY.clear()
        call = ask(draw(seed, wanted), MEMORY, "cpu").call  # type: ignore[arg-type]
        views = {name: View.of_numpy(x) for name, x in zip("qkv", (call.q, call.k, call.v), strict=True)}
        reasons[rung.unsupported(call.shape) or cannot_be_copied(views)] += 1
    assert reasons[None] >= 38
    assert reasons.keys() <= {None, "there is nothing to load"}


# -- mistakes ---------------------------------------------------------------------------------------------------------


def _caught(kernel: NumpyKernel, backward_share: float, seeds: range = range(250)) -> str | None:
    """What the first failing seed of a few shows."""
    for seed in seeds:
        failure = judge_seed(_numpy(kernel), seed, MEMORY, Wanted(backward_share)).failure
        if failure is not None:
            return failure
    return None


MISTAKES = {name: (Wrong(patch=patch), 0.0) for name, patch in STATE_MISTAKES.items()}
MISTAKES |= {f"{name}, backward": (Wrong(patch=patch), 1.0) for name, patch in BACKWARD_MISTAKES.items()}
MISTAKES |= {name: (Wrong(change), 0.0) for name, change in SPEC_MISTAKES.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_classic_mistake_is_caught(mistake: str) -> None:
    assert _caught(*MISTAKES[mistake]) is not None


class _WritesInputs(NumpyKernel):
    """Scales q in place, and back."""

    def forward(self, spec: Attention, q: Any, *args: Any) -> Partial:
        if q.dtype == np.float32 and q.flags.writeable:
            q *= np.float32(1.1)
            q /= np.float32(1.1)
        return super().forward(spec, q, *args)


class _ChangesBits(NumpyKernel):
    """Adds up in another order every time: the tile alternates."""

    wide = True

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None, watch: Any = None) -> Partial:
        self.wide = not self.wide
        return super().forward(spec, q, k, v, Tile(64, 64) if self.wide else Tile(64, 5))


class _LosesPrecision(NumpyKernel):
    """Computes float32 as bfloat16, as tensor cores are fond of."""

    def forward(self, spec: Attention, *args: Any) -> Partial:
        q, k, v, *rest = args
        if q.dtype != np.float32:
            return super().forward(spec, *args)
        q, k, v = (arrays.widen(arrays.narrow(x, "bfloat16"), np.float32) for x in (q, k, v))
        return super().forward(spec, q, k, v, *rest)


class _LeavesRowsUnwritten(NumpyKernel):
    """A row without keys is never stored."""

    def forward(self, spec: Attention, q: Any, *args: Any) -> Partial:
        done = super().forward(spec, q, *args)
        if done.out.dtype == np.float32:
            out = np.empty_like(done.out)
            np.copyto(out, done.out, where=(done.lse > -np.inf)[..., None])
            done = Partial(out, done.lse)
        return done


class _TilesByBatch(NumpyKernel):
    """Chooses its tile by how much work there is, batch_invariant or not."""

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None, watch: Any = None) -> Partial:
        return super().forward(spec, q, k, v, Tile(16, 16) if q.shape[0] == 1 else Tile(16, 7))


class _NeedsItsOwnForward(NumpyKernel):
    """Finds what backward needs by the lse that its own forward gave."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def forward(self, spec: Attention, *args: Any) -> Partial:
        done = super().forward(spec, *args)
        self.kept[id(done.lse)] = done
        return done

    def backward(self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, *args: Any, **options: Any) -> Grads:
        return super().backward(spec, q, k, v, self.kept[id(saved.lse)], *args, **options)


HOSTILE_USE: dict[str, tuple[type[NumpyKernel], float, str]] = {
    "writes its inputs": (_WritesInputs, 0.0, "written"),
    "changes bits": (_ChangesBits, 0.0, "other bits the second time"),
    "loses precision": (_LosesPrecision, 0.0, "off by"),
    "leaves rows unwritten": (_LeavesRowsUnwritten, 0.0, ""),
    "tiles by batch": (_TilesByBatch, 0.0, "alone"),
    "needs its own forward": (_NeedsItsOwnForward, 1.0, "KeyError"),
}


@pytest.mark.parametrize("mistake", HOSTILE_USE)
def test_mistake_under_hostile_use_is_caught(mistake: str) -> None:
    kernel, backward_share, told = HOSTILE_USE[mistake]
    assert told in (_caught(kernel(), backward_share) or "nothing was caught")


def test_warnings_and_refusals_are_told() -> None:
    class Warns(NumpyKernel):
        def forward(self, *args: Any) -> Partial:
            np.log(np.zeros(1))
            return super().forward(*args)

    class Refuses(NumpyKernel):
        def unsupported(self, spec: Attention, shape: Any) -> str | None:
            return "not today"

        def forward(self, *args: Any) -> Partial:
            raise AssertionError("it was asked all the same")

    assert "RuntimeWarning" in str(judge_seed(_numpy(Warns()), 1, MEMORY, WANTED).failure)
    refused = judge_seed(_numpy(Refuses()), 1, MEMORY, WANTED)
    assert (refused.refused, refused.failure, refused.results) == ("not today", None, Counter())


def test_the_simulator_takes_turns_in_another_order_the_second_time() -> None:
    system = systems.system("cuda-sim/unordered")
    assert isinstance(system.kernel, CudaSimKernel) and isinstance(system.again, CudaSimKernel)
    assert system.kernel.order != system.again.order and system.in_any_order
    assert systems.system("numpy").again is None


class _RoundsTooMuch(NumpyKernel):
    """Off by 20 roundings: more than the contract allows, and yet rounding could do it to any one number.

    Everywhere, or in calls with so many queries; not in packed ones, whose sequences have numbers of their own.
    """

    def __init__(self, queries: int | None) -> None:
        self.queries = queries

    def forward(self, spec: Attention, q: Any, *args: Any) -> Partial:
        done = super().forward(spec, q, *args)
        here = self.queries is None or (self.queries == q.shape[2] and spec.lengths is None)
        if not here or done.out.dtype not in (np.float32, np.float64):
            return done
        return Partial(done.out * (1 + 10 * np.finfo(done.out.dtype).eps), done.lse)


@pytest.mark.parametrize(
    ("name", "lucky", "results", "too_often"),
    [
        ("out", 5, 5, False),
        ("out", 6, 6, True),
        ("out", 6, 120, False),
        ("out", 6, 119, True),
        ("out of dense", 6, 40, False),
        ("out of dense", 6, 39, True),
        ("d_array", 6, 40, False),
        ("d_array", 6, 39, True),
        ("d_array of packed", 6, 20, False),
        ("d_array of packed", 6, 19, True),
        ("d_sinks", 6, 119, True),
    ],
)
def test_luck_is_rare_or_there_is_little_of_it(name: str, lucky: int, results: int, too_often: bool) -> None:
    told = Report(results=Counter({name: results}), lucky=Counter({name: lucky})).too_lucky
    assert told == (f"beyond the contract's limit more often than by luck: {name}" if too_often else None)


@pytest.mark.parametrize(
    ("queries", "cases", "which", "fine"),
    [(None, 100, {"out", "out of dense"}, set()), (1, 400, {"out of one query"}, {"out of dense", "out of packed"})],
)
def test_what_happens_everywhere_is_no_luck(
    queries: int | None,
    cases: int,
    which: set[str],
    fine: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everywhere, or with one query alone, which is a small part of all calls."""
    monkeypatch.setattr(systems.dispatch, "kernel", lambda name: _RoundsTooMuch(queries))
    assert fuzz.main(["--kernel", "numpy", "--cases", str(cases), "--backward-share", "0"]) == 1
    told = capsys.readouterr().out
    assert "0 failures" in told
    (names,) = re.findall("FAILED: beyond the contract's limit more often than by luck: (.*)", told)
    assert which <= {*names.split(", ")} and fine.isdisjoint(names.split(", "))


# -- kernels that take the process with them --------------------------------------------------------------------------

_RUN = """
import ctypes, sys, time
from tests import fuzz
from tests.fuzzing.running import workers
from tests.fuzzing.drawing.draw import Wanted
from tests.fuzzing.running.put import Put
from tests.fuzzing.running.systems import System
from tilewise.kernels.numpy import NumpyKernel

workers.PATIENCE = 2.0

class Bad(NumpyKernel):
    def forward(self, spec, q, k, v, *args):
        {mistake}
        return super().forward(spec, q, k, v, *args)

put = Put("numpy", Wanted(backward_share=0.0, cache_share=0.0), make=lambda name: System("numpy", Bad()))
report = fuzz.run(put, fuzz.blocks_of(range({seeds}), 3), jobs=2)
print(report.cases, len(report.failures), sorted(report.seeds) == list(range({seeds})), report.failures[0][1])
"""


def _run_bad(mistake: str, seeds: int) -> tuple[int, int, str]:
    """How many cases were judged, how many failed, and how the first of those did. No seed is lost."""
    command = [sys.executable, "-c", _RUN.format(mistake=mistake, seeds=seeds)]
    done = subprocess.run(command, cwd=ROOT, stdout=PIPE, stderr=DEVNULL, text=True, timeout=120, check=True)
    cases, failures, complete, first = done.stdout.split(maxsplit=3)
    assert complete == "True"
    return int(cases), int(failures), first


@pytest.mark.parametrize(
    "beyond", ["k.ctypes.data + k.nbytes if k.flags.c_contiguous else k.ctypes.data", "q.ctypes.data - 1"]
)
def test_reading_beyond_an_array_is_caught(beyond: str) -> None:
    """At its end or before its beginning: the process ends there, the seed is told, and the next one goes on."""
    cases, failures, first = _run_bad(f"ctypes.string_at({beyond}, 1)", seeds=20)
    assert "crashed: SIG" in first  # SEGV, or BUS on some systems
    assert 1 < failures < 10
    assert cases == 20


def test_a_hang_is_caught() -> None:
    cases, failures, first = _run_bad("time.sleep(1000 if q.shape[2] == 1 else 0)", seeds=12)
    assert "no answer within 2 s" in first
    assert failures >= 1
    assert cases == 12


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_failure_tells_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its seed, and as the smallest question that still fails so."""
    wrong = Wrong(patch=STATE_MISTAKES["missing lse term"])
    monkeypatch.setattr(systems.dispatch, "kernel", lambda name: wrong)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--kernel", "numpy", "--cases", "60", "--shrink-seconds", "5"]
    assert fuzz.main(arguments) == 1
    told = capsys.readouterr().out
    assert told.count("FAILED: ContractError") == fuzz.MOST_FAILURES
    lines = [shlex.split(line) for line in told.splitlines() if line.startswith("  again:")]
    by_seed = next(line for line in lines if "--only" in line)
    by_question = next(line for line in lines if "--question" in line)
    assert by_seed[1] == "OMP_NUM_THREADS=1"
    for line in (by_seed, by_question):
        assert fuzz.main(line[line.index("tests/fuzz.py") + 1 :]) == 1
        assert "1 cases" in capsys.readouterr().out
    small = read(by_question[by_question.index("--question") + 1])
    assert small.q.values.size * small.k.values.size <= 2
    monkeypatch.undo()
    assert fuzz.main(["--kernel", "numpy", "--question", written(small)]) == 0


def test_what_failed_once_only_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a process has kept, another has not."""
    from tests.fuzzing.running.failures import Failures

    Failures(Put("numpy", WANTED), 5.0).tell([(3, "ContractError: out is off")])
    assert "it does not fail when it is asked alone" in capsys.readouterr().out


def test_the_question_of_a_seed_is_found_without_a_kernel() -> None:
    """The same that its process put: of seeds whose first draw could not be judged too."""
    seen: list[tuple[tuple[int, ...], str]] = []

    class Notes(NumpyKernel):
        def forward(self, spec: Attention, q: Any, *args: Any) -> Partial:
            seen.append((q.shape, repr(spec.score)))
            return super().forward(spec, q, *args)

    redrawn = 0
    wanted = Wanted(shapes=1, backward_share=0.0, cache_share=0.0)
    for seed in range(40):
        seen.clear()
        redrawn += judge_seed(_numpy(Notes()), seed, MEMORY, wanted).redrawn.total()
        question = question_of(seed, wanted)
        assert isinstance(question, Question) and question.q.values.shape[3] == seen[0][0][3]
        MEMORY.clear()
        assert repr(ask(question, MEMORY, "cpu").call.spec.score) == seen[0][1]
    assert redrawn > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kernel", "none"], "--kernel"),
        (["--kernel", "auto"], "expected the name of one kernel system, got 'auto'"),
        (["--long", "cudas"], "expected all or one of cpu"),
        ([], "one of the arguments --kernel --long --left --merge --tell is required"),
        (["--kernel", "numpy", "--cases", "0"], "--cases: expected a whole number of at least 1, got '0'"),
        (["--kernel", "numpy", "--jobs", "two"], "--jobs: expected a whole number of at least 1, got 'two'"),
        (["--kernel", "numpy", "--backward-share", "2"], "--backward-share: expected a number from 0 to 1, got '2'"),
    ],
)
def test_bad_arguments(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fuzz.main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_troubles_are_failures() -> None:
    report = Report()
    report.add(4, Trouble("crashed: SIGSEGV"))
    report.add(5, Verdict("float32", "dense", ("full",), results=Counter(out=1)))
    assert report.failures == [(4, "crashed: SIGSEGV")] and (report.cases, report.answered) == (2, 1)

"""The fuzz on every kernel system that runs here, for a short time; and what it must see: mistakes, crashes, hangs."""

from __future__ import annotations

import json
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
from tests.fuzzing import device, systems
from tests.fuzzing.asking import ask, ask_linear
from tests.fuzzing.draw import Wanted, draw
from tests.fuzzing.memory import Memory
from tests.fuzzing.put import Put, judge_seed, question_of
from tests.fuzzing.question import Cache, Given, Layout, LinearQuestion, Question
from tests.fuzzing.report import Report
from tests.fuzzing.systems import System
from tests.fuzzing.trial import Verdict, judge
from tests.fuzzing.workers import Trouble
from tests.fuzzing.written import read, written
from tilewise import arrays, dispatch
from tilewise.contract import on_device
from tilewise.kernels.cuda.marshal import View, cannot_be_copied
from tilewise.kernels.cuda.rungs import RUNGS
from tilewise.kernels.cuda.simulator.kernel import CudaSimKernel, _walkable
from tilewise.kernels.numpy import NumpyKernel
from tilewise.linear.kernels.numpy import Kernel as LinearNumpyKernel
from tilewise.spec import Attention, Grads, Partial, Tile
from tilewise.validate import Call

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


# -- a question as a call ---------------------------------------------------------------------------------------------

_LAYOUTS = {
    "plain": Layout(), "at the end": Layout(at_page="end"), "at the beginning": Layout(at_page="begin"),
    "heads inside": Layout((0, 2, 1, 3), at_page="end"), "every other": Layout(step=(2, 1, 3, 1)),
    "reversed": Layout(reversed=(0, 2)), "padded": Layout(padding=16), "at an odd address": Layout(aside=1),
    "odd steps": Layout(padding=1, at_page="end"), "one head for all": Layout(expanded=(1,)),
    "read-only": Layout(writeable=False),
}  # fmt: skip


@pytest.mark.parametrize("name", _LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "bool", "int8"])
def test_arrays_lie_as_their_layouts_say(name: str, dtype: str) -> None:
    layout, memory = _LAYOUTS[name], Memory()
    values = np.random.default_rng(0).integers(-3, 4, (2, 3, 5, 8))
    values = values != 0 if dtype == "bool" else values if dtype == "int8" else values.astype(np.float64)
    values = np.broadcast_to(values[:, :1], values.shape) if layout.expanded else values
    x = memory.place(Given(values, dtype, layout))
    assert arrays.dtype_name(x) == dtype
    assert np.array_equal(arrays.widen(x, np.float64) if "float" in dtype else x, values)
    assert x.flags.writeable == (layout.writeable and not layout.expanded)
    assert memory.used[0] is x
    size, steps = x.itemsize, layout.step or (1,) * 4
    if layout.order:
        assert x.strides[1] < x.strides[2]
    if layout.reversed:
        assert [step < 0 for step in x.strides] == [True, False, True, False]
    if layout.padding:
        assert x.strides[2] == 8 * size + layout.padding
    if not layout.order and not layout.padding and not layout.reversed and not layout.expanded:
        assert x.strides[2] == 8 * size * steps[2]
    if not layout.at_page:
        assert x.ctypes.data % 16 == layout.aside or layout.reversed


def test_what_lies_between_and_beside_is_no_number() -> None:
    x = Memory().place(Given(np.zeros((3, 4)), "float32", Layout(step=(1, 2), at_page="begin")))
    around = np.lib.stride_tricks.as_strided(x, (3, 7), (x.strides[0], 4))
    assert np.isnan(around[:, 1::2]).all() and not np.isnan(around[:, ::2]).any()
    after = np.lib.stride_tricks.as_strided(x[2:, 3:], (1, 9), (x.strides[0], 4))
    assert np.isnan(after[:, 1:]).all()


@pytest.mark.parametrize("page", [None, 16])
def test_a_cache_is_scattered_and_spoilt_beyond_its_keys(page: int | None) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (Given(rng.standard_normal((3, heads, n, 4)), "float64") for heads, n in ((4, 2), (2, 40), (2, 40)))
    asked = ask(Question(q, k, v, 1.0, cache=Cache((40, 0, 17), page)), Memory(), "cpu")
    assert list(asked.cache.lengths) == [40, 0, 17]
    for b, n in enumerate((40, 0, 17)):
        found, _ = asked.cache.sequence(b)
        assert np.array_equal(found[0], k.values[b, :, :n])
    held = np.isfinite(asked.cache.k).all(axis=(1, 3)).sum()
    assert held == 57 and np.isnan(asked.cache.k).any()
    if page is not None:
        pages = asked.cache.table[0][asked.cache.table[0] >= 0]
        assert len(pages) == 3 and not np.array_equal(pages, pages[0] + np.arange(3))


def test_arrays_are_one_in_both_texts_and_wanted_where_told() -> None:
    one = Given(np.zeros((1, 1, 3, 3)), "float32")
    table = Given(np.zeros(3), "float32", wants_gradient=True)
    texts = {"mask": "load(a0, K) < 1", "score": "S + load(a0, Q) + load(a1, K)"}
    tables = table, replace(table, wants_gradient=False)
    spec = ask(Question(one, one, one, 1.0, **texts, arrays=tables), Memory(), "cpu").call.spec
    assert len(spec.wanted) == 1 and len({id(slot.array) for slot in spec.loaded}) == 2


def test_a_call_is_made_as_it_is_written() -> None:
    x = Given(np.zeros((1, 1, 3, 3)), "float32")
    question = Question(x, x, x, 1.0, "K <= Q", mask_as_written="prefix(2)")
    assert repr(ask(question, Memory(), "cpu").call.spec.mask) == "K < 2"


def test_a_constructor_that_is_not_its_definition_is_caught() -> None:
    rng = np.random.default_rng(0)
    q = Given(rng.standard_normal((1, 1, 4, 3)).astype(np.float32).astype(np.float64), "float32")
    right = Question(q, q, q, 1.0, "K <= Q + (NK - NQ)", mask_as_written="causal()")
    assert judge(_numpy(), right, MEMORY).failure is None
    wrong = replace(right, mask="K < Q + (NK - NQ)")
    assert "ContractError" in str(judge(_numpy(), wrong, MEMORY).failure)


@pytest.mark.parametrize("seed", range(6))
def test_questions_are_read_back_to_the_bit(seed: int) -> None:
    wanted = Wanted(half_share=0.5, linear_share=0.4, backward_share=0.7)
    question = draw(seed, wanted)
    text = written(question)
    again = read(text)
    assert written(again) == text and json.loads(text)["ask"] == (
        "linear" if isinstance(question, LinearQuestion) else "attention"
    )
    made = ask_linear if isinstance(question, LinearQuestion) else ask
    first, second = Memory(), Memory()
    made(question, first, "cpu"), made(again, second, "cpu")  # type: ignore[arg-type]
    assert [x.tobytes() for x in first.used] == [x.tobytes() for x in second.used]
    assert [x.strides for x in first.used] == [x.strides for x in second.used]


# -- on a device ------------------------------------------------------------------------------------------------------


def test_arrays_lie_on_a_device_as_they_do_here() -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 5, 8))
    for name in ("plain", "heads inside", "every other", "padded", "at the end"):
        x = MEMORY.place(Given(values, "bfloat16", _LAYOUTS[name]))
        there = device._placed(x, "cpu")
        assert there.stride() == tuple(step // 2 for step in x.strides)
        assert there.data_ptr() % 16 == x.ctypes.data % 16
        assert arrays.as_numpy(there).tobytes() == np.ascontiguousarray(x).tobytes()


def test_copies_have_the_numbers_of_a_row_side_by_side() -> None:
    """One head for all, between two addresses: a copy that keeps the order of its steps would turn it."""
    memory = np.zeros(100, np.uint8)
    x = np.lib.stride_tricks.as_strided(memory[1:25].view(np.float32), (2, 2, 1, 6), (0, 0, 0, 4))
    there = device._placed(x, "cpu")
    assert there.stride(-1) == 1 and np.array_equal(there.numpy(), x)
    assert device._placed(np.float64(3), "cpu").item() == 3
    assert _walkable(x).strides[-1] == x.itemsize


def test_no_tensor_has_steps_between_two_numbers() -> None:
    records = np.zeros(4, np.dtype({"names": ["x"], "formats": [np.float32], "offsets": [1], "itemsize": 9}))
    records["x"] = [1, 2, 3, 4]
    assert arrays.as_tensor(records["x"]).tolist() == [1, 2, 3, 4]


class _OnTensors(NumpyKernel):
    """The NumPy kernel as if it were a GPU's: tensors in, tensors out."""

    def forward(self, spec: Attention, q: Any, k: Any, v: Any, tile: Tile | None = None) -> Partial:
        assert arrays.is_torch(q) and all(arrays.is_torch(slot.array) for slot in spec.loaded)
        host = on_device(Call(spec, q, k, v, 4), "host", lambda x, device: arrays.as_numpy(x))
        done = super().forward(host.spec, host.q, host.k, host.v, tile)
        return Partial(*(arrays.as_tensor(np.asarray(x)) for x in (done.out, done.lse)))

    def backward(
        self, spec: Attention, q: Any, k: Any, v: Any, saved: Partial, d_out: Any, d_lse: Any = None,
        tile: Tile | None = None,
    ) -> Grads:  # fmt: skip
        assert all(x is None or arrays.is_torch(x) for x in (q, saved.out, saved.lse, d_out, d_lse))
        host = on_device(Call(spec, q, k, v, 4), "host", lambda x, device: arrays.as_numpy(x))
        given = (None if x is None else arrays.as_numpy(x) for x in (saved.out, saved.lse, d_out, d_lse))
        out, lse, d_out, d_lse = given
        return super().backward(host.spec, host.q, host.k, host.v, Partial(out, lse), d_out, d_lse, tile)


def test_calls_on_a_device_are_judged_as_others_are() -> None:
    # A device whose name is not "cpu": arrays become tensors.
    wanted = Wanted(backward_share=0.3, half_share=0.9, most_scores=60_000, shapes=1)
    system = _numpy(_OnTensors(), "cpu:0")
    verdicts = [judge_seed(system, seed, MEMORY, wanted) for seed in range(30)]
    assert [x.failure for x in verdicts if x.failure is not None] == []
    assert {"bfloat16", "float16"} <= {x.dtype for x in verdicts if x.results["out"]}
    assert {"decode", "dense", "packed"} <= {x.kind for x in verdicts}
    assert any(x.results["d_q"] for x in verdicts)


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
from tests.fuzzing import workers
from tests.fuzzing.draw import Wanted
from tests.fuzzing.put import Put
from tests.fuzzing.systems import System
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
    from tests.fuzzing.failures import Failures

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

"""The fuzz on every kernel system that runs here, for a short time; and what it must see: mistakes, crashes, hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import numpy as np
import pytest

from tests.conformance.wrong_kernels import BACKWARD_MISTAKES, SPEC_MISTAKES, STATE_MISTAKES, Wrong
from tests.expressions import Expressions
from tests.fuzzing import device
from tests.fuzzing.dice import Dice
from tests.fuzzing.draw import Wanted
from tests.fuzzing.judge import judge, make
from tests.fuzzing.memory import Memory, laid_out
from tests.fuzzing.menu import spoil_unread
from tests.fuzzing.rounding import error_ops
from tests.fuzzing.variants import MASKS, SCORES, Variants, drawn_options
from tests.strategies import BOOL_ARRAYS, FLOAT_ARRAYS, INT_ARRAYS, dense_env
from tilewise import arrays, dispatch
from tilewise.contract import on_device
from tilewise.expr import Loaded
from tilewise.kernels.cuda.marshal import View, cannot_be_copied
from tilewise.kernels.cuda.ops import variant
from tilewise.kernels.cuda.rungs import RUNGS
from tilewise.kernels.cuda.simulator.kernel import _walkable
from tilewise.kernels.cuda.source import assembled
from tilewise.kernels.numpy import NumpyKernel
from tilewise.kernels.numpy.ops import numpy_ops
from tilewise.spec import Attention, Grads, Partial, Tile
from tilewise.validate import Call
from tilewise.variants import VARIANTS
from tilewise.walking import evaluate, nodes

ROOT = Path(__file__).parent.parent
MEMORY = Memory()
WANTED = Wanted()


def _fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/fuzz.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("kernel", ["cpu", "numpy", "triton", *dispatch.simulated_rungs()])
def test_random_calls(kernel: str) -> None:
    reason = dispatch.kernel(kernel).unavailable()
    if reason is not None:
        pytest.skip(f"{kernel} cannot run on this machine: {reason}")
    cases = "300" if kernel in ("cpu", "numpy") else "8"  # each of the others' is compiled first, or interpreted
    pool = ["--pool", "8"] if kernel.endswith("forward_sm90") else []  # that takes a second or more
    done = _fuzz("--kernel", kernel, "--cases", cases, *pool)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases} cases" in done.stdout
    assert "0 failures" in done.stdout
    assert done.stderr == ""  # quiet where no one looks


def test_a_case_is_its_seed() -> None:
    """The same seed gives the same call, whatever was drawn before it."""
    kernel = NumpyKernel()
    alone = judge(kernel, 7, Memory(), WANTED)
    for seed in (5, 6):
        judge(kernel, seed, MEMORY, WANTED)
    assert judge(kernel, 7, MEMORY, WANTED) == alone


def test_calls_for_tensor_cores_are_such() -> None:
    """Hardly one is refused: by types and sizes, or by how arrays lie."""
    rung, reasons = RUNGS["forward_sm90"], Counter[str | None]()
    for seed in range(40):
        call = make(seed, MEMORY, Wanted(backward_share=0.0, half_share=1.0))[0].drawn.call
        views = {name: View.of_numpy(x) for name, x in zip("qkv", (call.q, call.k, call.v), strict=True)}
        reasons[rung.unsupported(call.shape) or cannot_be_copied(views)] += 1
    assert reasons[None] >= 38
    assert reasons.keys() <= {None, "there is nothing to load"}


def test_calls_of_a_pool_share_kernels() -> None:
    """Their sizes differ, not what is compiled."""
    rung = RUNGS["forward_sm90"]
    texts, sizes = set(), set()
    for seed in range(40):
        problem, redrawn = make(seed, MEMORY, Wanted(backward_share=0.0, half_share=1.0, pool=4))
        call, tile = problem.drawn.call, problem.drawn.tile
        sizes.add((call.shape.n_q, call.shape.n_k))
        if not redrawn:
            fitting = rung.fitting(tile or rung.default_tile(call.spec, call.shape), call.shape)
            texts.add(assembled(rung, call.spec, call.shape, fitting)[0].text)
    assert len(texts) <= 6
    assert len(sizes) > 20


def test_what_no_query_reads_is_spoilt() -> None:
    k, v = np.zeros((1, 1, 9, 8)), np.zeros((1, 1, 9, 8))
    spoil_unread((np.array([0, 4, 4, 6]), np.array([0, 3, 7, 9])), k, v)
    assert np.isnan(k).all(axis=(0, 1, 3)).tolist() == [False] * 3 + [True] * 4 + [False] * 2
    assert np.array_equal(np.isnan(k), np.isnan(v))


def test_arrays_lie_on_a_device_as_they_do_here() -> None:
    dice = Dice(1)
    for layout in ("plain", "heads inside", "sliced", "padded", "one head for all"):
        dice.weighted = lambda shares, layout=layout: layout  # type: ignore[method-assign]
        x = laid_out(dice.normal((2, 3, 5, 8)), "bfloat16", MEMORY, dice, aligned=True)
        there = device._placed(x, "cpu")
        assert there.stride() == tuple(step // 2 for step in x.strides)
        assert there.data_ptr() % 16 == x.ctypes.data % 16
        assert np.array_equal(arrays.as_numpy(there), x)


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
    wanted = Wanted(backward_share=0.3, half_share=0.9, device="cpu:0")
    verdicts = [judge(_OnTensors(), seed, MEMORY, wanted) for seed in range(30)]
    assert [x.failure for x in verdicts if x.failure is not None] == []
    assert {"bfloat16", "float16"} <= {x.dtype for x in verdicts if x.results["out"]}
    assert any(x.results["d_q"] for x in verdicts)


def test_every_named_variant_is_drawn() -> None:
    assert VARIANTS.keys() - MASKS.keys() - SCORES.keys() == set()


def test_masks_and_scores_are_drawn_that_share_values() -> None:
    """A bound of the mask starts a float of the score: what a generator keeps for one, the other finds."""
    sizes = dict.fromkeys(("B", "H", "HK", "Q", "K", "QP", "KP"), 40)
    drawn = [drawn_options(v) for v in (Variants(Dice(seed), MEMORY, sizes, False, 40) for seed in range(300))]
    texts = [variant(x.get("mask"), x.get("score")).text for x in drawn]
    bounds = [set(re.findall(r"[,{] (row\.r\d+ - first_key)", text)) for text in texts]
    shared = [text for text, found in zip(texts, bounds, strict=True) if any(f"float({x})" in text for x in found)]
    assert len(shared) >= 5


# -- the bound of rounding --------------------------------------------------------------------------------------------


def test_expressions_are_off_by_no_more_than_their_bound() -> None:
    """Expressions of every operation in float32 and in float64: the bound holds, and mostly says something."""
    pools = {"int": INT_ARRAYS, "float": FLOAT_ARRAYS, "bool": BOOL_ARRAYS}
    env = {name: np.float32(x) if name == "S" else x for name, x in dense_env(dtype=np.float32).items()}
    exact = {name: (np.float64(x) if name == "S" else x, 0.0) for name, x in env.items()}
    known, seen = 0, Counter[str]()
    for seed in range(400):
        dice = Dice(seed)
        drawn = Expressions(dice.below, lambda kind, dice=dice: Loaded(dice.one_of(pools[kind])))
        expr = drawn.number(dice.between(1, 4), scores=True)
        with np.errstate(all="ignore"):
            found = evaluate(expr, env, numpy_ops(np.float32))
            value, error = evaluate(expr, exact, error_ops("float32"))
            off = np.where(found == value, 0, np.abs(found - value))  # infinite ones are equal or not
        assert np.all((off <= error) | (error == np.inf)), f"seed {seed}: {expr!r}"
        known += bool(np.all(error <= 1e-3 * (1 + np.abs(value))))
        seen.update(node.op for node in nodes(expr))
    assert known > 200
    assert {"exp", "log", "tanh", "div", "mod", "floordiv", "where", "lt", "not", "load"} <= seen.keys()


# -- mistakes ---------------------------------------------------------------------------------------------------------


def _caught(kernel: NumpyKernel, backward_share: float, seeds: range = range(250)) -> str | None:
    """What the first failing seed of a few shows."""
    for seed in seeds:
        failure = judge(kernel, seed, MEMORY, Wanted(backward_share)).failure
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
    from tests import fuzz

    told = fuzz.Report(results=Counter({name: results}), lucky=Counter({name: lucky})).too_lucky
    assert told == (f"beyond the contract's limit more often than by luck: {name}" if too_often else None)


@pytest.mark.parametrize(
    ("queries", "cases", "which", "fine"),
    [(None, 100, {"out", "out of dense"}, set()), (1, 400, {"out of decode"}, {"out of dense", "out of packed"})],
)
def test_what_happens_everywhere_is_no_luck(
    queries: int | None,
    cases: int,
    which: set[str],
    fine: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everywhere, or with one query alone, which is a small part of all calls but of decoding."""
    from tests import fuzz

    monkeypatch.setattr(fuzz.dispatch, "kernel", lambda name: _RoundsTooMuch(queries))
    assert fuzz.main(["--kernel", "numpy", "--cases", str(cases), "--backward-share", "0"]) == 1
    told = capsys.readouterr().out
    assert "0 failures" in told
    (names,) = re.findall("FAILED: beyond the contract's limit more often than by luck: (.*)", told)
    assert which <= {*names.split(", ")} and fine.isdisjoint(names.split(", "))


# -- kernels that take the process with them --------------------------------------------------------------------------

_RUN = """
import ctypes, sys, time
from tests import fuzz
from tests.fuzzing.draw import Wanted
from tilewise.kernels.numpy import NumpyKernel

fuzz.PATIENCE = 2.0

class Bad(NumpyKernel):
    def forward(self, spec, q, k, v, *args):
        {mistake}
        return super().forward(spec, q, k, v, *args)

report = fuzz.run(Bad(), range({seeds}), Wanted(backward_share=0.0), jobs=2)
print(report.cases, len(report.failures), report.failures[0][1])
"""


def _run_bad(mistake: str, seeds: int) -> tuple[int, int, str]:
    """How many cases were judged, how many failed besides, and how the first of those did."""
    command = [sys.executable, "-c", _RUN.format(mistake=mistake, seeds=seeds)]
    done = subprocess.run(command, cwd=ROOT, stdout=PIPE, stderr=DEVNULL, text=True, timeout=120, check=True)
    cases, failures, first = done.stdout.split(maxsplit=2)
    return int(cases), int(failures), first


@pytest.mark.parametrize(
    "beyond", ["k.ctypes.data + k.nbytes if k.flags.c_contiguous else k.ctypes.data", "q.ctypes.data - 1"]
)
def test_reading_beyond_an_array_is_caught(beyond: str) -> None:
    """At its end or before its beginning: the process ends there, the seed is told, and the next one goes on."""
    cases, failures, first = _run_bad(f"ctypes.string_at({beyond}, 1)", seeds=20)
    assert "crashed: SIG" in first  # SEGV, or BUS on some systems
    assert failures > 1
    assert cases + failures == 20


def test_a_hang_is_caught() -> None:
    cases, failures, first = _run_bad("time.sleep(1000 if q.shape[2] == 1 else 0)", seeds=8)
    assert "no answer within 2 s" in first
    assert failures >= 1
    assert cases + failures == 8


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_failure_tells_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests import fuzz

    wrong = Wrong(patch=STATE_MISTAKES["missing lse term"])
    monkeypatch.setattr(fuzz.dispatch, "kernel", lambda name: wrong)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert fuzz.main(["--kernel", "numpy", "--cases", "60"]) == 1
    told = capsys.readouterr().out
    assert told.count("FAILED: ContractError") == fuzz.MOST_FAILURES
    replay = next(line for line in told.splitlines() if "again:" in line).split()
    assert replay[1] == "OMP_NUM_THREADS=1"
    assert fuzz.main(replay[4:]) == 1
    assert "1 cases" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kernel", "none"], "--kernel"),
        (["--kernel", "numpy", "--cases", "0"], "--cases: expected a whole number of at least 1, got '0'"),
        (["--kernel", "numpy", "--jobs", "two"], "--jobs: expected a whole number of at least 1, got 'two'"),
        (["--kernel", "numpy", "--backward-share", "2"], "--backward-share: expected a number from 0 to 1, got '2'"),
    ],
)
def test_bad_arguments(arguments: list[str], told: str) -> None:
    done = _fuzz(*arguments)
    assert done.returncode == 2
    assert told in done.stderr

"""`tilewise judge`: each kind of fault shows in its own cell, and the line that is printed shows it again."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.test_cli import _run
from tilewise.referee import contender, results, session
from tilewise.referee.court import Options
from tilewise.referee.features import FEATURES, parse
from tilewise.referee.program import program
from tilewise.referee.trial import Plan, Trial
from tilewise.referee.truth import truth

pytest.importorskip("torch")
FAKES = "tests.fake_attention"
ENDS = [("leaving", "code 7"), ("faulting", "SIGSEGV"), ("hanging", "timed out"), ("losing", "CUDA error")]
QUICK = {"--calls": "1", "--dtype": "float32", "--threads": "1"}


def _judge(capsys: pytest.CaptureFixture[str], fake: str, **more: str) -> tuple[int, str]:
    options = {**QUICK, **{f"--{name}": value for name, value in more.items()}}
    code, out, err = _run(capsys, "judge", f"{FAKES}:{fake}", *(x for pair in options.items() for x in pair))
    assert err == ""
    return code, out


def _cell(out: str, feature: str, what: str) -> str:
    found = re.search(rf"^{re.escape(feature)} +{what} +(.*)$", out, re.MULTILINE)
    assert found is not None, out
    return found[1]


def _again(capsys: pytest.CaptureFixture[str], out: str) -> str:
    """What the reproducing line prints."""
    line = re.search(r"^  tilewise (judge .*)$", out, re.MULTILINE)
    assert line is not None, out
    code, told, err = _run(capsys, *line[1].split())
    assert (code, err) == (1, "")
    return told


def test_a_right_one_is_right(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "right.json"
    code, out = _judge(capsys, "right", json=str(place))
    assert code == 0, out
    found = json.loads(place.read_text())
    counts = results.total(found)
    assert counts["right"] > 50
    assert not any(counts[name] for name in ("wrong", "inexact", "crashed", "not deterministic"))
    assert found["schema"] == results.SCHEMA and found["faults"] == []
    assert _cell(out, "softcap", "forward") == "not asked"
    assert _cell(out, "causal, top left", "forward") == "not asked", "it says bottom right"


def test_nan_in_rows_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _judge(capsys, "undefined", features="mask,mask-rows-without-keys")
    assert code == 1
    assert _cell(out, "mask", "forward") == "1 right"
    assert _cell(out, "mask, rows without keys", "forward") == "1 wrong"
    assert "rows without keys are NaN, expected 0" in out
    assert "rows without keys are NaN, expected 0" in _again(capsys, out)


def test_another_alignment_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _judge(capsys, "top_left", features="causal,causal-bottom-right", calls="2")
    assert code == 1
    assert _cell(out, "causal", "forward") == "2 right"
    assert _cell(out, "causal, bottom right", "forward") == "2 wrong"
    assert _again(capsys, out).splitlines()[1].startswith("wrong: out: off by")


def test_the_line_says_how_a_function_aligns(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = _judge(capsys, "right", features="causal-top-left", causal="top-left", **{"pass": "forward"})
    assert _cell(out, "causal, top left", "forward") == "1 wrong"
    assert " --causal top-left --only causal-top-left/" in out
    assert _again(capsys, out).splitlines()[1].startswith("wrong: out: off by")


@pytest.mark.parametrize(("fake", "told"), ENDS)
def test_a_process_that_ends_is_a_result(capsys: pytest.CaptureFixture[str], fake: str, told: str) -> None:
    code, out = _judge(capsys, fake, features="plain,causal,scale", timeout="3", **{"pass": "forward"})
    assert code == 1
    assert _cell(out, "plain", "forward") == "1 right"
    assert _cell(out, "causal", "forward") == "1 crashed"
    assert _cell(out, "scale", "forward") == "1 right", "a new process went on"
    assert told in out


def test_other_bits_the_second_time(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = _judge(capsys, "changing", features="plain", **{"pass": "forward"})
    assert _cell(out, "plain", "forward") == "1 right, 1 not deterministic"
    assert "other bits the second time: out" in _again(capsys, out)


def test_a_wrong_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _judge(capsys, "careless", features="plain")
    assert code == 1
    assert _cell(out, "plain", "forward") == "1 right"
    assert _cell(out, "plain", "gradients") == "1 wrong"
    assert "wrong: d_k: off by" in _again(capsys, out)


def test_a_refusal_is_no_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "refusing.json"
    code, out = _judge(
        capsys, "refusing", features="odd-head-dimensions,causal", json=str(place), **{"pass": "forward"}
    )
    assert code == 0
    assert _cell(out, "odd head dimensions", "forward") == "1 refused"
    assert re.search(r"\nrefused:\n  ValueError: head dimension \d+: .* of 8\n    in odd head dimensions\n", out)
    (record,) = [r for r in json.loads(place.read_text())["records"] if r["refused"]]
    assert "expected a multiple of 8" in record["reasons"][0]


def test_writing_to_an_input_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _judge(capsys, "writing", features="plain", **{"pass": "forward"})
    assert code == 1
    assert "wrong: q: the call wrote to this input" in out


def test_writing_to_a_mask_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _judge(capsys, "opening", features="mask", calls="4", **{"pass": "forward"})
    assert code == 1
    assert "wrong: mask: the call wrote to this input" in out


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        ("listing", "returned list"),
        ("silent", "returned NoneType"),
        ("beside", "returned (Tensor of float32, NoneType, int)"),
        ("counting", "returned Tensor of int64"),
    ],
)
def test_what_is_no_result_is_wrong(capsys: pytest.CaptureFixture[str], fake: str, told: str) -> None:
    """No error came, so it is no refusal."""
    code, out = _judge(capsys, fake, features="plain")
    assert code == 1
    assert _cell(out, "plain", "forward") == _cell(out, "plain", "gradients") == "1 wrong"
    assert f"wrong: out: {told}, expected out or (out, lse), each of them a torch.Tensor of floats" in out
    assert told in _again(capsys, out)


@pytest.mark.parametrize("name", ["numpy", "cpu", "sdpa"])
def test_ours_are_right_and_sdpa_runs(name: str) -> None:
    slow = {"many-heads", "long-rows"} if name == "numpy" else set()  # which takes seconds for each
    asked = {slug for slug, f in FEATURES.items() if not f.large and set(f.dtypes) & {"float32", "bfloat16"}} - slow
    with Trial(name, Options(threads=1), Plan(1, features=tuple(asked), dtypes=("float32", "bfloat16"))) as trial:
        if trial.introduction.missing is not None:
            pytest.skip(trial.introduction.missing)
        heard, faults = trial.run()
    assert {x.feature for x in heard} == asked
    if name != "sdpa":
        assert {x.finding.verdict for x in heard} <= {"right", "refused"} and not faults
        assert {x.feature for x in heard if x.finding.verdict == "refused"} <= {"columns-first"}


def test_several_contenders_have_a_file_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ("sdpa", f"{FAKES}:right")
    options = (
        "--calls",
        "1",
        "--features",
        "plain,causal",
        "--jobs",
        "2",
        "--split",
        "2",
        "--json",
        str(tmp_path / "judge"),
    )
    assert _run(capsys, "judge", *names, *options)[0] == 0
    assert sorted(x.name for x in (tmp_path / "judge").iterdir()) == ["sdpa.json", "tests.fake_attention-right.json"]
    found = json.loads((tmp_path / "judge" / "sdpa.json").read_text())
    asked = [(r["feature"], r["pass"]) for r in found["records"]]
    assert asked == [(f, p) for f in ("plain", "causal") for p in ("forward", "gradients")], "as one process tells it"
    assert _run(capsys, "judge", *names, "--json", str(tmp_path / "one.json"))[::2] == (
        2, f"tilewise: --json: expected a folder for several contenders, got '{tmp_path / 'one.json'}'\n"
    )  # fmt: skip


def test_an_idle_process_says_nothing_of_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh, session._begin, (list(sys.path),)) as pool:
        worker = pool.submit(os.getpid).result()
        time.sleep(0.2)  # until it waits for the next
        os.kill(worker, signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_a_budget_ends_a_trial(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "cut.json"
    _, out = _judge(capsys, "right", features="plain,causal", budget="0.001", json=str(place))
    found = json.loads(place.read_text())
    assert found["complete"] is False and results.total(found)["right"] <= 1
    assert "its --budget was spent" in out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "NAME: expected a contender, got none"),
        (["spda"], "NAME: expected one of cpu, numpy, .*sdpa/flash.*MODULE:FUNCTION of your own, got 'spda'"),
        (["sdpa", "--only", "mask/float32"], "--only: expected the id of a call, FEATURE/DTYPE/PASS/SIZE/SEED"),
        (["sdpa", "--features", "masks"], "--features: there is no 'masks'; expected some of plain, "),
        (["sdpa", "--calls", "0"], "--calls: expected a whole number"),
        (["sdpa", "--json", "/nowhere/x.json"], "--json: there is no folder"),
        (["tests.fake_attention:nobody", "--only", "plain/float32/forward/8/0"], "cannot be imported: module"),
    ],
)
def test_mistakes_are_told(capsys: pytest.CaptureFixture[str], argv: list[str], told: str) -> None:
    code, _, err = _run(capsys, "judge", *argv)
    assert code == 2
    assert re.search(told, err), err


def test_the_list_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "judge", "--list")
    assert code == 0
    assert set(contender.known()) <= set(re.findall(r"^  [✓✗] (\S+)", out, re.MULTILINE))
    assert re.search(r"✗ xformers +.*pip install xformers", out)


@pytest.mark.parametrize(
    "call", ["mask/bfloat16/gradients/2/0", "bias-with-inf/float32/forward/3/0", "plain/float64/gradients/2/1"]
)
def test_a_call_as_a_program_shows_the_same_number(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    made, what = parse(call), "d_k" if "gradients" in call else "out"
    place = (0, 0, 0, 1)
    text = program(made, contender.find("sdpa/math").code(made), "cpu", what, place)
    assert text is not None and "tilewise" not in text
    exec(text, {})
    shown, exact = float(capsys.readouterr().out), truth(call).expected[what]
    assert shown == pytest.approx(float(exact.exact[place]), abs=exact.limit)
    assert f"# float64 gives {float(exact.exact[place]):.6g}" in text


def test_a_large_call_is_no_program() -> None:
    for call in ("plain/float32/forward/200/0", "slices/float32/forward/2/0"):
        assert program(parse(call), ["out = q"], "cpu", "out", (0, 0, 0, 0)) is None
    assert program(parse("plain/float32/forward/2/0"), [], "cpu", "out", (0, 0, 0, 0)) is None


def test_a_function_of_numpy_arrays_needs_no_pytorch(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def attention(q, k, v, *, scale):\n"
        "    s = scale * (q.astype(float) @ k.astype(float).swapaxes(-1, -2))\n"
        "    p = np.exp(s - s.max(-1, keepdims=True))\n"
        "    return (p / p.sum(-1, keepdims=True) @ v).astype(q.dtype)\n"
        "def writing(q, k, v, *, scale):\n"
        "    out = attention(q, k, v, scale=scale)\n"
        "    q *= 2\n"
        "    return out\n"
    )
    script = """
import sys
sys.modules["torch"] = None
from tilewise.referee import truth, verdict
from tilewise.referee.court import Court, Options
court = Court("mine:attention", Options())
assert "gradients" not in court.introduce().says.arguments
for call in ("plain/float32/forward/8/0", "slices/float64/forward/8/0"):
    assert verdict.judge(truth.truth(call), court.hear(call).answer).verdict == verdict.RIGHT
assert Court("mine:writing", Options()).hear("plain/float32/forward/8/0").changed == "q"
assert Court("numpy", Options()).hear("bias-with-inf/bfloat16/gradients/8/0").differs == ()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")

"""The examples run, and check themselves."""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise import dispatch
from tilewise.spec import Attention, Shape

ROOT = Path(__file__).parent.parent


def test_flash_attention() -> None:
    command = [sys.executable, "-W", "ignore", "examples/flash_attention.py", "--lengths", "64"]
    done = subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 5
    assert "✗" not in done.stdout
    assert "Sequence Length: 64\nStandard Attention: " in done.stdout


@pytest.mark.parametrize(("reason", "chosen"), [(None, "tilelang"), ("it needs tilelang", "auto")])
def test_a_gpu_without_tilelang(
    reason: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever `auto` takes stands in for it."""
    asked: list[Any] = []

    def told(name: str, spec: Attention, shape: Shape) -> str | None:
        asked.append((name, shape.device, shape.dtype))
        return reason

    monkeypatch.setattr(dispatch, "reason", told)
    where = runpy.run_path(str(ROOT / "examples" / "flash_attention.py"))["where_to_compute"]
    gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "a GPU"))
    monkeypatch.setitem(where.__globals__, "imported_torch", lambda: gpu)
    assert where() == ("cuda:0", chosen)
    assert asked == [("tilelang", "cuda:0", "bfloat16")]
    assert (f"Without TileLang's kernels: {reason}" in capsys.readouterr().out) == (reason is not None)


@pytest.mark.parametrize("lengths", ["abc", "", "0", "-5", "512,", "1.5", "9" * 30])
@pytest.mark.parametrize("example", ["flash_attention", "linear_attention"])
def test_lengths_that_are_none(example: str, lengths: str) -> None:
    parse = runpy.run_path(str(ROOT / "examples" / f"{example}.py"))["whole_numbers"]
    with pytest.raises(argparse.ArgumentTypeError, match="expected whole numbers such as 512,1024, got"):
        parse(lengths)
    assert parse("64,128") == [64, 128]


def test_an_option_of_an_example_that_is_wrong_is_told_without_a_traceback() -> None:
    command = [sys.executable, "examples/flash_attention.py", "--lengths", "abc"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("argument --lengths: expected whole numbers such as 512,1024, got 'abc'\n")

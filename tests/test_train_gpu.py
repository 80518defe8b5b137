"""The script that trains twice: its losses, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests import train_gpu  # noqa: E402
from tilewise.bench.plot_parts import DRAWN_FROM, digest  # noqa: E402


def test_both_learn_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "made" / "training.json"
    assert train_gpu.main([str(results), "--device", "cpu", "--kernel", "cpu", "--steps", "12"]) == 0
    told = json.loads(results.read_text())
    assert list(told["losses"]) == ["tilewise cpu, bfloat16", "PyTorch math, float32"]
    one, other = told["losses"].values()
    assert len(one) == len(other) == 12
    assert one[-1] < one[0] and one != other
    assert told["apart"] <= train_gpu.MOST_APART
    assert "apart, at most 2% may be" in capsys.readouterr().out
    picture = tmp_path / "training.png"
    assert train_gpu.main([str(results), "--plot", str(picture), "--draw"]) == 0
    assert pytest.importorskip("PIL.Image").open(picture).text[DRAWN_FROM] == digest(told)


def test_wrong_attention_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_gpu, "by_tilewise", lambda kernel: lambda *heads: 8 * train_gpu.by_math(*heads))
    assert train_gpu.main([str(tmp_path / "x.json"), "--device", "cpu", "--steps", "40"]) == 1

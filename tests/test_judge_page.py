"""What the referee said, on the page of results: every mark, and nothing that a file could smuggle in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fake_results import made_up
from tilewise import cli
from tilewise.bench.page import trials
from tilewise.referee import results
from tilewise.referee.verdict import VERDICTS


def trial(name: str, **more: Any) -> dict[str, Any]:
    """Of two features: wrong gradients of the one, the other refused."""

    def record(feature: str, what: str, **counts: int) -> dict[str, Any]:
        return {
            "feature": feature,
            "pass": what,
            **dict.fromkeys((*VERDICTS, "not deterministic"), 0),
            **counts,
            "reasons": [],
        }

    records = [
        record("plain", "forward", right=3, **{"not deterministic": 1}), record("plain", "gradients", right=2, wrong=1),
        record("causal", "forward", refused=3), record("causal", "gradients", **{"not asked": 3}),
    ]  # fmt: skip
    fault = {
        "id": "plain/float32/gradients/2/0", "feature": "plain", "pass": "gradients", "dtype": "float32",
        "call": "q (1)", "verdict": "wrong", "what": "d_k", "error": 1.0, "limit": 1e-6, "reason": "off by 1",
        "not deterministic": [],
    }  # fmt: skip
    return {
        "schema": results.SCHEMA, "contender": name, "about": "a function", "ours": False,
        "notes": [], "complete": True, "device": "cpu", "versions": {"torch": "9.9"},
        "options": {"calls": 3, "seed": 0, "large": False},
        "machine": {"cpu": "abacus"}, "records": records, "faults": [fault], **more,
    }  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "sdpa.json").write_text(json.dumps(trial("sdpa")))
    (tmp_path / "judge" / "cpu.json").write_text(json.dumps(trial("cpu", ours=True)))
    return tmp_path


def test_the_page_has_a_table_and_the_faults(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stored / "forward.json").write_text(json.dumps(made_up("forward")))
    page = tmp_path / "page.html"
    assert cli.main(["bench", "--report", str(stored), "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert "left out" not in out and "2 trials" in out
    text = page.read_text()
    assert '<a href="#referee">' in text
    assert text.count("✓* ✗") == 2
    assert "wrong: d_k: off by 1" in text and "plain/float32/gradients/2/0" in text
    assert text.index(">cpu<") < text.index(">sdpa<"), "ours first"


def test_trials_alone_make_a_page(stored: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["bench", "--report", str(stored / "judge"), "-o", str(page)]) == 0
    assert "2 trials of tilewise judge" in page.read_text()
    assert cli.main(["bench", "--report", str(stored / "judge" / "sdpa.json"), "-o", str(page)]) == 0
    assert "1 trial of tilewise judge" in page.read_text()


def test_texts_of_a_trial_are_not_trusted(tmp_path: Path) -> None:
    evil = "</td><script>alert(1)</script>"
    made = trial(evil, about=evil, versions={evil: evil}, machine={"cpu": evil})
    made["faults"][0] |= {"reason": evil, "call": evil, "id": evil}
    (tmp_path / "evil.json").write_text(json.dumps(made))
    page = tmp_path / "page.html"
    assert cli.main(["bench", "--report", str(tmp_path / "evil.json"), "-o", str(page)]) == 0
    assert "<script>alert" not in page.read_text()


def test_trials_of_one_contender_are_one(stored: Path) -> None:
    more = trial("sdpa")
    more["records"] = [{**more["records"][0], "feature": "large arrays"}]
    (stored / "large").mkdir()
    (stored / "large" / "sdpa.json").write_text(json.dumps({**more, "faults": []}))
    found = trials.found([stored])
    assert [x["contender"] for x in found] == ["cpu", "sdpa"]
    assert trials.matrix(found)[1][-1] == ("large arrays", "", "✓*")


def test_a_cell_shows_the_worst_that_was_seen() -> None:
    head, rows = trials.matrix([trial("sdpa")])
    assert head == ("", "sdpa")
    assert rows == [("plain", "✓* ✗"), ("causal", "–")]

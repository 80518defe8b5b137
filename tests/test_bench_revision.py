"""Which sources were measured, as results tell it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tilewise.bench import revision

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working tree with one commit."""
    made = tmp_path / "tilewise"
    made.mkdir()
    (made / "api.py").write_text("1\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    monkeypatch.setattr(revision, "_PACKAGE", made)
    return made


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_commit_is_told_and_what_differs_from_it(package: Path) -> None:
    commit = _git(package, "rev-parse", "HEAD")
    (package.parent / "results.json").write_text("{}")  # of no account: it is what a run writes
    assert revision.revision() == {"commit": commit, "dirty": False}
    (package / "new.py").write_text("2\n")
    assert revision.revision() == {"commit": commit, "dirty": True}


def test_what_is_installed_inside_another_tree_has_no_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = package / "site-packages" / "tilewise"
    inside.mkdir(parents=True)
    monkeypatch.setattr(revision, "_PACKAGE", inside)
    assert revision.revision() == {"commit": None, "dirty": None}


def test_without_git_nothing_is_known(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert revision.revision() == {"commit": None, "dirty": None}

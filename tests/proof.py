"""The record of a GPU proof: what the logs say, in numbers, with the package and the machine that they are of.

`tests/prove_gpu.py` writes it as proof.json, proof by proof: a run may be short of time, and another one adds to it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tilewise.bench import machine

SCHEMA = 2
ROOT = Path(__file__).resolve().parent.parent
_SOURCES = (".py", ".cu", ".h", ".cpp", ".c")
_PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "numpy", "pytest")


# -- logs -------------------------------------------------------------------------------------------------------------

_ENDING = re.compile(r"^=*\s*(\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.]+s")  # pytest's last line, -q or not
_TESTS = ("passed", "failed", "skipped", "errors")
_SUMMARY = re.compile(r"^=+ (\w+ SUMMARY: .*)$", re.MULTILINE)
_CASES = re.compile(r"^([\d,]+) cases in .*, (\d+) failures$", re.MULTILINE)
_LARGEST = re.compile(r"largest error: ([\d.]+) of its limit \(seed (\d+)\)")


def counts(log: str) -> dict[str, Any]:
    """What a log tells of tests, of a sanitizer and of random calls; nothing of what it has none of."""
    found = {"tests": _tests(log), "sanitizer": list(dict.fromkeys(_SUMMARY.findall(log))), "fuzz": _fuzz(log)}
    return {name: x for name, x in found.items() if x}


def _tests(log: str) -> dict[str, int] | None:
    endings = [match for line in log.splitlines() if (match := _ENDING.match(line))]
    if not endings:
        return None
    told = (part.split() for part in endings[-1][1].split(", "))
    by_word = {"errors" if word == "error" else word: int(number) for number, word in told}
    return {word: by_word.get(word, 0) for word in _TESTS}


def _fuzz(log: str) -> dict[str, Any] | None:
    found = _CASES.search(log)
    if found is None:
        return None
    largest, failed = _LARGEST.search(log), re.findall(r"^  again: .*--only (\d+)", log, re.MULTILINE)
    return {
        "cases": int(found[1].replace(",", "")),
        "failures": int(found[2]),
        "failed_seeds": [int(seed) for seed in failed],
        "largest_error": None if largest is None else {"of_its_limit": float(largest[1]), "seed": int(largest[2])},
    }


# -- the record -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    name: str
    command: Sequence[str]
    how: str  # "held", "failed (1)", "did not end"
    seconds: float
    log: str

    @property
    def held(self) -> bool:
        return self.how == "held"

    def described(self) -> dict[str, Any]:
        command, found = list(self.command), counts(self.log)
        if "fuzz" in found and "--seed" in command:
            found["fuzz"] = {"first_seed": int(command[command.index("--seed") + 1]), **found["fuzz"]}
        told = shlex.join("python" if word == sys.executable else word for word in command)
        return {"command": told, "outcome": self.how, "seconds": round(self.seconds), **found}


def about() -> dict[str, Any]:
    """What a proof is of: a package, by all that it consists of, on a machine."""
    return {
        "schema": SCHEMA,
        "sources": digest(ROOT / "tilewise"),
        "machine": {**_gpu(), "cpu": machine.cpu_model(), "cores": machine.cores(), **_versions()},
    }


def digest(package: Path) -> str:
    """Of its sources: their paths and what is in them. What is compiled of them is not among them."""
    found = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in _SOURCES):
        content = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def commit(named: str | None = None) -> dict[str, Any]:
    """Which commit it is. named: by whom there is no repository to ask for, nor to tell whether it was changed."""
    told = named or _git("rev-parse", "HEAD")
    return {"commit": told, "dirty": bool(_git("status", "--porcelain")) if told and not named else None}


def _git(*command: str) -> str | None:
    try:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu() -> dict[str, str | None]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {"gpu": None, "driver": None}
    name, driver = map(str.strip, done.stdout.splitlines()[0].split(","))
    return {"gpu": name, "driver": driver}


def _versions() -> dict[str, str]:
    installed = {x.metadata["Name"].lower(): x.version for x in metadata.distributions()}
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    return {
        "os": system, "python": platform.python_version(), **{x: installed[x] for x in _PACKAGES if x in installed},
    }  # fmt: skip


class Record:
    """proof.json in a folder; what is there of the same sources and the same machine stays."""

    def __init__(self, folder: Path, about: dict[str, Any], commit: dict[str, Any], every: Iterable[str]) -> None:
        self.path, self._about, self._commit, self._every = folder / "proof.json", about, commit, tuple(every)
        before = self._before()
        is_same = all(before.get(name) == x for name, x in about.items())
        self.other = None if is_same or not before else f"{self.path} is of {_name(before)}, and begins anew"
        self._proofs: dict[str, Any] = before["proofs"] if is_same else {}

    def _before(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and isinstance(found.get("proofs"), dict) else {}

    def add(self, outcome: Outcome) -> None:
        """In the place of what the same proof said before."""
        self._proofs[outcome.name] = {**self._commit, **outcome.described()}
        missing = [name for name in self._every if name not in self._proofs]
        held = not missing and all(x["outcome"] == "held" for x in self._proofs.values())
        ordered = {name: self._proofs[name] for name in self._every if name in self._proofs}
        made = {**self._about, "held": held, "missing": missing, "proofs": ordered}
        self.path.write_text(json.dumps(made, indent=1) + "\n")


def _name(before: dict[str, Any]) -> str:
    return f"sources {str(before.get('sources'))[:12]}, or another machine"

"""Whether every way to install Tilewise resolves against the package index alone, at the versions that it claims.

    python tests/check_install.py STAMP    as `make check-install` does; the file STAMP is made when all resolve

The check leaves out this machine's configuration of pip and uv, which other users do not have. `uv lock` resolves all
extras together at their highest versions, for all platforms and Python versions. Then each extra resolves alone: by uv
at its lowest versions, for the oldest and the newest Python, and by pip at its highest. Nothing is installed. Without a
network the check says so and passes; with TILEWISE_REQUIRE_INDEX=1, as in CI, it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest requires it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.14")
SIDE_BY_SIDE = 4  # they wait for the network, not for a processor
UV = (sys.executable, "-m", "uv", "--no-config", "--no-python-downloads", "--quiet")
PIP = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--dry-run", "--quiet")
WITHOUT_INDEX = (
    "the package index cannot be reached, so that it was not checked whether the extras resolve. "
    "With a network, run `make check-install`"
)


def environment() -> dict[str, str]:
    """Without what a machine tells pip and uv: other indexes, folders of wheels, constraints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


def complaint(command: tuple[str, ...], folder: Path, requirements: str = "") -> str:
    """What a command said when it failed, or nothing."""
    done = subprocess.run(
        command, input=requirements, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def index_answers(folder: Path) -> bool:
    return not complaint((*UV, "pip", "compile", "--no-cache", "-"), folder, "setuptools")


def resolutions(project: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """The name of each check, its command, and the requirements for its standard input."""
    yield "uv lock", (*UV, "lock", "--python", sys.executable), ""
    for extra, more in project["optional-dependencies"].items():
        requirements = [*project["dependencies"], *more]
        for python in PYTHONS:
            name = f"extra {extra}, lowest versions, Python {python}"
            options = ("--only-binary", ":all:", "--python-version", python, "--resolution", "lowest-direct")
            yield name, (*UV, "pip", "compile", *options, "-"), "\n".join(requirements)
        # Metadata of wheels that have none beside them is read by ranges: else pip would fetch gigabytes.
        options = ("--ignore-installed", "--only-binary=:all:", "--use-feature=fast-deps")
        yield f"extra {extra}, pip", (*PIP, *options, *requirements), ""


def read_project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return project


def failures(root: Path) -> list[str]:
    """What does not resolve, in the words of uv or pip."""
    project = read_project(root)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(root / file, folder)
        shutil.copytree(root / "tilewise", folder / "tilewise", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            told = pool.map(lambda check: (check[0], complaint(check[1], folder, check[2])), resolutions(project))
            return [f"{name}: {words}" for name, words in told if words]


def main(stamp: Path | None) -> str | None:
    """A reason to fail, or nothing."""
    if not index_answers(ROOT):
        if os.environ.get("TILEWISE_REQUIRE_INDEX", "0") not in ("", "0"):
            return f"TILEWISE_REQUIRE_INDEX is set, and {WITHOUT_INDEX}."
        print(f"Left out: {WITHOUT_INDEX}.", file=sys.stderr)
        return None
    if broken := failures(ROOT):
        return "\n\n".join(["Some installs do not resolve against the package index alone:", *broken])
    if stamp:
        stamp.touch()
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))

"""Measures which lines the tests run, in Python and in the engine: python tests/measure_coverage.py FOLDER ARGUMENTS

ARGUMENTS are pytest's. The engine is built with gcov's counters in a folder of its own, never over the normal library.
FOLDER gets

    summary.json    lines and branches by part, with the date, the commit, the command, and whether a GPU was there
    missing.txt     every line that no test runs, with its text, file by file
    html/           coverage.py's pages of the Python files

`--tell FOLDER` keeps summary.json as results/coverage.json instead, and writes its table into CONTRIBUTING.md.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from anywhere, beside this package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tests.proof import commit
from tilewise.bench.machine import import_torch
from tilewise.kernels.cpu.engine import build

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = build.BUILD / "engine-coverage"
PAGE, KEPT = ROOT / "CONTRIBUTING.md", ROOT / "results" / "coverage.json"
ENGINE = "kernels/cpu/engine"

# Counters are shared by threads, and every path that this machine can run writes its own.
ENGINE_FLAGS = {"CXXFLAGS": "--coverage -fprofile-update=atomic", "LDFLAGS": "--coverage"}
# The compilers of CuTe and TileLang read their sources; Python never runs them, whatever the tests do.
NOT_PYTHON = (
    "tilewise/kernels/cute/source/*",
    "tilewise/kernels/tilelang/source/*",
    "tilewise/linear/kernels/tilelang/source/*",
    "build/*",  # modules of generated text, which have names of the package
)
# Reports leave out what runs do: processes in other folders count it. Errors that are ignored are of modules that tests
# made of generated text, and that are gone.
SETTINGS = """\
[run]
branch = true
parallel = true
concurrency = thread, multiprocessing
relative_files = true
data_file = {data}
source_pkgs = tilewise
omit = {omit}
patch = subprocess
disable_warnings = no-data-collected, module-not-imported, module-not-measured, already-imported, couldnt-parse
[report]
ignore_errors = true
omit = {omit}
exclude_also =
    if TYPE_CHECKING:
    @overload
    raise NotImplementedError
    ^ +\\.\\.\\.$
"""

Lines = dict[int, int]  # how often each ran
Record = dict[str, Any]


def measure(folder: Path, arguments: list[str]) -> int:
    """Run pytest with these arguments; its exit code, once everything is written."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ.update({name: f"{os.environ.get(name, '')} {flags}".strip() for name, flags in ENGINE_FLAGS.items()})
    library = build.link(build.compile_objects(objects=OBJECTS), objects=OBJECTS)
    for old in OBJECTS.glob("*.gcda"):
        old.unlink()
    settings = folder / "settings.ini"
    settings.write_text(SETTINGS.format(data=folder / "data", omit=", ".join(NOT_PYTHON)))
    coverage = [sys.executable, "-m", "coverage"]
    command = [*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ENGINE_FLAGS}
    code = subprocess.run(
        command, cwd=ROOT, env=environment | {"TILEWISE_LIBRARY": str(library)}, check=False
    ).returncode
    pages, numbers = str(folder / "html"), str(folder / "python.json")
    for step in (["combine"], ["json", "-o", numbers], ["html", "-d", pages]):
        subprocess.run([*coverage, *step, "--quiet", f"--rcfile={settings}"], cwd=ROOT, check=True)
    report(folder, shlex.join(["pytest", *arguments]), code)
    return code


def report(folder: Path, command: str, code: int) -> None:
    """The summary and the missing lines, of what was counted."""
    counted = json.loads((folder / "python.json").read_text())["files"]
    python = {name: file for name, file in counted.items() if name.startswith("tilewise/")}
    engine = engine_lines(OBJECTS)
    summary = {
        "date": date.today().isoformat(), **commit(), "command": command, "held": code == 0,
        "gpu": has_gpu(),
        "parts": parts(python, engine),
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    missed = {name: file["missing_lines"] for name, file in python.items()}
    missed |= {name: [line for line, count in lines.items() if not count] for name, lines in engine.items()}
    (folder / "missing.txt").write_text("".join(told(name, lines) for name, lines in sorted(missed.items()) if lines))
    print(table(summary))
    print(f"\nWhat no test runs: {os.path.relpath(folder / 'missing.txt')}; pages: {os.path.relpath(folder / 'html')}")


def has_gpu() -> bool:
    torch = import_torch()
    return torch is not None and torch.cuda.is_available()


def engine_lines(objects: Path, sources: Path = build.ENGINE) -> dict[str, Lines]:
    """How often each line of the sources ran, over all instruction sets, as gcov counted it."""
    counted: dict[str, Lines] = {}
    for notes in sorted(objects.glob("*.gcno")):
        told = subprocess.run(
            ["gcov", "--json-format", "--stdout", notes.stem], cwd=objects, capture_output=True, check=True
        ).stdout
        text = gzip.decompress(told) if told[:2] == b"\x1f\x8b" else told
        for file in (file for record in text.splitlines() for file in json.loads(record)["files"]):
            path = (objects / file["file"]).resolve()
            if not path.is_relative_to(sources):  # a header of the compiler's
                continue
            lines = counted.setdefault(os.path.relpath(path, ROOT), {})
            for line in file["lines"]:
                lines[line["line_number"]] = lines.get(line["line_number"], 0) + line["count"]
    return counted


def parts(python: dict[str, Record], engine: dict[str, Lines]) -> dict[str, dict[str, int]]:
    """Lines and branches, all and run, of each part of the package."""
    found: dict[str, dict[str, int]] = {}

    def add(part: str, **numbers: int) -> None:
        row = found.setdefault(part, dict.fromkeys(("lines", "run", "branches", "taken"), 0))
        for name, number in numbers.items():
            row[name] += number

    for name, file in python.items():
        totals = file["summary"]
        add(
            part_of(name), lines=totals["num_statements"], run=totals["covered_lines"],
            branches=totals["num_branches"], taken=totals["covered_branches"],
        )  # fmt: skip
    for lines in engine.values():
        add(ENGINE, lines=len(lines), run=sum(count > 0 for count in lines.values()))
    return dict(sorted(found.items()))


def part_of(name: str) -> str:
    """A folder of tilewise, or a kernel system; "" for the files that stand in tilewise itself."""
    folders = Path(name).parts[1:-1]
    return "/".join(folders[: 2 if folders[:1] == ("kernels",) else 1])


def told(name: str, lines: Iterable[int]) -> str:
    text = (ROOT / name).read_text().splitlines()
    return f"{name}\n" + "".join(f"{line:6} {text[line - 1]}\n" for line in sorted(lines)) + "\n"


def table(summary: Record) -> str:
    """The summary as the page shows it."""
    rows = [
        f"| `tilewise/{name}`{' (C++)' if name == ENGINE else ''} {_cells(row)}"
        for name, row in summary["parts"].items()
    ]
    python = [row for name, row in summary["parts"].items() if name != ENGINE]
    rows.append(f"| all Python {_cells({key: sum(row[key] for row in python) for key in python[0]})}")
    failed = "" if summary["held"] else " Some tests failed."
    where = "with" if summary["gpu"] else "without"
    which = f"{(summary['commit'] or 'no commit')[:10]}{' and changes to it' if summary['dirty'] else ''}"
    about = f"Measured on {summary['date']} at {which} by `{summary['command']}`, {where} a GPU.{failed}"
    return "\n".join(["| part | lines | run | branches taken |", "|---|---|---|---|", *rows, "", about])


def _cells(row: dict[str, int]) -> str:
    branches = _percent(row["taken"], row["branches"]) if row["branches"] else ""
    return f"| {row['lines']:,} | {_percent(row['run'], row['lines'])} | {branches} |"


def _percent(some: int, all_of_them: int) -> str:
    return f"{100 * some / max(all_of_them, 1):.0f}%"


def filled(page: str, summary: Record) -> str:
    """The page with its table made anew."""
    pattern = r"(<!-- coverage -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda match: f"{match[1]}{table(summary)}\n{match[2]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--tell":
        shutil.copyfile(Path(sys.argv[2], "summary.json"), KEPT)
        PAGE.write_text(filled(PAGE.read_text(), json.loads(KEPT.read_text())))
        sys.exit(0)
    try:
        sys.exit(measure(Path(sys.argv[1]).resolve(), sys.argv[2:]))
    except build.BuildError as failure:
        sys.exit(str(failure))

"""What `make coverage` makes of counts: parts, percents, a table in CONTRIBUTING.md; and how gcov's are read."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import measure_coverage as measuring

FILE = {"num_statements": 10, "covered_lines": 7, "num_branches": 4, "covered_branches": 3}
SUMMARY = {
    "date": "2026-01-02", "commit": "0123456789abcdef", "dirty": False, "command": "pytest -m 'not slow'", "held": True,
    "gpu": False,
    "parts": measuring.parts(
        {f"tilewise/{name}.py": {"summary": FILE} for name in ("api", "rope", "kernels/cuda/ops", "lab/__init__")},
        {"tilewise/kernels/cpu/engine/simd.h": {1: 0, 2: 5, 3: 1, 9: 2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("tilewise/api.py", ""),
        ("tilewise/kernels/host.py", "kernels"),
        ("tilewise/kernels/cuda/simulator/kernel.py", "kernels/cuda"),
        ("tilewise/linear/kernels/triton/call.py", "linear"),
    ],
)
def test_parts(name: str, part: str) -> None:
    assert measuring.part_of(name) == part


def test_the_table() -> None:
    assert measuring.table(SUMMARY).splitlines() == [
        "| part | lines | run | branches taken |",
        "|---|---|---|---|",
        "| `tilewise/` | 20 | 70% | 75% |",
        "| `tilewise/kernels/cpu/engine` (C++) | 4 | 75% |  |",
        "| `tilewise/kernels/cuda` | 10 | 70% | 75% |",
        "| `tilewise/lab` | 10 | 70% | 75% |",
        "| all Python | 40 | 70% | 75% |",
        "",
        "Measured on 2026-01-02 at 0123456789 by `pytest -m 'not slow'`, without a GPU.",
    ]
    assert "and changes to it" in measuring.table({**SUMMARY, "dirty": True})
    assert "`, with a GPU." in measuring.table({**SUMMARY, "gpu": True})
    assert "Some tests failed." in measuring.table({**SUMMARY, "held": False})


def test_the_page_has_what_was_measured() -> None:
    page = measuring.PAGE.read_text()
    assert measuring.filled(page, json.loads(measuring.KEPT.read_text())) == page
    assert "0123456789" in measuring.filled(page, SUMMARY)


@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("gcov")), reason="g++ and gcov are not both here")
def test_gcov_is_read(tmp_path: Path) -> None:
    """A header that two objects compile counts once, and what either ran."""
    sources, objects = tmp_path / "sources", tmp_path / "objects"
    sources.mkdir()
    objects.mkdir()
    (sources / "both.h").write_text(
        "static int chosen(int i) {\n    if (i == MINE)\n        return 1;\n"
        "    if (i > 5)\n        return 2;\n    return 3;\n}\n"
    )
    calls = {"one": "chosen(1)", "two": "chosen(7)"}
    for mine, (name, call) in enumerate(calls.items(), 1):
        text = f'#define MINE {mine}\n#include "both.h"\nint {name}() {{ return {call}; }}\n'
        (sources / f"{name}.cpp").write_text(text)
        command = ["g++", "--coverage", "-c", f"../sources/{name}.cpp", "-o", f"{name}.o"]
        subprocess.run(command, cwd=objects, check=True)
    (tmp_path / "main.cpp").write_text("int one();\nint two();\nint main() { return one() + two() - 3; }\n")
    program = ["g++", "--coverage", "-o", "program", "../main.cpp", "one.o", "two.o"]
    subprocess.run(program, cwd=objects, check=True)
    subprocess.run([str(objects / "program")], cwd=objects, check=True)
    counted = {Path(name).name: lines for name, lines in measuring.engine_lines(objects, sources).items()}
    assert set(counted) == {"both.h", "one.cpp", "two.cpp"}  # main.cpp is elsewhere
    assert [line for line, count in counted["both.h"].items() if not count] == [6]
    assert counted["both.h"][2] == 2

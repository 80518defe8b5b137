"""Writes the measured tables of README.md and docs/performance.md from results/*.json: python docs/tables.py

A table stands between the lines `<!-- NAME -->` and `<!-- end -->`; a test checks that what stands there is what this
makes, so that no page can quote a number that was not measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONTESTANTS = ("tilewise numpy", "torch sdpa", "torch naive", "numpy naive")
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")


def speed(file: str, columns: tuple[str, ...], d: int | None = None) -> str:
    """Milliseconds of each contestant, and our ratio to the best peer; all head dimensions, or one."""
    found = {key: cell for key, cell in _records(file).items() if d in (None, key[2])}
    lines = ["| variant | n | d | " + " | ".join(columns) + " | to the best peer |", "|---" * (4 + len(columns)) + "|"]
    for (variant, n, d), cell in found.items():
        times = [_time(cell.get(name)) for name in columns]
        ratio = cell[columns[0]]["ratio"]
        lines.append(f"| {variant} | {n} | {d} | " + " | ".join(times) + f" | {_ratio(ratio)} |")
    return "\n".join([*lines, "", _machine(file)])


def memory(file: str, columns: tuple[str, ...], d: int) -> str:
    """Extra megabytes of each contestant, and what the full matrices would take."""
    cells = {key: cell for key, cell in _records(file).items() if key[0] == "causal" and key[2] == d}
    lines = ["| n | " + " | ".join(columns) + " | the n x n scores |", "|---" * (2 + len(columns)) + "|"]
    for (_, n, _), cell in cells.items():
        heads = cell[columns[0]]["heads"]
        extra = [_megabytes(cell.get(name)) for name in columns]
        lines.append(f"| {n} | " + " | ".join(extra) + f" | {heads * n * n * 4 / 2**20:,.0f} |")
    return "\n".join([*lines, "", "MiB beyond the inputs, the output included."])


TABLES = {
    "short": lambda: speed("cpu-forward.json", CONTESTANTS, d=64),
    "forward": lambda: speed("cpu-forward.json", CONTESTANTS),
    "training": lambda: speed("cpu-training.json", CONTESTANTS),
    "memory": lambda: memory("cpu-forward.json", CONTESTANTS, 64),
}


def fill(page: str) -> str:
    """The page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def _results(file: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "results" / file).read_text()))


def _records(file: str) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    cells: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    results = _results(file)
    for r in results["records"]:
        if (r["pass"] == "forward+backward") == results["options"]["backward"]:
            cells.setdefault((r["variant"], r["n"], r["d"]), {})[r["contestant"]] = r
    order = results["options"]["variants"]
    return dict(sorted(cells.items(), key=lambda cell: (order.index(cell[0][0]), cell[0][2], cell[0][1])))


def _machine(file: str) -> str:
    results = _results(file)
    m, o = results["machine"], results["options"]
    return (
        f"Median milliseconds, {o['heads']} heads, batch {o['batch']}, {', '.join(o['dtype'])}; "
        f"{m['cores']} cores of an {m['cpu']}, NumPy {m['numpy']}, PyTorch {m['torch']} with {m['torch_threads']} "
        f"threads, {results['date'][:10]}. From `results/{file}`."
    )


def _time(r: dict[str, Any] | None) -> str:
    return "-" if r is None or r["median_ms"] is None else f"{r['median_ms']:.0f}"


def _ratio(ratio: float | None) -> str:
    return "no peer ran" if ratio is None else f"{ratio:.2f}x"


def _megabytes(r: dict[str, Any] | None) -> str:
    return "-" if r is None or r["extra_bytes"] is None else f"{r['extra_bytes'] / 2**20:,.0f}"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(fill(path.read_text()))

"""Writes the tables of README.md and docs/ that nobody should write by hand: python docs/tables.py

What was measured comes from results/, what kernel systems support from their own answers. A table stands between the
lines `<!-- NAME -->` and `<!-- end -->`; a test checks that what stands there is what this makes, so that no page can
quote a number that was not measured. What was not measured is said to be so.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from anywhere, beside this package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from docs import summary, support
from docs.markdown import table
from tilewise.bench import report, suite, targets
from tilewise.bench.accuracy import report as accuracy
from tilewise.bench.accuracy import run as accuracy_run
from tilewise.bench.accuracy import targets as accuracy_targets
from tilewise.bench.gpu import report as gpu_report
from tilewise.bench.gpu import suite as gpu_suite
from tilewise.bench.gpu import targets as gpu_targets
from tilewise.bench.page import trials
from tilewise.linear import bench as linear
from tilewise.linear import bench_gpu as linear_gpu
from tilewise.referee import results as judging
from tilewise.referee import verdict

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
PAGES = (
    README, PERFORMANCE,
    *(ROOT / "docs" / f"{name}.md" for name in ("accuracy", "backends", "judge", "linear", "support")),
)  # fmt: skip

_MARKS = {True: "✓", False: "✗", None: ""}
Record = dict[str, Any]
Results = dict[str, Any]


def fill(page: Path, results: Path = RESULTS) -> str:
    """The page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{MAKERS[match[1]](results, page)}\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", made, page.read_text(), flags=re.DOTALL)


# -- the CPU suite ----------------------------------------------------------------------------------------------------


def target_table(results: Path, page: Path) -> str:
    """Every number beside its target, of the sections that were measured."""
    found = _sections(results)
    if not found:
        return _unmeasured("cpu", "")
    about = f"Ratios are {suite.PEER}'s time over ours. {_conditions(next(iter(found.values())), reading=False)}"
    return f"{_checks(targets.checks(found))}\n\n{about}"


def _checks(checks: list[targets.Check]) -> str:
    return table(("", "measured", "target", ""), [(c.what, c.shown, c.target, _judgement(c)) for c in checks])


def _judgement(check: targets.Check) -> str:
    return (_MARKS[check.met] + " " + check.note).strip()


def section_table(name: str) -> Callable[[Path, Path], str]:
    def made(results: Path, page: Path) -> str:
        found = _sections(results).get(name)
        if found is None:
            return _unmeasured("cpu", name)
        head, rows = _COLUMNS[name]
        by_cell = report.cells(found)
        lines = [rows(_ours(cell), cell) for cell in by_cell if _ours(cell)]
        return f"{table(head, lines)}\n\nFrom `results/cpu/{name}.json`. {_conditions(found)}"

    return made


def picture(of: str, name: str, about: str) -> Callable[[Path, Path], str]:
    def made(results: Path, page: Path) -> str:
        path = results / of / f"{name}.png"
        return f"![{about}]({Path(os.path.relpath(path, page.parent)).as_posix()})" if path.exists() else ""

    return made


def _grid(r: Record, cell: list[Record]) -> tuple[str, ...]:
    speeds = (_number(r["gflops"]), _percent(r["fraction"]))
    return r["dtype"], r["variant"], str(r["n_k"]), str(r["d"]), *_both(r, cell), *speeds


def _decode(r: Record, cell: list[Record]) -> tuple[str, ...]:
    plain = _number(r["plain_read_gbs"]) + (" (cache)" if r["fits_cache"] else "")
    speeds = (_number(r["read_gbs"]), plain, _percent(r["read_fraction"]), _percent(r["fraction"]))
    return r["dtype"], str(r["n_k"]), f"{r['heads']} / {r['heads_k']}", *_both(r, cell), *speeds


def _window(r: Record, cell: list[Record]) -> tuple[str, ...]:
    each = None if r["median_ms"] is None else 1e6 * r["median_ms"] / (r["n_q"] * targets.WINDOW)
    return str(r["n_k"]), *_both(r, cell), _number(each)


def _memory(r: Record, cell: list[Record]) -> tuple[str, ...]:
    theirs = _peer(cell)
    share = None if r["extra_bytes"] is None else r["extra_bytes"] / r["matrix_bytes"]
    return str(r["n_k"]), _mebibytes(r), _mebibytes(theirs), f"{r['matrix_bytes'] / 2**20:,.0f}", _percent(share)


def _both(r: Record, cell: list[Record]) -> tuple[str, str, str]:
    return _time(r), _time(_peer(cell)), _ratio(r["ratio"])


_TIMES = ("ours, ms", f"{suite.PEER}, ms", "ratio")
_GRID = (("type", "variant", "n", "d", *_TIMES, "GFLOP/s", "of the peak"), _grid)
_READING = ("GB/s", "plain read, GB/s", "of that", "of the FMA peak")
_COLUMNS = {
    "forward": _GRID,
    "half": _GRID,
    "training": _GRID,
    "decode": (("type", "keys", "heads / of keys", *_TIMES, *_READING), _decode),
    "window": (("n", *_TIMES, "ns for each query and key"), _window),
    "memory": (("n", "ours, MiB", f"{suite.PEER}, MiB", "the n x n scores, MiB", "ours of those"), _memory),
}


def _sections(results: Path, of: str = "cpu") -> dict[str, Results]:
    names = suite.SECTIONS if of == "cpu" else gpu_suite.SECTIONS
    paths = {name: results / of / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def _ours(cell: list[Record]) -> Record | None:
    return next((r for r in cell if r["ours"]), None)


def _peer(cell: list[Record]) -> Record | None:
    return next((r for r in cell if r["contestant"] == suite.PEER), None)


def _unmeasured(of: str, name: str) -> str:
    return f"Not measured yet: `{' '.join(f'tilewise bench --{of} {name}'.split())} --json results/{of}` does it."


def _conditions(results: Results, reading: bool = True) -> str:
    """reading: with the rate of reading memory, which is each section's own."""
    m = results["machine"]
    measured = [("peak", m["peak_gflops"], "GFLOP/s")]
    if reading:
        measured.append(("best read rate", m["read_gbs"], "GB/s"))
    limits = [f"measured {what} {value:,.0f} {unit}" for what, value, unit in measured if value is not None]
    where = f"{m['cores']} cores of an {m['cpu']}, {m['torch_threads']} threads, PyTorch {m['torch']}"
    return ", ".join([where, *limits, results["date"][:10]]) + "."


# -- the GPU suite ----------------------------------------------------------------------------------------------------


def gpu_target_table(results: Path, page: Path) -> str:
    found = _sections(results, "gpu")
    of_linear = _linear(results, "gpu", linear_gpu.SCHEMA)
    checks = [*gpu_targets.checks(found), *(() if of_linear is None else linear_gpu.checks(of_linear))]
    if not checks or not found:
        return _unmeasured("gpu", "")
    about = f"Ratios are our speed over the peer's. {gpu_report.conditions(next(iter(found.values())))}"
    return f"{_checks(checks)}\n\n{about}"


def gpu_section_table(name: str) -> Callable[[Path, Path], str]:
    def made(results: Path, page: Path) -> str:
        found = _sections(results, "gpu").get(name)
        if found is None:
            return _unmeasured("gpu", name)
        head, rows = gpu_report.table_of(name, found)
        about = " ".join([f"From `results/gpu/{name}.json`, {found['date'][:10]}.", *gpu_report.notes(name, found)])
        return f"{table(head, rows)}\n\n{about}"

    return made


# -- linear attention -------------------------------------------------------------------------------------------------


def _linear(results: Path, of: str, schema: str) -> Results | None:
    path = results / of / "linear.json"
    found: Results | None = json.loads(path.read_text()) if path.exists() else None
    return found if found and found["schema"] == schema else None


def linear_table(results: Path, page: Path) -> str:
    found = _linear(results, "cpu", linear.SCHEMA)
    if found is None:
        return "Not measured yet: `tilewise bench --linear --json results/cpu` does it."
    m = found["machine"]
    where = f"{m['cores']} cores of an {m['cpu']}, {found['date'][:10]}"
    about = f"From `results/cpu/linear.json`: float32, {found['heads']} heads, d {found['d']}, {where}."
    return f"{table(*linear.table_of(found))}\n\n{linear.conclusion(found)}\n\n{about}"


def gpu_linear_table(results: Path, page: Path) -> str:
    found = _linear(results, "gpu", linear_gpu.SCHEMA)
    if found is None:
        return "Not measured yet: `tilewise bench --linear --device cuda --json results/gpu` does it."
    about = f"From `results/gpu/linear.json`, {found['date'][:10]}. {linear_gpu.notes(found)}"
    return f"{table(*linear_gpu.table_of(found))}\n\n{about}"


# -- accuracy ---------------------------------------------------------------------------------------------------------


def _accuracy(results: Path, of: str) -> Results | None:
    path = results / of / "accuracy.json"
    found: Results | None = json.loads(path.read_text()) if path.exists() else None
    return found if found and found["schema"] == accuracy_run.SCHEMA else None


def _accuracy_unmeasured(of: str) -> str:
    device = "" if of == "cpu" else " --device cuda"
    return f"Not measured yet: `tilewise bench --accuracy{device} --json results/{of}` does it."


def accuracy_table(of: str) -> Callable[[Path, Path], str]:
    """A table a result, in bfloat16: float16's errors are an eighth; and ratios of both types."""

    def made(results: Path, page: Path) -> str:
        found = _accuracy(results, of)
        if found is None:
            return _accuracy_unmeasured(of)
        parts = []
        for what in ("out", "d_q", "d_q saturated"):
            title = accuracy.TITLES.get(what, f"`{what}`")
            parts += [f"{title}, bfloat16:", table(*accuracy.table_of(found, what, "bfloat16"))]
        more = {
            "Gradients of ALiBi's slopes and of sinks:": accuracy.learned_table(found),
            "Errors over the best peer's, all cells of both types:": accuracy.ratio_table(found),
        }
        parts += [part for about, made in more.items() if made[1] for part in (about, table(*made))]
        about = f"From `results/{of}/accuracy.json`, {found['date'][:10]}. {accuracy.conditions(found)}"
        return "\n\n".join([*parts, about])

    return made


def accuracy_target_table(of: str) -> Callable[[Path, Path], str]:
    def made(results: Path, page: Path) -> str:
        found = _accuracy(results, of)
        return _accuracy_unmeasured(of) if found is None else _checks(accuracy_targets.checks(found))

    return made


# -- the NumPy kernel -------------------------------------------------------------------------------------------------

_NUMPY_COLUMNS = ("tilewise numpy", "torch sdpa", "torch naive", "numpy naive")


def numpy_table(results: Path, page: Path) -> str:
    """Milliseconds of each contestant, and our ratio to the best peer."""
    found = json.loads((results / "numpy.json").read_text())
    rows = []
    for cell in report.cells(found):
        by_name = {r["contestant"]: r for r in cell}
        r = by_name[_NUMPY_COLUMNS[0]]
        if r["d"] == 64:
            times = [_time(by_name.get(name)) for name in _NUMPY_COLUMNS]
            rows.append((r["variant"], str(r["n_k"]), *times, _ratio(r["ratio"])))
    about = f"Median milliseconds, d = 64, float32. From `results/numpy.json`. {_conditions(found)}"
    return f"{table(('variant', 'n', *_NUMPY_COLUMNS, 'to the best peer'), rows)}\n\n{about}"


# -- the referee ------------------------------------------------------------------------------------------------------


def judge_table(of: str) -> Callable[[Path, Path], str]:
    """Features by contenders."""

    def made(results: Path, page: Path) -> str:
        found = trials.found([results / of / "judge"])
        if not found:
            return f"Not judged yet: `tilewise judge ... --json results/{of}/judge` does it."
        m = found[0]["machine"]
        dates = sorted({x["date"][:10] for x in found})
        versions = {f"{package} {version}": None for x in found for package, version in x["versions"].items()}
        calls = sorted({x["options"]["calls"] for x in found})
        counts = " or ".join(map(str, calls))
        about = f"{m['gpu'] or m['cpu']}, {dates[-1]}; {', '.join(versions)}; {counts} calls of each feature and pass."
        return f"{table(*trials.matrix(found))}\n\n{about}"

    return made


def judge_faults(of: str) -> Callable[[Path, Path], str]:
    """The smallest call of each kind that was wrong, or that ended a process."""

    def made(results: Path, page: Path) -> str:
        found = trials.found([results / of / "judge"])
        rows = [
            (f"`{x['contender']}`", f"{fault['feature']}, {fault['pass']}", _fault_text(fault), f"`{fault['id']}`")
            for x in found
            for fault in x["faults"]
            if fault["verdict"] in (verdict.WRONG, verdict.CRASHED)
        ]
        nothing = "Nothing was wrong." if found else ""
        return table(("", "feature", "what", "`--only`"), rows) if rows else nothing

    return made


def _fault_text(fault: Record) -> str:
    return judging.fault_line(fault).removeprefix("wrong: ").replace("|", "/")


# -- cells of tables --------------------------------------------------------------------------------------------------


def _time(r: Record | None) -> str:
    return "-" if r is None or r["status"] != "ok" else _number(r["median_ms"])


def _number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def _ratio(ratio: float | None) -> str:
    return "no peer ran" if ratio is None else f"{ratio:.2f}x"


def _mebibytes(r: Record | None) -> str:
    return "-" if r is None or r["extra_bytes"] is None else f"{r['extra_bytes'] / 2**20:,.1f}"


MAKERS: dict[str, Callable[[Path, Path], str]] = {
    "cpu-targets": target_table,
    **{f"cpu-{name}": section_table(name) for name in suite.SECTIONS},
    "cpu-forward-picture": picture("cpu", "forward", "Forward: GFLOP/s beside the peak"),
    "cpu-decode-picture": picture("cpu", "decode", "Decoding: GB/s beside plain reads"),
    "cpu-scaling-picture": picture("cpu", "scaling", "Window and memory against n"),
    "cpu-linear": linear_table,
    "cpu-linear-picture": picture("cpu", "linear", "Milliseconds against n"),
    "gpu-targets": gpu_target_table,
    **{f"gpu-{name}": gpu_section_table(name) for name in gpu_suite.SECTIONS},
    "gpu-linear": gpu_linear_table,
    "gpu-linear-picture": picture("gpu", "linear", "Linear attention: GB/s beside the peer and a copy"),
    "gpu-forward-picture": picture("gpu", "forward", "Forward: TFLOP/s beside the peers"),
    "gpu-stress-picture": picture("gpu", "stress", "Hard inputs: TFLOP/s beside the peers"),
    "gpu-variants-picture": picture("gpu", "variants", "Variants: TFLOP/s beside the peers"),
    "gpu-gqa-picture": picture("gpu", "gqa", "Grouped heads: TFLOP/s beside the peers"),
    "gpu-backward-picture": picture("gpu", "backward", "Triton, backward: TFLOP/s beside the peers"),
    "gpu-gradients-picture": picture("gpu", "gradients", "CUDA C++, backward: TFLOP/s beside the peers"),
    "gpu-triton-picture": picture("gpu", "triton", "Triton, forward: TFLOP/s beside FlexAttention"),
    "gpu-cute-picture": picture("gpu", "cute", "CuTe DSL, forward: TFLOP/s beside the peers"),
    "gpu-cute_gradients-picture": picture("gpu", "cute_gradients", "CuTe DSL, backward: TFLOP/s beside the peers"),
    "gpu-tilelang-picture": picture("gpu", "tilelang", "TileLang, forward: TFLOP/s beside the peers"),
    "gpu-tilelang_gradients-picture": picture(
        "gpu", "tilelang_gradients", "TileLang, backward: TFLOP/s beside the peers"
    ),
    "gpu-training-picture": picture("gpu", "training", "Loss of both"),
    **{f"{of}-accuracy": accuracy_table(of) for of in ("cpu", "gpu")},
    **{f"{of}-accuracy-targets": accuracy_target_table(of) for of in ("cpu", "gpu")},
    **{f"judge-{of}": judge_table(of) for of in ("cpu", "gpu")},
    **{f"judge-{of}-faults": judge_faults(of) for of in ("cpu", "gpu")},
    "numpy": numpy_table,
    "comparisons": summary.comparisons,
    "machines": summary.machines,
    "matrix": summary.matrix,
    "status": summary.status,
    "backends": summary.backends,
    "support-by-shape": lambda results, page: support.by_shape(),
    "support-by-variant": lambda results, page: support.by_variant(),
    "support-by-kernel": lambda results, page: support.by_rung(),
    "taken-by-auto": lambda results, page: support.taken_by_auto(),
}

if __name__ == "__main__":
    for path in PAGES:
        path.write_text(fill(path))

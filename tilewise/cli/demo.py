"""`tilewise demo`: is it exact, and what does tiling bring? The first thing a new user runs."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tilewise as tw
from tilewise import arrays, dispatch, validate
from tilewise.bench.machine import import_torch
from tilewise.cases import Case
from tilewise.cli import UserError, compare, trace
from tilewise.cli.bench_options import check_kernel
from tilewise.cli.compare import Measured
from tilewise.cli.terminal import log_bars, progress, table
from tilewise.contract import ContractError, check_forward, expected_forward, on_device, on_host
from tilewise.explanation import size
from tilewise.spec import Tile

VARIANTS = (
    "full", "causal", "causal window", "prefix", "document", "dense", "alibi", "relative", "t5", "softcap", "bias",
    "sinks", "all at once",
)  # fmt: skip
FEW_VARIANTS = ("full", "causal", "alibi", "all at once")  # where each is compiled, simulated or interpreted
ROOT = Path(tw.__file__).parent.parent
_RUNGS = dispatch.simulated_rungs()
_PACKAGES = {"cuda": "cuda", "triton": "triton", "cute": "cutlass", "tilelang": "tilelang"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="check every kernel system, compare tiled with standard attention",
        description="Checks every kernel system that this machine can run against a float64 reference (CUDA's on the "
        "simulator, where there is no GPU), says what adds the others, then compares time and memory of standard "
        "attention (which stores the n x n matrix) with tiled attention over growing sequences. Under a minute.",
    )
    parser.add_argument("--kernel", metavar="NAME", help=f"show one kernel system: {', '.join(dispatch.NAMED)}")
    parser.add_argument(
        "--trace", action="store_true", help="print the tile steps of a small case in the NumPy kernel instead"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    shown = systems(args.kernel)
    if args.trace:
        print(trace.text())
        return 0
    print(f"Tilewise {tw.__version__}: exact attention, computed tile by tile")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} processors\n", flush=True)
    passed = _exactness(shown)
    if args.kernel is None:
        _tell_of_missing()
    passed &= _sample(shown[0])
    fast = [system.name for system in shown if not system.slow and system.device == "cpu"]
    rows = compare.on_cpu(fast[0]) if fast else []
    if rows:
        told = "Standard attention stores the n x n matrix; tiled attention never does"
        _report(f"{told} (1 head, d = 64, float32, CPU)", rows)
    if args.kernel is None or shown[0].device != "cpu":
        for title, gpu_rows in compare.on_gpu(args.kernel or "auto"):
            _report(title, gpu_rows)
            rows = rows or gpu_rows
    if not rows:
        print(f"Its time and memory are not compared: {shown[0].name} stands in for a GPU, slowly.\n")
    _meaning(rows, passed)
    return 0 if passed else 1


# -- who is shown -----------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """A kernel system as this machine can show it."""

    name: str
    device: str
    dtype: str

    @property
    def slow(self) -> bool:
        """Whether it stands in for a GPU: a simulator, an interpreter, or a compiler's target for tests."""
        system = self.name.partition("/")[0]
        return system in ("cuda-sim", "tilelang-c") or (system == "triton" and self.device == "cpu")

    @property
    def variants(self) -> tuple[str, ...]:
        """All where nothing is compiled for each of them."""
        return VARIANTS if self.name in ("cpu", "numpy") else FEW_VARIANTS

    @property
    def tile(self) -> Tile | None:
        """Small ones, so that there are several; slow systems take their own, and need fewer."""
        return None if self.slow or self.dtype != "float32" else Tile(32, 32)

    def case(self, variant: str) -> Case:
        return Case(variant, "multi-query" if self.slow else "ragged", self.dtype)


def systems(wanted: str | None) -> list[Shown]:
    """The kernel systems to show: those that can compute here, or the one named."""
    if wanted is not None:
        check_kernel(wanted)
        return [_shown(wanted)]
    import_torch()  # which is asked for GPUs
    names = [name for name in (*dispatch.NAMES, *dispatch.ONLY_IF_NAMED) if dispatch.kernel(name).unavailable() is None]
    if "cuda" in names:
        names = [name for name in names if name != "cuda-sim"]  # the same sources compute for real
    return [_shown(rung) for name in names for rung in (_RUNGS if name == "cuda-sim" else (name,))]


def _shown(name: str) -> Shown:
    """On arrays that it takes: a GPU's for those that compute there alone, halves for those without float32."""
    refused = ""
    for device, dtype in product(_devices(), ("float32", "float16", "bfloat16")):
        reason = compare.unsupported(name, device, dtype)
        if reason is None:
            return Shown(name, device, dtype)
        refused = refused or reason
    raise UserError(f"--kernel: the demo's arrays are not for {name!r}: {refused}")


def _devices() -> tuple[str, ...]:
    torch = import_torch()
    return ("cpu", "cuda:0") if torch is not None and torch.cuda.is_available() else ("cpu",)


def _tell_of_missing() -> None:
    """A line for each system that cannot compute here, with what adds it."""
    print("Skipped on this machine:")
    told = False
    for name in (*dispatch.NAMES, *dispatch.ONLY_IF_NAMED):
        reason = dispatch.kernel(name).unavailable()
        if reason is not None:
            print(f"  {name:10} {_adding(name, reason)}")
            told = True
    print("" if told else "  none\n")


def _adding(name: str, reason: str) -> str:
    """In one line; what pip installs is told as it is done here."""
    line, *more = reason.splitlines() or [""]
    package = _PACKAGES.get(name)
    if package is not None and "pip install" not in line and find_spec(package) is None:
        line += f"; pip install 'tilewise[{name}]'"
    if (ROOT / "pyproject.toml").exists():  # what was not installed from an index is not found there
        line = line.replace("pip install 'tilewise[", f"{_pip()} install '.[")
    return f"{line} (`tilewise doctor` tells all)" if more else line


def _pip() -> str:
    """As it is called from here: `make demo` has an environment of its own, which is not active."""
    pip = Path(sys.prefix) / "bin" / "pip"
    return str(pip.relative_to(Path.cwd())) if pip.exists() and pip.is_relative_to(Path.cwd()) else "pip"


# -- what is checked --------------------------------------------------------------------------------------------------


def _exactness(shown: list[Shown]) -> bool:
    """A line for each system and variant; True if all are within the contract."""
    print("Is it exact? The largest error against dense float64 attention, on shapes that no tile divides:")
    width = max(len(system.name) for system in shown)
    passed = True
    for system in shown:
        for variant in system.variants:
            progress(f"checking {system.name}: {variant}")
            mark, told = _check(system, variant)
            progress()
            print(f"  {mark} {system.name:{width}} {variant:16} {told}", flush=True)
            passed &= mark != "✗"
    print()
    return passed


def _check(system: Shown, variant: str) -> tuple[str, str]:
    case, kernel = system.case(variant), dispatch.kernel(system.name)
    call = on_device(case.inputs().call(), system.device)
    reason = kernel.unsupported(call.spec, call.shape)
    if reason is not None:
        return "-", f"unsupported: {reason}"
    try:
        error = check_forward(kernel, case, system.tile, system.device)
    except ContractError as found:
        return "✗", str(found)
    return "✓", f"max error {error:.1e}{'' if system.dtype == 'float32' else f', {system.dtype}'}"


def _sample(system: Shown) -> bool:
    """A first exercise's result: 16 queries and keys of one head, beside the reference. Whether it is right."""
    rng = np.random.default_rng(0)
    rows = (arrays.narrow(rng.standard_normal((16, 64), dtype=np.float32), system.dtype) for _ in range(3))
    host = validate.prepare(*rows)
    call = on_device(host, system.device)
    done = on_host(dispatch.kernel(system.name).forward(call.spec, call.q, call.k, call.v).out)
    wanted = expected_forward(host)[0]
    error = float(wanted.errors(done).max())
    out = arrays.widen(arrays.as_numpy(done), np.float64)[0, 0]
    verdict, matches = ("PASS", "matches") if error <= wanted.limit else ("FAIL", "does not match")
    print(f"[{verdict}] FlashAttention: Output {matches} reference (max error: {error:.9f})")
    print(f"Output shape: {list(out.shape)}")
    print(f"Sample output (first row):\n{''.join(f'{x:8.3f}' for x in out[0, :8])}\n", flush=True)
    return verdict == "PASS"


def _report(title: str, rows: list[compare.Row]) -> None:
    print(title)
    header = ["n", "standard", "tiled", "speed-up", "standard memory", "tiled memory", "full matrix", "tiles"]
    print(table(header, [_cells(row) for row in rows]))
    for (side, reason), labels in _missing(rows).items():
        print(f"  {side} attention at n = {'; '.join(labels)}: {reason}")
    print()
    items = []
    for row in rows:
        for side, result in (("standard", row.standard), ("tiled   ", row.tiled)):
            if isinstance(result, Measured) and result.bytes > 0:
                items.append((f"{row.label:>16} {side}", float(result.bytes), size(result.bytes)))
    if items:
        print("memory beyond the inputs, on a logarithmic scale")
        print(f"{log_bars(items)}\n")


def _missing(rows: list[compare.Row]) -> dict[tuple[str, str], list[str]]:
    """What did not run, and why: each reason once, with the lengths it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for side, result in (("standard", row.standard), ("tiled", row.tiled)):
            if isinstance(result, str):
                found.setdefault((side, result), []).append(row.label)
    return found


def _cells(row: compare.Row) -> list[str]:
    speed_up = f"{row.both[0].seconds / row.both[1].seconds:.2f}x" if row.both else "-"
    return [
        row.label, *(_time(x) for x in (row.standard, row.tiled)), speed_up,
        *(_memory(x) for x in (row.standard, row.tiled)), size(row.matrix_bytes), size(row.tile_bytes),
    ]  # fmt: skip


def _time(result: Measured | str) -> str:
    return f"{result.seconds * 1e3:.1f} ms" if isinstance(result, Measured) else "-"


def _memory(result: Measured | str) -> str:
    return size(result.bytes) if isinstance(result, Measured) else "-"


def _meaning(rows: list[compare.Row], passed: bool) -> None:
    """What the numbers say, computed from them."""
    print("What it means")
    ran = [(row.n, *row.both) for row in rows if row.both]
    if len(ran) > 1:
        (n_first, standard_first, tiled_first), (n, standard, tiled) = ran[0], ran[-1]
        print(
            f"  From n = {n_first} to {n} ({n // n_first}x), standard attention's memory grew "
            f"{standard.bytes / standard_first.bytes:,.0f}x, tiled attention's "
            f"{tiled.bytes / tiled_first.bytes:,.1f}x: O(n^2) against O(n)."
        )
        less, faster = standard.bytes / tiled.bytes, standard.seconds / tiled.seconds
        print(f"  At n = {n} tiled attention needed {less:,.0f}x less memory, and {_speed(faster)}.")
    for row in rows:
        if isinstance(row.standard, str) and isinstance(row.tiled, Measured):
            print(f"  At n = {row.label} the full matrix would take {size(row.matrix_bytes)}; the tiles just run.")
    print(f"  The results are {'exact: every check passed.' if passed else 'NOT all exact: see the ✗ lines above.'}")
    called = "python -m tilewise" if sys.argv[0].endswith("__main__.py") else os.path.relpath(sys.argv[0])
    command = "tilewise" if shutil.which("tilewise") else called
    print(f"  Next: {command} plan --mask 'causal() & window(512)' --n 8192; {command} demo --trace; {command} bench")


def _speed(ratio: float) -> str:
    return f"was {ratio:.1f}x as fast" if ratio >= 1 else f"took {1 / ratio:.1f}x as long"

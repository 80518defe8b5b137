"""`tilewise demo`: is it exact, and what does tiling bring? The first thing a new user runs."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from typing import Any

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


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="check every kernel system, compare tiled with standard attention",
        description="Checks every kernel system against a float64 reference, then compares time and memory of standard "
        "attention (which stores the n x n matrix) with tiled attention over growing sequences. Under a minute.",
    )
    parser.add_argument("--kernel", metavar="NAME", help=f"show one kernel system: {', '.join(dispatch.NAMED)}")
    parser.add_argument(
        "--trace", action="store_true", help="print the tile steps of a small case in the NumPy kernel instead"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    names = _systems(args.kernel)
    device = _device(names[0]) if args.kernel else "cpu"
    if args.trace:
        print(trace.text())
        return 0
    print(f"Tilewise {tw.__version__}: exact attention, computed tile by tile")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} processors\n")
    passed = _exactness(names, device) & _sample(names[0], device)
    rows = compare.on_cpu(names) if device == "cpu" else []
    if rows:
        told = "Standard attention stores the n x n matrix; tiled attention never does"
        _report(f"{told} (1 head, d = 64, float32, CPU)", rows)
    for title, gpu_rows in compare.on_gpu(args.kernel or "auto"):
        _report(title, gpu_rows)
        rows = rows or gpu_rows
    _meaning(rows, passed)
    return 0 if passed else 1


def _systems(wanted: str | None) -> list[str]:
    """The kernel systems to show: those that run here, or the one named."""
    if wanted is None:
        return [name for name in dispatch.NAMES if dispatch.kernel(name).unavailable() is None]
    check_kernel(wanted)
    reason = compare.unsupported(wanted, _device(wanted))
    if reason is not None:
        raise UserError(f"--kernel: the demo's arrays are not for {wanted!r}: {reason}")
    return [wanted]


def _device(name: str) -> str:
    """Where the demo's arrays are to be: on a GPU for those that compute there alone, if there is one."""
    torch = import_torch()
    has_gpu = torch is not None and torch.cuda.is_available()
    return "cuda:0" if has_gpu and compare.unsupported(name) is not None else "cpu"


def _exactness(names: list[str], device: str) -> bool:
    """A line for each system and variant; True if all are within the contract."""
    print("Is it exact? The largest error against dense float64 attention, on shapes that no tile divides:")
    passed = True
    for name in names:
        for variant in VARIANTS:
            progress(f"checking {name}: {variant}")
            line, ok = _check(name, variant, device)
            progress()
            print(line)
            passed &= ok
    print()
    return passed


def _check(name: str, variant: str, device: str) -> tuple[str, bool]:
    case = Case(variant, "ragged")
    kernel = dispatch.kernel(name)
    call = on_device(case.inputs().call(), device)
    reason = kernel.unsupported(call.spec, call.shape)
    if reason is not None:
        return f"  - {name:8} {variant:16} unsupported: {reason}", True
    try:
        error = check_forward(kernel, case, Tile(32, 32), device)
    except ContractError as found:
        return f"  ✗ {name:8} {variant:16} {found}", False
    return f"  ✓ {name:8} {variant:16} max error {error:.1e}", True


def _sample(name: str, device: str) -> bool:
    """A first exercise's result: 16 queries and keys of one head, beside the reference. Whether it is right."""
    rng = np.random.default_rng(0)
    host = validate.prepare(*(rng.standard_normal((16, 64), dtype=np.float32) for _ in range(3)))
    call = on_device(host, device)
    done = on_host(dispatch.kernel(name).forward(call.spec, call.q, call.k, call.v).out)
    wanted = expected_forward(host)[0]
    error, out = float(wanted.errors(done).max()), arrays.as_numpy(done)[0, 0]
    verdict, matches = ("PASS", "matches") if error <= wanted.limit else ("FAIL", "does not match")
    print(f"[{verdict}] FlashAttention: Output {matches} reference (max error: {error:.9f})")
    print(f"Output shape: {list(out.shape)}")
    print(f"Sample output (first row):\n{''.join(f'{x:8.3f}' for x in out[0, :8])}\n")
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

"""`tilewise bench --linear`: linear attention beside softmax attention, and where it overtakes it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tilewise.cli import UserError
from tilewise.cli.bench_options import check_gpu, several, whole
from tilewise.cli.terminal import progress


def run(args: argparse.Namespace) -> int:
    found = _on_gpu() if args.device == "cuda" else _on_cpu(args)
    if args.json is not None:
        from tilewise.cli.bench import write

        path = Path(args.json)
        write(found, path / "linear.json" if path.is_dir() else path)
    return 0


def _on_gpu() -> dict[str, Any]:
    check_gpu("--device cuda")
    from tilewise.linear import bench_gpu

    found = bench_gpu.results(progress=progress)
    progress()
    print(bench_gpu.text(found))
    return found


def _on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    from tilewise.linear import bench, dispatch

    kernel = args.kernel or "auto"
    if kernel not in ("auto", *dispatch.SYSTEMS):
        raise UserError(f"--kernel: expected one of {', '.join(dispatch.SYSTEMS)} with --linear, got {kernel!r}")
    lengths = [whole("n", n) for n in several("n", args.n, "512,1024")] if args.n else bench.LENGTHS
    d, heads, repeat = (
        whole(name, given) if given else default
        for name, given, default in (("d", args.d, 64), ("heads", args.heads, 8), ("repeat", args.repeat, 7))
    )
    rows = bench.measured(sorted(lengths), d, heads, kernel, repeat)
    found = bench.results(rows, d, heads)
    print(bench.text(found))
    return found

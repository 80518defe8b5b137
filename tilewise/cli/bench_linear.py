"""`tilewise bench --linear`: linear attention beside softmax attention, and where it overtakes it."""

from __future__ import annotations

import argparse
from pathlib import Path

from tilewise.cli import UserError
from tilewise.cli.bench_options import several, whole


def run(args: argparse.Namespace) -> int:
    from tilewise.cli.bench import write
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
    if args.json is not None:
        write(found, Path(args.json))
    return 0

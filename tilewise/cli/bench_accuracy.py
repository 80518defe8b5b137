"""`tilewise bench --accuracy`: relative errors of everyone's results and gradients against float64."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tilewise.cli import UserError
from tilewise.cli.bench_options import check_gpu, check_kernel, check_writable
from tilewise.cli.terminal import progress

_NAME = "accuracy.json"  # where a folder is given
_FIXED = (
    "n", "d", "variants", "dtype", "batch", "heads", "heads_k", "threads", "backward", "repeat", "budget", "no_memory",
    "plot",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    for name in _FIXED:
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')}: --accuracy has its own cells; leave it out")
    from tilewise.bench.accuracy import report
    from tilewise.bench.accuracy.run import SCHEMA
    from tilewise.cli.bench import stored, write

    target = None if args.json is None else _file("--json", args.json)
    if args.source is not None:
        source = Path(args.source)
        found = stored(source / _NAME if source.is_dir() else source, SCHEMA)
    else:
        found = _measured(args)
    print(report.text(found))
    if target is not None:
        write(found, target)
    return 0


def _file(option: str, given: str) -> Path:
    check_writable(option, given)
    path = Path(given)
    return path / _NAME if path.is_dir() else path


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    from tilewise.bench.accuracy import cells, contestants
    from tilewise.bench.accuracy.run import Measurement
    from tilewise.bench.machine import import_torch

    device = args.device or "cpu"
    if device == "cuda":
        check_gpu("--device cuda")
    elif import_torch() is None:
        raise UserError("--accuracy needs PyTorch; pip install torch")
    if args.kernel is not None:
        check_kernel(args.kernel)
    chosen, names = cells.cells(device, args.quick), contestants.names(device, args.kernel)
    options = {"device": device, "quick": args.quick, "kernel": args.kernel}
    found = Measurement(device, chosen, names, progress).results(options)
    progress()
    return found

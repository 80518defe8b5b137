"""`tilewise bench --linear`: linear attention beside softmax attention, and where it overtakes it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tilewise.cli import UserError
from tilewise.cli.bench_options import check_gpu, check_matplotlib, check_writable, several, whole
from tilewise.cli.terminal import progress

_NAME = "linear"  # of its files, where a folder is given


def run(args: argparse.Namespace) -> int:
    from tilewise.linear import bench, bench_gpu

    json_to, picture = _target("--json", args.json, ".json"), _target("--plot", args.plot, ".png")
    if picture is not None:
        check_matplotlib()
    if args.source is not None:
        found = _stored(Path(args.source), (bench.SCHEMA, bench_gpu.SCHEMA))
    else:
        found = _on_gpu() if args.device == "cuda" else _on_cpu(args)
    print((bench_gpu if found["schema"] == bench_gpu.SCHEMA else bench).text(found))
    if json_to is not None:
        from tilewise.cli.bench import write

        write(found, json_to)
    if picture is not None:
        from tilewise.linear import bench_plot

        bench_plot.draw(found, picture)
        print(f"wrote {picture}")
    return 0


def _target(option: str, given: str | None, suffix: str) -> Path | None:
    """A file, or a folder, where it has a name of its own."""
    if given is None:
        return None
    check_writable(option, given)
    path = Path(given)
    if path.is_dir():
        return path / f"{_NAME}{suffix}"
    if suffix == ".png" and path.suffix != suffix:
        raise UserError(f"{option}: expected a file ending in .png or an existing folder, got {given!r}")
    return path


def _stored(source: Path, schemas: tuple[str, ...]) -> dict[str, Any]:
    from tilewise.cli.bench import stored

    path = source / f"{_NAME}.json" if source.is_dir() else source
    try:
        schema = json.loads(path.read_text()).get("schema")
    except (OSError, ValueError, AttributeError, RecursionError):
        schema = None  # which is told of below
    return stored(path, schema if schema in schemas else schemas[0])


def _on_gpu() -> dict[str, Any]:
    check_gpu("--device cuda")
    from tilewise.linear import bench_gpu

    found = bench_gpu.results(progress=progress)
    progress()
    return found


def _on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    from tilewise.dispatch import Unsupported
    from tilewise.linear import bench, dispatch

    kernel = args.kernel or "auto"
    if kernel not in ("auto", *dispatch.SYSTEMS):
        raise UserError(f"--kernel: expected one of {', '.join(dispatch.SYSTEMS)} with --linear, got {kernel!r}")
    lengths = [whole("n", n) for n in several("n", args.n, "512,1024")] if args.n else bench.LENGTHS
    d, heads, repeat = (
        whole(name, given) if given else default
        for name, given, default in (("d", args.d, 64), ("heads", args.heads, 8), ("repeat", args.repeat, 7))
    )
    try:
        rows = bench.measured(sorted(lengths), d, heads, kernel, repeat)
    except Unsupported as error:
        raise UserError(f"--kernel: {error}") from None
    return bench.results(rows, d, heads)

"""What the suites of --cpu and --gpu share: sections are measured one by one, shown and written as they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tilewise.cli import UserError
from tilewise.cli.bench_options import check_matplotlib, check_writable

Results = dict[str, Any]
Show = Callable[[str, Results], str]  # a section's name and results as text


def check(args: argparse.Namespace, suite: str, fixed: Iterable[str]) -> None:
    """Refuse options that the suite decides itself, and targets that could not be written."""
    for name in fixed:
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: the suite of {suite} has its own cells; leave out {option}, or {suite}")
    for option, target in (("--json", args.json), ("--plot", args.plot)):
        if target is None:
            continue
        if Path(target).suffix or Path(target).is_file():
            raise UserError(f"{option}: with {suite} a folder is expected, for a file a section, got {target!r}")
        check_writable(option, target)
    if args.plot is not None:
        check_matplotlib()


def stored(args: argparse.Namespace, suite: str, names: Iterable[str], schema: Any, show: Show) -> dict[str, Results]:
    """The sections in a folder that an earlier run wrote."""
    from tilewise.cli.bench import stored

    paths = {name: Path(args.source) / f"{name}.json" for name in names}
    found = {name: stored(path, schema) for name, path in paths.items() if path.is_file()}
    if not found:
        raise UserError(f"--from: with {suite} a folder with {', '.join(p.name for p in paths.values())} is expected")
    for name, results in found.items():
        print(show(name, results) + "\n")
    return found


def measured(
    args: argparse.Namespace, names: Iterable[str], measure: Callable[[str], Results | None], show: Show
) -> dict[str, Results]:
    """Every section that came to its end. None of `measure`: stopped by the keyboard."""
    from tilewise.cli.bench import write

    done: dict[str, Results] = {}
    for name in names:
        results = measure(name)
        if results is None:
            print(f"stopped in {name}, which is left out", file=sys.stderr)
            break
        done[name] = results
        print(show(name, results))
        if args.json is not None:
            Path(args.json).mkdir(exist_ok=True)
            write(results, Path(args.json) / f"{name}.json")
        print(flush=True)
    if not done:
        raise KeyboardInterrupt
    return done


def drawn(args: argparse.Namespace, draw: Callable[[Path], list[Path]]) -> None:
    if args.plot is not None:
        Path(args.plot).mkdir(exist_ok=True)
        for path in draw(Path(args.plot)):
            print(f"wrote {path}")

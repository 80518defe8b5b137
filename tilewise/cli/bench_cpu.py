"""`tilewise bench --cpu`: the native engine beside PyTorch's SDPA, section by section, and its targets."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise import dispatch
from tilewise.cli import UserError
from tilewise.cli.bench_options import check_kernel, check_matplotlib, check_writable, seconds, whole
from tilewise.cli.terminal import progress

if TYPE_CHECKING:
    from tilewise.bench.suite import Section

Results = dict[str, Any]
_FIXED = ("n", "d", "variants", "dtype", "batch", "heads", "heads_k", "backward", "quick", "no_memory")


def run(args: argparse.Namespace) -> int:
    _check(args)
    from tilewise.bench import report

    sections = _stored(args) if args.source is not None else _measured(args)
    print(report.summary(sections))
    if args.plot is not None:
        from tilewise.bench import plot_suite

        Path(args.plot).mkdir(exist_ok=True)
        for path in plot_suite.draw(sections, Path(args.plot)):
            print(f"wrote {path}")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in _FIXED:
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: the suite of --cpu has its own cells; leave out {option}, or --cpu")
    for option, target in (("--json", args.json), ("--plot", args.plot)):
        if target is None:
            continue
        if Path(target).suffix or Path(target).is_file():
            raise UserError(f"{option}: with --cpu a folder is expected, for a file a section, got {target!r}")
        check_writable(option, target)
    if args.plot is not None:
        check_matplotlib()


def _chosen(args: argparse.Namespace) -> list[Section]:
    from tilewise.bench.suite import SECTIONS

    return [section for name, section in SECTIONS.items() if not args.cpu or name in args.cpu]


def _stored(args: argparse.Namespace) -> dict[str, Results]:
    """The sections in a folder that an earlier run wrote."""
    from tilewise.bench import report
    from tilewise.cli.bench import stored

    paths = {section.name: Path(args.source) / f"{section.name}.json" for section in _chosen(args)}
    found = {name: stored(path) for name, path in paths.items() if path.is_file()}
    if not found:
        raise UserError(f"--from: with --cpu a folder with {', '.join(p.name for p in paths.values())} is expected")
    for name, results in found.items():
        print(report.section(name, results) + "\n")
    return found


def _measured(args: argparse.Namespace) -> dict[str, Results]:
    """Every section that came to its end; each is shown and written as soon as it does."""
    from tilewise.bench import report
    from tilewise.cli.bench import write

    done: dict[str, Results] = {}
    options = _options(args)
    for section in _chosen(args):
        results = _section(section, options)
        if results is None:
            print(f"stopped in {section.name}, which is left out", file=sys.stderr)
            break
        done[section.name] = results
        print(report.section(section.name, results))
        if args.json is not None:
            Path(args.json).mkdir(exist_ok=True)
            write(results, Path(args.json) / f"{section.name}.json")
        print(flush=True)
    if not done:
        raise KeyboardInterrupt
    return done


def _options(args: argparse.Namespace) -> dict[str, Any]:
    from tilewise.bench import suite

    kernel = args.kernel or suite.KERNEL
    if args.kernel is None and kernel not in dispatch.NAMES:
        raise UserError(f"--cpu measures the kernel system {kernel!r}, which is not here; name another with --kernel")
    check_kernel(kernel)
    return {
        "kernel": kernel,
        "threads": suite.THREADS if args.threads is None else whole("threads", args.threads),
        "repeat": suite.REPEAT if args.repeat is None else whole("repeat", args.repeat),
        "budget": suite.BUDGET if args.budget is None else seconds("budget", args.budget),
    }


def _section(section: Section, options: dict[str, Any]) -> Results | None:
    """None: stopped by the keyboard."""
    from tilewise.bench import contestants, roofline, run, suite

    present, missing = contestants.installed(options["kernel"])
    present = [c for c in present if suite.takes_part(c.name, options["kernel"])]
    missing = {name: why for name, why in missing.items() if suite.takes_part(name, options["kernel"])}
    progress(f"{section.name}: measuring the machine's own limits")
    roof = roofline.measured(options["threads"])
    settings = section.settings(options["threads"], options["repeat"], options["budget"])
    records = run.Sweep(present, settings, partial(_tell, section.name)).run(section.cells)
    progress()
    if len(records) < len(present) * len(section.cells):
        return None
    return run.results(records, {"section": section.name, **options}, missing, roof)


def _tell(name: str, line: str) -> None:
    progress(f"{name} {line}")

"""`tilewise bench --cpu`: the native engine beside PyTorch's SDPA, section by section, and its targets."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from tilewise import dispatch
from tilewise.cli import UserError, bench_sections
from tilewise.cli.bench_options import check_kernel, seconds, whole
from tilewise.cli.terminal import progress

Results = dict[str, Any]
_FIXED = ("n", "d", "variants", "dtype", "batch", "heads", "heads_k", "backward", "quick", "device", "no_memory")


def run(args: argparse.Namespace) -> int:
    bench_sections.check(args, "--cpu", _FIXED)
    from tilewise.bench import plot_suite, report
    from tilewise.bench.run import SCHEMA
    from tilewise.bench.suite import SECTIONS

    names = [name for name in SECTIONS if not args.cpu or name in args.cpu]
    if args.source is not None:
        sections = bench_sections.stored(args, "--cpu", names, SCHEMA, report.section)
    else:
        sections = bench_sections.measured(args, names, partial(_section, _options(args)), report.section)
    print(report.summary(sections))
    bench_sections.drawn(args, partial(plot_suite.draw, sections))
    return 0


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


def _section(options: dict[str, Any], name: str) -> Results | None:
    """None: stopped by the keyboard."""
    from tilewise.bench import contestants, roofline, run, suite

    section = suite.SECTIONS[name]
    present, missing = contestants.installed(options["kernel"])
    present = [c for c in present if suite.takes_part(c.name, options["kernel"])]
    missing = {who: why for who, why in missing.items() if suite.takes_part(who, options["kernel"])}
    progress(f"{name}: measuring the machine's own limits")
    roof = roofline.measured(options["threads"])
    settings = section.settings(options["threads"], options["repeat"], options["budget"])
    records = run.Sweep(present, settings, partial(_tell, name)).run(section.cells)
    progress()
    if len(records) < len(present) * len(section.cells):
        return None
    return run.results(records, {"section": name, **options}, missing, roof)


def _tell(name: str, line: str) -> None:
    progress(f"{name} {line}")

"""`tilewise bench --gpu`: the GPU kernels beside cuDNN, FlashAttention-4 and FlexAttention, and their targets."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewise.cli import UserError, bench_sections
from tilewise.cli.bench_options import check_gpu, check_kernel, whole
from tilewise.cli.terminal import progress

if TYPE_CHECKING:
    from tilewise.bench.gpu.run import Suite

Results = dict[str, Any]
_FIXED = (
    "n", "d", "variants", "dtype", "batch", "heads", "heads_k", "backward", "budget", "threads", "device", "no_memory",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    bench_sections.check(args, "--gpu", _FIXED)
    from tilewise.bench.gpu import plot, report
    from tilewise.bench.gpu.run import SCHEMA
    from tilewise.bench.gpu.suite import SECTIONS

    names = [name for name in SECTIONS if not args.gpu or name in args.gpu]
    if args.source is not None:
        sections = bench_sections.stored(args, "--gpu", names, SCHEMA, report.section)
    else:
        sections = _measured(args, names)
    print(report.summary(sections))
    bench_sections.drawn(args, partial(plot.draw, sections))
    return 0


def _measured(args: argparse.Namespace, names: list[str]) -> dict[str, Results]:
    from tilewise.bench.gpu import report
    from tilewise.bench.gpu.run import Suite

    check_gpu("--gpu")
    options = _options(args)
    with Suite(options["kernel"], _settings(options), progress) as suite:
        return bench_sections.measured(args, names, partial(_section, suite, options), report.section)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What the JSON records. --repeat counts rounds here: within one the time decides."""
    from tilewise.bench.gpu import suite
    from tilewise.bench.gpu.timing import Settings

    kernel = args.kernel or suite.KERNEL
    check_kernel(kernel)
    rounds = (suite.QUICK if args.quick else Settings()).rounds
    repeat = rounds if args.repeat is None else whole("repeat", args.repeat)
    return {"kernel": kernel, "rounds": repeat, "quick": args.quick}


def _settings(options: dict[str, Any]) -> Any:
    from tilewise.bench.gpu import suite
    from tilewise.bench.gpu.timing import Settings

    return replace(suite.QUICK if options["quick"] else Settings(), rounds=options["rounds"])


def _section(suite: Suite, options: dict[str, Any], name: str) -> Results | None:
    """None: stopped by the keyboard."""
    from tilewise.bench.gpu.suite import SECTIONS
    from tilewise.bench.refusal import RefusedError

    section = SECTIONS[name]
    options = {**options, "kernel": section.kernel or options["kernel"]}
    try:
        return suite.section(section, section.quick if options["quick"] else section.cases, options)
    except KeyboardInterrupt:
        return None
    except RefusedError as error:
        raise UserError(f"--gpu: the GPU cannot be measured: {error.status}: {error.reason}") from None
    finally:
        progress()

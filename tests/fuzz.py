"""Random calls on one kernel system, judged by the contract: `python tests/fuzz.py --kernel numpy --cases 10000`.

Case i is made from the seed SEED + i alone, so `--only SEED` makes one of them again. A case is a call of random sizes,
strides, types, magnitudes, expressions and tile, forward and perhaps backward, or a linear attention. Its results must
be within the contract, the same bits the second time, and its inputs untouched; many arrays end at a page that no one
may touch. A failure is made small by itself, and printed as a line that asks for it again (`--question`).

    python tests/fuzz.py --kernel cpu --isa portable --seconds 60 --jobs 2
    python tests/fuzz.py --long all --seconds 3600 --jobs 16     # goes on where results/fuzz.json ends, and adds to it
    python tests/fuzz.py --left                                  # which calls are not on record yet
    python tests/fuzz.py --merge FILE ... ; python tests/fuzz.py --tell

On systems that compile, calls share kernels (--shapes). TRITON_INTERPRET=1 takes Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the judge's matrices are too small to share
if __name__ == "__main__":  # the project's folder, not the script's own, where `cuda` is something else
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tests.fuzzing.drawing.draw import Wanted
from tests.fuzzing.running import long, systems
from tests.fuzzing.running.failures import Failures
from tests.fuzzing.running.long import Long
from tests.fuzzing.running.put import Put
from tests.fuzzing.running.records import KEPT, ROOT, Record, left, merged, of_now, tell
from tests.fuzzing.running.report import Report
from tests.fuzzing.running.workers import answered
from tests.fuzzing.running.written import read
from tests.proof import digest
from tilewise.cli.terminal import progress

MOST_FAILURES = 10
BLOCK = 15  # seeds that a process takes at a time, where nothing is compiled for them


def run(
    put: Put, blocks: Iterable[Sequence[int]], jobs: int, seconds: float | None = None, total: int | None = None,
    piece: Callable[[Report], None] = lambda report: None,
) -> Report:  # fmt: skip
    """Judge every seed, or until the time is up, there are enough failures, or the user has seen enough.

    piece: is shown what was judged so far, now and then.
    """
    report = Report()
    until = None if seconds is None else time.monotonic() + seconds
    try:
        for found in answered(put.begin, blocks, jobs, until):
            if found is not None:
                report.add(*found)
            else:
                piece(report)
            progress(report.progress(total))
            if len(report.failures) >= MOST_FAILURES:
                break
    except KeyboardInterrupt:
        report.interrupted = True
    progress()
    return report


def blocks_of(seeds: range, size: int) -> Iterator[range]:
    return (seeds[at : at + size] for at in range(0, len(seeds), size))


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.left or options.merge or options.tell:
        return _on_record(options)
    if options.long == "all":
        further = ["--jobs", str(options.jobs), *(["--commit", options.commit] if options.commit else [])]
        return _one_after_the_other(options.results, options.seconds, further)
    name = options.long or options.kernel
    systems.before_processes(name)
    reason = systems.unavailable(name)
    if reason is not None:
        print(f"--kernel {name}: {reason}", file=sys.stderr)
        return 2
    put = Put(name, _wanted(name, options), options.isa)
    if options.question is not None:
        return _asked_again(put, options.question)
    if options.long is not None:
        return _long(put, options)
    seeds = range(options.seed, options.seed + (options.cases or (10_000 if options.seconds is None else 10**9)))
    if options.only is not None:
        seeds = range(options.only, options.only + 1)
    report = run(put, blocks_of(seeds, _block(put)), options.jobs, options.seconds,
                 None if options.seconds is not None else len(seeds))  # fmt: skip
    return _told(put, report, options.shrink_seconds)


def _block(put: Put) -> int:
    """Seeds that one process takes at a time: all of a variant's, where it is compiled."""
    return put.wanted.shapes if systems.compiles(put.name) else BLOCK


def _told(put: Put, report: Report, shrink_seconds: float) -> int:
    Failures(put, shrink_seconds).tell(report.failures)
    print(report.summary())
    if report.too_lucky is not None:
        print(f"FAILED: {report.too_lucky}")
    return 1 if report.failures or report.too_lucky else 130 if report.interrupted else 0


def _asked_again(put: Put, text: str) -> int:
    report = Report()
    for found in answered(put.begin, [[read(sys.stdin.read() if text == "-" else text)]], 1):
        if found is not None:
            report.add(0, found[1])
    for _, failure in report.failures:
        print(f"FAILED: {failure}")
    print(report.summary())
    return 1 if report.failures else 0


def _long(put: Put, options: argparse.Namespace) -> int:
    recorded = systems.recorded(put.name)
    of = of_now(recorded, put.isa, options.commit)
    going = Long(options.results, of, options.cases or long.share(recorded, put.isa))
    print(f"{recorded}{f', {put.isa}' if put.isa else ''}: {going.left:,} calls left", flush=True)
    report = run(put, going.blocks(options.seed, _block(put)), options.jobs, options.seconds, None, going.take)
    going.take(report, at_once=True)
    return _told(put, report, options.shrink_seconds)


def _one_after_the_other(path: Path, seconds: float | None, further: list[str]) -> int:
    codes = []
    for command, environment in long.commands(path, seconds, further):
        codes.append(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)
    return max(codes, default=0)


def _on_record(options: argparse.Namespace) -> int:
    for line in merged(options.results, options.merge or []):
        print(f"left out: {line}")
    if options.tell:
        tell(options.results)
    if options.left:
        for name, number in left(Record(options.results), digest(ROOT / "tilewise")).items():
            print(f"{name}: {number:,} calls")
    return 0


def _wanted(name: str, options: argparse.Namespace) -> Wanted:
    """What the options say, and where they say nothing what suits the kernel."""
    asked = {name: getattr(options, name) for name in ("backward_share", "half_share", "shapes")}
    return replace(systems.wanted(name), **{name: x for name, x in asked.items() if x is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Random calls on one kernel system, judged by the contract.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--kernel", type=_kernel, metavar="NAME", help="a kernel system, or a rung of it (cuda/tiled)")
    what.add_argument(
        "--long", type=_long_name, metavar="NAME|all", help="go on with its long run, and put it on record"
    )
    what.add_argument("--left", action="store_true", help="tell which calls are not on record yet")
    what.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add other machines' records")
    what.add_argument("--tell", action="store_true", help="write the record's table into docs/contract.md")
    parser.add_argument("--isa", metavar="NAME", help="the engine's instruction set: portable, avx2, avx512")
    parser.add_argument("--cases", type=_at_least(1), metavar="N", help="how many (default: 10000, or a run's target)")
    parser.add_argument("--seconds", type=float, metavar="N", help="no more time than that")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of the first case; others follow (default: 0)")
    parser.add_argument("--only", type=_at_least(0), metavar="SEED", help="one case again, by its own seed")
    parser.add_argument("--question", metavar="TEXT", help="one case again, as a failure printed it; -: from stdin")
    parser.add_argument("--jobs", type=_at_least(1), default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument(
        "--backward-share", type=_share, metavar="P", help="of cases with a backward pass (default: 0.3)"
    )
    parser.add_argument(
        "--half-share", type=_share, metavar="P",
        help="of cases that tensor cores can compute (default: 1 for forward_sm90, 0.5 for cuda and cuda-sim, else 0)",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", type=_at_least(1), metavar="N",
        help=f"calls in a row that share what is compiled (default: {systems.SHAPES_COMPILED} where it takes seconds, "
        f"else {systems.SHAPES})",
    )  # fmt: skip
    parser.add_argument(
        "--shrink-seconds", type=float, default=60.0, metavar="N", help="time to make each failure small (default: 60)"
    )
    parser.add_argument("--results", type=Path, default=KEPT, metavar="FILE", help="the record of long runs")
    parser.add_argument("--commit", help="which commit this is, where no repository tells")
    return parser


def _kernel(name: str) -> str:
    try:
        systems.check_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _long_name(name: str) -> str:
    if name == "all":
        return name
    if name not in {x.partition(" ")[0] for x in systems.TARGETS}:
        raise argparse.ArgumentTypeError(f"expected all or one of {', '.join(systems.TARGETS)}, got {name!r}")
    return name


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return number


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return share


if __name__ == "__main__":
    sys.exit(main())

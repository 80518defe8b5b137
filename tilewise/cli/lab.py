"""`tilewise lab`: exercises to do, graded: start, check, hint, solution."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli import UserError
from tilewise.cli.terminal import progress

if TYPE_CHECKING:
    from tilewise.lab.exercises.folder import Folder
    from tilewise.lab.exercises.grading import Verdict

LIMIT = 60.0  # seconds an exercise, with what it compiles
PRINTED = 20  # lines of a learner's own that are shown
EXERCISES = "online_softmax, tiled_attention, causal_skipping, triton_kernel, cuda_kernel, cuda_tiles"
_EXAMPLES = """examples:
  tilewise lab start attention-lab                      writes the exercises into a new folder
  cd attention-lab
  tilewise lab check                                    grades all of them
  tilewise lab check online_softmax                     or one
  tilewise lab hint online_softmax                      opens one more hint

The first three need NumPy alone, triton_kernel needs Triton, but no GPU, and the CUDA ones a C++ compiler."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "lab",
        help="exercises: write the algorithm yourself, and have it graded",
        description=f"Exercises cut out of the project's own sources, in this order: {EXERCISES}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda args: parser.print_help() or 2)
    actions = parser.add_subparsers(metavar="ACTION")
    words = {"nargs": "*", "metavar": "EXERCISE", "help": "names of exercises, or of their files (default: all)"}

    start = actions.add_parser("start", help="write the exercises into a folder")
    start.add_argument("folder", metavar="DIR", help="the folder, made if it is not there")
    start.add_argument("exercises", **words)
    start.add_argument("--force", action="store_true", help="begin anew: your files are kept as NAME.old")
    start.set_defaults(run=_start)

    check = actions.add_parser(
        "check",
        help="grade them; exit code 0 if all that were asked for are right",
        usage="tilewise lab check [-h] [--limit SECONDS] [DIR] [EXERCISE ...]",
    )
    check.add_argument("words", nargs="*", metavar="DIR, EXERCISE", help="(default: all of them, in this folder)")
    check.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS",
                       help="for one exercise (default: %(default)g)")  # fmt: skip
    check.set_defaults(run=_check)

    hint = actions.add_parser("hint", help="open one more hint of an exercise")
    hint.add_argument("exercise", metavar="EXERCISE", help="its name, or that of its file")
    hint.add_argument("folder", nargs="?", metavar="DIR", help="(default: this folder)")
    which = hint.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="show those that are open; open none")
    which.add_argument("--all", action="store_true", help="open all of them")
    hint.set_defaults(run=_hint)

    solution = actions.add_parser("solution", help="show the project's own lines of an exercise")
    solution.add_argument("exercise", metavar="EXERCISE", help="its name, or that of its file")
    solution.set_defaults(run=_solution)


# -- actions ----------------------------------------------------------------------------------------------------------


def _start(args: argparse.Namespace) -> int:
    from tilewise.lab.exercises.folder import Folder

    folder, names = Folder(Path(args.folder)), _names(args.exercises)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"DIR: expected a folder, got the file '{folder.path}'")
    worked = folder.with_work(names)
    if worked and not args.force:
        files = ", ".join(str(folder.file(name)) for name in worked)
        raise UserError(
            f"{files}: there is work of yours in it; nothing was written. "
            f"`tilewise lab start {args.folder} {' '.join(worked)} --force` begins anew and keeps it as NAME.old"
        )
    for name in folder.write(names):
        print(f"kept {folder.file(name)}.old")
    for name in names:
        print(f"wrote {folder.file(name)}")
    print(f"\nOpen {folder.file(names[0])}: it says what to write. Then: tilewise lab check {args.folder} {names[0]}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from tilewise.lab.exercises.grading import graded

    if not args.limit > 0:
        raise UserError(f"--limit: expected seconds, more than 0, got {args.limit:g}")
    folder, names = _folder_and_names(args.words)
    wrong = []
    for name in names:
        progress(f"checking {name}")
        begin = time.monotonic()
        verdict = graded(name, folder.file(name), args.limit)
        progress()
        print(_report(name, verdict, time.monotonic() - begin), flush=True)
        wrong += [] if verdict.is_right else [name]
    place = "" if folder.path == Path() else f" {folder.path}"
    more = f"; a hint: tilewise lab hint {wrong[0]}{place}" if wrong else ""
    print(f"\n{len(names) - len(wrong)} of {len(names)} done{more}")
    return 1 if wrong else 0


def _hint(args: argparse.Namespace) -> int:
    name = _name(args.exercise)  # there may be a folder of that name
    folder, _ = _folder_and_names([args.folder] if args.folder else [])
    before, every = folder.hints(name, more=0)
    hints, _ = folder.hints(name, more=0 if args.again else every if args.all else 1)
    shown = 0 if args.again or args.all else len(before)
    for number, hint in list(enumerate(hints, start=1))[shown:]:
        print(textwrap.fill(f"hint {number} of {every}: {hint}", 100, subsequent_indent="    ", break_long_words=False))
    if not hints:
        print(f"no hint is open; `tilewise lab hint {name}` opens the first of {every}")
    elif shown == every:
        print(f"all {every} hints are open; `tilewise lab hint {name} --again` shows them")
    return 0


def _solution(args: argparse.Namespace) -> int:
    from tilewise.lab.exercises import exercise

    print(exercise(_name(args.exercise)).source.solution(), end="")
    return 0


# -- what they print --------------------------------------------------------------------------------------------------


def _report(name: str, verdict: Verdict, seconds: float) -> str:
    if verdict.missing:
        return f"· {name}: not checked: {verdict.missing}"
    if verdict.is_right:
        return f"✓ {name}: {len(verdict.passed)} checks, {seconds:.1f} s"
    lines = verdict.wrong.splitlines()
    if verdict.passed:
        lines.append(f"right before that: {'; '.join(verdict.passed)}")
    if verdict.printed.strip():
        printed = verdict.printed.rstrip().splitlines()
        more = [f"({len(printed) - PRINTED} lines more)"] if len(printed) > PRINTED else []
        lines += ["your code printed:", *(f"  {line}" for line in printed[:PRINTED]), *more]
    return "\n    ".join([f"✗ {name}: {lines[0]}", *lines[1:]])


# -- what they are asked for ------------------------------------------------------------------------------------------


def _folder_and_names(words: Sequence[str]) -> tuple[Folder, list[str]]:
    """A folder and exercises, in any order. A file's path is both."""
    from tilewise.lab.exercises import NAMES
    from tilewise.lab.exercises.folder import Folder

    names = [word for word in words if Path(word).stem in NAMES and not Path(word).is_dir()]
    folders = {word for word in words if word not in names} | {
        str(Path(x).parent) for x in names if Path(x).parent != Path()
    }
    unknown = next((word for word in folders if not Path(word).is_dir()), None)
    if unknown is not None:
        raise UserError(f"expected a folder or one of {EXERCISES}, got {unknown!r}")
    if len(folders) > 1:
        raise UserError(f"expected one folder, got {', '.join(sorted(folders))}")
    folder = Folder(Path(*folders))
    if not folder.exists:
        raise UserError(f"'{folder.path}' has no exercises; `tilewise lab start {folder.path}` writes them")
    return folder, _names(names)


def _names(words: Sequence[str]) -> list[str]:
    """In the order in which to do them."""
    from tilewise.lab.exercises import NAMES

    asked = {_name(word) for word in words} or set(NAMES)
    return [name for name in NAMES if name in asked]


def _name(word: str) -> str:
    from tilewise.lab.exercises import NAMES

    name = Path(word).stem
    if name not in NAMES:
        raise UserError(f"EXERCISE: expected one of {EXERCISES}, got {word!r}")
    return name

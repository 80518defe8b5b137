"""The command line: `tilewise demo`, `plan`, `explain` ... One file a command, each with add_parser and run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tilewise._version import __version__

COMMANDS = ("demo", "doctor", "plan", "explain", "lab", "bench", "judge", "warmup", "tune", "build")


class UserError(Exception):
    """Something the user can mend: printed without a traceback, exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _command(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a reader that went away is met here, not when Python ends
    except UserError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntilewise: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `tilewise plan | head`
        _forget_output()
        return 0
    except MemoryError as error:
        print(f"tilewise: out of memory: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None and error.strerror else ""
        print(f"tilewise: {where}{error.strerror or error}", file=sys.stderr)
        _forget_output()
        return 1


def _command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="tilewise",
        description="Exact attention, computed tile by tile.",
        epilog="Start with `tilewise demo`. Each command has its own --help.",
    )
    parser.add_argument("--version", action="version", version=f"tilewise {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"tilewise.cli.{name}").add_parser(commands)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ✓ and █ shows something else, not a traceback
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    return int(args.run(args))


def _forget_output() -> None:
    """What could not be written is not tried again when Python ends, which would print a traceback."""
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())

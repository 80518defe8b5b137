"""`tilewise bench`: time, memory and error of our kernel systems beside their peers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise import dispatch
from tilewise.cli import UserError
from tilewise.cli.terminal import progress

if TYPE_CHECKING:
    from tilewise.bench.problem import Cell
    from tilewise.bench.run import Settings

FULL_SWEEP = {
    "n": "512,1024,2048,4096", "d": "64", "variants": "full,causal,window,alibi,softcap", "dtype": "float32",
    "batch": "1", "heads": "4", "repeat": "20", "budget": "2",
}  # fmt: skip
QUICK_SWEEP = {**FULL_SWEEP, "n": "256,1024", "variants": "causal", "heads": "2", "repeat": "5", "budget": "0.5"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time, memory and error beside PyTorch and NumPy",
        description="Times every kernel system of this machine beside its peers: in turns, on the same data, medians. "
        "Peers are PyTorch's SDPA, naive attention in PyTorch and in NumPy, where they are installed.",
        epilog="The default sweep takes a few minutes, --quick some seconds. NumPy's own threads follow its BLAS "
        "library's environment variable, e.g. OPENBLAS_NUM_THREADS=1.",
    )
    add = parser.add_argument
    add("--n", metavar="LIST", help=f"lengths, queries and keys alike ({FULL_SWEEP['n']})")
    add("--d", metavar="LIST", help=f"head dimensions ({FULL_SWEEP['d']})")
    known = "full, causal, window, prefix, document, alibi, softcap, bias"
    add("--variants", metavar="LIST", help=f"{known} ({FULL_SWEEP['variants']})")
    add("--dtype", metavar="LIST", help="float32, float16, bfloat16, float64 (float32)")
    add("--batch", metavar="N", help="sequences (1)")
    add("--heads", metavar="N", help="query heads (4)")
    add("--heads-k", metavar="N", help="key heads, which divide the query heads (as many)")
    add("--kernel", metavar="NAME", help="only this kernel system of ours, beside the peers")
    add("--threads", metavar="N", help="PyTorch's threads (its own choice)")
    add("--backward", action="store_true", help="also time forward and backward together")
    add("--repeat", metavar="N", help="repetitions at most (20)")
    add("--budget", metavar="SECONDS", help="for one contestant's repetitions in one cell (2)")
    add("--quick", action="store_true", help="a small sweep, in seconds; other options still count")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", dest="device", action="store_const", const="cpu", default="cpu", help="the default")
    device.add_argument("--gpu", dest="device", action="store_const", const="cuda", help="needs PyTorch with CUDA")
    add("--no-memory", action="store_true", help="do not measure memory, which starts a process a contestant")
    add("--json", metavar="FILE", help="write every number")
    add("--plot", metavar="FILE.png", help="draw speed and memory; a folder takes a picture a type and pass")
    add("--from", dest="source", metavar="FILE", help="show or plot the results in this JSON file; nothing is run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_targets(args)
    results = _measured(args) if args.source is None else _stored(args.source)
    from tilewise.bench import table

    print(table.text(results))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        print(f"wrote {args.json}")
    if args.plot is not None:
        from tilewise.bench import plot

        for path in plot.draw(results, Path(args.plot)):
            print(f"wrote {path}")
    return 0


def _check_targets(args: argparse.Namespace) -> None:
    """What would fail at the end of a long run fails at its start."""
    if args.plot is not None and find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; pip install matplotlib")
    if args.plot is not None and not Path(args.plot).is_dir() and Path(args.plot).suffix != ".png":
        raise UserError(f"--plot: expected a file ending in .png or an existing folder, got {args.plot!r}")
    if args.json is not None and Path(args.json).is_dir():
        raise UserError(f"--json: expected a file, got the folder {args.json!r}")
    for option, target in (("--json", args.json), ("--plot", args.plot)):
        if target is None:
            continue
        folder = Path(target) if Path(target).is_dir() else Path(target).parent
        if not folder.is_dir():
            raise UserError(f"{option}: there is no folder {str(folder)!r}")
        if not os.access(Path(target) if Path(target).exists() else folder, os.W_OK):
            raise UserError(f"{option}: {target!r} cannot be written")


def _stored(source: str) -> dict[str, Any]:
    from tilewise.bench.run import SCHEMA

    try:
        found: Any = json.loads(Path(source).read_text())
    except OSError as error:
        raise UserError(f"--from: cannot read {source!r}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"--from: {source!r} is not JSON; expected a file written by `tilewise bench --json`") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA or not found.get("records"):
        raise UserError(f"--from: expected results of `tilewise bench --json` (schema {SCHEMA}), got schema {schema!r}")
    return dict(found)


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    options = _options(args)
    settings, cells = _settings(options), _cells(options)
    _check_kernel(options["kernel"])
    timer = _prepare_torch(options)
    from tilewise.bench import contestants, run, table

    present, missing = contestants.installed(options["kernel"])
    records = run.Sweep(present, settings, timer, progress).run(cells)
    progress()
    if not records:
        raise KeyboardInterrupt
    done = len({tuple(record[name] for name in table.CELL) for record in records})
    if done < len(cells):
        print(f"stopped after {done} of {len(cells)} cells; these are their results", file=sys.stderr)
    return run.results(records, options, missing, options["device"])


# -- options ----------------------------------------------------------------------------------------------------------


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Every option with its value, checked: what the JSON records. No file names."""
    from tilewise.bench.problem import DTYPES, VARIANTS
    from tilewise.validate import MAX_HEAD_DIM

    given = {**(QUICK_SWEEP if args.quick else FULL_SWEEP)}
    given.update({name: getattr(args, name) for name in given if getattr(args, name) is not None})
    numbers = {name: _whole(name, given[name]) for name in ("batch", "heads", "repeat")}
    heads_k = numbers["heads"] if args.heads_k is None else _whole("heads-k", args.heads_k)
    if numbers["heads"] % heads_k:
        raise UserError(f"--heads-k: expected a divisor of the {numbers['heads']} query heads, got {heads_k}")
    return {
        "n": [_whole("n", x) for x in _list("n", given["n"])],
        "d": [_whole("d", x, most=MAX_HEAD_DIM) for x in _list("d", given["d"])],
        "variants": _names("variants", given["variants"], tuple(VARIANTS)),
        "dtype": _names("dtype", given["dtype"], DTYPES),
        **numbers,
        "heads_k": heads_k,
        "kernel": args.kernel,
        "threads": None if args.threads is None else _whole("threads", args.threads),
        "backward": args.backward,
        "budget": _seconds("budget", given["budget"]),
        "quick": args.quick,
        "device": args.device,
        "memory": not args.no_memory,
    }


def _list(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise UserError(f"--{option}: expected a list such as {FULL_SWEEP[option]}, got {text!r}")
    return list(dict.fromkeys(items))


def _names(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = _list(option, text)
    for name in names:
        if name not in known:
            raise UserError(f"--{option}: there is no {name!r}; expected some of {', '.join(known)}")
    return names


def _whole(option: str, text: str, most: int = 2**31 - 1) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        limit = f"from 1 to {most}" if most < 2**31 - 1 else "of at least 1"
        raise UserError(f"--{option}: expected a whole number {limit}, got {text!r}")
    return int(text)


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"--{option}: expected a number of seconds above 0, got {text!r}")
    return seconds


def _settings(options: dict[str, Any]) -> Settings:
    from tilewise.bench.run import Settings

    return Settings(options["repeat"], options["budget"], options["memory"], options["threads"])


def _cells(options: dict[str, Any]) -> list[Cell]:
    from tilewise.bench.problem import Cell

    return [
        Cell(variant, n, d, dtype, options["batch"], options["heads"], options["heads_k"], backward, options["device"])
        for dtype in options["dtype"]
        for backward in (False, True)[: 1 + options["backward"]]
        for d in options["d"]
        for variant in options["variants"]
        for n in options["n"]
    ]


def _check_kernel(name: str | None) -> None:
    if name is None:
        return
    try:
        reason = dispatch.kernel(name).unavailable()
    except ValueError:
        raise UserError(f"--kernel: there is no {name!r}; expected one of {', '.join(dispatch.NAMES)}") from None
    if reason is not None:
        raise UserError(f"--kernel: {name!r} cannot run here: {reason}")


def _prepare_torch(options: dict[str, Any]) -> Any:
    """Set PyTorch's threads, and choose how time is taken."""
    from tilewise.bench import measure

    wanted = [flag for flag, on in (("--gpu", options["device"] != "cpu"), ("--threads", options["threads"])) if on]
    if not wanted:
        return measure.wall_timer()
    try:
        import torch
    except (ImportError, OSError):
        raise UserError(f"{wanted[0]} needs PyTorch; pip install torch") from None
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    if options["device"] == "cpu":
        return measure.wall_timer()
    if not torch.cuda.is_available():
        raise UserError("--gpu needs PyTorch with CUDA and an NVIDIA GPU; this PyTorch sees none (use --cpu)")
    return measure.cuda_timer()

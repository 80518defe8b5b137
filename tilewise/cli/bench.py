"""`tilewise bench`: time, memory and error of our kernel systems beside their peers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli import UserError, bench_report
from tilewise.cli.bench_options import (
    check_gpu,
    check_kernel,
    check_matplotlib,
    check_writable,
    names,
    seconds,
    several,
    whole,
)
from tilewise.cli.terminal import progress
from tilewise.kernels.disk import write_whole

if TYPE_CHECKING:
    from tilewise.bench.problem import Cell

FULL_SWEEP = {
    "n": "512,1024,2048,4096", "d": "64", "variants": "full,causal,window,alibi,softcap", "dtype": "float32",
    "batch": "1", "heads": "4", "repeat": "20", "budget": "2",
}  # fmt: skip
QUICK_SWEEP = {**FULL_SWEEP, "n": "256,1024", "variants": "causal", "heads": "2", "repeat": "5", "budget": "0.5"}
CPU_SECTIONS = ("forward", "half", "training", "decode", "window", "memory")
GPU_SECTIONS = (
    "forward",
    "stress",
    "variants",
    "gqa",
    "varlen",
    "ladder",
    "units",
    "triton",
    "backward",
    "gradients",
    "learned",
    "cute",
    "cute_gradients",
    "scaling",
    "projection",
    "tilelang",
    "tilelang_gradients",
    "step",
    "decode",
    "launch",
    "first",
)
_CPU_HELP = f"the CPU engine's suite, with its targets: {', '.join(CPU_SECTIONS)}, or all of them"
_PARALLEL_HELP = "attention over so many processes of this machine, and the bytes that they send (1 2)"
_ACCURACY_HELP = "relative errors of results and gradients against float64, beside peers; with --device cuda on a GPU"
_GPU_HELP = f"the GPU kernels' suite, with its targets: {', '.join(GPU_SECTIONS)}, or all of them"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time, memory and error beside PyTorch and NumPy",
        description="Times every kernel system of this machine beside its peers: in turns, each in a process of its "
        "own, on the same data, medians. Peers are PyTorch's SDPA, naive attention in PyTorch and in NumPy, where they "
        "are installed.",
        epilog="The default sweep takes a few minutes, --quick some seconds. --cpu is the native engine's own suite "
        "beside PyTorch's SDPA, with its targets: about ten minutes, a file a section in the folders that --json and "
        "--plot name. --gpu is that of the CUDA kernels, beside cuDNN, FlashAttention-4 and FlexAttention: twenty.",
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
    add("--threads", metavar="N", help="threads of every contestant (its own choice; 2 with --cpu)")
    add("--backward", action="store_true", help="also time forward and backward together")
    add("--repeat", metavar="N", help="repetitions at most (20); with --gpu rounds (5)")
    add("--budget", metavar="SECONDS", help="for one contestant's repetitions in one cell (2)")
    add("--quick", action="store_true", help="a small sweep, in seconds; other options still count; --gpu has one too")
    add("--device", choices=("cpu", "cuda"), help="where the sweep runs (cpu); cuda needs PyTorch with CUDA")
    suite = parser.add_mutually_exclusive_group()
    suite.add_argument("--cpu", nargs="*", choices=CPU_SECTIONS, metavar="SECTION", help=_CPU_HELP)
    suite.add_argument("--gpu", nargs="*", choices=GPU_SECTIONS, metavar="SECTION", help=_GPU_HELP)
    suite.add_argument("--parallel", nargs="*", metavar="RANKS", help=_PARALLEL_HELP)
    suite.add_argument(
        "--linear", action="store_true", help="linear attention beside causal softmax attention, by length"
    )
    suite.add_argument("--accuracy", action="store_true", help=_ACCURACY_HELP)
    add("--no-memory", action="store_true", help="do not measure memory, which starts a process a contestant and cell")
    add("--json", metavar="FILE", help="write every number")
    add("--plot", metavar="FILE.png", help="draw speed and memory; a folder takes a picture a type and pass")
    add("--from", dest="source", metavar="FILE", help="show or plot the results in this JSON file; nothing is run")
    bench_report.add_options(parser, suite)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.source is None:
        return _run(args)
    try:
        return _run(args)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:  # whatever a file lacks
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"--from: '{args.source}' is not as its schema has it: {what}") from None


def _run(args: argparse.Namespace) -> int:
    if args.report is not None:
        return bench_report.run(args)
    bench_report.refuse_its_options(args)
    if args.cpu is not None:
        from tilewise.cli import bench_cpu

        return bench_cpu.run(args)
    if args.gpu is not None:
        from tilewise.cli import bench_gpu

        return bench_gpu.run(args)
    if args.parallel is not None:
        from tilewise.cli import bench_parallel

        return bench_parallel.run(args)
    if args.accuracy:
        from tilewise.cli import bench_accuracy

        return bench_accuracy.run(args)
    if args.linear:
        from tilewise.cli import bench_linear

        return bench_linear.run(args)
    _check_targets(args)
    from tilewise.bench import table
    from tilewise.bench.run import SCHEMA

    results = _measured(args) if args.source is None else stored(Path(args.source), SCHEMA)
    print(table.text(results))
    if args.json is not None:
        write(results, Path(args.json))
    if args.plot is not None:
        from tilewise.bench import plot

        for path in plot.draw(results, Path(args.plot)):
            print(f"wrote {path}")
    return 0


def _check_targets(args: argparse.Namespace) -> None:
    if args.plot is not None:
        check_matplotlib()
        if not Path(args.plot).is_dir() and Path(args.plot).suffix != ".png":
            raise UserError(f"--plot: expected a file ending in .png or an existing folder, got {args.plot!r}")
    if args.json is not None and Path(args.json).is_dir():
        raise UserError(f"--json: expected a file, got the folder {args.json!r}")
    for option, target in (("--json", args.json), ("--plot", args.plot)):
        if target is not None:
            check_writable(option, target)


def write(results: dict[str, Any], path: Path) -> None:
    write_whole(path, (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())
    print(f"wrote {path}")


def stored(source: Path, expected: Any) -> dict[str, Any]:
    """Results that were written before, in the schema that is expected."""
    try:
        found: Any = json.loads(source.read_text())
    except OSError as error:
        raise UserError(f"--from: cannot read '{source}': {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"--from: '{source}' is not JSON; expected a file written by `tilewise bench --json`") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != expected or not found.get("records"):
        raise UserError(
            f"--from: expected results of `tilewise bench --json` (schema {expected}), got schema {schema!r}"
        )
    return dict(found)


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    options = _options(args)
    cells = _cells(options)
    if options["kernel"] is not None:
        check_kernel(options["kernel"])
    if options["device"] != "cpu":
        check_gpu("--device cuda")
    from tilewise.bench import contestants, machine, roofline, run, table

    load = machine.load()  # before any of it is ours
    present, missing = contestants.installed(options["kernel"])
    settings = run.Settings(options["repeat"], options["budget"], options["memory"], options["threads"])
    roof = roofline.measured(options["threads"]) if options["device"] == "cpu" else roofline.UNKNOWN
    records = run.Sweep(present, settings, progress).run(cells)
    progress()
    if not records:
        raise KeyboardInterrupt
    done = len({tuple(record[name] for name in table.CELL) for record in records})
    if done < len(cells):
        print(f"stopped after {done} of {len(cells)} cells; these are their results", file=sys.stderr)
    return run.results(records, options, missing, roof, load)


# -- options ----------------------------------------------------------------------------------------------------------


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Every option with its value, checked: what the JSON records. No file names."""
    from tilewise.bench.problem import DTYPES, VARIANTS
    from tilewise.validate import MAX_HEAD_DIM

    given = {**(QUICK_SWEEP if args.quick else FULL_SWEEP)}
    given.update({name: getattr(args, name) for name in given if getattr(args, name) is not None})
    lists = {name: several(name, given[name], FULL_SWEEP[name]) for name in ("n", "d", "variants", "dtype")}
    numbers = {name: whole(name, given[name]) for name in ("batch", "heads", "repeat")}
    heads_k = numbers["heads"] if args.heads_k is None else whole("heads-k", args.heads_k)
    if numbers["heads"] % heads_k:
        raise UserError(f"--heads-k: expected a divisor of the {numbers['heads']} query heads, got {heads_k}")
    return {
        "n": [whole("n", x) for x in lists["n"]],
        "d": [whole("d", x, most=MAX_HEAD_DIM) for x in lists["d"]],
        "variants": names("variants", lists["variants"], tuple(VARIANTS)),
        "dtype": names("dtype", lists["dtype"], DTYPES),
        **numbers,
        "heads_k": heads_k,
        "kernel": args.kernel,
        "threads": None if args.threads is None else whole("threads", args.threads),
        "backward": args.backward,
        "budget": seconds("budget", given["budget"]),
        "quick": args.quick,
        "device": args.device or "cpu",
        "memory": not args.no_memory,
    }


def _cells(options: dict[str, Any]) -> list[Cell]:
    from tilewise.bench.problem import Cell

    sizes = options["batch"], options["heads"], options["heads_k"]
    return [
        Cell(variant, n, n, d, dtype, *sizes, backward, options["device"])
        for dtype in options["dtype"]
        for backward in (False, True)[: 1 + options["backward"]]
        for d in options["d"]
        for variant in options["variants"]
        for n in options["n"]
    ]

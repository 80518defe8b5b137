"""`tilewise tune`: the Triton kernels' tiles, warps and stages tried out on this GPU, and the best of them kept."""

from __future__ import annotations

import argparse
import math
from typing import Any

from tilewise.bench.machine import import_torch
from tilewise.cli import UserError
from tilewise.cli.bench_options import names, several, whole
from tilewise.cli.terminal import progress
from tilewise.kernels import gpus
from tilewise.kernels.triton.choices import Choice, Pass, up

_PASSES = tuple(kind.value for kind in Pass)
_ABOUT = """Tries tiles, warps and stages of the Triton kernels on this machine's GPU, for heads of given sizes in half
precision, and keeps the best in the cache folder (TILEWISE_CACHE, or the user's own), for plain calls and for masked
ones apart. Calls take them from then on; tw.explain tells. What is not tuned keeps the table's. It compiles up to a few
hundred kernels for each head, which takes many minutes; --passes has less."""
_ABOUT_PASSES = """the forward pass, gradients of q, of k and v, of a bias (pairs) and of other arrays, and decoding
(default: %(default)s)"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune", help="find the best tiles of the Triton kernels on this GPU", description=_ABOUT
    )
    parser.add_argument("--d", default="64,128,256", metavar="LIST", help="head dimensions (default: %(default)s)")
    parser.add_argument("--passes", default=",".join(_PASSES), metavar="LIST", help=_ABOUT_PASSES)
    parser.add_argument("--device", default="cuda:0", help="(default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    heads = [whole("d", d, most=512) for d in several("d", args.d, "64,128")]
    kinds = [Pass(x) for x in names("passes", several("passes", args.passes, "forward,d_query"), _PASSES)]
    _check_gpu()
    from tilewise.kernels.triton import trials, tuned

    for d in heads:
        tried = (trial for kind in kinds for trial in trials.trials(kind, d, args.device))
        found = {(trial.kind, trial.calls, up(d)): _best(trial, d) for trial in tried}
        print(f"kept in {tuned.save(tuned.gpu_name(args.device), found)}")
    return 0


def _check_gpu() -> None:
    import_torch()
    from tilewise.kernels.triton import not_installed
    from tilewise.kernels.triton.modules import is_interpreted

    interpreted = "TRITON_INTERPRET is set, and an interpreter has no speed to tune" if is_interpreted() else None
    reason = not_installed() or interpreted or gpus.none_here()
    if reason is not None:
        raise UserError(f"tune needs a GPU that Triton serves: {reason}")


def _best(trial: Any, d: int) -> Choice:
    """The fastest choice, and a line that tells of it."""
    from tilewise.kernels.triton import trials

    name, before = f"{trial.kind.value}, {trial.calls.value}, d {d}", trials.taken(trial)
    times = {before: trials.milliseconds(trial, before)}
    others = [choice for choice in trials.candidates(trial) if choice != before]
    for i, choice in enumerate(others, start=1):
        progress(f"{name}: {i} of {len(others)}: {choice}")
        times[choice] = trials.milliseconds(trial, choice)
    progress()
    best = min(times, key=times.__getitem__)
    if math.isinf(times[best]):
        raise UserError(f"{name}: no choice runs on this GPU; please report it with `tilewise doctor`")
    gain = "as before" if best == before else f"before {times[before]:.3f} ms, {before}"
    print(f"{name}: {times[best]:.3f} ms, {best} ({gain})")
    return best

"""`tilewise tune`: the Triton kernels' tiles, warps and stages tried out on this GPU, and the best of them kept."""

from __future__ import annotations

import argparse
import math
from typing import Any

from tilewise.bench.machine import import_torch
from tilewise.cli import UserError
from tilewise.cli.bench_options import several, whole
from tilewise.cli.terminal import progress

_ABOUT = """Tries tiles, warps and stages of the Triton kernels on this machine's GPU, forward and backward, for heads
of given sizes, and keeps the best in the cache folder (TILEWISE_CACHE, or the user's own). Calls take them from then
on; tw.explain tells. It compiles some dozens of kernels for each head, which takes minutes."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune", help="find the best tiles of the Triton kernels on this GPU", description=_ABOUT
    )
    parser.add_argument("--d", default="64,128,256", metavar="LIST", help="head dimensions (default: %(default)s)")
    parser.add_argument("--device", default="cuda:0", help="(default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    heads = [whole("d", d, most=512) for d in several("d", args.d, "64,128")]
    _check_gpu()
    from tilewise.kernels.triton import trials, tuned
    from tilewise.kernels.triton.tuning import up

    found: tuned.Choices = {kind.value: {} for kind in trials.PASSES}
    for d in heads:
        calls = trials.problems(d, args.device)
        for kind in trials.PASSES:
            best = _best(kind, d, calls)
            found[kind.value][up(d)] = (best.tile.q, best.tile.k, best.warps, best.stages)
    print(f"kept in {tuned.save(tuned.gpu_name(args.device), found)}")
    return 0


def _check_gpu() -> None:
    import_torch()
    from tilewise.kernels.triton import no_gpu, not_installed
    from tilewise.kernels.triton.modules import is_interpreted

    interpreted = "TRITON_INTERPRET is set, and an interpreter has no speed to tune" if is_interpreted() else None
    reason = not_installed() or interpreted or no_gpu()
    if reason is not None:
        raise UserError(f"tune needs a GPU that Triton serves: {reason}")


def _best(kind: Any, d: int, calls: list[Any]) -> Any:
    """The fastest choice, and a line that tells of it."""
    from tilewise.kernels.triton import trials

    before = trials.default(kind, calls[0])
    times = {before: trials.milliseconds(kind, before, calls)}
    others = [choice for choice in trials.candidates(kind, calls[0]) if choice != before]
    for i, choice in enumerate(others, start=1):
        progress(f"{kind.value}, d {d}: {i} of {len(others)}: {choice}")
        times[choice] = trials.milliseconds(kind, choice, calls)
    progress()
    best = min(times, key=times.__getitem__)
    if math.isinf(times[best]):
        raise UserError(f"{kind.value}, d {d}: no choice runs on this GPU; please report it with `tilewise doctor`")
    gain = "as before" if best == before else f"before {times[before]:.3f} ms, {before}"
    print(f"{kind.value}, d {d}: {times[best]:.3f} ms, {best} ({gain})")
    return best

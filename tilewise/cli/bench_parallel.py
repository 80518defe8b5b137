"""`tilewise bench --parallel`: attention over processes of this machine, beside one; and what they send each other."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.cli import UserError
from tilewise.cli.bench_options import check_writable, whole
from tilewise.cli.terminal import progress

if TYPE_CHECKING:
    from tilewise.bench.ranks import Sizes

RANKS = ["1", "2"]
_FIXED = (
    "variants", "dtype", "batch", "kernel", "threads", "backward", "budget", "device", "no_memory", "plot",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from tilewise.bench import ranks
    from tilewise.cli.bench import stored, write

    for name in _FIXED:
        if getattr(args, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')}: --parallel has its own; leave it out")
    if args.source is not None:
        print(ranks.text(stored(Path(args.source), ranks.SCHEMA)))
        return 0
    if find_spec("torch") is None:
        raise UserError("--parallel needs PyTorch; pip install torch")
    if args.json is not None:
        check_writable("--json", args.json)
    found = ranks.results([whole("parallel", x) for x in args.parallel or RANKS], _sizes(args), progress)
    progress()
    print(ranks.text(found))
    if args.json is not None:
        write(found, Path(args.json))
    return 0


def _sizes(args: argparse.Namespace) -> Sizes:
    from tilewise.bench.ranks import Sizes

    quick = {"n": 1024, "repeat": 2} if args.quick else {}
    given = {name: getattr(args, name) for name in ("n", "heads", "heads_k", "d", "repeat")}
    told = {name: whole(name.replace("_", "-"), text) for name, text in given.items() if text is not None}
    if "heads" in told:
        told.setdefault("heads_k", told["heads"])
    sizes = Sizes(**{**quick, **told})
    if sizes.heads % sizes.heads_k:
        raise UserError(f"--heads-k: expected a divisor of the {sizes.heads} query heads, got {sizes.heads_k}")
    return sizes

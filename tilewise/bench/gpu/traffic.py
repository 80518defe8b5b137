"""What one launch really reads and writes: Nsight Compute's counters of DRAM and L2, from a process of its own."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from tilewise.bench.gpu import cases
from tilewise.bench.gpu.cases import Case
from tilewise.bench.gpu.contestants import find
from tilewise.bench.refusal import public

DRAM, L2 = "dram__bytes.sum", "lts__t_bytes.sum"
_MARK = "spin_kernel"  # what torch.cuda._sleep launches: it stands before each contestant's own kernels
_TIMEOUT = 120.0

Plays = Sequence[tuple[str, Case]]  # who plays, and what


def measured(plays: Plays) -> list[dict[str, float]] | str:
    """Bytes by metric of a single call of each; or why there are none."""
    if shutil.which("ncu") is None:
        return "ncu (Nsight Compute) is not on PATH"
    command = [
        "ncu", "--csv", "--print-units", "base", "--profile-from-start", "off", "--metrics", f"{DRAM},{L2}",
        sys.executable, "-c", f"from {__name__} import *; play({list(plays)!r})",
    ]  # fmt: skip
    try:
        path = os.pathsep.join(p for p in sys.path if p)  # as it is here: the package may not be installed
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, env=env)
    except (OSError, subprocess.SubprocessError) as error:
        return public(f"ncu: {type(error).__name__}")
    found = parsed(done.stdout)
    if len(found) == len(plays):
        return found
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return public(": ".join([f"ncu counted {len(found)} of {len(plays)} calls", *last]))


def parsed(text: str) -> list[dict[str, float]]:
    """The sums of each call's kernels, in the order of the calls."""
    lines = [line for line in text.splitlines() if line.startswith('"')]  # the tool's own words stand between them
    found: list[dict[str, float]] = []
    last = None  # the launch of the row before: a launch has a row for each metric
    for row in csv.DictReader(lines):
        if _MARK in row["Kernel Name"]:
            if row["ID"] != last:
                found.append({DRAM: 0.0, L2: 0.0})
        elif found:
            found[-1][row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
        last = row["ID"]
    return found


def play(plays: Plays) -> None:
    """One call of each, between the marks, its second: the first compiles."""
    import torch

    entered = [find(name).enter(case, [cases.draw(case, 0, "cuda")]) for name, case in plays]
    for entry in entered:
        entry.calls[0]()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for entry in entered:
        torch.cuda._sleep(1)
        entry.calls[0]()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()

"""What one launch really does: Nsight Compute's counters of bytes and of busy units, from a process of its own."""

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
# Shares of the cycles, in percent: of tensor cores, of the unit for exponentials, of the slots to issue instructions.
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
EXPONENTIALS = "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
_TIME = "gpu__time_duration.sum"
_MARK = "spin_kernel"  # what torch.cuda._sleep launches: it stands before each contestant's own kernels
_TIMEOUT = 120.0

Plays = Sequence[tuple[str, Case]]  # who plays, and what
Launches = list[dict[str, float]]  # their metrics


def traffic(plays: Plays) -> list[dict[str, float]] | str:
    """Bytes by metric of a single call of each, over all its launches; or why there are none."""
    found = _counted(plays, (DRAM, L2))
    if isinstance(found, str):
        return found
    return [{name: sum(launch[name] for launch in call) for name in (DRAM, L2)} for call in found]


def busy(plays: Plays) -> list[dict[str, float]] | str:
    """Shares by metric of the longest launch of a single call of each; or why there are none."""
    found = _counted(plays, (TENSOR, EXPONENTIALS, ISSUE, _TIME))
    return found if isinstance(found, str) else [max(call, key=lambda launch: launch[_TIME]) for call in found]


def _counted(plays: Plays, metrics: Sequence[str]) -> list[Launches] | str:
    if shutil.which("ncu") is None:
        return "ncu (Nsight Compute) is not on PATH"
    command = [
        "ncu", "--csv", "--print-units", "base", "--profile-from-start", "off", "--metrics", ",".join(metrics),
        sys.executable, "-c", f"from {__name__} import *; play({list(plays)!r})",
    ]  # fmt: skip
    try:
        path = os.pathsep.join(p for p in sys.path if p)  # as it is here: the package may not be installed
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, env=env)
    except (OSError, subprocess.SubprocessError) as error:
        return public(f"ncu: {type(error).__name__}")
    found = parsed(done.stdout)
    if len(found) == len(plays) and all(found):
        return found
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return public(": ".join([f"ncu counted {sum(map(bool, found))} of {len(plays)} calls", *last]))


def parsed(text: str) -> list[Launches]:
    """Each call's launches with their metrics, in the order of the calls."""
    lines = [line for line in text.splitlines() if line.startswith('"')]  # the tool's own words stand between them
    found: list[Launches] = []
    last = None  # the launch of the row before: a launch has a row for each metric
    for row in csv.DictReader(lines):
        is_new, last = row["ID"] != last, row["ID"]
        if _MARK in row["Kernel Name"]:
            if is_new:
                found.append([])
        elif found:
            if is_new:
                found[-1].append({})
            found[-1][-1][row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
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

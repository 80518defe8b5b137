"""How much memory: a contestant runs once in a fresh process, and the growth of its peak is read. Outputs count too.

Limits: pages, not requests, are counted, so a few hundred KiB are noise; a library's own buffers count as its use.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewise.bench.contestants import RefusedError, find
from tilewise.bench.problem import Cell, Problem

_CHILD = "from tilewise.bench.memory import child; child()"
_WARM_UP = 64  # queries: enough to load libraries and start threads
_KILLED = -9


def extra_bytes(cell: Cell, contestant: str, seed: int, threads: int | None, timeout: float) -> int:
    """Bytes beyond the inputs at the peak of one call, in a fresh process."""
    if sys.platform == "win32":
        raise RefusedError("unsupported", "peak memory is measured on Linux and macOS only")
    job = {"cell": asdict(cell), "contestant": contestant, "seed": seed, "threads": threads}
    return int(in_child(_CHILD, json.dumps(job), timeout))


def in_child(code: str, told: str, timeout: float) -> str:
    """The last line that Python code prints in a process of its own, which is told something on its input."""
    # A fixed threshold makes glibc return freed blocks at once: memory freed before the call cannot hide what it takes.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "MALLOC_MMAP_THRESHOLD_": "65536"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], input=told, capture_output=True, text=True, timeout=timeout, env=env
        )
    except subprocess.TimeoutExpired:
        raise RefusedError("skipped", f"the memory measurement took more than {timeout:.0f} s") from None
    if done.returncode == _KILLED:
        raise RefusedError("out of memory", "the process that measures memory was killed")
    if done.returncode != 0:
        raise RefusedError("failed", (done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout.strip().splitlines()[-1]


def child() -> None:
    """The other side of extra_bytes."""
    job = json.load(sys.stdin)
    cell = Cell(**job["cell"])
    if job["threads"] is not None and "torch" in job["contestant"]:
        import torch

        torch.set_num_threads(job["threads"])
    contestant = find(job["contestant"])
    small = Problem.make(Cell(**{**job["cell"], "n": min(cell.n, _WARM_UP)}), job["seed"])
    warm = contestant.enter(small)
    warm.run(warm.put(small.d_out))
    problem = Problem.make(cell, job["seed"])
    entry = contestant.enter(problem)
    d_out = entry.put(problem.d_out)
    sys.stdout.write(f"{peak_growth(lambda: entry.run(d_out)) + entry.held_bytes}\n")


def peak_growth(action: Callable[[], Any]) -> int:
    """Bytes by which this process grew at most while it ran the action."""
    gc.collect()
    before = _reset_peak()
    result = action()
    grown = _peak() - before
    del result
    return max(grown, 0)


def _reset_peak() -> int:
    """Bytes in use now. Where the system can reset it (Linux), the peak starts again from here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return _peak()  # the highest so far: growth below an earlier peak goes unseen


def _peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def cuda_extra_bytes(action: Callable[[], Any], held_bytes: int) -> int:
    """The same on a GPU, where the allocator keeps count."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = action()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    del result
    return int(grown) + held_bytes

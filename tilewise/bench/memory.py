"""How much memory: a contestant runs once in a fresh process, and the growth of its peak is read. Outputs count too.

Limits: pages, not requests, are counted, so a few hundred KiB are noise; a library's own buffers count as its use.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewise.bench.refusal import RefusedError

# A fixed threshold makes glibc return freed blocks at once: memory freed before the call cannot hide what it takes.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak_growth(action: Callable[[], Any]) -> int:
    """Bytes by which this process grew at most while it ran the action."""
    if sys.platform == "win32":
        raise RefusedError("unsupported", "peak memory is measured on Linux and macOS only")
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


def cuda_peak_growth(action: Callable[[], Any]) -> int:
    """The same on a GPU, where the allocator keeps count."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = action()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    del result
    return int(grown)

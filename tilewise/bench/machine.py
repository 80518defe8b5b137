"""What machine and which versions: enough to read a result by, nothing that says whose it is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "OMP_NUM_THREADS")


def describe(device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """threads: what contestants are told to use."""
    told = {**os.environ, **thread_variables(threads)}
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": total_memory(),
        "cache_bytes": cache_bytes(),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas(),
        "blas_threads": {name: told[name] for name in _THREADS if name in told},
        **_torch(device, threads),
    }


def thread_variables(count: int | None) -> dict[str, str]:
    """Environment variables that give a process of any of the libraries so many threads."""
    return {} if count is None else dict.fromkeys(_THREADS, str(count))


def cpu_model() -> str:
    try:
        if sys.platform == "darwin":
            told = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
            )
            return told.stdout.strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """How many processes ran or waited, the mean of a minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def total_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def cache_bytes() -> int | None:
    """The last-level cache: the largest that the first core has; None where the system does not say."""
    try:
        told = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
        return max((int(size.removesuffix("K")) * 1024 for size in told), default=None)
    except (OSError, ValueError):
        return None


def available_memory() -> int | None:
    """What could be taken now: the system's answer, or a container's limit where that is lower; else all there is."""
    found = total_memory()
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max", no number, means no limit
        return limit - used if found is None else min(found, limit - used)
    except (OSError, ValueError):
        return found


def blas() -> str:
    """The name and version alone: the rest of NumPy's answer has paths."""
    try:
        config: Any = np.show_config(mode="dicts")
        found = config["Build Dependencies"]["blas"]
        return f"{found['name']} {found['version']}"
    except (TypeError, KeyError):  # NumPy 1.24 knows no mode
        return "unknown"


def import_torch() -> Any:
    """PyTorch, or None where it is not installed or its libraries cannot be loaded."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


def _torch(device: str, threads: int | None) -> dict[str, Any]:
    torch = import_torch()
    if torch is None:
        return {"torch": None, "torch_threads": None, "gpu": None}
    gpu = torch.cuda.get_device_name() if device != "cpu" else None
    return {"torch": torch.__version__, "torch_threads": threads or torch.get_num_threads(), "gpu": gpu}


def one_line(machine: Mapping[str, Any]) -> str:
    """For the head of a table and the foot of a picture; what is not known is left out."""
    known = {name: machine.get(name) for name in ("gpu", "cpu", "os", "python", "numpy", "torch")}
    parts = [
        known["gpu"],
        known["cpu"] and f"{known['cpu']}, {machine['cores']} cores",
        known["os"],
        known["python"] and f"Python {known['python']}",
        known["numpy"] and f"NumPy {known['numpy']} ({machine['blas']})",
        known["torch"] and f"PyTorch {known['torch']} ({machine['torch_threads']} threads)",
    ]
    return " · ".join(p for p in parts if p)


def gpu_lines(machine: Mapping[str, Any]) -> list[str]:
    """The software of the GPU and its power limit, as far as they are known."""
    parts = (
        [f"CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, driver {machine['driver']}"] if "cuda" in machine else []
    )
    parts += [f"{name} {version}" for name, version in machine.get("versions", {}).items() if version]
    return [*parts, f"power limit {machine['power_limit_w']} W"] if machine.get("power_limit_w") else parts

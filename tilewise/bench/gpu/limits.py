"""How fast this GPU could be, measured: products of matrices, copies, exponentials. And what it is, in words."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib import metadata
from statistics import median
from typing import Any

from tilewise.bench import machine as cpu

_MATRIX = 8192
_COPIED = 2 << 30  # bytes
_REPEATS = 20
_PACKAGES = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "tilelang", "cuda-core")
_QUERIES = {
    "driver": "driver_version", "power_limit_w": "power.limit", "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.memory",
}  # fmt: skip


def machine() -> dict[str, Any]:
    """The host, the GPU and the versions; nothing that says whose they are."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    return {
        **cpu.describe("cuda"),
        "gpu_memory_bytes": gpu.total_memory,
        "sms": gpu.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        **_told(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _told() -> dict[str, str | None]:
    """The driver's answers, None where its tool is not there."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(_QUERIES)
    return dict(zip(_QUERIES, map(str.strip, done.stdout.splitlines()[0].split(",")), strict=True))


def measured() -> dict[str, float | None]:
    """matmul_tflops in bfloat16; copy_gbs, bytes read and written; read_gbs, bytes read, or copied if that is faster;
    exp_gops, thousand millions of exp2 a second."""
    import torch

    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = _seconds(lambda: a @ b)
    source = torch.ones(_COPIED, device="cuda", dtype=torch.int8)
    copy = 2 * _COPIED / _seconds(source.clone) / 1e9
    read = _COPIED / _seconds(source.view(torch.float32).sum) / 1e9
    return {
        "matmul_tflops": 2 * _MATRIX**3 / matmul / 1e12,
        "copy_gbs": copy,
        "read_gbs": max(copy, read),
        "exp_gops": _exp_gops(),
    }


def _exp_gops() -> float | None:
    try:
        from tilewise.bench.gpu import exponentials
    except ImportError:  # Triton is not here
        return None
    call, count = exponentials.prepared()
    return count / _seconds(call) / 1e9


def _seconds(call: Callable[[], Any]) -> float:
    import torch

    times = []
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        stop.record()
        torch.cuda.synchronize()
        del result
        times.append(start.elapsed_time(stop) / 1e3)
    return float(median(times[_REPEATS // 4 :]))  # the first ones compile, allocate and wake the clocks


def shortest_ms(flops: float, exps: float, traffic: float, limits: dict[str, Any]) -> dict[str, float | None]:
    """Milliseconds that each limit alone would leave: the largest is the one that binds."""
    work = {
        "matrix": (flops, "matmul_tflops", 1e9),
        "exp": (exps, "exp_gops", 1e6),
        "bytes": (traffic, "copy_gbs", 1e6),
    }
    return {
        name: amount / (limits[rate] * unit) if limits.get(rate) else None
        for name, (amount, rate, unit) in work.items()
    }

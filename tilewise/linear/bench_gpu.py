"""Linear attention on a GPU: milliseconds, and what share of the memory's speed they are. bfloat16, causal."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.bench import machine
from tilewise.bench.stamp import stamp
from tilewise.bench.table import columns
from tilewise.linear.api import linear_attention

SCHEMA = "linear gpu 1"


class Shape(NamedTuple):
    batch: int
    n: int
    heads: int
    d: int


SHAPES = (Shape(8, 2048, 16, 128), Shape(1, 16384, 16, 128), Shape(1, 131072, 16, 128), Shape(1, 16384, 32, 64))


def results(normalize: bool = False, repeat: int = 20) -> dict[str, Any]:
    import torch

    records = [_measured(torch, shape, normalize, repeat) for shape in SHAPES]
    name = torch.cuda.get_device_name()
    return {
        "schema": SCHEMA,
        **stamp(machine.describe("cuda")),
        "gpu": name,
        "copy": _copy_rate(torch, repeat),
        "normalize": normalize,
        "records": records,
    }


def _measured(torch: Any, shape: Shape, normalize: bool, repeat: int) -> dict[str, Any]:
    size = (shape.batch, shape.heads, shape.n, shape.d)
    q, k, v, d_out = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> Any:
        return linear_attention(q, k, v, feature_map="identity", normalize=normalize, kernel="triton")

    with torch.no_grad():
        forward = _milliseconds(torch, run, repeat)
    out = run()
    backward = _milliseconds(torch, lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True), repeat)
    gigabytes = q.numel() * q.element_size() / 1e9
    return {
        **shape._asdict(), "forward_ms": forward, "backward_ms": backward,
        # The least that must be moved: q, k, v and out; and q, k, v, d_out and three gradients.
        "forward_rate": 4 * gigabytes / forward * 1e3, "backward_rate": 7 * gigabytes / backward * 1e3,
    }  # fmt: skip


def _milliseconds(torch: Any, call: Callable[[], Any], repeat: int) -> float:
    """The median of calls, each between two events; the first few compile and warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def _copy_rate(torch: Any, repeat: int) -> float:
    """Gigabytes a second, read and written, of a plain copy: what memory can do."""
    x = torch.empty(1 << 28, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    gigabytes = 2 * float(x.numel() * x.element_size()) / 1e9
    return gigabytes / _milliseconds(torch, lambda: y.copy_(x), repeat) * 1e3


def text(found: dict[str, Any]) -> str:
    heads = ("batch, n, heads, d", "forward ms", "GB/s", "of a copy", "backward ms", "GB/s", "of a copy")
    rows = [
        (
            f"{r['batch']}, {r['n']}, {r['heads']}, {r['d']}",
            f"{r['forward_ms']:.3f}", f"{r['forward_rate']:.0f}", f"{r['forward_rate'] / found['copy']:.0%}",
            f"{r['backward_ms']:.3f}", f"{r['backward_rate']:.0f}", f"{r['backward_rate'] / found['copy']:.0%}",
        )
        for r in found["records"]
    ]  # fmt: skip
    title = f"linear attention on {found['gpu']}, bfloat16, causal; a copy moves {found['copy']:.0f} GB/s"
    return "\n".join([title, *columns([heads, *rows])])

"""Standard against tiled attention over growing sequences: time and memory, measured side by side."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import tilewise as tw
from tilewise import dispatch, lab, schedule
from tilewise.arrays import Array
from tilewise.bench.machine import available_memory, import_torch
from tilewise.cli.terminal import progress
from tilewise.explanation import size
from tilewise.expr import Expr
from tilewise.spec import Attention, Shape, Tile

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BEYOND = 131072  # with a window: tiles skip what the full matrix would have to store
WINDOW = 256
D = 64
PATIENCE = 12.0  # seconds for one call
ASSUMED_MEMORY = 8 << 30  # where the system does not say


@dataclass(frozen=True)
class Measured:
    seconds: float
    bytes: int  # the most allocated at once beyond the inputs


@dataclass(frozen=True)
class Row:
    """One length: what each took, or why it did not run."""

    n: int
    label: str
    standard: Measured | str
    tiled: Measured | str
    matrix_bytes: int
    tile_bytes: int

    @property
    def both(self) -> tuple[Measured, Measured] | None:
        """Standard and tiled, if both ran."""
        if isinstance(self.standard, Measured) and isinstance(self.tiled, Measured):
            return self.standard, self.tiled
        return None


def on_cpu(name: str) -> list[Row]:
    """A kernel system that works in main memory, beside standard attention in NumPy."""
    rows: list[Row] = []
    for n in LENGTHS:
        progress(f"standard against tiled attention: n = {n}")
        q, k, v = _inputs(n)
        reason = _too_large(4 * n * n, available_memory()) or _too_slow(n * n, [(r.n, r.standard) for r in rows])
        standard = reason or _measure(partial(lab.standard_attention, q, k, v))
        reason = _too_slow(n * n, [(r.n, r.tiled) for r in rows])
        tiled = reason or _measure(partial(tw.attention, q, k, v, kernel=name))
        rows.append(_row(n, f"{n}", None, name, standard, tiled))
    progress(f"a window, at n = {BEYOND}")
    q, k, v = _inputs(BEYOND)
    mask = tw.window(WINDOW)
    reason = _too_slow(BEYOND * (2 * WINDOW + 1), [(r.n, r.tiled) for r in rows])
    tiled = reason or _measure(partial(tw.attention, q, k, v, mask=mask, kernel=name))
    standard = f"not run: it would store {size(4 * BEYOND * BEYOND)} for the {2 * WINDOW + 1} keys that count in a row"
    rows.append(_row(BEYOND, f"{BEYOND}, window({WINDOW})", mask, name, standard, tiled))
    progress()
    return rows


def unsupported(name: str, device: str = "cpu", dtype: str = "float32") -> str | None:
    """Why a kernel system cannot compute on arrays as these, or None."""
    spec, shape = _problem(1, None)
    return dispatch.kernel(name).unsupported(spec, replace(shape, device=device, dtype=dtype))


def _inputs(n: int) -> list[Array]:
    rng = np.random.default_rng(n)
    return [rng.standard_normal((n, D), dtype=np.float32) for _ in range(3)]


def _row(n: int, label: str, mask: Expr | None, name: str, standard: Measured | str, tiled: Measured | str) -> Row:
    spec, shape = _problem(n, mask)
    plan = schedule.plan(spec, shape, dispatch.kernel(name).default_tile(spec, shape))
    return Row(n, label, standard, tiled, plan.bytes_matrix, plan.bytes_on_chip)


def _too_slow(scores: int, before: list[tuple[int, Measured | str]]) -> str:
    """Why so many scores are not tried, judging by the last length that ran: on a busy machine, and with a simulator,
    the demo must end all the same."""
    ran = [(n, result.seconds) for n, result in before if isinstance(result, Measured)]
    if not ran:
        return ""
    last_n, seconds = ran[-1]
    expected = seconds * scores / last_n**2
    return "" if expected <= PATIENCE else f"not run: judging by n = {last_n} it would take about {expected:.0f} s"


def on_gpu(kernel: str) -> Iterator[tuple[str, list[Row]]]:
    """The same on a GPU, if PyTorch sees one; running out of memory is a result, not a failure."""
    torch = import_torch()
    if torch is None or not torch.cuda.is_available():
        return
    rows: list[Row] = []
    for n in (*LENGTHS, 2 * LENGTHS[-1], 4 * LENGTHS[-1], 8 * LENGTHS[-1]):
        progress(f"on the GPU: n = {n}")
        q, k, v = torch.randn(3, 1, 8, n, D, device="cuda", dtype=torch.bfloat16)
        reason = _too_slow(n * n, [(r.n, r.standard) for r in rows])
        standard = reason or _measure_gpu(torch, partial(_standard_gpu, torch, q, k, v))
        reason = _too_slow(n * n, [(r.n, r.tiled) for r in rows])
        tiled = reason or _measure_gpu(torch, partial(tw.attention, q, k, v, kernel=kernel))
        plan = schedule.plan(Attention(D**-0.5), Shape(1, 8, 8, n, n, D, D, "bfloat16"), Tile())
        rows.append(Row(n, f"{n}", standard, tiled, plan.bytes_matrix, plan.bytes_on_chip))
    progress()
    yield f"The same on {torch.cuda.get_device_name()} (8 heads, d = {D}, bfloat16)", rows


def _problem(n: int, mask: Expr | None) -> tuple[Attention, Shape]:
    return Attention(D**-0.5, mask), Shape(1, 1, 1, n, n, D, D)


def _measure(call: Callable[[], Any]) -> Measured:
    """Median time of up to three runs, and the most memory NumPy held at once in them."""
    seconds: list[float] = []
    tracemalloc.start()  # it counts allocations, of which an attention makes few: the time hardly notices
    try:
        while len(seconds) < 3 and sum(seconds) < 0.5:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return Measured(statistics.median(seconds), tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _standard_gpu(torch: Any, q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT * D**-0.5, dim=-1) @ v


def _measure_gpu(torch: Any, call: Callable[[], Any]) -> Measured | str:
    """Median time of five runs and peak memory on the GPU, or why it did not run."""
    out_of_memory = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)  # the older name before 2.5
    seconds: list[float] = []
    try:
        call()  # libraries take their workspaces at the first call
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except out_of_memory:
        return f"out of memory on the GPU ({size(torch.cuda.get_device_properties(0).total_memory)} in all)"
    except tw.Unsupported as error:
        return " ".join(str(error).split())
    return Measured(statistics.median(seconds), torch.cuda.max_memory_allocated() - before)


def _too_large(matrix: int, free: int | None) -> str:
    """Why standard attention is not tried: it holds the scores and the weights, two matrices at the least."""
    free = free or ASSUMED_MEMORY
    if 2 * matrix <= free // 2:
        return ""
    return f"not run: two matrices of {size(matrix)} do not fit comfortably into {size(free)} of free memory"

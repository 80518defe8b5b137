"""Linear attention beside causal softmax attention, on the same arrays and by turns: where one overtakes the other.

Counted in multiplications a row of a head, softmax attention has 2 d for each of n / 2 keys, and linear attention 2 d
for each of a chunk's rows and 2 d (d + 1) for its state: they are equal at n = 2 (chunk + d + 1).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from tilewise.api import attention
from tilewise.bench import machine
from tilewise.bench.stamp import stamp
from tilewise.bench.table import columns
from tilewise.linear.api import linear_attention
from tilewise.linear.kernels.cpu import CHUNK

SCHEMA = "linear 1"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Row:
    """Seconds of a call, medians."""

    n: int
    linear: float
    softmax: float


def measured(lengths: Sequence[int], d: int = 64, heads: int = 8, kernel: str = "auto", repeat: int = 7) -> list[Row]:
    """Both at each length, float32, causal."""
    rng = np.random.default_rng(0)
    rows = []
    for n in lengths:
        q, k, v = rng.standard_normal((3, 1, heads, n, d)).astype(np.float32)
        linear = partial(linear_attention, q, k, v, kernel=kernel)
        softmax = partial(attention, q, k, v, causal=True, kernel=kernel)
        rows.append(Row(n, *medians(repeat, linear, softmax)))
    return rows


def medians(repeat: int, *calls: Callable[[], Any]) -> list[float]:
    """Of each call's seconds; they take turns, so that a busy moment meets all of them."""
    taken: list[list[float]] = [[] for _ in calls]
    for round_ in range(repeat + 1):
        for times, call in zip(taken, calls, strict=True):
            begin = time.perf_counter()
            call()
            if round_ > 0:  # the first is not measured: it loads what is needed
                times.append(time.perf_counter() - begin)
    return [statistics.median(times) for times in taken]


def growth(rows: Sequence[Row]) -> float | None:
    """The exponent of n by which the time of linear attention grows, fitted over all lengths; None: one fits any."""
    if len({row.n for row in rows}) < 2:
        return None
    x, y = np.log([row.n for row in rows]), np.log([row.linear for row in rows])
    return float(np.polyfit(x, y, 1)[0])


def crossover(rows: Sequence[Row]) -> float | None:
    """The n from which linear attention is the faster one, between two that were measured; None: not yet."""
    ahead = [math.log(row.softmax / row.linear) for row in rows]
    for i, here in enumerate(ahead):
        if all(x > 0 for x in ahead[i:]):
            if i == 0:
                return float(rows[0].n)
            share = -ahead[i - 1] / (here - ahead[i - 1])
            return float(rows[i - 1].n * (rows[i].n / rows[i - 1].n) ** share)
    return None


def expected_crossover(d: int) -> int:
    """By the number of multiplications alone."""
    return 2 * (CHUNK + d + 1)


def results(rows: Sequence[Row], d: int, heads: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA, **stamp(machine.describe()), "d": d, "heads": heads, "growth": growth(rows),
        "crossover": crossover(rows), "expected": expected_crossover(d), "records": [asdict(row) for row in rows],
    }  # fmt: skip


def table_of(found: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of a table, for the terminal and for the pages."""
    rows = [Row(**record) for record in found["records"]]
    return ("n", "softmax ms", "linear ms", "speed-up"), [
        (str(r.n), f"{r.softmax * 1e3:.2f}", f"{r.linear * 1e3:.2f}", f"{r.softmax / r.linear:.2f}x") for r in rows
    ]


def conclusion(found: dict[str, Any]) -> str:
    grows = "" if found["growth"] is None else f"Linear attention's time grows as n^{found['growth']:.2f}. "
    at = f"from n = {found['crossover']:.0f} on" if found["crossover"] else "at none of these lengths"
    return (
        f"{grows}{'It' if grows else 'Linear attention'} is the faster one {at}; "
        f"by multiplications alone it would be from n = {found['expected']} on."
    )


def text(found: dict[str, Any]) -> str:
    head, rows = table_of(found)
    title = f"linear attention beside causal softmax attention, float32, {found['heads']} heads, d {found['d']}"
    return "\n".join([title, *columns([head, *rows]), conclusion(found)])

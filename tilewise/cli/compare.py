"""Standard against tiled attention over growing sequences: time and memory, measured side by side."""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

import tilewise as tw
from tilewise import dispatch, lab, schedule
from tilewise.cli.terminal import progress
from tilewise.explanation import size
from tilewise.expr import Expr
from tilewise.spec import Attention, Shape

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BEYOND = 131072  # with a window: tiles skip what the full matrix would have to store
WINDOW = 256
D = 64


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


def on_cpu(names: list[str]) -> list[Row]:
    """The first of these kernel systems that works in main memory, beside standard attention in NumPy."""
    name = next((n for n in names if dispatch.kernel(n).unsupported(*_problem(1, None)) is None), names[0])
    rows = []
    for n, mask in [*((n, None) for n in LENGTHS), (BEYOND, tw.window(WINDOW))]:
        label = f"{n}" if mask is None else f"{n}, window({WINDOW})"
        progress(f"standard against tiled attention: n = {label}")
        rng = np.random.default_rng(n)
        q, k, v = (rng.standard_normal((n, D), dtype=np.float32) for _ in range(3))
        spec, shape = _problem(n, mask)
        plan = schedule.plan(spec, shape, dispatch.kernel(name).default_tile(spec, shape))
        rows.append(
            Row(
                n, label, _standard(q, k, v), _measure(_Attention(q, k, v, mask, name)),
                plan.bytes_matrix, plan.bytes_on_chip,
            )  # fmt: skip
        )
    progress()
    return rows

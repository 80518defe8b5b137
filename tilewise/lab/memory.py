"""What blocks save: bytes of the matrix of scores and of one block of it, counted and measured."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TypedDict

import numpy as np

from tilewise.lab.attention import TiledAttention, standard_attention
from tilewise.lab.checks import whole

_MATRIX_LIMIT = 2**30  # bytes of a score matrix that verify_memory_usage still dares to make


class MemoryReport(TypedDict):
    """Bytes, and ratios of bytes. None: not measured, because the score matrix would be too large to make."""

    standard_attention_matrix: int
    tiled_max_block: int
    memory_reduction: float
    standard_peak: int | None
    tiled_peak: int
    measured_reduction: float | None


def verify_memory_usage(seq_len: int, d: int = 64, block_size: int = 32) -> MemoryReport:
    """Bytes of the score matrix against one block of it, and the measured peaks of running both, in float32.

    Peaks are tracemalloc's, with the output and without the inputs. If the matrix is over 1 GiB, standard attention is
    not run and what it would measure is None. The tiled run takes (seq_len / block_size) ** 2 Python steps.
    """
    seq_len, d, block_size = whole("seq_len", seq_len), whole("d", d), whole("block_size", block_size)
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((seq_len, d), dtype=np.float32) for _ in range(3))
    matrix, block = seq_len**2 * Q.itemsize, min(block_size, seq_len) ** 2 * Q.itemsize
    tiled = peak(lambda: TiledAttention(block_size, block_size)(Q, K, V))
    standard = peak(lambda: standard_attention(Q, K, V)) if matrix <= _MATRIX_LIMIT else None
    return {
        "standard_attention_matrix": matrix,
        "tiled_max_block": block,
        "memory_reduction": matrix / block,
        "standard_peak": standard,
        "tiled_peak": tiled,
        "measured_reduction": None if standard is None else standard / tiled,
    }


def peak(run: Callable[[], object]) -> int:
    """The most bytes held at once while run() runs, beyond those held before it."""
    outer = tracemalloc.is_tracing()  # someone else's trace must go on
    if not outer:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not outer:
            tracemalloc.stop()

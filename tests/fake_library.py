"""Stands in for the native engine's library: its measurements are known, and what may go wrong."""

from __future__ import annotations

import os

from tilewise.arrays import Array


def unavailable() -> str | None:
    return os.environ.get("FAKE_UNAVAILABLE")


def peak_flops(dtype: str) -> float:
    assert dtype == "float32"
    assert "FAKE_BROKEN" not in os.environ, "no clock"
    return 1e9 * int(os.environ["OMP_NUM_THREADS"])


def read_rate(*read: Array) -> float:
    """Of given arrays a rate that tells how large they are; of a buffer of its own, a better one at each call."""
    if read:
        return 1e4 * sum(x.nbytes for x in read)
    _buffers.append(1e9 * (1 + len(_buffers)))
    return _buffers[-1]


_buffers: list[float] = []

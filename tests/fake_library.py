"""Stands in for the native engine's library: its measurements are known, and what may go wrong."""

from __future__ import annotations

import os


def unavailable() -> str | None:
    return os.environ.get("FAKE_UNAVAILABLE")


def peak_flops(dtype: str) -> float:
    assert dtype == "float32"
    assert "FAKE_BROKEN" not in os.environ, "no clock"
    return 1e9 * int(os.environ["OMP_NUM_THREADS"])


def read_rate() -> float:
    return 4e9

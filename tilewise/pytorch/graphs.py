"""CUDA graphs: what a captured launch uses stays for as long as the process does, as a replay may come at any time."""

from __future__ import annotations

from typing import Any

import torch

FIRST = (
    "a CUDA graph is captured around a call that was never made before; make it once first, "
    "so that its kernels are compiled and its plan is on the GPU"
)
held: dict[int, Any] = {}


def hold(used: Any) -> None:
    held[id(used)] = used


def is_capturing() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())

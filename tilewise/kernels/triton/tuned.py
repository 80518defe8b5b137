"""What `tilewise tune` found on this machine's GPUs, in the user's cache folder: it goes before the table."""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import cache
from pathlib import Path

from tilewise.kernels import disk

Choices = dict[str, dict[int, tuple[int, int, int, int]]]  # by pass and head: queries and keys of a tile, warps, stages
_logger = logging.getLogger("tilewise")


@cache
def choices(device: str) -> Choices:
    """By pass and head; nothing if nobody tuned, or what was kept cannot be read."""
    return _read(path_for(gpu_name(device))) if device.startswith("cuda") else {}


def _read(path: Path) -> Choices:
    try:
        kept = json.loads(path.read_text())["choices"]
        return {kind: {int(d): _choice(told) for d, told in by_head.items()} for kind, by_head in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _logger.warning("%s is not what `tilewise tune` writes (%s), and is passed over; tune again", path, error)
        return {}


def _choice(told: list[int]) -> tuple[int, int, int, int]:
    q, k, warps, stages = map(int, told)
    if min(q, k, warps, stages) < 1 or any(n & (n - 1) for n in (q, k, warps)):
        raise ValueError(f"{told} is no choice: powers of 2 for a tile and its warps, and stages")
    return q, k, warps, stages


def save(gpu: str, found: Choices) -> Path:
    """Written beside what was found before for other heads."""
    path = path_for(gpu)
    before = _read(path)
    joined = {kind: {**before.get(kind, {}), **found.get(kind, {})} for kind in {**before, **found}}
    text = json.dumps({"gpu": gpu, "triton": sys.modules["triton"].__version__, "choices": joined}, indent=1)
    choices.cache_clear()
    return disk.user_cache("triton").text(path.name, text + "\n")


def path_for(gpu: str) -> Path:
    return disk.user_cache("triton").folder / f"tuned-{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}.json"


@cache
def gpu_name(device: str) -> str:
    return str(sys.modules["torch"].cuda.get_device_name(device))

"""What `tilewise tune` found on this machine's GPUs, in the user's cache folder: it goes before the table."""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import cache
from pathlib import Path

from tilewise.kernels import disk, gpus
from tilewise.kernels.triton.choices import HEADS, Calls, Choice, Pass
from tilewise.spec import Tile

Key = tuple[Pass, Calls, int]  # the last: heads up to this size
FORMAT = 2  # of the file; the first one had plain and masked calls together
_logger = logging.getLogger("tilewise")


@cache
def choices(device: str) -> dict[Key, Choice]:
    """Nothing if nobody tuned, or what was kept cannot be read."""
    is_here = device.startswith("cuda") and not gpus.is_imagined(device)
    return _read(gpu_name(device)) if is_here else {}


def _read(gpu: str) -> dict[Key, Choice]:
    files, path = disk.user_cache("triton"), path_for(gpu)
    try:
        told = json.loads(files.text(path.name))
        if told.get("format", 1) != FORMAT:
            why = f"it is in format {told.get('format', 1)}, and this version of Tilewise reads {FORMAT}"
            _logger.info("%s is passed over: %s; `tilewise tune` makes it anew", path, why)
            return {}
        return {_key(name): _choice(numbers) for name, numbers in told["choices"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except disk.UntrustedError as error:
        _logger.warning("%s is passed over: %s", path, error)
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _logger.warning("%s is not what `tilewise tune` writes (%s), and is passed over; tune again", path, error)
        return {}


def _key(name: str) -> Key:
    kind, calls, head = name.split()
    if int(head) not in HEADS:
        raise ValueError(f"{name!r}: heads are up to one of {HEADS}")
    return Pass(kind), Calls(calls), int(head)


def _name(key: Key) -> str:
    kind, calls, head = key
    return f"{kind.value} {calls.value} {head}"


def _choice(told: list[int]) -> Choice:
    q, k, warps, stages = map(int, told)
    if min(q, k, warps, stages) < 1 or any(n & (n - 1) for n in (q, k, warps)):
        raise ValueError(f"{told} is no choice: powers of 2 for a tile and its warps, and stages")
    return Choice(Tile(q, k), warps, stages)


def save(gpu: str, found: dict[Key, Choice]) -> Path:
    """Written beside what was found before for other passes, calls and heads."""
    path = path_for(gpu)
    kept = {_name(key): [x.tile.q, x.tile.k, x.warps, x.stages] for key, x in {**_read(gpu), **found}.items()}
    told = {"format": FORMAT, "gpu": gpu, "triton": sys.modules["triton"].__version__, "choices": kept}
    choices.cache_clear()
    return disk.user_cache("triton").add_text(path.name, json.dumps(told, indent=1) + "\n")


def path_for(gpu: str) -> Path:
    return disk.user_cache("triton").folder / f"tuned-{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}.json"


@cache
def gpu_name(device: str) -> str:
    return str(sys.modules["torch"].cuda.get_device_name(device))

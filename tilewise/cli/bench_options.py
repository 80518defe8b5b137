"""The values of `tilewise bench`'s options, checked: each error names the option, what came and what was expected."""

from __future__ import annotations

import os
import reprlib
from importlib.util import find_spec
from pathlib import Path

from tilewise import dispatch
from tilewise.cli import UserError


def several(option: str, text: str, example: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise UserError(f"--{option}: expected a list such as {example}, got {text!r}")
    return list(dict.fromkeys(items))


def names(option: str, items: list[str], known: tuple[str, ...]) -> list[str]:
    for item in items:
        if item not in known:
            raise UserError(f"--{option}: there is no {item!r}; expected some of {', '.join(known)}")
    return items


def whole(option: str, text: str, most: int = 2**31 - 1) -> int:
    digits = text.lstrip("0")
    if not text.isascii() or not text.isdigit() or len(digits) > len(str(most)) or not 1 <= int(digits or 0) <= most:
        limit = f"from 1 to {most}" if most < 2**31 - 1 or len(digits) > 9 else "of at least 1"
        raise UserError(f"--{option}: expected a whole number {limit}, got {reprlib.repr(text)}")
    return int(text)


def seconds(option: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UserError(f"--{option}: expected a number of seconds above 0, got {text!r}")
    return found


def check_kernel(name: str) -> None:
    if name not in dispatch.NAMED:
        raise UserError(f"--kernel: expected one of {', '.join(dispatch.NAMED)}, got {name!r}")
    from tilewise.bench.machine import import_torch

    import_torch()  # which is asked for GPUs
    reason = dispatch.kernel(name).unavailable()
    if reason is not None:
        raise UserError(f"--kernel: {name!r} cannot run here: {reason}")


def check_gpu(option: str) -> None:
    try:
        import torch
    except (ImportError, OSError):
        raise UserError(f"{option} needs PyTorch; pip install torch") from None
    if not torch.cuda.is_available():
        raise UserError(f"{option} needs PyTorch with CUDA and an NVIDIA GPU; this PyTorch sees none")


def check_matplotlib(option: str = "--plot") -> None:
    if find_spec("matplotlib") is None:
        raise UserError(f"{option} needs matplotlib; pip install matplotlib")


def check_writable(option: str, target: str) -> None:
    """What would fail at the end of a long run fails at its start."""
    folder = Path(target) if Path(target).is_dir() else Path(target).parent
    if not folder.is_dir():
        raise UserError(f"{option}: there is no folder {str(folder)!r}")
    if not os.access(Path(target) if Path(target).exists() else folder, os.W_OK):
        raise UserError(f"{option}: {target!r} cannot be written")

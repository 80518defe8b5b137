"""What compiled a file, and for which machine: a part of its name, so that another one compiles anew."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ARCHITECTURE = platform.machine() or "unknown"


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def version(command: tuple[str, ...]) -> str:
    """What a compiler says of itself, or, if it says nothing, what its file looks like."""
    path = shutil.which(command[0])
    if path is None:
        return "none"
    done = subprocess.run(
        [path, *command[1:], "--version"], capture_output=True, text=True, errors="replace", check=False
    )
    about = Path(path).stat()
    return done.stdout if done.returncode == 0 else f"{path} {about.st_size} {about.st_mtime_ns}"


@cache
def machine() -> str:
    """Code that may be of this very processor: compilers can be told so by their own settings."""
    return f"{host()} {_features()}"


def host(environment: Iterable[str] = ()) -> str:
    """Code for processors of this architecture and this C library. environment: variables that a compiler reads."""
    given = [f"{name}={os.environ[name]}" for name in environment if name in os.environ]
    own = _features() if "native" in "".join(given) else ""
    return " ".join((platform.system(), ARCHITECTURE, *_libc(), *given, own))


@cache
def _libc() -> tuple[str, str]:
    return platform.libc_ver()


def _features() -> str:
    """The instructions that the processor has, as the system tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # macOS
        return platform.processor()
    told = (line.partition(":") for line in text.splitlines())
    found = (rest for name, _, rest in told if name.strip() in ("flags", "Features"))
    return " ".join(sorted(next(found, platform.processor()).split()))

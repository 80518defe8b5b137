"""Which sources were measured: their commit, and whether files of the package differ from it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent


def revision() -> dict[str, Any]:
    """Nothing is known of a package that lies in no working tree of its own, or where git is not there."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _PACKAGE.parent:
        return {"commit": None, "dirty": None}
    return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain", "--", str(_PACKAGE)))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""Why there is no number: a contestant that does not run, fails or starves is a result of the benchmark too."""

from __future__ import annotations

import re

_PATH = re.compile(r"(?:[A-Za-z]:\\|~?/)[\w.+-]+(?:[\\/][\w.+-]+)+")


class RefusedError(Exception):
    """A contestant does not run a cell, and why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason

    def __str__(self) -> str:
        return self.reason


def refusal(error: Exception) -> RefusedError:
    """Any error as a result."""
    if isinstance(error, RefusedError):
        return error
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    starved = isinstance(error, MemoryError) or "out of memory" in told or "can't allocate memory" in told
    if not starved:
        return RefusedError("failed", told)
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", told)
    return RefusedError("out of memory", f"it asked for {asked[1]}" if asked else told)


def public(text: str) -> str:
    """A reason without paths, which name users."""
    return _PATH.sub("<path>", text)

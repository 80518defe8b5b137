"""What every results file says of itself: the version, when, on which machine, and of which sources."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from tilewise._version import __version__
from tilewise.bench.revision import revision


def stamp(machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "tilewise": __version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine,
        "source": revision(),
    }

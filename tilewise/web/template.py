"""A page as one file: a template with its style, scripts and data put in. No network, no other file, no framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SHARED = Path(__file__).parent


@cache
def asset(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def style(own: Path) -> str:
    """What all pages look like, and what this one has beyond it."""
    return asset(SHARED / "look.css") + asset(own)


def script(*own: Path) -> str:
    return "\n".join(map(asset, (SHARED / "theme.js", *own)))


def filled(template: Path, values: Mapping[str, str]) -> str:
    """Each {{name}} of the template with its value; what a value says is never looked at again."""
    return re.sub(r"{{(\w+)}}", lambda found: values[found[1]], asset(template))

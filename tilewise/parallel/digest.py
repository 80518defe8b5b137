"""A number for what would be long to tell."""

from __future__ import annotations

from hashlib import blake2b


def digest(said: object) -> int:
    """The same in every process for what prints the same, and never 0."""
    return int.from_bytes(blake2b(repr(said).encode(), digest_size=7).digest(), "big") + 1

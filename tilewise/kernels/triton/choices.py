"""The table: tiles, warps and stages of every kernel, by architecture, pass, kind of call and size of heads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from tilewise.spec import Tile


class Pass(Enum):
    FORWARD = "forward"
    D_QUERY = "d_query"
    D_KEYS = "d_keys"
    PAIRS = "pairs"  # the gradient of a bias
    ARRAYS = "arrays"  # those of other arrays
    DECODE = "decode"


class Calls(Enum):
    PLAIN = "plain"  # of q, k and v alone: no tile is cut short, and one that is larger reads fewer keys
    MASKED = "masked"  # with a mask, and all others that are not plain


@dataclass(frozen=True)
class Choice:
    tile: Tile
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """As a launch takes them."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        return f"tiles of {self.tile.q} queries and {self.tile.k} keys, {self.warps} warps, {self.stages} stages"


class Entry(NamedTuple):
    """A choice, and where it is from."""

    choice: Choice
    row: str  # of the table
    origin: str  # measured, tuned (by `tilewise tune`, on this GPU) or reckoned

    def __str__(self) -> str:
        return f"{self.origin}, {self.row}"


HEADS = (64, 128, 256, 512)  # an entry is for heads up to its own size
BLACKWELL = "sm_100"
_ByHead = dict[int, Choice]
_Row = dict[tuple[Pass, Calls], _ByHead]


def _c(q: int, k: int, warps: int, stages: int) -> Choice:
    return Choice(Tile(q, k), warps, stages)


def _of(kind: Pass, by_head: _ByHead) -> _Row:
    """For all calls alike."""
    return {(kind, calls): by_head for calls in Calls}


# For half precision. Measured on an H200 (results/gpu has what they reach) but for what _MEASURED leaves out, which is
# reckoned from what has room.
_HOPPER: _Row = {
    (Pass.FORWARD, Calls.PLAIN): {
        64: _c(128, 64, 4, 3), 128: _c(128, 128, 8, 3), 256: _c(128, 64, 8, 2), 512: _c(32, 32, 4, 1),
    },
    (Pass.FORWARD, Calls.MASKED): {
        64: _c(64, 64, 4, 3), 128: _c(64, 64, 4, 3), 256: _c(128, 64, 8, 2), 512: _c(32, 32, 4, 1),
    },
    **_of(Pass.D_QUERY, {
        64: _c(64, 64, 4, 3), 128: _c(128, 64, 8, 3), 256: _c(64, 64, 4, 2), 512: _c(32, 16, 4, 1),
    }),
    **_of(Pass.D_KEYS, {
        64: _c(64, 64, 4, 3), 128: _c(64, 64, 4, 2), 256: _c(64, 64, 8, 2), 512: _c(16, 32, 4, 1),
    }),
    **_of(Pass.PAIRS, {
        64: _c(128, 64, 8, 3), 128: _c(128, 64, 8, 2), 256: _c(64, 64, 4, 1), 512: _c(16, 16, 4, 1),
    }),
    **_of(Pass.ARRAYS, {
        64: _c(64, 64, 4, 2), 128: _c(64, 64, 8, 2), 256: _c(32, 32, 4, 1), 512: _c(16, 16, 4, 1),
    }),
    # Tile.q: rows at most. Three tiles of k and of v are under way, so that one program keeps its share of memory busy.
    **_of(Pass.DECODE, {
        64: _c(64, 128, 4, 4), 128: _c(64, 64, 4, 4), 256: _c(32, 32, 4, 4), 512: _c(32, 16, 4, 4),
    }),
}  # fmt: skip
_MEASURED = {
    **dict.fromkeys((Pass.FORWARD, Pass.D_QUERY, Pass.D_KEYS), (64, 128, 256)), Pass.PAIRS: (64, 128),
    Pass.DECODE: (128,), Pass.ARRAYS: (),
}  # fmt: skip

# Reckoned, not measured, as all below: what differs from Hopper's where a block has 163 KiB of shared memory. These fit
# as they are, two stages of them at least, and where they can leave room for a second program on a multiprocessor.
_AMPERE: _Row = {
    (Pass.FORWARD, Calls.PLAIN): {128: _c(128, 64, 8, 3), 256: _c(64, 64, 4, 2)},
    (Pass.FORWARD, Calls.MASKED): {128: _c(64, 64, 4, 2), 256: _c(64, 64, 4, 2)},
    **_of(Pass.D_QUERY, {256: _c(32, 64, 4, 2)}),
    **_of(Pass.D_KEYS, {256: _c(64, 32, 4, 2)}),
}

# Likewise for 99 KiB: two stages; in decoding smaller tiles rather than fewer under way.
_ADA: _Row = {
    (Pass.FORWARD, Calls.PLAIN): {64: _c(128, 64, 4, 2), 128: _c(128, 64, 8, 2), 256: _c(32, 32, 4, 2)},
    (Pass.FORWARD, Calls.MASKED): {64: _c(64, 64, 4, 2), 128: _c(64, 64, 4, 2), 256: _c(32, 32, 4, 2)},
    **_of(Pass.D_QUERY, {64: _c(64, 64, 4, 2), 128: _c(64, 64, 4, 2), 256: _c(32, 32, 4, 2)}),
    **_of(Pass.D_KEYS, {64: _c(64, 64, 4, 2), 256: _c(32, 32, 4, 2)}),
    **_of(Pass.PAIRS, {64: _c(64, 64, 4, 2), 128: _c(64, 64, 4, 1)}),
    **_of(Pass.DECODE, {64: _c(64, 64, 4, 4), 128: _c(32, 32, 4, 4), 256: _c(32, 16, 4, 4)}),
}

# Likewise for the 64 KiB of AMD's GPUs: above heads of 64 a single stage rather than still smaller tiles.
_AMD: _Row = {
    **_of(Pass.FORWARD, {64: _c(64, 64, 4, 2), 128: _c(64, 64, 4, 1), 256: _c(32, 32, 4, 1)}),
    **_of(Pass.D_QUERY, {64: _c(64, 64, 4, 2), 128: _c(32, 64, 4, 1), 256: _c(32, 16, 4, 1)}),
    **_of(Pass.D_KEYS, {64: _c(64, 64, 4, 2), 128: _c(32, 32, 4, 1), 256: _c(16, 32, 4, 1)}),
    **_of(Pass.PAIRS, {64: _c(64, 64, 4, 1), 128: _c(32, 32, 4, 1)}),
    **_of(Pass.ARRAYS, {64: _c(64, 64, 4, 1), 128: _c(32, 32, 4, 1)}),
    **_of(Pass.DECODE, {64: _c(64, 64, 4, 2), 128: _c(32, 32, 4, 2), 256: _c(32, 16, 4, 2)}),
}

# Likewise for Blackwell's 227 KiB, of which its tensor cores need more.
_BLACKWELL: _Row = {
    (Pass.FORWARD, Calls.PLAIN): {128: _c(128, 128, 8, 2)},
    **_of(Pass.D_KEYS, {256: _c(64, 64, 8, 1)}),
}

_ROWS = {"sm_90": _HOPPER, "sm_80": _AMPERE, "sm_86": _ADA, BLACKWELL: _BLACKWELL, "gfx": _AMD}
_SAME = {  # tensor cores, and shared memory
    "sm_87": "sm_80", "sm_89": "sm_86", "sm_120": "sm_86", "sm_121": "sm_86",
    "sm_101": BLACKWELL, "sm_103": BLACKWELL, "sm_110": BLACKWELL,
}  # fmt: skip

# float32 has no tensor cores: its products are written out, and large tiles take long to compile.
_FLOAT32 = {64: _c(32, 32, 4, 2), 128: _c(32, 32, 4, 2), 256: _c(32, 16, 4, 2), 512: _c(16, 16, 4, 1)}


def up(size: int) -> int:
    """The entry for heads of this size."""
    return next(limit for limit in HEADS if size <= limit)


def row_of(architecture: str) -> str:
    """The name of the row that is its own, if there is one."""
    return "gfx" if architecture.startswith("gfx") else _SAME.get(architecture, architecture)


@cache
def entry(architecture: str, kind: Pass, calls: Calls, head: int) -> Entry:
    """For half precision. What an architecture's own row leaves out is Hopper's, which is fitted if it is too large."""
    name = row_of(architecture)
    own = _ROWS.get(name, {}).get((kind, calls), {})
    choice = own.get(head) or _HOPPER[kind, calls][head]
    is_measured = name == "sm_90" and head in _MEASURED[kind]
    row = f"{calls.value} calls on {name if head in own else 'any GPU'}, heads up to {head}"
    return Entry(choice, row, "measured" if is_measured else "reckoned")


def entry_of_float32(head: int) -> Entry:
    return Entry(_FLOAT32[head], f"float32 on any GPU, heads up to {head}", "reckoned")

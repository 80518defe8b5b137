"""Values of a variant in C++: where each one varies, and in which frame it is.

A value is absolute or belongs to the frame of a tile, whose columns count from its first key. Only the functions here
join values of a tile's frame; everything else takes absolute ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

from tilewise.kernels.cuda.sums import Linear, Range


class Place(IntFlag):
    """Where a value varies; what depends on both a query and a key varies from score to score."""

    HEAD = 0
    ROW = 1
    KEY = 2
    SCORE = 3


class Frame(IntEnum):
    """How often the first key of a tile is taken off a value.

    Comparisons need one frame on both sides; a sum or difference has the sum or difference of the frames; everything
    else takes absolute values alone.
    """

    ABSOLUTE = 0
    FROM_FIRST_KEY = 1  # as columns are counted
    TO_FIRST_KEY = -1  # what a column is added to


class FrameError(TypeError):
    """The generator would mix values of two frames: its own mistake, told when the code is written."""


STRUCTS = {Place.HEAD: "head", Place.ROW: "row", Place.KEY: "key"}  # what holds the values of each place


@dataclass(frozen=True)
class Term:
    """A value in C++: a literal, or a name in the place where it is computed."""

    text: str
    type: str  # bool, int, int64 or float
    place: Place
    named: bool = True  # a literal is the same everywhere
    of_score: bool = False  # it depends on S, so that it may be off in the last place; positions decide over masks
    from_array: bool = False  # such integers may have any size, so arithmetic on them takes 64 bits, as in NumPy
    linear: Linear | None = None
    absolute_of: Linear | None = None  # a sum whose size it is
    within: Range | None = None  # a condition not written down yet: another bound may join it
    frame: Frame = Frame.ABSOLUTE

    def seen_from(self, place: Place) -> str:
        """How code of that place calls the value."""
        return self.text if not self.named or self.place == place else f"{STRUCTS[self.place]}.{self.text}"


COLUMN = Term("column", "int", Place.KEY, frame=Frame.FROM_FIRST_KEY)


def all_absolute(*terms: Term) -> None:
    framed = [f"{x.text} ({x.frame.name})" for x in terms if x.frame]
    if framed:
        raise FrameError(f"expected absolute values, got {', '.join(framed)}")


def compared_with_column(symbol: str, bound: Term) -> str:
    """A condition on the column of a score, of which the place is SCORE."""
    if bound.frame != COLUMN.frame:
        raise FrameError(f"a column is compared with {bound.text}, whose frame is {bound.frame.name}")
    return f"{COLUMN.seen_from(Place.SCORE)} {symbol} {bound.seen_from(Place.SCORE)}"


def joined_to_column(sign: int, start: Term) -> str:
    """`start` plus or minus the column: an absolute float."""
    if start.frame + sign * COLUMN.frame != Frame.ABSOLUTE:
        raise FrameError(f"a column times {sign} is added to {start.text}, whose frame is {start.frame.name}")
    return f"{start.seen_from(Place.SCORE)} {'+' if sign > 0 else '-'} float({COLUMN.seen_from(Place.SCORE)})"

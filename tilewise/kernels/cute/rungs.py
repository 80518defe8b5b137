"""The kernels, in the order in which a reader would climb them: what each takes, and by which tiles it goes."""

from __future__ import annotations

from typing import Protocol

from tilewise.derivative import ONE, score_slopes
from tilewise.expr import COMPARISONS, Expr, S
from tilewise.kernels import gpus
from tilewise.kernels.cute.near import Table, is_in, table_of
from tilewise.schedule import itemsize
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import nodes, variables

_PLAIN = {*COMPARISONS, "and", "add", "sub", "var", "const"}


class Rung(Protocol):
    """A kernel: source/SOURCE.py."""

    name: str
    source: str
    scaling: str  # what the scale is multiplied into: "scores", which their exponent has in it, "q" or "k"
    oldest: tuple[int, int]  # the compute capability that it needs
    newest: tuple[int, int]
    MOST_D: int  # the largest head
    maps: bool  # its tiles come by the copy engine, which does not take arrays that lie anyhow
    differentiated: bool  # BACKWARD has the gradients of what it computes
    persistent: bool  # its blocks take one query tile after the other

    def unsupported(self, shape: Shape) -> str | None:
        """Why it cannot compute calls of this shape."""

    def tile(self, spec: Attention, shape: Shape) -> Tile: ...

    def tile_by_key(self, spec: Attention, shape: Shape) -> Tile | None:
        """By which it goes a second time, key tile by key tile; None: it does not."""

    def columns(self, d: int) -> int:
        """As many of a head's as it multiplies: those beyond the head are 0."""

    def shared_bytes(self, shape: Shape) -> int:
        """Of shared memory that a block needs at least."""


class Basic:
    source, oldest, newest, maps, differentiated, persistent = "basic", (8, 0), (99, 0), False, False, False
    DTYPES = ("float16", "bfloat16", "float32")
    MOST_D = 128  # acc has a row of it for each thread: registers have no room for more

    def __init__(self, name: str = "basic", scaling: str = "scores") -> None:
        self.name, self.scaling = name, scaling

    def unsupported(self, shape: Shape) -> str | None:
        if shape.dtype not in self.DTYPES:
            return f"it computes {', '.join(self.DTYPES)}, and the arrays are {shape.dtype}; kernel='cpu' takes them"
        if max(shape.d, shape.d_v) > self.MOST_D:
            return f"it takes head dimensions up to {self.MOST_D}, and they are {shape.d} and {shape.d_v}"
        return None

    def tile(self, spec: Attention, shape: Shape) -> Tile:
        return Tile(64, 64)

    def tile_by_key(self, spec: Attention, shape: Shape) -> Tile | None:
        return None

    def columns(self, d: int) -> int:
        return max(1 << (d - 1).bit_length(), 16)

    def shared_bytes(self, shape: Shape) -> int:
        """Tiles of q, k, v and p, whose rows are 16 bytes apart, and what the DSL keeps for itself."""
        widths = self.columns(shape.d), self.columns(shape.d), self.columns(shape.d_v), 64
        return 64 * sum(width * itemsize(shape.dtype) + 16 for width in widths) + 1024


LONG = 2048  # queries of a sequence


class ForwardSm90:
    """A warpgroup has 64 queries of the tile; registers decide how many keys, shared memory how many stages."""

    name, source, scaling = "forward_sm90", "forward_sm90", "scores"
    oldest, newest, maps, differentiated, persistent = (9, 0), (9, 0), True, True, True
    MOST_D = gpus.MOST_D

    def unsupported(self, shape: Shape) -> str | None:
        return gpus.not_for_hopper(shape)

    def tile(self, spec: Attention, shape: Shape) -> Tile:
        """Smaller where a variant takes registers too: for the addresses of a key's cells in an array, say."""
        table = table_of(spec)
        is_simple = spec.score is None or (table is not None and table.is_all_of(spec.score))
        is_costly, largest = _is_costly(spec, table), max(shape.d, shape.d_v)
        if largest > 128:
            return Tile(128, 48 if is_costly else 64)
        if largest > 64 or is_costly:
            return Tile(128, 64 if is_costly else 128)
        # Three warpgroups hide more, but their larger tiles leave more of a short sequence over, and a thread of them
        # has no registers for a score.
        sequences = 1 if spec.lengths is None else max(len(spec.lengths.q) - 1, 1)
        is_long = shape.n_q // sequences >= LONG and is_simple and not spec.batch_invariant
        return Tile(192, 96) if is_long else Tile(128, 128)

    def tile_by_key(self, spec: Attention, shape: Shape) -> Tile | None:
        return None

    def columns(self, d: int) -> int:
        return 64 if d <= 64 else 128 if d <= 128 else 256

    def shared_bytes(self, shape: Shape) -> int:
        """Two stages, which all of its heads have room for."""
        return gpus.SHARED


class BackwardSm90(ForwardSm90):
    """A block has 128 keys, and meets 64 queries at a time, or twice that where heads are small, scores are products
    alone and masks are plain."""

    name, source, differentiated, persistent = "backward_sm90", "backward_sm90", False, False
    about = "scores are computed once"
    NARROW, SMALL = 128, 64  # heads

    def takes(self, spec: Attention, shape: Shape) -> bool:
        """Whether registers have room: what a slope keeps, or what a score reads of a key, takes too many."""
        return max(shape.d, shape.d_v) <= self.NARROW and not _is_costly(spec) and not _has_slope(spec)

    def tile(self, spec: Attention, shape: Shape) -> Tile:
        is_small = max(shape.d, shape.d_v) <= self.SMALL and spec.score is None and _is_plain(spec.mask)
        return Tile(128 if is_small else 64, 128)

    def tile_by_key(self, spec: Attention, shape: Shape) -> Tile | None:
        return self.tile(spec, shape)


class BackwardTwiceSm90(ForwardSm90):
    """A warpgroup has 64 queries of the first pass's tile, and 64 keys of the second's."""

    name, source, differentiated, persistent = "backward_sm90_twice", "backward_sm90_twice", False, False
    about = "scores are computed twice: registers have no room for all sums"

    def tile(self, spec: Attention, shape: Shape) -> Tile:
        """Smaller where a score's slope keeps products, too."""
        if max(shape.d, shape.d_v) <= 128:
            return Tile(128, 64)
        return Tile(128, 32 if _is_costly(spec) or _has_slope(spec) else 48)

    def tile_by_key(self, spec: Attention, shape: Shape) -> Tile | None:
        if max(shape.d, shape.d_v) <= 128:
            return Tile(64 if max(shape.d, shape.d_v) <= 64 else 32, 128)
        return Tile(self.tile(spec, shape).k, 128)


def backward_rung(spec: Attention, shape: Shape) -> BackwardSm90 | BackwardTwiceSm90:
    """Whose gradients these are: of five products, or of seven where those have no room."""
    return BACKWARD if BACKWARD.takes(spec, shape) else BACKWARD_TWICE


def _has_slope(spec: Attention) -> bool:
    """Whether products of q and k are kept beside their scores, for the derivative of those."""
    return score_slopes(spec)[S] is not ONE


def _is_plain(mask: Expr | None) -> bool:
    """Whether it is comparisons of positions, all of which hold: what others compute takes registers, too."""
    if mask is None:
        return True
    named = {"B", "H", "HK"} & variables(mask)
    return not named and all(node.op in _PLAIN for node in nodes(mask))


def _is_costly(spec: Attention, table: Table | None = None) -> bool:
    """table: an array whose cells are read at no cost."""
    return any(_takes_registers(node) and not is_in(table, node, spec) for node in nodes(*spec.expressions))


def _takes_registers(node: Expr) -> bool:
    """Whether it reads an array at a place that depends on the key, or divides, in many steps."""
    return node.op == "floordiv" or (node.op == "load" and bool({"K", "KP"} & variables(node)))


BASIC = Basic()
LADDER: tuple[Rung, ...] = (BASIC, ForwardSm90())  # the last that can takes a call
BACKWARD, BACKWARD_TWICE = BackwardSm90(), BackwardTwiceSm90()  # whatever kernel was forward's
# Exercises, to be compared: half precision rounds q or k once more if it is scaled before it is multiplied.
SCALED = (Basic("scaled_q", "q"), Basic("scaled_k", "k"))
RUNGS: dict[str, Rung] = {rung.name: rung for rung in (*LADDER, *SCALED)}

"""The kernels, in the order in which a reader would climb them: what each takes, and by which tiles it goes."""

from __future__ import annotations

from typing import Protocol

from tilewise.schedule import itemsize
from tilewise.spec import Shape, Tile


class Rung(Protocol):
    """A kernel: source/NAME.py."""

    name: str
    oldest: tuple[int, int]  # the compute capability that it needs
    newest: tuple[int, int]

    def unsupported(self, shape: Shape) -> str | None:
        """Why it cannot compute calls of this shape."""

    def tile(self, shape: Shape) -> Tile: ...

    def columns(self, d: int) -> int:
        """As many of a head's as it multiplies: those beyond the head are 0."""

    def shared_bytes(self, shape: Shape) -> int:
        """What a block keeps in shared memory."""


class Basic:
    name, oldest, newest = "basic", (8, 0), (99, 0)
    DTYPES = ("float16", "bfloat16", "float32")
    MOST_D = 256
    ROOM = 227 << 10  # bytes of shared memory; GPUs that have less refuse the launch

    def unsupported(self, shape: Shape) -> str | None:
        if shape.dtype not in self.DTYPES:
            return f"it computes {', '.join(self.DTYPES)}, and the arrays are {shape.dtype}; kernel='cpu' takes them"
        if max(shape.d, shape.d_v) > self.MOST_D:
            return f"it takes head dimensions up to {self.MOST_D}, and they are {shape.d} and {shape.d_v}"
        return None

    def tile(self, shape: Shape) -> Tile:
        return Tile(64, 64)

    def columns(self, d: int) -> int:
        return max(1 << (d - 1).bit_length(), 16)

    def shared_bytes(self, shape: Shape) -> int:
        size = itemsize(shape.dtype)
        rows = sum(self.columns(d) * size + 16 for d in (shape.d, shape.d, shape.d_v, 64))
        return 64 * rows


RUNGS: dict[str, Rung] = {rung.name: rung for rung in (Basic(),)}

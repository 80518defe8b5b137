"""A kernel as the compiler is asked for it: all that its code depends on, and nothing of the call beside that."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewise import arrays
from tilewise.kernels.cute import modules
from tilewise.kernels.cute.near import Table, table_of
from tilewise.kernels.cute.rungs import Rung
from tilewise.schedule import itemsize
from tilewise.spec import Attention, Shape, Tile

_SOURCES = Path(__file__).with_name("source")


@dataclass(frozen=True)
class Wanted:
    rung: str
    source: str
    dtype: str
    tile: Tile
    depth: int  # columns of q and k, with those of zeros that are added
    columns: int  # of v
    vector: int  # numbers of a row that lie at a multiple of their size in bytes, and are loaded at once
    raw: bool  # scores stay products of q and k up to the exponent, which then has the scale in it
    scaling: str  # what is multiplied by the scale if not the exponent: "scores", or tiles of "q" or "k" on their way
    has_sinks: bool
    packed: bool  # sequences lie one behind the other
    loaded: tuple[tuple[str, int], ...]  # the type and the rank of each array that the variant reads
    functions: str  # the variant's, as Python
    persistent: bool = False  # blocks take one query tile after the other
    table: Table | None = None  # of which tiles come along with those of keys
    by_key: Tile | None = None  # by which a second kernel of the same library goes, key tile by key tile
    remainder: bool = False  # what rounding took from results is stored, too
    heads: int = 0  # whose results are multiplied by w_o before they are stored; 0: results are stored as they are

    def name(self, arch: str, runtime: str) -> str:
        """Of its file, which is a library of this kind of host. runtime: of which CUDA it needs the library."""
        parts = (_sources(), modules.operations(), arch, runtime, platform.machine(), repr(self))
        return f"{self.rung}-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:32]}.so"

    def __str__(self) -> str:
        heads = f"{self.depth}" if self.depth == self.columns else f"{self.depth} and {self.columns}"
        is_long = ", long" if self.tile.q > 128 else ""
        kept = ", with remainder" if self.remainder else ""
        aligned = "" if self.vector > 1 else ", not aligned"
        return f"{self.rung}, {self.dtype}, heads up to {heads}{is_long}{kept}{aligned}"


def kernel_of(rung: Rung, spec: Attention, shape: Shape, aligned: bool = True) -> Wanted:
    """aligned: rows of q, k, v and the output begin at multiples of 16 bytes."""
    loaded = tuple((arrays.dtype_name(slot.array), max(len(slot.array.shape), 1)) for slot in spec.loaded)
    tile, by_key = rung.tile(spec, shape), rung.tile_by_key(spec, shape)
    table = table_of(spec) if rung.persistent else None
    if table is not None and tile.k % table.columns:
        table = None
    return Wanted(
        rung.name, rung.source, shape.dtype, tile, rung.columns(shape.d), rung.columns(shape.d_v),
        vector=16 // itemsize(shape.dtype) if aligned else 1,
        raw=spec.raw_scores and rung.scaling == "scores", scaling=rung.scaling,
        has_sinks=spec.sinks is not None and by_key is None, packed=spec.lengths is not None,
        loaded=loaded, functions=modules.text(spec, by_key is not None, table), persistent=rung.persistent, table=table,
        by_key=by_key, remainder=spec.stores_remainder(shape.dtype) and rung.differentiated,
    )  # fmt: skip


@cache
def _sources() -> str:
    """The kernels', and how they are called."""
    linked = [Path(__file__).with_name(name) for name in ("compiler.py", "shim.c")]
    return "".join(path.read_text() for path in [*sorted(_SOURCES.glob("*.py")), *linked])

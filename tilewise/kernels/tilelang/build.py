"""A kernel as the compiler is asked for it: all that its code depends on, and nothing of the call beside that."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.kernels.tilelang.choices import padded
from tilewise.kernels.tilelang.compiler import C
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import loads

# Of source/, where each kernel is written down.
MODULES = {
    "simple": "simple", "forward": "forward", "rows": "backward", "d_query": "backward", "d_keys": "backward",
    **dict.fromkeys(("of_rows", "of_columns", "of_pairs", "of_distances"), "gradients"),
}  # fmt: skip
_FOLDER = Path(__file__).parent


class Variant(NamedTuple):
    """The expressions of a kernel by name (score, mask ...), and the arrays that it is given for them."""

    expressions: dict[str, Expr]
    slots: Sequence[Loaded]


@dataclass(frozen=True)
class Build:
    kernel: str
    target: str  # an architecture such as sm_90a, or C
    dtype: str
    d: int
    d_v: int
    tile: Tile
    stages: int  # tiles that are loaded ahead
    threads: int  # that compute; those that load come on top
    turns: bool  # warpgroups begin their products one after the other
    heads_first: bool  # blocks have the same tile of all heads, and then the next
    raw: bool  # scores stay products of q and k up to the exponent, which then has the scale in it
    has_sinks: bool
    shared_keys: bool  # by several heads of queries
    packed: bool  # sequences lie one behind the other
    from_zero: bool  # positions are those in the arrays
    aligned: bool  # rows begin at multiples of 16 bytes, so that the copy engine takes them; packed ones lie by tokens
    loaded: tuple[tuple[str, int], ...]  # the type and the rank of each array that the variant reads
    expressions: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, text, which of the arrays it reads

    @property
    def on_gpu(self) -> bool:
        return self.target != C

    @property
    def sum_dtype(self) -> str:
        """Of d_k and d_v: where several heads share keys, they are still to be added up."""
        return "float32" if self.shared_keys else self.dtype

    @property
    def depth(self) -> int:
        """Columns of a tile of q or k, with those of zeros that are added."""
        return padded(self.d) if self.on_gpu else self.d

    @property
    def columns(self) -> int:
        """The same of v."""
        return padded(self.d_v) if self.on_gpu else self.d_v

    @property
    def name(self) -> str:
        """Of its library."""
        text = sources(MODULES.get(self.kernel, "tiles"))
        digest = hashlib.sha256(f"{text}{self!r}{self.depth}{self.columns}".encode()).hexdigest()[:32]
        return f"{self.kernel}-{digest}.so"

    def __str__(self) -> str:
        heads = f"{self.d}" if self.d == self.d_v else f"{self.d} and {self.d_v}"
        return f"{self.kernel}, {self.dtype}, heads of {heads}, tiles of {self.tile.q} x {self.tile.k}, {self.target}"


def variant_of(spec: Attention, **others: Expr) -> Variant:
    """The variant's score and mask, and expressions that follow from them, such as derivatives."""
    named = {"score": spec.score, "mask": spec.mask, **others}
    return Variant({name: expr for name, expr in named.items() if expr is not None}, spec.loaded)


def told_of(variant: Variant) -> dict[str, Any]:
    """What of a variant decides over a kernel's code."""
    places = {id(slot.array): i for i, slot in enumerate(variant.slots)}
    return {
        "loaded": tuple((arrays.dtype_name(slot.array), max(len(slot.array.shape), 1)) for slot in variant.slots),
        "expressions": tuple(
            (name, expr.key, tuple(places[id(slot.array)] for slot in loads(expr)))
            for name, expr in variant.expressions.items()
        ),
    }


def told_of_call(spec: Attention, shape: Shape) -> dict[str, Any]:
    """What of a call does, beside its variant."""
    return {
        "dtype": shape.dtype, "d": shape.d, "d_v": shape.d_v,
        "raw": spec.raw_scores, "has_sinks": spec.sinks is not None, "shared_keys": shape.backward and shape.group > 1,
        "packed": spec.lengths is not None,
        "from_zero": spec.lengths is None and shape.origin_q == shape.origin_k == 0,
    }  # fmt: skip


@cache
def sources(module: str) -> str:
    """The text that a module's kernels are made of, with what it imports: another text is another kernel. Of what is
    chosen, a build knows all."""
    found, wanted = {}, [module]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = (_FOLDER / "source" / f"{name}.py").read_text()
            wanted += re.findall(r"^from tilewise\.kernels\.tilelang\.source\.(\w+) import", found[name], re.MULTILINE)
    around = ((_FOLDER / f"{name}.py").read_text() for name in ("ops", "compiler"))
    return "".join((*(found[name] for name in sorted(found)), *around))

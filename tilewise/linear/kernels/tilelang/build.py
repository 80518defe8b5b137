"""A kernel of linear attention as the compiler is asked for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewise.expr import S
from tilewise.kernels.tilelang.build import sources
from tilewise.kernels.tilelang.choices import padded
from tilewise.kernels.tilelang.compiler import C
from tilewise.linear.spec import Linear
from tilewise.spec import Shape

_MODULES = {
    "outputs": "forward", "segment_states": "states", "d_segment_states": "states", "scan": "states",
    "row_weights": "backward", "d_query": "backward", "d_keys": "backward",
}  # fmt: skip
KERNELS = tuple(_MODULES)
PREFIX = "linear-"  # of the names of libraries
CHUNK = 64  # rows, as many as a warpgroup multiplies
_ON_C = 32
_WARPGROUP = 128  # threads
_STAGES, _STAGES_IF_RAW = 2, 3  # tiles of features leave no room for more
_SIDE_BY_SIDE = 8  # numbers of a row that a thread loads at once


@dataclass(frozen=True)
class LinearBuild:
    """All that a kernel's code depends on."""

    kernel: str
    target: str  # an architecture such as sm_90a, or C
    dtype: str
    d: int
    d_v: int
    chunk: int
    stages: int  # chunks that are loaded ahead
    feature: str
    causal: bool
    normalize: bool
    decays: bool
    scaled: bool
    shared_keys: bool  # by several heads of queries
    packed: bool  # sequences lie one behind the other
    aligned: bool  # rows begin at multiples of 16 bytes, so that the copy engine takes them

    @property
    def on_gpu(self) -> bool:
        return self.target != C

    @property
    def raw_keys(self) -> bool:
        """Features of keys are keys: products take their tiles as they come."""
        return self.feature == S.key

    @property
    def raw_queries(self) -> bool:
        return self.raw_keys and not self.scaled

    @property
    def operand(self) -> str:
        """What products take. Sums over a sequence leave the range of float16: in main memory it is widened."""
        return self.dtype if self.on_gpu else "float32"

    @property
    def sum_dtype(self) -> str:
        """Of d_k and d_v: where several heads share keys, they are still to be added up."""
        return "float32" if self.shared_keys else self.dtype

    @property
    def depth(self) -> int:
        """Rows of a state, with those of zeros that are added."""
        return padded(self.d) if self.on_gpu else self.d

    @property
    def columns(self) -> int:
        """Its columns."""
        return padded(self.d_v) if self.on_gpu else self.d_v

    @property
    def threads(self) -> int:
        """Those that compute: two warpgroups share the registers that a large state takes."""
        return _WARPGROUP * (2 if max(self.depth, self.columns) > CHUNK else 1) if self.on_gpu else 1

    @property
    def row_lanes(self) -> int:
        """Rows of a chunk whose features lie side by side in registers; a thread has every so many-th of them."""
        return min(self.threads * _SIDE_BY_SIDE // self.depth, self.chunk) if self.on_gpu else 1

    @property
    def name(self) -> str:
        """Of its library."""
        text = f"{sources('tiles')}{_sources()}{self!r}{self.depth}{self.columns}{self.threads}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return f"{PREFIX}{self.kernel}-{digest}.so"

    def __str__(self) -> str:
        heads = f"{self.d}" if self.d == self.d_v else f"{self.d} and {self.d_v}"
        return f"linear attention, {self.kernel}, {self.dtype}, heads of {heads}, {self.target}"


def build_of(
    kernel: str, spec: Linear, shape: Shape, decays: bool, target: str, chunk: int, aligned: bool
) -> LinearBuild:
    is_raw = spec.feature.key == S.key and spec.scale == 1 and not (decays or spec.normalize) and kernel != "d_keys"
    stages = 0 if target == C else _STAGES_IF_RAW if is_raw else _STAGES
    return LinearBuild(
        kernel, target, shape.dtype, shape.d, shape.d_v, chunk, stages,
        spec.feature.key, spec.causal, spec.normalize, decays, spec.scale != 1, shape.group > 1,
        spec.lengths is not None, aligned,
    )  # fmt: skip


def default_chunk(target: str) -> int:
    return _ON_C if target == C else CHUNK


def written(kernel: str) -> Callable[[LinearBuild, Linear], Any]:
    """The function that writes a kernel down. TileLang is imported when it is called, and no sooner."""
    module = import_module(f"tilewise.linear.kernels.tilelang.source.{_MODULES[kernel]}")
    found: Callable[[LinearBuild, Linear], Any] = getattr(module, kernel)
    return found


@cache
def _sources() -> str:
    return "".join(path.read_text() for path in sorted((Path(__file__).parent / "source").glob("*.py")))

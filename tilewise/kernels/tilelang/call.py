"""A kernel's arguments, by the names that its text has for them, and its launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from tilewise.derivative import ONE, score_slopes
from tilewise.expr import S
from tilewise.kernels.tilelang import library
from tilewise.kernels.tilelang.build import MODULES, Build, Variant, told_of, told_of_call, variant_of
from tilewise.kernels.tilelang.choices import Choice, Pass, chosen, heads_first
from tilewise.kernels.tilelang.support import MOST_ARRAYS
from tilewise.kernels.tilelang.visits import visits_on
from tilewise.kernels.uploads import loaded_on
from tilewise.spec import Attention, Shape, Tile

_LOG2_E = np.float32(1.4426950408889634)
_ROWS = 128  # numbers of rows are kept in so many, or a multiple, so that the copy engine finds them aligned
_ALIGNED = 16  # bytes, as it takes rows

_READERS = {
    "has_sinks": ("forward",), "shared_keys": ("d_keys",), "raw": tuple(MODULES.keys() - {"simple", "rows"}),
    "from_zero": tuple(MODULES.keys() - {"simple", "rows"}), "heads_first": ("forward", "d_query", "d_keys"),
}  # fmt: skip


def row_places(n: int) -> int:
    """Places for a number of each row."""
    return -(-n // _ROWS) * _ROWS


class Call:
    """A kernel's arguments, by the names that its text has for them, and the launch."""

    def __init__(
        self, spec: Attention, shape: Shape, target: str, kind: Pass, tile: Tile | None, variant: Variant,
        operands: Sequence[Any],
    ) -> None:  # fmt: skip
        """operands: the arrays whose rows the copy engine may take."""
        self.spec, self.shape, self.target, self.variant = spec, shape, target, variant
        self.device = torch.device(shape.device)
        self.aligned = all(map(suits_copy_engine if spec.lengths is None else lies_by_tokens, operands))
        self.choice: Choice = chosen(kind, spec, shape, target, tile, self.aligned)
        scale = np.float32(spec.scale)
        self._kept: list[Any] = []
        self._results: list[tuple[Any, Any]] = []
        self._values: dict[str, Any] = {
            "batch": shape.batch, "heads": shape.heads, "heads_k": shape.heads_k, "n_q": shape.n_q, "n_k": shape.n_k,
            "n_rows": row_places(shape.n_q), "group": shape.group,
            "scale": scale, "factor": scale * _LOG2_E if spec.raw_scores else _LOG2_E,
        }  # fmt: skip
        self._load()

    def plan(self, by_key: bool = False) -> None:
        """The tiles that blocks have, and those that each visits."""
        made = visits_on(self.device, self.spec, self.shape, self.choice.tile, by_key)
        self._values |= {"tiles": made.records.shape[2], "n_visits": len(made.visits)}
        self.give(records=made.records, visits=made.visits)

    def tell(self, **numbers: int) -> None:
        self._values |= numbers

    def give(self, **given: Any) -> None:
        """Arrays: their addresses and, where they need not be side by side, their steps."""
        for name, x in given.items():
            lies = x if x.is_cuda else x.contiguous()
            self._kept.append(lies)
            steps = {f"{name}_step{i}": step for i, step in enumerate(steps_of(lies))}
            self._values |= {name: lies.data_ptr(), **steps}

    def take(self, **results: Any) -> None:
        """Arrays that the kernel writes; where it wants them side by side, they are copied to where they belong."""
        lie = {name: x if x.is_cuda else x.contiguous() for name, x in results.items()}
        self._results += [(results[name], x) for name, x in lie.items() if x is not results[name]]
        self.give(**lie)

    def _load(self) -> None:
        """The variant's arrays. Of those that a kernel has room for and the variant has not, nothing is read."""
        self._values |= {f"a{i}": None for i in range(MOST_ARRAYS)}
        for i, x in enumerate(loaded_on(self.spec, self.device)):
            x = as_kernels_take(x)
            self.give(**{f"a{i}": x})
            self._values |= {f"a{i}_size{axis}": size for axis, size in enumerate(x.shape)}
            self._values |= {f"a{i}_step{axis}": step for axis, step in enumerate(x.stride())}

    def launch(self, kernel: str) -> None:
        build = build_of(kernel, self.spec, self.shape, self.target, self.choice, self.variant, self.aligned)
        stream = torch.cuda.current_stream().cuda_stream if build.on_gpu else None
        found = library.kernel(build, lambda: written(kernel)(build, self.variant))
        found.launch({**self._values, "stream": stream}, self.device)
        for x, lies in self._results:
            x.copy_(lies)


def builds_of(spec: Attention, shape: Shape, target: str, simple: bool = False) -> list[Build]:
    """The kernels of a call whose rows lie as most do; those that add up gradients of arrays are not among them."""
    kinds = [Pass.SIMPLE if simple else Pass.FORWARD]
    if shape.backward:
        kinds = [Pass.ROWS, Pass.D_QUERY, Pass.D_KEYS]
    slope = score_slopes(spec)[S] if shape.backward else ONE
    plain, with_slope = variant_of(spec), variant_of(spec, **({} if slope is ONE else {"slope": slope}))
    variants = {Pass.ROWS: Variant({}, ()), Pass.D_QUERY: with_slope, Pass.D_KEYS: with_slope}
    return [
        build_of(kind.value, spec, shape, target, chosen(kind, spec, shape, target), variants.get(kind, plain))
        for kind in kinds
    ]


def build_of(
    kernel: str, spec: Attention, shape: Shape, target: str, choice: Choice, variant: Variant, aligned: bool = True
) -> Build:
    """What the compiler is asked for. aligned: rows begin at multiples of 16 bytes."""
    told = {**told_of_call(spec, shape), "heads_first": heads_first(spec, shape, target)}
    for name, readers in _READERS.items():  # calls that differ in what a kernel does not look at have the same one
        told[name] = told[name] and kernel in readers
    return Build(
        kernel, target, tile=choice.tile, stages=choice.stages, threads=choice.threads, turns=choice.turns,
        aligned=aligned, **told, **told_of(variant),
    )  # fmt: skip


def written(kernel: str) -> Callable[[Build, Variant], Any]:
    """The function that writes a kernel down. TileLang is imported when it is called, and no sooner."""
    module = import_module(f"tilewise.kernels.tilelang.source.{MODULES[kernel]}")
    found: Callable[[Build, Variant], Any] = getattr(module, kernel)
    return found


def suits_copy_engine(x: Any) -> bool:
    """It takes rows that begin at multiples of 16 bytes, each elsewhere: what is expanded lies too close."""
    steps = [step * x.element_size() for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.data_ptr() % _ALIGNED == 0 and all(step % _ALIGNED == 0 and 0 < step < 2**40 for step in steps)


def lies_by_tokens(x: Any) -> bool:
    """Whether packed sequences lie as (total, heads, d) has them, from a multiple of 16 bytes on."""
    _, heads, total, d = x.shape
    wanted = ((heads, d), (total, heads * d))
    lies = all(size == 1 or step == want for (size, want), step in zip(wanted, x.stride()[1:3], strict=True))
    return lies and x.data_ptr() % _ALIGNED == 0


def steps_of(x: Any) -> list[int]:
    """From batch index to batch index, and so on. Of a dimension of size 1 PyTorch may tell any; none is taken."""
    return [step if size > 1 else _ALIGNED for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)]


def as_kernels_take(x: Any) -> Any:
    """An array of a variant: of one dimension at least, conditions as bytes."""
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return x if x.ndim else x.reshape(1)

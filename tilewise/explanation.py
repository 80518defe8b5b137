"""What a call would do, in words and numbers: the answer of tw.explain and the body of `tilewise plan`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tilewise import arrays, dispatch
from tilewise.kernels.gpus import lying
from tilewise.schedule import Kind, Plan, itemsize, plan
from tilewise.spec import Attention, Shape, Tile
from tilewise.validate import Call

_SHADES = {Kind.EMPTY: "·", Kind.PARTIAL: "▒", Kind.FULL: "█"}
MAX_MAP = 64  # rows and columns of a printed tile map


@dataclass(frozen=True, eq=False)
class Explanation:
    """Which kernel takes a call and why, why each other one does not, and the plan of its tiles."""

    kernel: str | None  # None: no kernel system can compute this call
    reasons: dict[str, str | None]
    spec: Attention
    shape: Shape
    plan: Plan | None  # None: the arrays it depends on are not in main memory
    choice: str | None = None  # what the kernel system chose beside the tile
    gradients: str | None = None  # the kernel system or rung that would compute them
    gradient_reasons: dict[str, str | None] = field(default_factory=dict)  # as for the forward pass, of those before it
    why: str = ""  # the order that `auto` followed, and where it is from
    gradients_why: str = ""
    slowness: str | None = None  # why the kernel is slow here, and what would be faster
    gradients_slowness: str | None = None

    def __str__(self) -> str:
        lines = [describe(self.spec, self.shape)]
        lines += _told("kernel", self.kernel, self.why, self.slowness, self.reasons)
        if self.choice is not None:
            lines.append(f"choice: {self.choice}")
        lines += _told("gradients", self.gradients, self.gradients_why, self.gradients_slowness, self.gradient_reasons)
        lines.append(describe_kept(self.shape))
        if self.plan is not None:
            lines.append(describe_plan(self.plan))
        return "\n".join(lines)

    @property
    def bytes_kept(self) -> dict[str, int]:
        """What a forward pass keeps for the backward pass beside its operands, result by result."""
        return kept_for_backward(self.shape)


def _told(what: str, taken: str | None, why: str, slowness: str | None, reasons: dict[str, str | None]) -> list[str]:
    lines = [f"{what}: {taken or 'none can compute this call'}"]
    lines += [f"  why: {why}"] if why else []
    lines += [f"  slow: {slowness}"] if slowness else []
    others = {name: reason for name, reason in reasons.items() if name != taken}
    return lines + [
        f"  not {', '.join(names)}: {reason or f'it could, but {taken} comes first or was asked for'}"
        for reason, names in dispatch.by_reason(others).items()
    ]


def explain_call(call: Call, kernel: str) -> Explanation:
    """What resolve would answer, without raising: a call that nothing can compute is explained too."""
    shape = lying(call.shape, q=call.q, k=call.k, v=call.v)
    made, gradients = (dispatch.choice(kernel, call.spec, replace(shape, backward=x)) for x in (False, True))
    system = dispatch.kernel(made.taken) if made.taken else None
    tile = system.default_tile(call.spec, shape) if system else Tile()
    return Explanation(
        made.taken,
        made.reasons,
        call.spec,
        call.shape,
        plan=plan(call.spec, call.shape, tile) if call.shape.device == "cpu" else None,
        choice=system.choice(call.spec, shape) if isinstance(system, dispatch.Chooses) else None,
        gradients=gradients.taken,
        gradient_reasons=_before(gradients),
        why=_why(made),
        gradients_why=_why(gradients),
        slowness=made.slowness,
        gradients_slowness=gradients.slowness,
    )


def _why(made: dispatch.Choice) -> str:
    """Of `auto` alone: what was named is taken because it was."""
    if made.row is None or made.taken is None:
        return ""
    where = made.row.group if made.architecture == "cpu" else f"{made.row.group} ({made.architecture})"
    return f"the first usable of {', '.join(made.tried)} ({where}, {made.dtype}; {made.row.origin})"


def _before(made: dispatch.Choice) -> dict[str, str | None]:
    """The reasons of those that come before it; of all if nothing is taken."""
    if made.taken is None:
        return made.reasons
    return {name: made.reasons[name] for name in made.tried[: made.tried.index(made.taken)]}


def describe(spec: Attention, shape: Shape) -> str:
    """The call in one line, and its expressions."""
    heads = f"{shape.heads}" if shape.group == 1 else f"{shape.heads} (keys: {shape.heads_k})"
    dims = f"{shape.d}" if shape.d == shape.d_v else f"{shape.d} (values: {shape.d_v})"
    lines = [
        f"attention: batch {shape.batch}, heads {heads}, queries {shape.n_q}, keys {shape.n_k}, head dim {dims}, "
        f"{shape.dtype} on {shape.device}"
    ]
    lines += [f"{name}: {expr}" for name, expr in (("mask", spec.mask), ("score", spec.score)) if expr is not None]
    if spec.rope is not None:
        lines.append(
            f"rope: {spec.rope}; cpu turns q and k before its tiles, triton too where many tiles of queries read the "
            "same keys, the others tile by tile"
        )
    return "\n".join(lines)


def kept_for_backward(shape: Shape) -> dict[str, int]:
    """Bytes of each result that the backward pass reads. In half precision the remainder of out is one of them."""
    rows = shape.batch * shape.heads * shape.n_q
    kept = {"out": rows * shape.d_v * itemsize(shape.dtype), "lse": rows * arrays.compute_dtype(shape.dtype).itemsize}
    return kept | ({"remainder": kept["out"]} if shape.dtype in arrays.HALF_DTYPES else {})


def describe_kept(shape: Shape) -> str:
    """The same in one line."""
    return "kept for a backward pass: " + ", ".join(f"{name} {size(n)}" for name, n in kept_for_backward(shape).items())


def describe_plan(p: Plan) -> str:
    """The numbers of a plan."""
    counts, total = p.counts, max(sum(p.counts.values()), 1)
    kinds = ", ".join(f"{k.name} {counts[k]:,} ({counts[k] / total:.0%})" for k in Kind)
    return "\n".join(
        [
            f"tiles: {p.grid[0]} x {p.grid[1]} of {p.tile.q} x {p.tile.k} per head; in total {kinds}",
            f"operations: {count(p.flops)}, {ratio(p.flops, p.flops_naive)} of full attention's {count(p.flops_naive)}",
            f"slow-memory traffic: tiled {size(p.bytes_tiled)}, naive {size(p.bytes_naive)} "
            f"({p.bytes_naive / max(p.bytes_tiled, 1):.1f}x)",
            f"on-chip memory: {size(p.bytes_on_chip)} a tile; the full matrix would take {size(p.bytes_matrix)}",
        ]
    )


def tile_map(p: Plan, b: int = 0, h: int = 0) -> str:
    """The grid of tiles as text: · EMPTY, ▒ PARTIAL, █ FULL. In a large grid a cell stands for a block of tiles."""
    kinds = p.kinds(b, h)
    legend = "queries down, keys across: · EMPTY  ▒ PARTIAL  █ FULL"
    if not kinds.size:
        return f"no tiles\n{legend}"
    steps = [-(-n // MAX_MAP) for n in kinds.shape]
    least, most = kinds, kinds
    for axis, step in enumerate(steps):
        edges = np.arange(0, kinds.shape[axis], step)
        least, most = np.minimum.reduceat(least, edges, axis), np.maximum.reduceat(most, edges, axis)
    cells = np.where(least == most, least, Kind.PARTIAL)
    lines = ["".join(_SHADES[Kind(int(cell))] for cell in row) for row in cells]
    blocks = f" (a cell is {steps[0]} x {steps[1]} tiles)" if max(steps) > 1 else ""
    return "\n".join([*lines, legend + blocks])


def size(n: float) -> str:
    """Bytes, readable."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def count(n: float) -> str:
    """Operations, readable."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if n < 1000 or unit == " P":
            return f"{n:.0f}" if not unit else f"{n:.3g}{unit}"
        n /= 1000
    raise AssertionError("unreachable")


def ratio(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"

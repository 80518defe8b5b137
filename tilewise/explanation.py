"""What a call would do, in words and numbers: the answer of tw.explain and the body of `tilewise plan`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise import dispatch
from tilewise.schedule import Kind, Plan, plan
from tilewise.spec import Attention, Shape
from tilewise.validate import Call

_SHADES = {Kind.EMPTY: "·", Kind.PARTIAL: "▒", Kind.FULL: "█"}
MAX_MAP = 64  # rows and columns of a printed tile map


@dataclass(frozen=True, eq=False)
class Explanation:
    """Which kernel system takes a call, why each other one does not, and the plan of its tiles."""

    kernel: str
    reasons: dict[str, str | None]
    spec: Attention
    shape: Shape
    plans: list[Plan]

    def __str__(self) -> str:
        lines = [describe(self.spec, self.shape), f"kernel: {self.kernel}"]
        for name, reason in self.reasons.items():
            if name != self.kernel:
                lines.append(f"  not {name}: {reason or f'it could, but {self.kernel} comes first or was asked for'}")
        lines += [describe_plan(p) for p in self.plans]
        return "\n".join(lines)

    @property
    def plan(self) -> Plan:
        return self.plans[0]


def explain_call(call: Call, kernel: str) -> Explanation:
    system = dispatch.resolve(kernel, call.spec, call.shape)
    tile = system.default_tile(call.spec, call.shape)
    plans = [plan(call.spec, part, tile) for part, _, _ in call.shape.sequences(call.spec.lengths)]
    return Explanation(system.name, dispatch.reasons(call.spec, call.shape), call.spec, call.shape, plans)


def describe(spec: Attention, shape: Shape) -> str:
    """The call in one line, and its expressions."""
    heads = f"{shape.heads}" if shape.group == 1 else f"{shape.heads} (keys: {shape.heads_k})"
    dims = f"{shape.d}" if shape.d == shape.d_v else f"{shape.d} (values: {shape.d_v})"
    lines = [
        f"attention: batch {shape.batch}, heads {heads}, queries {shape.n_q}, keys {shape.n_k}, head dim {dims}, "
        f"{shape.dtype} on {shape.device}"
    ]
    lines += [f"{name}: {expr}" for name, expr in (("mask", spec.mask), ("score", spec.score)) if expr is not None]
    return "\n".join(lines)


def describe_plan(p: Plan) -> str:
    """The numbers of a plan."""
    counts, total = p.counts, max(sum(p.counts.values()), 1)
    kinds = ", ".join(f"{k.name} {counts[k]:,} ({counts[k] / total:.0%})" for k in Kind)
    return "\n".join(
        [
            f"tiles: {p.grid[0]} x {p.grid[1]} of {p.tile.q} x {p.tile.k} a head; in all {kinds}",
            f"operations: {count(p.flops)} of {count(p.flops_naive)} ({ratio(p.flops, p.flops_naive)} of full attention)",
            f"slow-memory traffic: tiled {size(p.bytes_tiled)}, naive {size(p.bytes_naive)} "
            f"({p.bytes_naive / max(p.bytes_tiled, 1):.1f}x)",
            f"on-chip memory: {size(p.bytes_on_chip)} a tile; the full matrix would take {size(p.bytes_matrix)}",
        ]
    )


def tile_map(p: Plan, b: int = 0, h: int = 0) -> str:
    """The grid of tiles as text: · EMPTY, ▒ PARTIAL, █ FULL; a large grid is sampled."""
    kinds = p.kinds(b, h)
    rows, cols = (range(0, n, -(-n // MAX_MAP)) for n in kinds.shape) if kinds.size else (range(0), range(0))
    lines = ["".join(_SHADES[Kind(int(kinds[i, j]))] for j in cols) for i in rows]
    sampled = f" (every {rows.step} x {cols.step} tiles shown)" if kinds.size and max(rows.step, cols.step) > 1 else ""
    return "\n".join([*lines, f"queries down, keys across: · EMPTY  ▒ PARTIAL  █ FULL{sampled}"])


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

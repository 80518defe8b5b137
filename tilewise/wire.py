"""An attention as a line of text and a list of arrays, and back: what crosses the boundary of a PyTorch operator.

The line says everything but the arrays: {"kernel": "auto", "scale": 0.125, "mask": "K <= Q + (NK - NQ)"}. An expression
that reads arrays says which, by their places in the list: "score": "S + load(a0, Q, K)", "score arrays": [2]. So does
a rotary embedding: "rope": {"base": 10000.0}, "rope arrays": {"positions": 3}. The cumulative lengths of packed
sequences are arrays too, the last two: they differ from call to call, and compiled graphs and caches are kept by the
line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise import arrays
from tilewise.expr import Expr, Loaded, Record, from_records, records
from tilewise.rope import PLAIN, Rope
from tilewise.spec import Attention, Lengths, Positions
from tilewise.text import read
from tilewise.walking import loads, nodes

_CACHE_SIZE = 256


def encode(spec: Attention, kernel: str) -> tuple[str, list[Any]]:
    """The line, and the arrays it names. Sinks travel beside them."""
    given: dict[int, Any] = {}  # in order, by id
    said: list[Any] = []
    for expr in (spec.mask, spec.score):
        reads = [] if expr is None else [slot.array for slot in loads(expr)]
        given.update((id(array), array) for array in reads)
        place = {key: i for i, key in enumerate(given)}
        said += [None if expr is None else repr(expr), tuple(place[id(array)] for array in reads)]
    said += _said_of_rope(spec.rope, given)
    lengths = [] if spec.lengths is None else [spec.lengths.q, spec.lengths.k]
    line = _line(kernel, spec.scale, *said, bool(lengths), spec.positions, spec.batch_invariant, spec.wide_out)
    return line, [*given.values(), *lengths]


def _said_of_rope(rope: Rope | None, given: dict[int, Any]) -> list[Any]:
    """What it is, and the places of its arrays, which join those given."""
    if rope is None:
        return [None, ()]
    named = rope.arrays
    given.update((id(array), array) for array in named.values())
    place = {key: i for i, key in enumerate(given)}
    plain = tuple((name, getattr(rope, name)) for name in PLAIN if getattr(rope, name) is not None)
    return [plain, tuple((name, place[id(array)]) for name, array in named.items())]


@lru_cache(maxsize=_CACHE_SIZE)
def _line(
    kernel: str, scale: float, mask: Any, mask_arrays: Any, score: Any, score_arrays: Any, rope: Any, rope_arrays: Any,
    packed: bool, positions: Positions, batch_invariant: bool, wide_out: bool,
) -> str:  # fmt: skip
    said = {
        "kernel": kernel, "scale": scale,
        "mask": mask, "mask arrays": mask_arrays or None, "score": score, "score arrays": score_arrays or None,
        "rope": None if rope is None else dict(rope), "rope arrays": dict(rope_arrays) or None,
        "packed": packed or None, "positions": None if positions == Positions() else asdict(positions),
        "batch_invariant": batch_invariant or None, "wide_out": wide_out or None,
    }  # fmt: skip
    return json.dumps({name: value for name, value in said.items() if value is not None})


@dataclass(frozen=True, eq=False)
class Template:
    """A line that was read: an attention with places for its arrays."""

    kernel: str
    scale: float
    mask: _Pattern | None
    score: _Pattern | None
    packed: bool
    positions: Positions
    batch_invariant: bool
    wide_out: bool
    rope: dict[str, Any] | None
    rope_places: dict[str, int]

    def fill(
        self, given: Sequence[Any], sinks: Any = None, wanted: Collection[int] = (), keeps_remainder: bool = False
    ) -> Attention:
        """The attention on these arrays; wanted: the places of those whose gradients are wanted. keeps_remainder: the
        operator says it, not the line."""
        lengths = Lengths(given[-2], given[-1]) if self.packed else None
        slots = [Loaded(array, grad=i in wanted) for i, array in enumerate(given)]
        mask, score = (None if pattern is None else pattern.fill(slots) for pattern in (self.mask, self.score))
        rope = None
        if self.rope is not None:
            rope = Rope(**self.rope, **{name: given[i] for name, i in self.rope_places.items()})
        return Attention(
            self.scale, mask, score, sinks, lengths, self.positions, self.batch_invariant, rope, self.wide_out,
            keeps_remainder,
        )  # fmt: skip


def decode(line: str, given: Sequence[Any]) -> Template:
    """Read a line that goes with these arrays. It is read once for arrays of the same types and shapes."""
    read_by_name = given[:-2] if is_packed(line) else given
    return _template(line, tuple((arrays.dtype_name(x), tuple(x.shape)) for x in read_by_name))


def score_arrays(line: str) -> list[int]:
    """The places of the arrays that the score reads: those that have gradients."""
    places: list[int] = _said(line).get("score arrays", [])
    return places


def is_packed(line: str) -> bool:
    """Whether the last two arrays are lengths."""
    return bool(_said(line).get("packed"))


def has_wide_out(line: str) -> bool:
    """Whether out is in the type computed with."""
    return bool(_said(line).get("wide_out"))


def ignores_batch(line: str) -> bool:
    """Whether it is all the same which member of a batch a query belongs to. Positions may be a member's own."""
    said = _said(line)
    if is_packed(line) or "positions" in said.get("rope arrays", {}):
        return False
    return not any(re.search(r"\bB\b", said.get(name, "")) for name in ("mask", "score"))


@lru_cache(maxsize=_CACHE_SIZE)
def _said(line: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(line)
    return said


@lru_cache(maxsize=_CACHE_SIZE)
def _template(line: str, kinds: tuple[tuple[str, tuple[int, ...]], ...]) -> Template:
    said = _said(line)
    stand_ins = [_stand_in(*kind) for kind in kinds]
    mask, score = (
        _Pattern.of(said[name], said.get(f"{name} arrays", []), stand_ins) if name in said else None
        for name in ("mask", "score")
    )
    return Template(
        said["kernel"], said["scale"], mask, score, said.get("packed", False), Positions(**said.get("positions", {})),
        said.get("batch_invariant", False), said.get("wide_out", False), said.get("rope"), said.get("rope arrays", {}),
    )  # fmt: skip


def _stand_in(dtype: str, shape: tuple[int, ...]) -> arrays.Array:
    """An array of this type and shape that takes no memory."""
    return np.broadcast_to(np.empty((), arrays.BFLOAT16 if dtype == "bfloat16" else dtype), shape)


@dataclass(frozen=True, eq=False)
class _Pattern:
    """An expression whose loads name their arrays by place."""

    records: list[Record]

    @classmethod
    def of(cls, text: str, places: list[int], stand_ins: list[arrays.Array]) -> _Pattern:
        expr = read(text, [stand_ins[i] for i in places])
        place = {id(x): i for i, x in enumerate(stand_ins)}
        pattern: list[Record] = []
        for node, (op, args, kind, payload) in zip(nodes(expr), records(expr), strict=True):
            if op == "load":
                pattern.append((op, args, kind, place[id(payload.array)]))
            elif all(isinstance(pattern[a][3], Expr) for a in args):  # it reads no array, so it is the same every time
                pattern.append((op, (), kind, node))
            else:
                pattern.append((op, args, kind, payload))
        return cls(pattern)

    def fill(self, slots: Sequence[Loaded]) -> Expr:
        return from_records(
            (op, args, kind, slots[payload] if op == "load" else payload) for op, args, kind, payload in self.records
        )

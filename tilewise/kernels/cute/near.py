"""Arrays of which a score reads the cell of its query and its key: tiles of one come along with tiles of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise import arrays
from tilewise.expr import Expr
from tilewise.spec import Attention
from tilewise.walking import nodes

CELL_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_COPIED = 16  # bytes: the copy engine takes steps that are multiples of it
_OF_A_HEAD = ("B", "H", "HK")


@dataclass(frozen=True)
class Table:
    """Its axes: others, which a head chooses, then queries, then keys."""

    slot: int  # which of the arrays that the variant reads
    dtype: str
    others: tuple[str | int, ...]  # what they are read at: a variable, or a number

    @property
    def is_shared(self) -> bool:
        """Whether all heads read the same cells."""
        return not any(isinstance(x, str) for x in self.others)

    @property
    def columns(self) -> int:
        """Of a part of a tile, as shared memory has it: its rows have 64 bytes at least."""
        return 64 // CELL_BYTES[self.dtype]

    def is_all_of(self, expr: Expr) -> bool:
        """Whether a score is S and its cell, added."""
        names = [arg.payload if arg.op == "var" else arg.op for arg in expr.args]
        return expr.op == "add" and sorted(names) == ["S", "load"]

    @property
    def index(self) -> tuple[str, ...]:
        """As text of an expression."""
        return (*map(str, self.others), "Q", "K")


def table_of(spec: Attention) -> Table | None:
    """The first array of the score that can come by tiles, or None."""
    slots = {id(slot.array): i for i, slot in enumerate(spec.loaded)}
    found = (_table(node, slots) for node in _loads(spec))
    return next((table for table in found if table is not None), None)


def is_in(table: Table | None, node: Expr, spec: Attention) -> bool:
    """Whether a node reads a cell of the table's tile."""
    if table is None or node.op != "load" or not any(node is other for other in _loads(spec)):
        return False
    return _table(node, {id(slot.array): i for i, slot in enumerate(spec.loaded)}) == table


def _loads(spec: Attention) -> list[Expr]:
    return [] if spec.score is None else [node for node in nodes(spec.score) if node.op == "load"]


def _table(node: Expr, slots: dict[int, int]) -> Table | None:
    array, index = node.payload.array, [_index(arg) for arg in node.args]
    dtype = arrays.dtype_name(array)
    if dtype not in CELL_BYTES or len(index) > 4 or index[-2:] != ["Q", "K"]:
        return None
    others = index[:-2]
    if not all(isinstance(x, int) or x in _OF_A_HEAD for x in others) or not _is_copied(array, CELL_BYTES[dtype]):
        return None
    return Table(slots[id(array)], dtype, tuple(x for x in others if x is not None))


def _index(arg: Expr) -> str | int | None:
    """The variable or the number that an axis is read at; None if it is neither."""
    return arg.payload if arg.op == "var" or (arg.op == "const" and isinstance(arg.payload, int)) else None


def _is_copied(array: Any, size: int) -> bool:
    """Whether the copy engine takes it as it will be on a GPU, where arrays of the host lie without gaps."""
    if arrays.is_torch(array) and array.device.type != "cpu":
        steps, begins = array.stride(), array.data_ptr()
    else:
        is_dense = array.is_contiguous() if arrays.is_torch(array) else array.flags.c_contiguous
        if not is_dense:
            return False
        steps, begins = [_product(array.shape[i + 1 :]) for i in range(len(array.shape))], 0
    outer = [step * size for n, step in zip(array.shape[:-1], steps[:-1], strict=True) if n > 1]
    return steps[-1] == 1 and begins % _COPIED == 0 and all(x > 0 and x % _COPIED == 0 for x in outer)


def _product(sizes: Any) -> int:
    made = 1
    for size in sizes:
        made *= int(size)
    return made

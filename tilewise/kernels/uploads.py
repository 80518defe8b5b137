"""What kernels on a GPU are given beside q, k and v: plans and the variant's arrays, brought there once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.expr import Loaded
from tilewise.kernels.reads import readers_of_cells
from tilewise.kernels.summing import key_of
from tilewise.kernels.tables import Tables, tables
from tilewise.pytorch import graphs
from tilewise.pytorch.constants import constant_on
from tilewise.sharing import Kept
from tilewise.spec import Attention, Shape, Tile

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Plan:
    """Tables on a device."""

    records: Any
    runs: Any
    steps: tuple[int, int]
    visits: int
    most_visits: int


_on_devices = Kept[tuple[Any, list[Any]]](256)


def kept_on(device: Any, key: tuple[Any, ...], slots: Sequence[Loaded], make: Callable[[], T]) -> T:
    """What `make` brings to a device, once: it follows from the key and from what variants made themselves.

    slots: the arrays that it looks at. Those of callers may change, and so it is made anew.
    """
    capturing = graphs.is_capturing()

    def made() -> tuple[T, list[Any]]:
        if capturing:
            raise RuntimeError(graphs.FIRST)
        return make(), constants

    constants = [slot.array for slot in slots]  # kept as well, so that no other array gets their id
    if not all(slot.constant for slot in slots):
        fresh: T = made()[0]
        return fresh
    found = _on_devices.found((device, key, *map(id, constants)), made)
    if capturing:
        graphs.hold(found)
    kept: T = found[0]
    return kept


def readers_on(
    device: Any, key: tuple[Any, ...], slots: Sequence[Loaded], read: Callable[[], Array], size: int
) -> tuple[Any, Any]:
    """Who reads each cell of an array, cell by cell, and where each cell's readers begin."""

    def make() -> tuple[Any, ...]:
        return tuple(torch.from_numpy(x).to(device) for x in readers_of_cells(read(), size))

    order, begins = kept_on(device, (*key, size), slots, make)
    return order, begins


def plan_on(device: Any, spec: Attention, shape: Shape, tile: Tile, by_key: bool) -> Plan:
    """It looks at arrays in main memory alone."""
    return planned_on(device, spec, shape, tile, by_key, "plan", lambda made: brought(device, made))


def brought(device: Any, made: Tables) -> Plan:
    records, runs = (torch.from_numpy(x).to(device) for x in (made.records, made.runs))
    return Plan(records, runs, made.steps, made.visits, made.most_visits)


def planned_on(
    device: Any, spec: Attention, shape: Shape, tile: Tile, by_key: bool, name: str, brought: Callable[[Tables], T]
) -> T:
    """What becomes of a plan's tables on a device, once; name: of what it is."""
    expressions = tuple(None if expr is None else expr.key for expr in (spec.mask, spec.score))
    looked_at = [slot for slot in spec.loaded if slot.constant or not arrays.is_elsewhere(slot.array)]
    key = (name, shape, tile, by_key, key_of(spec.lengths), expressions)
    return kept_on(device, key, looked_at, lambda: brought(tables(spec, shape, tile, by_key)))


def loaded_on(spec: Attention, device: Any) -> list[Any]:
    """The arrays that a variant reads."""
    return [_loaded(slot, device) for slot in spec.loaded]


def _loaded(slot: Loaded, device: Any) -> Any:
    """What a variant made itself is moved to a GPU once."""
    is_far = slot.constant and device.type != "cpu" and not arrays.is_torch(slot.array)
    return constant_on(slot.array, device) if is_far else tensor(slot.array, device)


def tensor(x: Any, device: Any) -> Any:
    return (x.detach() if arrays.is_torch(x) else arrays.as_tensor(x)).to(device)

"""A call's plan, as kernels take it. What its mask reads on a GPU is looked at there, before each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import keys_of, loaded_by, records_of
from tilewise.kernels.triton.source import refine as kernels
from tilewise.kernels.triton.tuning import processors
from tilewise.kernels.uploads import Plan, plan_on
from tilewise.schedule import is_unseen
from tilewise.spec import Attention, Shape, Tile

_LEAST_VISITS = 32  # tiles one after the other, which take about as long as two launches
_AT_MOST = 256 << 20  # bytes of memory
_AT_ONCE = 256  # tiles of a row that are joined at a time


def planned(spec: Attention, shape: Shape, tile: Tile, q: Any, by_key: bool = False) -> tuple[Any, ...]:
    """The grid; the records of its tiles, their runs, and the variant's arrays."""
    made = plan_on(q.device, spec, shape, tile, by_key)
    grid = made.records.shape[2], shape.heads_k if by_key else shape.heads, shape.batch
    if is_unseen(spec) and 0 not in (*grid, made.most_visits) and _is_worthwhile(made, spec, shape, q.device):
        made = refined(made, spec, shape, tile, q, by_key)
    return grid, records_of(spec, shape, made.records, made.steps), made.runs, loaded_by(spec, q)


def _is_worthwhile(plan: Plan, spec: Attention, shape: Shape, device: Any) -> bool:
    """Whether skipping tiles may save more time than finding them takes, and memory has room for what is found."""
    batch, heads, tiles, fields = plan.records.shape
    if 4 * batch * heads * tiles * (fields + 4 * plan.most_visits) > _AT_MOST:
        return False
    if spec.batch_invariant:  # not decided by what else is in the batch
        return True
    visits = plan.visits * (shape.batch // batch) * (shape.heads // heads)
    return bool(max(plan.most_visits, visits // processors(device)) >= _LEAST_VISITS)


def refined(plan: Plan, spec: Attention, shape: Shape, tile: Tile, q: Any, by_key: bool) -> Plan:
    """The plan without tiles that are EMPTY by what arrays hold now, and with those FULL that are.

    In memory of its own: another call may run beside this one, with other arrays. Room is for a run a tile.
    """
    masked, most = replace(spec, score=None), plan.most_visits
    records = records_of(spec, shape, plan.records, plan.steps)
    batch, heads, tiles, _ = plan.records.shape
    found = torch.empty(batch * heads * tiles * most, dtype=torch.int32, device=q.device)
    made, runs = torch.empty_like(plan.records), torch.empty((len(found), 3), dtype=torch.int32, device=q.device)
    grid = tiles * most, heads, batch
    kernels.look[grid](
        records, plan.runs, loaded_by(masked, q), found, shape.group, most,
        MASK=getattr(modules.variant(masked, keys_of(shape)), "mask", None),
        TILE_Q=tile.q, TILE_K=tile.k, BY_KEY=by_key,
    )  # fmt: skip
    grid = tiles, heads, batch
    kernels.join[grid](plan.records, found, made, runs, most, AT_ONCE=_AT_ONCE)
    return replace(plan, records=made, runs=runs)

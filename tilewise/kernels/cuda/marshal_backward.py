"""A backward pass as the kernels take it: what marshal.py makes of a call, and what is more around that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import Structure
from typing import Any

from tilewise.kernels.cuda import marshal, structs
from tilewise.kernels.cuda.backward_rungs import columns_of_sums
from tilewise.kernels.cuda.marshal import L2_SHARE, Tables, View
from tilewise.kernels.cuda.tables import Table
from tilewise.kernels.cuda.tensor_map import TensorMap
from tilewise.spec import Shape, Tile


def params(call: Any, arrays_of: dict[str, View]) -> Structure:
    """Backward of source/params.h around Params: d_out, d_lse and remainder if there are any, delta, d_q,
    d_k and d_v."""
    full: Any = structs.backward_type(len(call.arrays))()
    full.params = call
    for name, view in arrays_of.items():
        setattr(full, name, structs.Array(view.address, *view.steps[:3]))
    return full  # type: ignore[no-any-return]


def sums(full: Any, view: View, told: dict[str, int]) -> Structure:
    """Sums of source/arrays.h around Backward. told: its other fields."""
    made: Any = structs.sums_type(len(full.params.arrays))()
    made.backward, made.sums = full, structs.Array(view.address, *view.steps[:3])
    for name, value in told.items():
        setattr(made, name, value)
    return made  # type: ignore[no-any-return]


def maps(
    views: dict[str, View], dtype: str, tile: Tile, table: Table | None, loaded: Sequence[View],
    names: Sequence[str] = structs.BACKWARD_OPERANDS,
) -> dict[str, TensorMap]:  # fmt: skip
    """What the copy engine brings to Hopper's kernels of a backward pass, or stores. loaded: as Params has them."""
    return marshal.tensor_maps({name: views[name] for name in names}, dtype, tile, table, loaded)


def sums_launch(made: Any, maps: dict[str, bytes]) -> Structure:
    """Launch of source/arrays_sm90.cu around Sums."""
    full: Any = structs.aligned(structs.sums_launch_type(len(made.backward.params.arrays)))
    for name, encoded in maps.items():
        setattr(full, name, structs.TensorMapBytes.from_buffer_copy(encoded))
    full.sums = made
    return full  # type: ignore[no-any-return]


def gathering(sums: View, cells: View, order: View, begins: View) -> tuple[Structure, int]:
    """Gathering of source/cells.cu, and how many cells there are of all heads."""
    heads = sums.shape[0] * sums.shape[1]
    addresses = (x.address for x in (sums, cells, order, begins))
    return structs.Gathering(*addresses, heads, sums.shape[2], cells.shape[2]), heads * cells.shape[2]


def launch(
    full: Any, shape: Shape, tile: Tile, by_key: Tables, by_query: Tables, at: int, maps: dict[str, bytes],
    at_once: int, ordered: bool,
) -> Structure:  # fmt: skip
    """Launch of source/sm90_backward.h around Backward, but for its workspace and its count.

    at: where the tables by query are; at_once: blocks that run; ordered: key tiles add to d_q in their order.
    """
    made: Any = structs.aligned(structs.backward_launch_type(len(full.params.arrays)))
    for name, encoded in maps.items():
        setattr(made, name, structs.TensorMapBytes.from_buffer_copy(encoded))
    made.backward = full
    made.sequences, made.offsets, made.runs = (
        at + 4 * place for place in (by_query.sequences_at, by_query.offsets_at, by_query.runs_at)
    )
    made.q_tiles, made.offsets_apart, made.heads = by_query.tiles, 1, shape.batch * shape.heads_k
    made.section, made.sections = section, sections = _sections(shape, by_key, at_once, ordered)
    made.share, made.shares = _shares(shape, tile, by_query)
    made.behind = min(sections - 1, math.ceil(_UNDER_WAY * at_once / (section * by_key.tiles)))
    made.items = marshal.blocks(shape, by_key, by_key=True) + made.shares * (made.heads + made.behind * section)
    return made  # type: ignore[no-any-return]


_UNDER_WAY = 1.5  # key tiles a block that may not be done when d_q of those before is to be rounded, and some to spare
_SHARE = 1 << 17  # bytes of sums that a block rounds at a time: about as many as its registers hold


def _shares(shape: Shape, tile: Tile, by_query: Tables) -> tuple[int, int]:
    """Query tiles of a share of d_q, and shares of a key head."""
    share = max(1, _SHARE // (4 * tile.q * columns_of_sums(shape)))
    return share, -(-by_query.tiles * shape.group // share)


# -- what blocks take -------------------------------------------------------------------------------------------------


def blocks(launch: Any, shape: Shape, by_query: Tables, at_once: int) -> tuple[int, int]:
    """Of Hopper's kernels of the backward pass: a block a query tile, and as many as run at once."""
    return marshal.blocks(shape, by_query), min(launch.items, at_once)


def _sections(shape: Shape, by_key: Tables, at_once: int, ordered: bool) -> tuple[int, int]:
    """How many heads take turns, and how many sections there are, the last with the rest.

    One head after the other, whose key tiles read the same queries at about the same time, but for the last ones: they
    take turns, so that their largest tiles are not what all others wait for. In order, key tiles of a head begin one
    after the other, each when the one before has added to its first sum: heads enough that all blocks are busy
    nevertheless, more where key tiles differ, and so many that the cache holds what they read and add to.
    """
    heads = max(1, shape.heads_k * shape.batch)
    is_even = by_key.most_tiles <= by_key.mean_visits
    if not ordered:
        visits = by_key.mean_visits * by_key.tiles
        last = 1 if is_even else math.ceil(0.5 * at_once * by_key.most_tiles / visits)
        return 1, max(0, heads - last) + 1
    by_cache = L2_SHARE // max(1, 2 * (shape.n_k + shape.group * shape.n_q) * (shape.d + shape.d_v))
    to_spare = 2 if is_even else 6  # by trying: where key tiles differ, the short ones end sooner than the mean tells
    by_chain = to_spare + math.ceil(at_once / max(1.0, by_key.mean_visits * shape.group))  # a step from one to the next
    section = min(heads, max(1, by_cache, by_chain))
    return section, max(1, heads // section)


# -- plans that are looked up on the GPU ------------------------------------------------------------------------------


def refined_parts(by_query: Tables, by_key: Tables, tile: Tile) -> dict[str, int]:
    """Whole numbers that refined plans take: pairs and runs of either, and what is found of tiles, a byte a warp."""
    parts: dict[str, int] = {}
    for name, x in {"by_query": by_query, "by_key": by_key}.items():
        n_offsets = x.runs_at - x.offsets_at
        parts |= {f"offsets_{name}": 2 * n_offsets, f"runs_{name}": 3 * n_offsets * x.most_tiles}
    found = (by_query.runs_at - by_query.offsets_at) * by_query.most_tiles * tile.q // 32
    return {**parts, "found": -(-found // 4)}


def refinement_blocks(by_query: Tables, by_key: Tables, tile: Tile, threads: int) -> tuple[int, int]:
    """Of both launches: the first as above, the second has a block for each tile of either plan."""
    plans = math.prod(by_query.plans)
    looking = plans * by_query.tiles * -(-by_query.most_tiles // (threads // tile.q))
    return looking, plans * (by_query.tiles + by_key.tiles)


def refinement(call: Any, by_query: Tables, by_key: Tables, at: tuple[int, int], joins: bool) -> Structure:
    """Refinement of source/refine_backward.cu, but for where the refined plans go; at: where the tables are."""
    full: Any = structs.backward_refinement_type(len(call.arrays))()
    full.params, full.joins = call, joins
    full.batches, full.heads = by_query.plans
    for name, made, first in zip(("by_query", "by_key"), (by_query, by_key), at, strict=True):
        places = (first + 4 * place for place in (made.sequences_at, made.offsets_at, made.runs_at))
        setattr(full, name, structs.Plan(*places, made.tiles, made.runs_at - made.offsets_at, made.most_tiles))
    return full  # type: ignore[no-any-return]

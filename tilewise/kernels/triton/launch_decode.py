"""Decoding: the kernels of a call, and of what is appended to a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilewise import arrays
from tilewise.arrays import Array
from tilewise.cache import Cache
from tilewise.cache.base import on_device
from tilewise.kernels.triton import modules
from tilewise.kernels.triton.arguments import loaded_by, sizes, starts_early, steps_of
from tilewise.kernels.triton.choices import Pass
from tilewise.kernels.triton.fitting import power_of_2
from tilewise.kernels.triton.reach import reach
from tilewise.kernels.triton.source import decode as decode_kernels
from tilewise.kernels.triton.source import pages as pages_kernels
from tilewise.kernels.triton.tuning import chosen, fitting_rows, processors, splits_of
from tilewise.kernels.triton.turning import as_argument
from tilewise.kernels.uploads import tensor
from tilewise.pytorch.rope import rotation_on
from tilewise.rope import Rope, positions_of_keys
from tilewise.spec import Attention, Partial, Shape

_ROWS = 32  # of a program that appends, at most
_AT_ONCE = 64  # shares that are merged at a time, at most: each time their results are waited for


# Triton's interpreter computes with NumPy, which warns of what IEEE's inf and NaN are for.
@np.errstate(all="ignore")
def decode(spec: Attention, q: Any, cache: Cache, rope: Rope | None) -> Partial:
    """Attention of (batch, heads, n, d) queries, the last of their sequences, to a cache. Nothing waits for the GPU."""
    k, v = _tensor(cache.k), _tensor(cache.v)
    shape = Shape.of(spec, q, *cache.outline())
    out = torch.empty_strided(*arrays.stored_as(q, v), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if 0 in out.shape:
        return Partial(out, lse)
    choice = fitting_rows(chosen(Pass.DECODE, spec, shape), shape)
    seen = reach(spec, shape)
    row_tiles = -(-shape.group * shape.n_q // choice.tile.q)
    programs = row_tiles * shape.heads_k * (1 if spec.batch_invariant else shape.batch)
    tiles = -(-min(seen.far, shape.n_k) // choice.tile.k)
    splits = splits_of(programs, tiles, processors(q.device))
    is_whole = splits == 1
    early = starts_early(q.device)
    in_advance = {"launch_pdl": True} if early else {}  # an option that only some GPUs know
    parts = Partial(out, lse) if is_whole else _parts(shape, splits, q.device)
    sinks = q if spec.sinks is None else tensor(spec.sinks, q.device).contiguous()
    variant = modules.variant(spec, cache.capacity)
    grid = splits * row_tiles, shape.heads_k, shape.batch
    decode_kernels.decode[grid](
        q, k, v, parts.out, parts.lse, sinks, *_read(cache), steps_of(q), steps_of(k), steps_of(v),
        (*steps_of(parts.out), 0 if is_whole else shape.d_v), (*steps_of(parts.lse), 0 if is_whole else 1),
        _table_step(cache), tuple(seen), loaded_by(spec, q), shape.group, shape.n_q, int(k.shape[0]),
        cache.capacity, splits, spec.scale,
        **_turning(rope, cache, keys=False),
        SCORE=getattr(variant, "score", None), MASK=getattr(variant, "mask", None),
        HAS_SINKS=is_whole and spec.sinks is not None, PAGE=cache.page_size, EARLY=early, **sizes(shape, choice.tile),
        # The number of a page is loaded as far ahead as what the page holds, and so takes as many stages again.
        num_warps=choice.warps, num_stages=choice.stages if cache.page_size is None else 2 * choice.stages - 1,
        **in_advance,
    )  # fmt: skip
    if not is_whole:
        grid = shape.n_q, shape.heads, shape.batch
        decode_kernels.merge[grid](
            parts.out, parts.lse, out, lse, sinks, steps_of(out), steps_of(lse), shape.n_q, splits,
            HAS_SINKS=spec.sinks is not None, SPLITS=power_of_2(splits), AT_ONCE=min(_AT_ONCE, power_of_2(splits)),
            D_V=shape.d_v, COLUMNS=power_of_2(shape.d_v), EARLY=early, **in_advance,
        )  # fmt: skip
    return Partial(out, lse)


def append(cache: Cache, k: Any, v: Any, counts: Array, rope: Rope | None) -> None:
    """Write new keys, turned, and values behind those of each sequence; counts: how many of them are its own."""
    n = int(k.shape[2])
    if n == 0:
        return
    stored_k, stored_v = _tensor(cache.k), _tensor(cache.v)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    is_ragged = bool(np.any(counts != n))
    told = on_device(counts, k.device) if is_ragged else stored_k
    rows, d, d_v = min(_ROWS, 1 << (n - 1).bit_length()), int(k.shape[3]), int(v.shape[3])
    grid = -(-n // rows), cache.heads, cache.batch
    pages_kernels.append[grid](
        stored_k, stored_v, k, v, *_read(cache), told, *map(steps_of, (stored_k, stored_v, k, v)), _table_step(cache),
        n, int(stored_k.shape[0]), cache.capacity, **_turning(rope, cache, keys=True),
        PAGE=cache.page_size, HAS_COUNTS=is_ragged, ROWS=rows, D=d, D_V=d_v,
        DEPTH=power_of_2(d), COLUMNS=power_of_2(d_v),
    )  # fmt: skip


def _turning(rope: Rope | None, cache: Cache, keys: bool) -> dict[str, Any]:
    """What queries, or new keys, are turned by: at given positions, or at those counted from where their sequences
    begin, for which there is a table as long as sequences may become."""
    if rope is None:
        return {"turn": None, "PAIRS": 0, "INTERLEAVED": False, "COUNTED": False}
    given, d = positions_of_keys(rope) if keys else rope.positions, int(cache.k.shape[3])
    where = (range(cache.capacity),) if given is None else given
    turn = as_argument(rotation_on(_tensor(cache.k).device, rope, where, d))
    return {"turn": turn, "PAIRS": rope.pairs(d), "INTERLEAVED": rope.interleaved, "COUNTED": given is None}


def _tensor(x: Any) -> Any:
    return x if arrays.is_torch(x) else arrays.as_tensor(x)


def _read(cache: Cache) -> tuple[Any, Any]:
    """Lengths, and the table of pages, or anything where there are none."""
    lengths = _tensor(cache.lengths)
    return lengths, lengths if cache.table is None else _tensor(cache.table)


def _table_step(cache: Cache) -> int:
    return 0 if cache.table is None else int(cache.table.shape[1])


def _parts(shape: Shape, splits: int, device: Any) -> Partial:
    """Room for the results over shares of the keys: (batch, heads, n, splits, d_v), and without the last."""
    rows = shape.batch, shape.heads, shape.n_q, splits
    out = torch.empty((*rows, shape.d_v), dtype=torch.float32, device=device)
    return Partial(out, torch.empty(rows, dtype=torch.float32, device=device))

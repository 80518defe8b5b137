"""`tilewise plan --arch`: the shared memory that tiles take, beside what GPUs have."""

from __future__ import annotations

import json
from typing import Any

from tilewise.cli import UserError
from tilewise.cli.terminal import table
from tilewise.generations import GENERATIONS, Generation, tile_bytes
from tilewise.spec import Shape, Tile

TILES = (Tile(64, 64), Tile(128, 64), Tile(128, 128), Tile(128, 256))
ALL = "all"


def run(arch: str, shape: Shape, tiles: tuple[Tile, ...], as_json: bool) -> int:
    found = list(GENERATIONS.values()) if arch == ALL else [_generation(arch)]
    if as_json:
        print(json.dumps([_numbers(generation, tile, shape) for generation in found for tile in tiles], indent=2))
        return 0
    print(f"Shared memory of tiles, d {shape.d}, {shape.dtype}: that of q stays, pairs of k and v come by.")
    print(_of_all(found, shape, tiles) if arch == ALL else _of_one(found[0], shape, tiles))
    return 0


def _generation(arch: str) -> Generation:
    """sm_90a is sm_90 with instructions of its own."""
    found = GENERATIONS.get(arch.removesuffix("a").removesuffix("f"))
    if found is None:
        raise UserError(f"--arch: expected one of {', '.join(GENERATIONS)} or {ALL}, got {arch!r}")
    return found


def _of_all(found: list[Generation], shape: Shape, tiles: tuple[Tile, ...]) -> str:
    taken = [f"{_kib(q)} + {_kib(pair)}" for q, pair in (tile_bytes(tile, shape) for tile in tiles)]
    rows = [("KiB of q + of a pair", "", *taken)]
    rows += [(_told_of(g), _kib(g.block), *(_told(g.stages(tile, shape)) for tile in tiles)) for g in found]
    return f"Pairs that a block has room for:\n\n{table(('', 'KiB a block', *map(_named, tiles)), rows)}"


def _of_one(generation: Generation, shape: Shape, tiles: tuple[Tile, ...]) -> str:
    head = ("tile", "q, KiB", "a pair, KiB", "pairs that fit", "taken, KiB", "of the limit", "blocks a processor")
    rows = [_row(_numbers(generation, tile, shape)) for tile in tiles]
    about = f"{_told_of(generation)}: a block may take {_kib(generation.block)} KiB"
    return (
        f"{about}, a processor has {_kib(generation.processor)}. "
        f"Taken: with two pairs, if they fit.\n\n{table(head, rows)}"
    )


def _row(numbers: dict[str, Any]) -> tuple[str, ...]:
    tile, q, pair = numbers["tile"], _kib(numbers["q"]), _kib(numbers["pair"])
    if not numbers["stages"]:
        return tile, q, pair, *("-",) * 4
    taken, limit = numbers["bytes"], numbers["limit"]
    return tile, q, pair, str(numbers["stages"]), _kib(taken), f"{taken / limit:.0%}", str(numbers["blocks"])


def _numbers(generation: Generation, tile: Tile, shape: Shape) -> dict[str, Any]:
    """bytes, blocks: with two pairs, or with one where there is no room for two."""
    q, pair = tile_bytes(tile, shape)
    stages = generation.stages(tile, shape)
    taken = q + min(stages, 2) * pair
    return {
        "arch": generation.arch, "limit": generation.block, "tile": _named(tile), "q": q, "pair": pair,
        "stages": stages, "bytes": taken, "blocks": generation.blocks(taken) if stages else 0,
    }  # fmt: skip


def _told_of(generation: Generation) -> str:
    return f"{generation.arch}, {generation.name} ({generation.gpus})"


def _named(tile: Tile) -> str:
    return f"{tile.q}x{tile.k}"


def _kib(size: int) -> str:
    return f"{size / 1024:g}"


def _told(count: int) -> str:
    return str(count) if count else "-"

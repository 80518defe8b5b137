"""A kernel's source: one text, its headers and the variant spliced in, so that compiling needs no files at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewise import arrays
from tilewise.expr import Expr, Loaded
from tilewise.kernels.cuda import structs
from tilewise.kernels.cuda.ops import STORED, Variant, variant
from tilewise.kernels.cuda.rungs import RUNGS, SOURCES, Compiled
from tilewise.kernels.cuda.tables import TABLE_BYTES, Table, layout
from tilewise.sharing import Kept
from tilewise.spec import Attention, Shape, Tile
from tilewise.walking import loads

Headers = Mapping[str, str]

ENTRY = "attention"  # the kernel's name in every source
_INCLUDE = re.compile(r'#include "(.*)"')


@dataclass(frozen=True)
class Source:
    """What to compile, and what a launch of it needs."""

    text: str
    rung: str
    threads: int
    shared_bytes: int
    constants: tuple[int, ...] = ()  # that the variant is told at run time
    table: Table | None = None  # whose tiles come along with those of keys


def assembled(
    rung: Compiled,
    spec: Attention,
    shape: Shape,
    tile: Tile,
    headers: Headers | None = None,
    tables: bool = True,
    slope: Expr | None = None,
) -> tuple[Source, list[Loaded]]:
    """The source of a call, made once for all calls of its kind; and the arrays it loads, in their order.

    tables: whether the arrays begin where the copy engine can load them from. slope: of the score, for a backward pass,
    by S or by what it reads from an array.
    """
    exprs = [e for e in (spec.score, spec.mask) if e is not None]  # in the order in which `variant` writes them
    slots = loads(*exprs)
    sinks = None if spec.sinks is None else arrays.dtype_name(spec.sinks)
    raw, out = spec.raw_scores, spec.out_dtype(shape.dtype)
    keeps = spec.stores_remainder(shape.dtype) and rung.name in RUNGS  # not the kernels of a backward pass
    number = {id(slot.array): i for i, slot in enumerate(slots)}
    key = (
        rung, shape.d, shape.d_v, shape.dtype, out, keeps, tile, raw, sinks, headers is None, tables,
        *(layout(slot.array) for slot in slots),
        *(
            None if e is None else (e.key, *(number[id(x.array)] for x in loads(e)))
            for e in (spec.score, spec.mask, slope)
        ),
    )  # fmt: skip

    def make() -> Source:
        made = variant(spec.mask, spec.score, slope)
        return source(
            rung, made, shape, tile, raw=raw, sinks=sinks, headers=headers, tables=tables, out=out, keeps=keeps
        )

    return _sources.found(key, make), slots


_sources: Kept[Source] = Kept(512)


def source(
    rung: Compiled,
    made: Variant,
    shape: Shape,
    tile: Tile,
    *,
    raw: bool = True,
    sinks: str | None = None,
    headers: Headers | None = None,
    tables: bool = True,
    out: str | None = None,
    keeps: bool = False,
) -> Source:
    """The source of one kernel.

    raw: products of q and k grow as scores do, so that the scale can be left to the exponent. sinks: their type, if
    there are any. headers: these replace files of those names. tables: whether the copy engine can load the arrays.
    out: its type, if it is not that of q. keeps: whether what rounding takes from it is stored as well.
    """
    constants = {
        "D": shape.d, "D_V": shape.d_v, "TILE_Q": tile.q, "TILE_K": tile.k, "MAX_RANK": structs.MAX_RANK,
        "MAX_CONSTANTS": structs.MAX_CONSTANTS,
        "N_ARRAYS": len(made.slots), "HAS_SINKS": sinks is not None, "RAW_SCORES": raw, "USES_TABLE": False,
        "KEEPS_REMAINDER": keeps,
        **rung.constants(tile, shape, TABLE_BYTES[made.table.dtype] if made.table and tables else 0),
    }  # fmt: skip
    config = "\n".join([
        "struct Half;", "struct BFloat;",
        *(f"constexpr {type(x).__name__} {name} = {str(x).lower()};" for name, x in constants.items()),
        f"typedef {STORED[shape.dtype]} Element;", f"typedef {STORED[out or shape.dtype]} Out;",
        f"typedef {STORED[sinks or 'float32']} Sink;", "",
    ])  # fmt: skip
    given = {"config.h": config, "variant.h": made.text, **rung.headers(tile, shape), **(headers or {})}
    text = spliced(f"{rung.name}.cu", given, rung.folder)
    table = made.table if constants["USES_TABLE"] else None
    return Source(text, rung.name, rung.threads(tile), constants["SHARED_BYTES"], made.constants, table)


def spliced(name: str, given: Headers, folder: Path = SOURCES) -> str:
    """The file with each header in place of its #include, once; compilers tell lines by the files' own names."""
    seen: set[str] = set()

    def lines(file: str) -> list[str]:
        seen.add(file)
        made = [f'#line 1 "{file}"']
        text = given[file] if file in given else _read(folder if file == name else SOURCES, file)
        for number, line in enumerate(text.splitlines(), start=1):
            included = _INCLUDE.fullmatch(line.strip())
            if included is None:
                made.append("" if line.strip() == "#pragma once" else line)
            elif included[1] in seen:
                made.append("")
            else:
                made += [*lines(included[1]), f'#line {number + 1} "{file}"']
        return made

    return "\n".join(lines(name)) + "\n"


@cache
def _read(folder: Path, name: str) -> str:
    return (folder / name).read_text()

"""A kernel's source: one text, its headers and the variant spliced in, so that compiling needs no files at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewise.kernels.cuda import structs
from tilewise.kernels.cuda.ops import STORED, Variant
from tilewise.kernels.cuda.rungs import SOURCES, Rung
from tilewise.spec import Shape, Tile

ENTRY = "attention"  # the kernel's name in every source
_INCLUDE = re.compile(r'#include "(.*)"')


@dataclass(frozen=True)
class Source:
    """What to compile, and what a launch of it needs."""

    text: str
    rung: str
    threads: int
    shared_bytes: int


def source(
    rung: Rung,
    variant: Variant,
    shape: Shape,
    tile: Tile,
    sinks: str | None = None,
    headers: dict[str, str] | None = None,
) -> Source:
    """The source of one kernel. `sinks` is the type of the sinks, if there are any; `headers` replace files of those names."""
    constants = {
        "D": shape.d, "D_V": shape.d_v, "TILE_Q": tile.q, "TILE_K": tile.k,
        "MAX_RANK": structs.MAX_RANK, "N_ARRAYS": len(variant.slots), **rung.constants(tile, shape.d, shape.d_v),
    }  # fmt: skip
    config = "\n".join([
        "struct Half;", "struct BFloat;",
        *(f"constexpr int {name} = {value};" for name, value in constants.items()),
        f"constexpr bool HAS_SINKS = {'false' if sinks is None else 'true'};",
        f"typedef {STORED[shape.dtype]} Element;", f"typedef {STORED[sinks or 'float32']} Sink;", "",
    ])  # fmt: skip
    given = {"config.h": config, "variant.h": variant.text, **(headers or {})}
    return Source(
        spliced(f"{rung.name}.cu", given, rung.folder), rung.name, rung.threads(tile), constants["SHARED_BYTES"]
    )


def spliced(name: str, given: dict[str, str], folder: Path = SOURCES) -> str:
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

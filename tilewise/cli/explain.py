"""`tilewise explain`: watch the tiles at work, on a page made from the NumPy kernel's own steps."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tilewise import schedule
from tilewise.cli import UserError, explain_server
from tilewise.cli.plan import check_plan, tile_of, with_expression
from tilewise.cli.terminal import progress
from tilewise.explainer.page import MOST_BYTES, page, payload, recorded_bytes
from tilewise.explainer.record import record
from tilewise.explainer.timeline import timeline
from tilewise.explanation import size
from tilewise.kernels.disk import write_whole
from tilewise.schedule import Kind
from tilewise.spec import Attention, Shape, Tile

MOST_TILES = 1024
MOST_PAGE = 2_000_000  # bytes
_LIMITS = {"n_q": (1, 4096), "n_k": (1, 4096), "d": (1, 256), "heads": (1, 64), "head": (0, 63), "seed": (0, 2**32 - 1)}

_EXAMPLES = """examples:
  tilewise explain --mask "causal() & window(96)" --n 256 --block 64 -o page.html
  tilewise explain --mask "causal()" --score "softcap(5.0)" --n 96 --block 16x32
  tilewise explain --serve        # change the expression, the lengths and the tiles in the browser

Expressions are written as for `tilewise plan`."""


@dataclass(frozen=True)
class Asked:
    """What to explain. On the command line, and in the page's controls, by the same names."""

    mask: str = "causal() & window(96)"
    score: str = ""
    n_q: int = 256
    n_k: int = 256
    block: str = "32"
    d: int = 16
    heads: int = 1
    head: int = 0
    magnitude: float = 3.0  # so that exponents overflow float16 now and then, if the maximum is not subtracted
    seed: int = 0

    @classmethod
    def of_fields(cls, given: Mapping[str, str]) -> Asked:
        """From a form's fields: text, of which nothing is believed."""
        unknown = sorted(set(given) - {field.name for field in fields(cls)})
        if unknown:
            raise UserError(f"{unknown[0]}: there is no such field; expected {', '.join(f.name for f in fields(cls))}")
        kinds = {field.name: type(field.default) for field in fields(cls)}
        return cls(**{name: _converted(name, text.strip(), kinds[name]) for name, text in given.items()})


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="watch the tiles at work: one HTML page, or live in the browser",
        description="Runs the NumPy kernel on small random inputs, records every tile step and writes one HTML page "
        "that plays them: tiles, scores, running maxima, memory traffic, and the kernels' sources side by side.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = Asked()
    parser.add_argument(
        "--mask", metavar="TEXT", default=usual.mask, help="the mask, '' for none (default: %(default)s)"
    )
    parser.add_argument(
        "--score", metavar="TEXT", default=usual.score, help="the score, such as 'softcap(5.0)' (default: S)"
    )
    parser.add_argument("--n", type=int, default=usual.n_q, help="queries and keys (default: %(default)s)")
    parser.add_argument("--n-q", type=int, metavar="N", help="queries, if not --n")
    parser.add_argument("--n-k", type=int, metavar="N", help="keys, if not --n")
    parser.add_argument(
        "--block", metavar="SIZE", default=usual.block, help="tile size: 32, or 32x64 (default: %(default)s)"
    )
    parser.add_argument("--d", type=int, default=usual.d, help="head dimension (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=usual.heads, help="(default: %(default)s)")
    parser.add_argument("--head", type=int, metavar="H", default=usual.head, help="the head that is shown (default: 0)")
    parser.add_argument(
        "--magnitude", type=float, default=usual.magnitude, help="what q is multiplied by (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the random inputs (default: %(default)s)")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", default=Path("explain.html"), help="(default: %(default)s)"
    )
    parser.add_argument("--serve", action="store_true", help="serve it on this machine instead, with live controls")
    parser.add_argument("--port", type=int, default=8765, help="for --serve; 0 takes any (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = {field.name: getattr(args, field.name) for field in fields(Asked)}
    given |= {name: args.n if given[name] is None else given[name] for name in ("n_q", "n_k")}
    data = recording(Asked(**given), _option)
    if args.serve:
        return explain_server.serve(args.port, data, lambda form: recording(Asked.of_fields(form)))
    text = page(data).encode()
    write_whole(args.out, text)
    kinds = [step["kind"] for step in data["steps"]]
    counts = ", ".join(f"{kinds.count(kind.name)} {kind.name}" for kind in Kind)
    print(f"{args.out}: {len(kinds)} tiles ({counts}), {size(len(text))}; open it in a browser")
    return 0


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def recording(asked: Asked, label: Callable[[str], str] = str) -> dict[str, Any]:
    """The page's data. label: what errors call a field."""
    shape, tile = _shape(asked, label), tile_of(asked.block, label("block"))
    spec = Attention(shape.d**-0.5)
    for name, text in (("mask", asked.mask), ("score", asked.score)):
        spec = with_expression(spec, shape, name, text or None, label(name))
    _check_size(spec, shape, tile, asked.head, label)
    progress("recording the tiles")
    with np.errstate(all="ignore"):  # a score may overflow, which the page shows
        made = record(spec, shape, tile, head=asked.head, seed=asked.seed, magnitude=asked.magnitude)
        progress("tracing the Hopper kernel on the simulator")
        roles = timeline(spec, shape, tile, asked.seed)
        progress()
        data = payload(spec, made, asdict(asked), roles)
    taken = len(page(data).encode())
    if taken > MOST_PAGE:
        raise UserError(
            f"mask, score: the page would take {size(taken)}, {size(MOST_PAGE)} is the most; write them shorter"
        )
    return data


def _shape(asked: Asked, label: Callable[[str], str]) -> Shape:
    for name, (least, most) in _LIMITS.items():
        value = getattr(asked, name)
        if not least <= value <= most:
            raise UserError(f"{label(name)}: expected {least} to {most}, got {value}")
    if asked.head >= asked.heads:
        raise UserError(f"{label('head')}: expected 0 to {asked.heads - 1}, got {asked.head}")
    if not (math.isfinite(asked.magnitude) and 0 < asked.magnitude <= 1e4):
        raise UserError(f"{label('magnitude')}: expected a number above 0, at most 10000, got {asked.magnitude}")
    return Shape(1, asked.heads, asked.heads, asked.n_q, asked.n_k, asked.d, asked.d)


def _check_size(spec: Attention, shape: Shape, tile: Tile, head: int, label: Callable[[str], str]) -> None:
    plan = schedule.plan(spec, shape, tile)
    rows, columns = plan.grid
    if rows * columns > MOST_TILES:
        told = f"{tile.q} x {tile.k} makes {rows} x {columns} tiles, {MOST_TILES} in all is the most"
        raise UserError(f"{label('block')}: {told}; take larger tiles or shorter sequences")
    check_plan(plan, label("block"))
    taken = recorded_bytes(plan, head)
    if taken > MOST_BYTES:
        told = f"the recorded numbers would take {size(taken)}, {size(MOST_BYTES)} is the most"
        raise UserError(f"{label('n_q')}: {told}; take shorter sequences, or a mask that leaves more tiles out")


def _converted(name: str, text: str, kind: type[Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{name}: expected a {'whole ' if kind is int else ''}number, got {text[:40]!r}") from None

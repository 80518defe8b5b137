"""A recording as one HTML page that needs nothing else: no network, no other file, no framework."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._version import __version__
from tilewise.arrays import Array
from tilewise.explainer import generated, places, sources
from tilewise.explainer.record import Numbers, Recording, Step
from tilewise.schedule import Plan
from tilewise.spec import Attention, Shape, Tile
from tilewise.steps import STEPS
from tilewise.web import template

MOST_BYTES = 1_400_000  # of recorded numbers in a page: with all else it stays below 2 MB
ASSETS = Path(__file__).with_name("assets")
SCRIPTS = (
    "data.js", "colours.js", "grid.js", "tile.js", "numbers.js", "memory.js", "variant.js", "kernels.js", "timeline.js",
    "player.js",
)  # fmt: skip
_P_LEVELS = 65535  # p is from 0 to 1


def recorded_bytes(plan: Plan, head: int = 0) -> int:
    """How much of a page the numbers of a recording will take, in base64."""
    kinds, d_v = plan.kinds(0, head), plan.shape.d_v
    rows, keys = (np.diff(np.minimum(np.arange(n + 1) * size, total)) for n, size, total in (
        (plan.grid[0], plan.tile.q, plan.shape.n_q), (plan.grid[1], plan.tile.k, plan.shape.n_k),
    ))  # fmt: skip
    visited = (kinds > 0) * rows[:, None]
    return int((visited * keys * 6 + visited * (4 * d_v + 21)).sum()) * 4 // 3


def payload(spec: Attention, made: Recording, asked: Mapping[str, Any], timeline: Mapping[str, Any]) -> dict[str, Any]:
    """All that the page's scripts read. asked: the fields of its controls, as they were given."""
    shape, tile = made.plan.shape, made.plan.tile
    return {
        "asked": dict(asked),
        "call": _call(shape, tile, made.head),
        "plan": _plan(made.plan),
        "steps": [_step(step) for step in made.steps],
        "v": _packed(made.v),
        "out": _packed(made.done.out),
        "lse": _packed(made.done.lse),
        "formulas": generated.formulas(spec),
        "code": generated.code(spec),
        "labels": list(STEPS.items()),
        "sources": {name: [asdict(x) for x in sources.sections(name)] for name in sources.FILES},
        "places": [asdict(x) for x in places.placements(spec, shape, tile)],
        "timeline": dict(timeline),
    }


def page(data: Mapping[str, Any], live: bool = False) -> str:
    """The document. live: with controls that ask the server it came from for other recordings."""
    filled = {
        "version": __version__,
        "style": template.style(ASSETS / "page.css"),
        "script": template.script(*(ASSETS / name for name in SCRIPTS)),
        "connect": "'self'" if live else "'none'",
        "mode": "live" if live else "saved",
        "title": html.escape(data["asked"]["mask"] or "full attention"),
        "data": to_json(data).replace("<", "\\u003c"),  # or a text in it could end the script
    }
    return template.filled(ASSETS / "page.html", filled)


def to_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _call(shape: Shape, tile: Tile, head: int) -> dict[str, Any]:
    return {
        "nQ": shape.n_q, "nK": shape.n_k, "d": shape.d, "dV": shape.d_v, "dtype": shape.dtype,
        "heads": shape.heads, "head": head, "tileQ": tile.q, "tileK": tile.k,
    }  # fmt: skip


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "grid": plan.grid, "tiled": plan.bytes_tiled, "naive": plan.bytes_naive, "onChip": plan.bytes_on_chip,
        "matrix": plan.bytes_matrix, "flops": plan.flops, "flopsNaive": plan.flops_naive,
    }  # fmt: skip


def _step(step: Step) -> dict[str, Any]:
    used = step.memory
    return {
        "i": step.query_tile, "j": step.key_tile, "kind": step.kind.name,
        "tiled": used.tiled, "naive": used.naive, "onChip": used.on_chip,
        "numbers": None if step.numbers is None else _numbers(step.numbers),
    }  # fmt: skip


def _numbers(x: Numbers) -> dict[str, Any]:
    return {
        "s": _packed(x.s), "p": _packed(np.rint(x.p * _P_LEVELS), "<u2"), "rescale": _packed(x.rescale),
        "rowMax": _packed(x.row_max), "rowSum": _packed(x.row_sum), "acc": _packed(x.acc),
        "moved": _packed(x.moved, "u1"), "bare": {name: _packed(total) for name, total in x.bare_sums.items()},
    }  # fmt: skip


def _packed(x: Array, dtype: npt.DTypeLike = "<f4") -> str:
    """Little-endian numbers in base64: exact, infinities included, and short."""
    return base64.b64encode(np.ascontiguousarray(x, dtype).tobytes()).decode()

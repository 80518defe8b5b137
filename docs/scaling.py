"""Writes the tables of docs/scaling.md: python docs/scaling.py

The cost model that `parallel.explain` prints, beside bytes that were measured (results/parallel.json, by `tilewise
bench --parallel --json`), and at sizes that nobody here can measure, with published link speeds. A test checks that
what stands in the page is what this makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tilewise.explanation import size
from tilewise.expr import Expr
from tilewise.parallel import Layout, contiguous, cost, zigzag
from tilewise.parallel.cost import H100, Cost, Way
from tilewise.spec import Attention, Shape
from tilewise.variants import causal, window

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scaling.md"
MEASURED = ROOT / "results" / "parallel.json"

RANKS = (8, 16, 64, 256, 1024)
LENGTHS = tuple(2**i for i in range(14, 25, 2))
HEADS, HEADS_K, D = 64, 8, 128  # a model of 70 billion parameters, in bfloat16, one sequence
MASKS: dict[str, tuple[Expr, Callable[[int, int], Layout]]] = {
    "causal": (causal(), zigzag),
    "window": (causal() & window(4096), contiguous),
}


def ways(ranks: int) -> list[Way]:
    """Of each number of ranks that share heads, up to a machine's, a ring and a gather of such teams."""
    return [Way(each, n) for n in (1, 2, 4, 8) for each in ("ring", "gather")[n == ranks :]]


@cache
def costs(mask: str, n: int, ranks: int) -> tuple[Cost, ...]:
    shape = Shape(1, HEADS, HEADS_K, n, n, D, D, "bfloat16", "cuda:0")
    variant, make = MASKS[mask]
    layout = make(n, ranks)
    return tuple(cost.costs(ways(ranks), Attention(1.0, variant), shape, layout, layout, H100))


def quickest(mask: str, n: int, ranks: int) -> Cost:
    return cost.least(costs(mask, n, ranks), H100)


def efficiency(found: Cost) -> float:
    """Time that ranks would take if nothing had to be sent and all had the same work, over the time predicted."""
    work = found.needs.work
    return found.compute * sum(work) / (max(work) * len(work)) / found.seconds


# -- tables -----------------------------------------------------------------------------------------------------------


def measured_table() -> str:
    found = json.loads(MEASURED.read_text())
    rows = [
        (r["mask"], str(r["ranks"]), r["method"], _beside(r, "forward"), _beside(r, "backward"))
        for r in found["records"]
        if r["ranks"] > 1
    ]
    return _table(("mask", "ranks", "method", "sent forward", "sent backward"), rows)


def _beside(record: dict[str, Any], which: str) -> str:
    found, told = record[f"{which}_bytes"], record[f"{which}_theory"]
    return f"{size(found)} ({found / told:.0%})"


def efficiency_table(mask: str) -> Callable[[], str]:
    def made() -> str:
        rows = [(str(ranks), *(_efficiency(mask, n, ranks) for n in LENGTHS)) for ranks in RANKS]
        return _table(("GPUs", *(f"n {_thousands(n)}" for n in LENGTHS)), rows)

    return made


def _efficiency(mask: str, n: int, ranks: int) -> str:
    found = quickest(mask, n, ranks)
    return f"{efficiency(found):.0%} {found.way.named(ranks)}"


def held_table() -> str:
    """Keys and values of others that a GPU has at a time, at the longest sequence, if 4 share heads."""
    rows = []
    for ranks in RANKS:
        found = {each.way: size(each.held) for each in costs("causal", LENGTHS[-1], ranks)}
        rows.append((str(ranks), found[Way("ring", 4)], found[Way("gather", 4)]))
    return _table(("GPUs", "ring", "gather"), rows)


def _thousands(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


MAKERS = {
    "measured": measured_table, "causal": efficiency_table("causal"), "window": efficiency_table("window"),
    "held": held_table,
}  # fmt: skip


def fill(text: str) -> str:
    """The page with its tables made anew."""
    pattern = r"<!-- ([\w-]+) -->\n.*?<!-- end -->"
    return re.sub(pattern, lambda m: f"<!-- {m[1]} -->\n{MAKERS[m[1]]()}\n<!-- end -->", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))

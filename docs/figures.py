"""Draws the figures of the docs: python docs/figures.py (or `make pictures`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

import tilewise as tw
from tilewise.bench.plot_parts import DRAWN_FROM, digest
from tilewise.expr import Expr
from tilewise.picture import grid
from tilewise.schedule import plan
from tilewise.spec import Attention, Shape, Tile

IMAGES = Path(__file__).parent / "images"
RATES = IMAGES.parent.parent / "results" / "gpu" / "variants.json"  # what the first picture's bars are of
BLUE, ORANGE, PALE = "#2f5d8a", "#e0a030", "#eceff4"
KINDS = ListedColormap([PALE, ORANGE, BLUE])  # of tiles: EMPTY, PARTIAL, FULL
CONTESTANTS = {  # of these bars: what they are called, and their colours
    "tilewise cuda": ("Tilewise", "#c2410c"),
    "FlexAttention": ("FlexAttention", "#94a3b8"),
    "FlashAttention-4": ("FlashAttention-4", "#15803d"),
}
N = 32
RNG = np.random.default_rng(3)
IDS = np.repeat([0, 1, 2], [12, 8, 12])
DENSE = RNG.random((N, N)) < 0.35
TABLE = np.cos(np.arange(12) / 2.2) * np.exp(-np.arange(12) / 9)
RAMP = np.linspace(-4, 4, N)

MASKS: dict[str, Expr] = {
    "causal()": tw.causal(),
    "window(6)": tw.window(6),
    "causal() & window(6)": tw.causal() & tw.window(6),
    "causal() | prefix(8)": tw.causal() | tw.prefix(8),
    "document(ids)": tw.document(IDS),
    "dilated(4)": tw.dilated(4),
    "dense(mask)": tw.dense(DENSE),
    "(Q // 8) == (K // 8)": (tw.Q // 8) == (tw.K // 8),
}
SCORES: dict[str, tuple[Expr, object]] = {
    "alibi(8), head 0": (tw.alibi(8), 0.0),
    "relative(table)": (tw.relative(TABLE), 0.0),
    "t5(table)": (tw.t5(RNG.standard_normal(16), max_distance=24), 0.0),
    "softcap(1.0), S from -4 to 4": (tw.softcap(1.0), RAMP),
}


def draw_variants() -> None:
    """Every named variant as an image: queries down, keys across."""
    figure, axes = plt.subplots(3, 4, figsize=(11, 9), layout="constrained")
    for axis, (title, expr) in zip(axes.flat, MASKS.items(), strict=False):
        axis.imshow(grid(expr, N, N), cmap=ListedColormap([PALE, BLUE]), vmin=0, vmax=1)
        axis.set_title(title, fontsize=11, family="monospace")
    for axis, (title, (expr, s)) in zip(axes.flat[len(MASKS) :], SCORES.items(), strict=True):
        axis.imshow(grid(expr, N, N, s=s), cmap="viridis")
        axis.set_title(title, fontsize=11, family="monospace")
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.suptitle(
        "Variants: masks (dark: the query sees the key) and scores. Queries down, keys across.", fontsize=12
    )
    figure.savefig(IMAGES / "variants.png", dpi=80)


def draw_plans() -> None:
    """What the schedule makes of four masks: EMPTY tiles are skipped, FULL ones need no mask code."""
    n, tile = 2048, Tile(64, 64)
    masks = {
        "causal()": tw.causal(),
        "causal() & window(256)": tw.causal() & tw.window(256),
        "document(ids)": tw.document(np.repeat(np.arange(6), [300, 500, 148, 600, 100, 400])),
        "causal() | prefix(512)": tw.causal() | tw.prefix(512),
    }
    figure, axes = plt.subplots(1, 4, figsize=(11, 3.8), layout="constrained")
    for axis, (title, mask) in zip(axes, masks.items(), strict=True):
        made = plan(Attention(1.0, mask), Shape(1, 1, 1, n, n, 64, 64), tile)
        axis.imshow(made.kinds(), cmap=KINDS, vmin=0, vmax=2)
        axis.set_title(
            f"{title}\n{made.flops / made.flops_naive:.0%} of the operations", fontsize=10, family="monospace"
        )
        axis.set_xticks([])
        axis.set_yticks([])
    figure.suptitle("Plans at n = 2048, tiles of 64 x 64: grey EMPTY (skipped), orange PARTIAL, blue FULL", fontsize=12)
    figure.savefig(IMAGES / "plans.png", dpi=80)


def draw_overview() -> None:
    """README's picture: an expression, the tiles it leaves, and how fast such variants are."""
    results = json.loads(RATES.read_text())
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 3.9), width_ratios=(1, 1, 1.9), layout="constrained"
    )
    _draw_mask(left)
    _draw_tiles(middle)
    _draw_speeds(right, results)
    figure.savefig(IMAGES / "overview.png", dpi=100, metadata={DRAWN_FROM: digest(results)})


def _sliding(window: int, first: int) -> Expr:
    return tw.causal() & ((tw.Q - tw.K < window) | (tw.K < first))


def _draw_mask(axis: Any) -> None:
    axis.imshow(grid(_sliding(6, 2), 20, 20), cmap=ListedColormap([PALE, BLUE]), vmin=0, vmax=1)
    axis.set_title("1. Write a mask as an expression\ncausal() & ((Q - K < 6) | (K < 2))", fontsize=10)
    axis.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])


def _draw_tiles(axis: Any) -> None:
    n, window = 4096, 1024
    made = plan(Attention(1.0, _sliding(window, 4)), Shape(1, 1, 1, n, n, 64, 64), Tile(256, 256))
    axis.imshow(made.kinds(), cmap=KINDS, vmin=0, vmax=2)
    left = made.flops / made.flops_naive
    axis.set_title(f"2. Tilewise skips the empty tiles\nn = {n}, window {window}: {left:.0%} of the work", fontsize=10)
    axis.set(xticks=[], yticks=[], xlabel="pale: skipped, orange: masked, blue: full")


def _draw_speeds(axis: Any, results: dict[str, Any]) -> None:
    """At d 128 and the longest n: the variants that everyone has a right result for."""
    n = max(r["n"] for r in results["records"])
    chosen = [r for r in results["records"] if (r["d"], r["n"], r["status"]) == (128, n, "ok")]
    speeds: dict[str, dict[str, float]] = {name: {} for name in CONTESTANTS}
    for r in chosen:
        speeds[r["contestant"]][r["variant"]] = r["tflops"]
    variants = [name for name in speeds["tilewise cuda"] if all(name in found for found in speeds.values())]
    for i, (contestant, (label, colour)) in enumerate(CONTESTANTS.items()):
        places = [place + 0.27 * (i - 1) for place in range(len(variants))]
        heights = [speeds[contestant][name] for name in variants]
        axis.bar_label(axis.bar(places, heights, width=0.25, color=colour, label=label), fmt="%.0f", fontsize=8)
    axis.set_xticks(range(len(variants)), [name.replace(" ", "\n") for name in variants])
    axis.set_ylim(0, 1.2 * max(r["tflops"] for r in chosen))  # room for the legend
    axis.set_ylabel("TFLOP/s")
    where = f"Forward on an {results['machine']['gpu'].removeprefix('NVIDIA ')}"
    title = f"3. One expression, a fast kernel for each variant\n{where}, bfloat16, head dimension 128, n = {n}"
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=9, ncols=3, loc="upper center")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_variants()
    draw_plans()
    draw_overview()

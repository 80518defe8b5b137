"""Draws the figures of the docs: python docs/figures.py (or `make pictures`)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

import tilewise as tw
from tilewise.expr import Expr
from tilewise.picture import grid
from tilewise.schedule import plan
from tilewise.spec import Attention, Shape, Tile

IMAGES = Path(__file__).parent / "images"
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
        axis.imshow(grid(expr, N, N), cmap=ListedColormap(["#eceff4", "#2f5d8a"]), vmin=0, vmax=1)
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
        axis.imshow(made.kinds(), cmap=ListedColormap(["#eceff4", "#e0a030", "#2f5d8a"]), vmin=0, vmax=2)
        axis.set_title(
            f"{title}\n{made.flops / made.flops_naive:.0%} of the operations", fontsize=10, family="monospace"
        )
        axis.set_xticks([])
        axis.set_yticks([])
    figure.suptitle("Plans at n = 2048, tiles of 64 x 64: grey EMPTY (skipped), orange PARTIAL, blue FULL", fontsize=12)
    figure.savefig(IMAGES / "plans.png", dpi=80)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_variants()
    draw_plans()

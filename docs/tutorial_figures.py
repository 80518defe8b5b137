"""Draws the figures of the tutorial, each from what the page's own code computes: python -m docs.tutorial_figures.

They are narrow and tall, so that they can be read on a telephone.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import tilewise as tw
from docs.figures import BLUE, IMAGES, KINDS, ORANGE, PALE
from tilewise.bench.plot_parts import GREY, TEXT, new_figure, save
from tilewise.explainer.timeline import Span, timeline
from tilewise.lab import verify_memory_usage
from tilewise.picture import grid
from tilewise.schedule import plan
from tilewise.softmax import State
from tilewise.spec import Attention, Shape, Tile

RED, GREEN, WORKS = "#b91c1c", "#0f766e", "#9db4cc"
WIDTH, DPI = 5.6, 150
LIMITS = {"float16": (float(np.finfo(np.float16).max), ORANGE), "float32": (float(np.finfo(np.float32).max), RED)}
RATES = IMAGES.parent.parent / "results" / "gpu" / "forward.json"


def draw_softmax() -> None:
    """Step 1: which rows the plain softmax loses, and why."""
    s = np.random.default_rng(0).standard_normal((1000, 64))
    figure = new_figure(WIDTH, 5.4)
    above, below = figure.subplots(2, 1)
    magnitudes = np.geomspace(1, 300, 40)
    for dtype, (_, colour) in LIMITS.items():
        above.plot(magnitudes, [_lost(m * s, dtype) for m in magnitudes], color=colour, lw=2.4)
    stable = [_lost(m * (s - s.max(axis=-1, keepdims=True)), "float16") for m in magnitudes]
    above.plot(magnitudes, stable, color=BLUE, lw=2.4)
    above.text(4.2, 60, "plain, float16", color=ORANGE, ha="right")
    above.text(55, 60, "plain, float32", color=RED)
    above.text(1, -13, "maximum subtracted, float16", color=BLUE)
    above.set(
        xscale="log",
        xlabel="scores, standard deviation",
        ylabel="rows that are NaN (%)",
        title="What is lost",
        ylim=(-18, 106),
    )
    above.set_xticks([1, 10, 100], ["1", "10", "100"])
    row = 30 * s[0]
    below.scatter(range(64), row / np.log(10), color=GREY, s=16, label="exp(s)")
    below.scatter(range(64), (row - row.max()) / np.log(10), color=BLUE, s=16, label="exp(s - maximum)")
    for dtype, (limit, colour) in LIMITS.items():
        below.axhline(np.log10(limit), color=colour, lw=1.6)
        below.text(
            76,
            np.log10(limit),
            f"largest\n{dtype}",
            color=colour,
            ha="right",
            va="center",
            fontsize=9,
            backgroundcolor="white",
        )
    below.set(xlabel="key", ylabel="exponent of 10", title="One row, scores times 30", ylim=(-85, 55), xlim=(-2, 79))
    below.legend(frameon=False, ncols=2, loc="lower left")
    _save(figure, "softmax")


def _lost(s: Any, dtype: str) -> float:
    """Percent of the rows that softmax without a maximum makes NaN of."""
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(s.astype(dtype))
        return 100 * float(np.isnan(e / e.sum(axis=-1, keepdims=True)).any(axis=-1).mean())


def draw_online_softmax() -> None:
    """Step 2: one row of scores in blocks, the running maximum, and what becomes of the sum."""
    s, block = 2 * np.random.default_rng(37).standard_normal(48), 8
    state, row_sum, heights = State.init((1,), 0, np.float64), 0.0, []
    figure = new_figure(WIDTH, 5.4)
    above, below = figure.subplots(2, 1)
    for i in range(0, len(s), block):
        p, rescale = state.step(s[None, i : i + block], np.zeros((block, 0)))
        above.scatter(range(i, i + block), s[i : i + block], color=BLUE if i // block % 2 else GREY, s=18)
        above.plot([i - 0.5, i + block - 0.5], [state.row_max[0]] * 2, color=ORANGE, lw=3)
        heights.append((row_sum, row_sum * float(rescale[0]), float(p.sum()), float(rescale[0])))
        row_sum = float(state.row_sum[0])
    above.set(ylabel="score", xlabel="key", title="Scores, in blocks of 8; the line is row_max so far")
    for i, (before, kept, new, rescale) in enumerate(heights):
        below.bar(i, before, color="none", edgecolor=GREY, ls="--", width=0.7)
        below.bar(i, kept, color=BLUE, width=0.7)
        below.bar(i, new, bottom=kept, color=ORANGE, width=0.7)
        below.text(i, max(before, kept + new) + 0.08, f"× {rescale:.2f}", ha="center", color=TEXT, fontsize=9)
    below.set(xlabel="block", title="row_sum, and the factor that the old sum was rescaled by")
    below.set_ylim(0, 1.35 * max(max(before, kept + new) for before, kept, new, _ in heights))
    below.legend(
        handles=[
            Patch(facecolor="none", edgecolor=GREY, ls="--", label="before"),
            Patch(color=BLUE, label="rescaled"), Patch(color=ORANGE, label="the block's own"),
        ], ncols=3, frameon=False, loc="upper left",
    )  # fmt: skip
    _save(figure, "online_softmax")


def draw_tiles() -> None:
    """Step 3: measured memory, and bytes that a plan counts."""
    figure = new_figure(WIDTH, 5.6)
    above, below = figure.subplots(2, 1)
    lengths = [256, 512, 1024, 2048, 4096]
    found = [verify_memory_usage(n, block_size=128) for n in lengths]
    for name, colour, label in (("standard_peak", ORANGE, "standard"), ("tiled_peak", BLUE, "tiles of 128 x 128")):
        above.plot(lengths, [x[name] / 2**20 for x in found], "o-", color=colour, lw=2.4, label=label)
    _by_length(above, lengths, "MiB", "Memory, the measured peak (float32, d 64)")
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    plans = {n: {t: _plan(n, Tile(t, 128)) for t in (32, 128)} for n in lengths}
    below.plot(lengths, [plans[n][32].bytes_naive / 2**30 for n in lengths], "o-", color=ORANGE, lw=2.4, label="naive")
    for rows, style in ((32, "o--"), (128, "o-")):
        moved = [plans[n][rows].bytes_tiled / 2**30 for n in lengths]
        below.plot(lengths, moved, style, color=BLUE, lw=2.4, label=f"tiles of {rows} queries")
    _by_length(below, lengths, "GiB", "Bytes moved, counted by the plan (float16, d 128)")
    _save(figure, "tiles")


def _plan(n: int, tile: Tile) -> Any:
    return plan(Attention(1.0), Shape(1, 1, 1, n, n, 128, 128, dtype="float16"), tile)


def _by_length(axis: Any, lengths: list[int], unit: str, title: str) -> None:
    axis.set(xscale="log", yscale="log", ylabel=unit, title=title)
    axis.set_xticks(lengths, [str(n) for n in lengths])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("n, queries and keys")
    axis.legend(frameon=False)


def draw_skipping() -> None:
    """Step 4: masks score by score, and the plan's tiles, which were found without looking at scores."""
    n, tile = 192, Tile(32, 32)
    masks = {
        "causal() & window(80)": tw.causal() & tw.window(80),
        "causal() & document(ids)": tw.causal() & tw.document(np.repeat([0, 1, 2], [80, 64, 48])),
    }
    figure = new_figure(WIDTH, 6.0)
    for row, (title, mask) in zip(figure.subplots(2, 2), masks.items(), strict=True):
        made = plan(Attention(1.0, mask), Shape(1, 1, 1, n, n, 64, 64), tile)
        row[0].imshow(grid(mask, n, n), cmap=ListedColormap([PALE, "#5b85ad"]), extent=(0, n, n, 0))
        row[1].imshow(made.kinds(), cmap=KINDS, vmin=0, vmax=2, extent=(0, n, n, 0))
        row[0].set_title(title, fontsize=9.5, family="monospace")
        row[1].set_title(f"{made.flops / made.flops_naive:.0%} of the operations", fontsize=9.5)
        for axis in row:
            axis.set_xticks(range(0, n + 1, tile.k), [])
            axis.set_yticks(range(0, n + 1, tile.q), [])
            axis.grid(color="white", lw=1.2)
            axis.tick_params(length=0)
    names = {"EMPTY: skipped": PALE, "PARTIAL: masked": ORANGE, "FULL: no mask": BLUE}
    handles = [Patch(facecolor=colour, edgecolor=GREY, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    _save(figure, "skipping")


def measured_rates() -> dict[str, float]:
    """What the GPU of results/gpu reached: products of matrices and copies."""
    machine = json.loads(RATES.read_text())["machine"]
    return {name: machine[name] for name in ("matmul_tflops", "copy_gbs")}


def draw_gpu_kernel() -> None:
    """Step 5: operations for each byte, by the height of the tile."""
    figure = new_figure(WIDTH, 3.6)
    axis, n, heights = figure.subplots(), 16384, [1, 2, 4, 8, 16, 32, 64, 128, 256]
    plans = [_plan(n, Tile(rows, 128)) for rows in heights]
    rates = measured_rates()
    balance = 1e3 * rates["matmul_tflops"] / rates["copy_gbs"]
    axis.plot(heights, [x.flops / x.bytes_tiled for x in plans], "o-", color=BLUE, lw=2.4, label="tiles")
    naive = plans[0].flops_naive / plans[0].bytes_naive
    axis.axhline(naive, color=ORANGE, lw=2, label=f"naive: {naive:.0f}")
    axis.axhline(balance, color=TEXT, lw=1.6, ls="--", label=f"an H200, as measured: {balance:.0f}")
    axis.set(xscale="log", yscale="log", xlabel="queries of a tile", ylabel="operations for each byte")
    axis.set_xticks(heights, [str(rows) for rows in heights])
    axis.set_xticks([], minor=True)
    axis.legend(frameon=False)
    axis.set_title(f"n = {n}, heads of 128, float16", fontsize=10)
    _save(figure, "gpu_kernel", rates)


def draw_warp_specialised() -> None:
    """Step 6: the simulator's trace of the Hopper kernel."""
    shape = Shape(1, 1, 1, 128, 512, 64, 64, dtype="float16")
    told = timeline(Attention(0.125), shape, Tile(128, 64))
    roles = {role: -i for i, role in enumerate(told["roles"])}
    figure = new_figure(WIDTH, 4.2)
    axis = figure.subplots()
    for span in told["spans"]:
        width = max(span.end - span.start, 1.5)  # what begins and ends in one round is seen, too
        axis.barh(roles[span.role], width, left=span.start, height=0.72, color=_colour(span))
    names = ["its products" if role.startswith("products") else role for role in roles]
    axis.set_yticks(list(roles.values()), names)
    axis.set_xlabel("round of turns")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    shown = {"works": WORKS, "waits": PALE, "copy": ORANGE, "2 q @ k.T": BLUE, "6 p @ v": GREEN}
    handles = [Patch(facecolor=colour, edgecolor=GREY, lw=0.5, label=name) for name, colour in shown.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=5, frameon=False, handlelength=1.2, columnspacing=1
    )
    _save(figure, "warp_specialised")


def _colour(span: Span) -> str:
    if span.kind == "product":
        return BLUE if span.step == "2" else GREEN
    return {"works": WORKS, "waits": PALE, "copy": ORANGE}[span.kind]


def _save(figure: Any, name: str, *drawn_from: dict[str, Any]) -> None:
    save(figure, IMAGES / f"{name}.png", *drawn_from, dpi=DPI)


def main() -> None:
    draw_softmax()
    draw_online_softmax()
    draw_tiles()
    draw_skipping()
    draw_gpu_kernel()
    draw_warp_specialised()


if __name__ == "__main__":
    main()

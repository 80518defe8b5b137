"""The GPU suite as pictures: speed against n beside what a product of matrices reaches, and bars of the variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewise.bench import plot_parts as parts
from tilewise.bench.gpu.suite import SECTIONS
from tilewise.bench.plot_parts import TEXT, Palette, Record

Results = dict[str, Any]
_LIMIT = {"color": TEXT, "linestyle": (0, (4, 2)), "linewidth": 1.3, "zorder": 1}


def draw(sections: dict[str, Results], folder: Path) -> list[Path]:
    """A picture for each section that has a speed to show and a number to show it by."""
    written = []
    for name, results in sections.items():
        make = _MAKERS.get(name)
        if make is None or not any(r["status"] == "ok" for r in results["records"]):
            continue
        path = folder / f"{name}.png"
        parts.save(make(name, results), path, results)
        written.append(path)
    return written


def _against_n(name: str, results: Results) -> Any:
    """A row of panels for each mask, a panel for each head dimension."""
    records, colours = results["records"], parts.palette(results["records"])
    masks, dims = parts.unique(records, "variant"), sorted(parts.unique(records, "d"))
    figure = parts.new_figure(max(4.2 * len(dims), 9.0), 3.3 * len(masks) + 1.2)
    axes = figure.subplots(len(masks), len(dims), squeeze=False, sharey=True)
    for i, mask in enumerate(masks):
        for j, d in enumerate(dims):
            shown = [r for r in records if r["variant"] == mask and r["d"] == d]
            _limit(axes[i][j], results)
            _lines(axes[i][j], shown, colours)
            axes[i][j].set_title(f"{mask}, d = {d}", fontsize=11, fontweight="bold")
        axes[i][0].set_ylabel("TFLOP/s (higher is better)")
    axes[0][0].set_ylim(bottom=0)  # once all lines are there: it ends the shared axis's own scaling
    for axis in axes[-1]:
        axis.set_xlabel("n (16384 tokens in all)")
    _finish(figure, axes, name, results)
    return figure


def _lines(axis: Any, records: list[Record], colours: Palette) -> None:
    for name, line in parts.lines(records, "tflops", "n").items():
        n = [r["n"] for r in line]
        axis.plot(n, [r["tflops"] for r in line], label=name, **parts.line_style(line[0], colours))
        slow, fast = ([_at(r, end) for r in line] for end in (max, min))
        axis.fill_between(n, slow, fast, color=colours[name], alpha=0.15, linewidth=0)
    parts.log_ticks(axis, sorted(parts.unique(records, "n")))


def _at(r: Record, end: Any) -> float:
    """TFLOP/s of the slowest or the fastest round."""
    return float(r["tflops"] * r["median_ms"] / end(r["rounds_ms"]))


def _bars(name: str, results: Results) -> Any:
    """A panel for each head dimension, a group of bars for each variant and n."""
    records, colours = results["records"], parts.palette(results["records"])
    dims = sorted(parts.unique(records, "d"))
    figure = parts.new_figure(11.0, 3.4 * len(dims) + 1.2)
    axes = figure.subplots(len(dims), 1, squeeze=False)
    for axis, d in zip(axes[:, 0], dims, strict=True):
        _groups(axis, [r for r in records if r["d"] == d], colours)
        _limit(axis, results)
        axis.set_title(f"d = {d}", fontsize=11, fontweight="bold")
        axis.set_ylabel("TFLOP/s (higher is better)")
    _finish(figure, axes, name, results)
    return figure


def _groups(axis: Any, records: list[Record], colours: Palette) -> None:
    names = parts.unique(records, "contestant")
    groups = list(dict.fromkeys(map(_group, records)))
    width = 0.8 / len(names)
    for r in (r for r in records if r["status"] == "ok"):
        at = groups.index(_group(r)) + (names.index(r["contestant"]) - (len(names) - 1) / 2) * width
        axis.bar(at, r["tflops"], width, color=colours[r["contestant"]], label=r["contestant"])
        if r["ratio"] is not None:
            axis.annotate(
                f"{r['ratio']:.2f}x", (at, r["tflops"]), (0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    parts.plain(axis)
    axis.grid(False, axis="x")


def _group(r: Record) -> str:
    inputs = "" if r["inputs"] == "normal" else f"{r['inputs']}\n"
    return f"{inputs}{r['variant']}\nn {r['n']}"


def _limit(axis: Any, results: Results) -> None:
    axis.axhline(results["machine"]["matmul_tflops"], label="measured matmul of 8192", **_LIMIT)


def _finish(figure: Any, axes: Any, name: str, results: Results) -> None:
    parts.footer(figure, results, "Medians of interleaved rounds; bands and numbers: rounds, and to the best peer.")
    parts.legend(figure, axes, f"Attention on the GPU: {SECTIONS[name].about}")


_MAKERS = {
    "forward": _against_n,
    "gqa": _against_n,
    "triton": _against_n,
    "backward": _bars,
    "gradients": _against_n,
    "cute": _bars,
    "cute_gradients": _against_n,
    "tilelang": _against_n,
    "tilelang_gradients": _against_n,
    "stress": _bars,
    "variants": _bars,
}

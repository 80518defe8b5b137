"""The suite as pictures: speed beside the machine's peak, decoding beside plain reads, growth of time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewise.bench import plot_parts as parts
from tilewise.bench.plot_parts import TEXT, Palette, Record
from tilewise.bench.problem import WINDOW
from tilewise.bench.suite import DECODE_HEADS, GROUPS_AT, SECTIONS

Results = dict[str, Any]
_LIMIT = {"color": TEXT, "linestyle": (0, (4, 2)), "linewidth": 1.3, "zorder": 1}
_PLAIN_READ = {"linestyle": "none", "marker": "_", "markersize": 16, "markeredgewidth": 2, "zorder": 1}


def draw(sections: dict[str, Results], folder: Path) -> list[Path]:
    """A picture for each of the sections that there are results of; window and memory share one."""
    figures: dict[str, tuple[Any, ...]] = {}  # each with the results it was drawn from
    for name in ("forward", "half", "training"):
        if name in sections:
            figures[name] = _speed(name, sections[name]), sections[name]
    if "decode" in sections:
        figures["decode"] = _decode(sections["decode"]), sections["decode"]
    growing = {name: results for name, results in sections.items() if name in ("window", "memory")}
    if growing:
        figures["scaling"] = _scaling(growing), *growing.values()
    for name, (figure, *results) in figures.items():
        parts.save(figure, folder / f"{name}.png", *results)
    return [folder / f"{name}.png" for name in figures]


# -- forward, half, training ------------------------------------------------------------------------------------------


def _speed(name: str, results: Results) -> Any:
    """Bars of GFLOP/s: a row of panels for each type, a panel for each variant, a group of bars for each size."""
    records, colours = results["records"], parts.palette(results["records"])
    types, variants = parts.unique(records, "dtype"), parts.unique(records, "variant")
    figure = parts.new_figure(5.6 * len(variants), 3.3 * len(types) + 1.2)
    axes = figure.subplots(len(types), len(variants), squeeze=False, sharey=True)
    for i, dtype in enumerate(types):
        for j, variant in enumerate(variants):
            shown = [r for r in records if r["dtype"] == dtype and r["variant"] == variant]
            _bars(axes[i][j], shown, colours)
            _limit(axes[i][j], results["machine"]["peak_gflops"], "measured peak of float32")
            axes[i][j].set_title(f"{dtype}, {variant}", fontsize=11, fontweight="bold")
        axes[i][0].set_ylabel("GFLOP/s (higher is better)")
    parts.footer(figure, results, "Bars: medians; numbers: our speed over the peer's.")
    parts.legend(figure, axes, f"Attention on the CPU: {SECTIONS[name].about}")
    return figure


def _bars(axis: Any, records: list[Record], colours: Palette) -> None:
    sizes = sorted({(r["n_k"], r["d"]) for r in records})
    names = parts.unique(records, "contestant")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        for r in (r for r in records if r["contestant"] == name and r["status"] == "ok"):
            at = sizes.index((r["n_k"], r["d"])) + (i - (len(names) - 1) / 2) * width
            axis.bar(at, r["gflops"], width, color=colours[name], label=name)
            if r["ours"] and r["ratio"] is not None:
                axis.annotate(
                    f"{r['ratio']:.2f}x", (at, r["gflops"]), (0, 2), textcoords="offset points", ha="center", fontsize=8
                )
    axis.set_xticks(range(len(sizes)), [f"n {n}\nd {d}" for n, d in sizes], fontsize=8)
    parts.plain(axis)
    axis.grid(False, axis="x")


def _limit(axis: Any, value: float | None, label: str) -> None:
    if value is not None:
        axis.axhline(value, label=label, **_LIMIT)


# -- decode -----------------------------------------------------------------------------------------------------------


def _decode(results: Results) -> Any:
    """Read rate against keys, a panel a type; and against the query heads that share a key head."""
    records, colours = results["records"], parts.palette(results["records"])
    usual = [r for r in records if r["heads"] == DECODE_HEADS]
    types = parts.unique(usual, "dtype")
    figure = parts.new_figure(3.1 * (len(types) + 1) + 0.6, 4.2)
    axes = figure.subplots(1, len(types) + 1, squeeze=False, sharey=True)
    for axis, dtype in zip(axes[0], types, strict=False):
        _rates(axis, [r for r in usual if r["dtype"] == dtype], "n_k", colours)
        axis.set_title(dtype, fontsize=11, fontweight="bold")
        axis.set_xlabel("keys")
    groups = [{**r, "group": r["heads"] // r["heads_k"]} for r in records]
    shared = [r for r in groups if r["n_k"] == GROUPS_AT and r["dtype"] == "float32"]
    _rates(axes[0][-1], shared, "group", colours)
    axes[0][-1].set_title(f"float32, {GROUPS_AT} keys", fontsize=11, fontweight="bold")
    axes[0][-1].set_xlabel("query heads for each key head")
    for axis in axes[0]:
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("k and v read, GB/s (higher is better)")
    parts.footer(figure, results, "Medians. Bars: a plain read of the same k and v, in the same process.")
    parts.legend(figure, axes, "Decoding on the CPU: one query for many keys")
    return figure


def _rates(axis: Any, records: list[Record], along: str, colours: Palette) -> None:
    for name, line in parts.lines(records, "read_gbs", along).items():
        rates = [r["read_gbs"] for r in line]
        axis.plot([r[along] for r in line], rates, label=name, **parts.line_style(line[0], colours))
    for name, line in parts.lines(records, "plain_read_gbs", along).items():
        rates = [r["plain_read_gbs"] for r in line]
        axis.plot([r[along] for r in line], rates, label=f"plain read, {name}", color=colours[name], **_PLAIN_READ)
    parts.log_ticks(axis, sorted(parts.unique(records, along)))


# -- window and memory ------------------------------------------------------------------------------------------------


def _scaling(sections: dict[str, Results]) -> Any:
    """How time of a window and memory grow with n, both axes logarithmic."""
    figure = parts.new_figure(5.2 * len(sections) + 0.4, 4.6)
    axes = figure.subplots(1, len(sections), squeeze=False)
    for axis, (name, results) in zip(axes[0], sections.items(), strict=True):
        colours = parts.palette(results["records"])
        if name == "memory":
            parts.memory_panel(axis, results["records"], colours)
            axis.set_title("causal: memory beyond the inputs", fontsize=11, fontweight="bold")
        else:
            _times(axis, results["records"], colours)
            axis.set_title(f"causal, the last {WINDOW} keys: milliseconds", fontsize=11, fontweight="bold")
        axis.set_xlabel("n (queries = keys)")
    parts.footer(figure, next(iter(sections.values())), "Medians. Lower is better.")
    parts.legend(figure, axes, "How it grows with the sequence")
    return figure


def _times(axis: Any, records: list[Record], colours: Palette) -> None:
    found = parts.lines(records, "median_ms")
    for name, line in found.items():
        times = [r["median_ms"] for r in line]
        axis.plot([r["n_k"] for r in line], times, label=name, **parts.line_style(line[0], colours))
    ours = next((line for line in found.values() if line[0]["ours"]), None)
    if ours is not None:
        ends = [ours[0]["n_k"], ours[-1]["n_k"]]
        straight = [ours[0]["median_ms"] * n / ends[0] for n in ends]
        axis.plot(
            ends, straight, color=TEXT, linestyle=":", linewidth=1.5, label="in proportion to n × window", zorder=1
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    parts.log_ticks(axis, sorted(parts.unique(records, "n_k")))

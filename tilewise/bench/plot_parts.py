"""What the pictures share: colours, axes, legends, footers, and the panel of memory against n."""

from __future__ import annotations

import hashlib
import json
from itertools import cycle
from pathlib import Path
from typing import Any

from tilewise.bench import machine
from tilewise.explanation import size

Record = dict[str, Any]
Palette = dict[str, str]

DPI = 75
DRAWN_FROM = "Drawn from"  # a text in a picture: the digest of its results
GREY = "#94a3b8"
TEXT = "#475569"
_OURS = ("#c2410c", "#7c3aed", "#0f766e", "#be185d", "#a16207", "#15803d")
_PEERS = {
    "torch sdpa": "#1d4ed8", "torch naive": "#0284c7", "numpy naive": "#64748b",
    "cuDNN": "#1d4ed8", "FlashAttention-4": "#15803d", "FlexAttention": "#64748b",
    "torch sdpa efficient": "#0284c7", "FlashAttention-4 deterministic": "#65a30d",
}  # fmt: skip
_OTHERS = ("#0369a1", "#4d7c0f", "#6d28d9", "#b45309")
PAGE = 4096  # bytes: nothing measurable is drawn here, as a logarithmic axis has no 0


def palette(records: list[Record]) -> Palette:
    """The same colour in every picture of a run."""
    ours = list(dict.fromkeys(r["contestant"] for r in records if r["ours"]))
    others = [name for name in unique(records, "contestant") if name not in (*ours, *_PEERS)]
    return {**_PEERS, **dict(zip(others, cycle(_OTHERS))), **dict(zip(ours, cycle(_OURS)))}


def new_figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path, *results: dict[str, Any], dpi: int = DPI) -> None:
    """With a digest of what it was drawn from, by which pictures are found that are older than their results."""
    figure.savefig(path, dpi=dpi, metadata={DRAWN_FROM: digest(*results)})


def digest(*results: dict[str, Any]) -> str:
    """Of results that were just measured the same as of those read from their file."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def line_style(record: Record, colours: Palette) -> dict[str, Any]:
    ours = record["ours"]
    return {
        "color": colours[record["contestant"]], "marker": "o" if ours else "s", "markersize": 5 if ours else 4,
        "linewidth": 2.4 if ours else 1.6, "zorder": 3 if ours else 2,
    }  # fmt: skip


def lines(records: list[Record], field: str, along: str = "n_k") -> dict[str, list[Record]]:
    """Right answers with this number, a contestant each, sizes rising."""
    found: dict[str, list[Record]] = {}
    for r in sorted(records, key=lambda r: r[along]):
        if r["status"] == "ok" and r[field] is not None:
            found.setdefault(r["contestant"], []).append(r)
    return found


def unique(records: list[Record], field: str) -> list[Any]:
    return list(dict.fromkeys(r[field] for r in records))


def log_ticks(axis: Any, values: list[int]) -> None:
    """A logarithmic axis that names the sizes that were measured."""
    from matplotlib.ticker import NullLocator

    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [str(x) for x in values], fontsize=8, rotation=30 if len(values) > 5 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    plain(axis)


def plain(axis: Any) -> None:
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(True, color="#e2e8f0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def memory_panel(axis: Any, records: list[Record], colours: Palette) -> None:
    """Extra memory against n, and what the full matrix would take."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    sizes = sorted({r["n_k"]: r["matrix_bytes"] for r in records}.items())
    axis.plot(*zip(*sizes, strict=True), color=GREY, linestyle=(0, (2, 2)), linewidth=1.5, label="full n × n matrix")
    for name, line in lines(records, "extra_bytes").items():
        extra = [max(r["extra_bytes"], PAGE) for r in line]
        axis.plot([r["n_k"] for r in line], extra, label=name, **line_style(line[0], colours))
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: size(y)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    log_ticks(axis, sorted(unique(records, "n_k")))


def footer(figure: Any, results: dict[str, Any], about: str) -> None:
    made = f"tilewise {results['tilewise']}, {results['date'][:10]}. {about}"
    figure.supxlabel(f"{machine.one_line(results['machine'])}\n{made}", fontsize=7.5, color=TEXT)


def legend(figure: Any, axes: Any, title: str) -> None:
    """One for the figure: every line once. The figure's title is the legend's, since the two would overlap."""
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()), list(found), loc="outside upper center", ncols=min(len(found), 6), frameon=False,
        fontsize=9, title=title, title_fontsize=13,
    )  # fmt: skip

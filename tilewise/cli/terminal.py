"""What the commands share on a terminal: progress, tables, bars."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence


def progress(text: str = "") -> None:
    """A line that the next one overwrites, on stderr; nothing when that is not a terminal. Empty text clears it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text[:width]}")
        sys.stderr.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the rest to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = []
    for line in (header, ["-" * w for w in widths], *rows):
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def log_bars(items: Sequence[tuple[str, float, str]], width: int = 44) -> str:
    """A bar an item, (label, value, text), on a logarithmic scale from the smallest to the largest value."""
    values = [math.log(value) for _, value, _ in items]
    low, span = min(values), max(values) - min(values) or 1.0
    label_width = max(len(label) for label, _, _ in items)
    return "\n".join(
        f"{label.ljust(label_width)}  {'█' * (1 + round((value - low) / span * (width - 1)))} {text}"
        for (label, _, text), value in zip(items, values, strict=True)
    )

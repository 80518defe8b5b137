"""Small pieces of HTML that the page's parts share. Texts of results files are never trusted: all are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Data:
    """A cell of a table: its text, the exact number behind it, and its style."""

    text: str = ""
    value: float | None = None
    style: str = ""

    def __str__(self) -> str:
        exact = "" if self.value is None else f' data-value="{self.value!r}"'
        style = f' class="{self.style}"' if self.style else ""
        return f"<td{style}{exact}>{escape(self.text)}</td>"


@dataclass(frozen=True)
class Row:
    name: str
    cells: Sequence[Data | str]
    id: str = ""
    link: str = ""
    about: str = ""  # a second line of its name
    style: str = ""

    def __str__(self) -> str:
        name = f'<a href="#{self.link}">{escape(self.name)}</a>' if self.link else escape(self.name)
        name += f"<br><small>{escape(self.about)}</small>" if self.about else ""
        attributes = (f' id="{self.id}"' if self.id else "") + (f' class="{self.style}"' if self.style else "")
        cells = "".join(str(cell if isinstance(cell, Data) else Data(cell)) for cell in self.cells)
        return f'<tr{attributes}><th scope="row">{name}</th>{cells}</tr>'


def table(head: Sequence[str], rows: Iterable[Row | Sequence[str]], label: str) -> str:
    """A table in a box of its own, which scrolls where the screen is narrow."""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(str(row if isinstance(row, Row) else Row(row[0], row[1:])) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label, quote=True)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )

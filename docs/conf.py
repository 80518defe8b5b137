"""The site: Sphinx reads the pages as they are, plain Markdown, and fails on a link that leads nowhere (`make site`).

Added here are the menu, formulas as MathML, which browsers draw by themselves, and a page for every source file that
a page links to. So nothing asks a network for anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from docs.navigation import NAVIGATION  # noqa: E402

project = html_title = "Tilewise"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_theme_options = {"source_edit_link": ""}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
smartquotes = False  # reasons quote code
html_show_sphinx = html_show_copyright = html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "github-dark"

LANGUAGES = {".py": "python", ".cu": "cuda", ".h": "cpp", ".cpp": "cpp"}
SOURCES = "source"  # the folder of the site where linked files are
linked: set[str] = set()


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", inline_renderers=(_formula, None), block_renderers=(_formula, None))
    app.connect("source-read", _add_menu)
    app.connect("doctree-read", _link_sources, priority=100)  # before Sphinx copies files that are linked to
    app.connect("doctree-read", _size_figures)
    app.connect("html-collect-pages", _source_pages)


def _add_menu(app: Sphinx, page: str, source: list[str]) -> None:
    """To the first page, where Sphinx looks for it; the file itself stays free of directives."""
    if page == "index":
        menus = (
            "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])
            for caption, pages in NAVIGATION.items()
        )
        source[0] = "\n\n".join([source[0], *menus])


def _formula(translator: Any, node: nodes.math | nodes.math_block) -> None:
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def _link_sources(app: Sphinx, tree: nodes.document) -> None:
    """Links to files beside the pages lead to pages that show them, not to downloads."""
    page = app.env.docname
    for link in list(tree.findall(addnodes.download_reference)):
        path = (DOCS / page).parent.joinpath(link["reftarget"]).resolve().relative_to(DOCS.parent).as_posix()
        linked.add(path)
        to = app.builder.get_relative_uri(page, f"{SOURCES}/{path}")
        link.replace_self(nodes.reference("", "", *link.children, refuri=to, internal=True))


def _size_figures(app: Sphinx, tree: nodes.document) -> None:
    """Those of the tutorial have more pixels than they are wide, for screens that show more."""
    if app.env.docname.startswith("tutorial/"):
        for image in tree.findall(nodes.image):
            image["width"] = "560px"


def _source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in sorted(linked):
        file = DOCS.parent / path
        text = app.builder.highlighter.highlight_block(file.read_text(), LANGUAGES.get(file.suffix, "text"))
        yield f"{SOURCES}/{path}", {"title": path, "body": f"<h1>{escape(path)}</h1>{text}"}, "page.html"

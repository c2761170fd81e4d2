"""The site: every page of the repository as it stands, with search (`make site`).

Its navigation is docs/index.md: each of that page's sections is a part of it. A link that leads nowhere ends the build.
"""

import re
import tomllib
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]

project = "Postroom"
author = "The Postroom authors"
project_copyright = author
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md", "sdk/README.md"]
exclude_patterns = [".*", "build", "dist", "tests", "docs/site"]

nitpicky = True
myst_heading_anchors = 4
myst_disable_syntax = [
    "myst_block_break",
    "myst_line_comment",
    "myst_role",
    "myst_target",
]  # pages are read on GitHub too
highlight_language = "none"

html_theme = "furo"
html_title = f"Postroom {version}"
html_additional_pages = {"index": "home.html"}
templates_path = ["."]
html_copy_source = False
html_show_sphinx = False

_ANCHOR = re.compile(r'<a id="([^"]+)">')
_LINK = re.compile(r"\[([^]]+)\]\(([^)#\s]+)\)")
_SECTION = re.compile(r"^## (?P<title>.*)\n\n(?P<items>(?:- .*\n)+)", re.MULTILINE)
_PAGE = re.compile(r"^- \[([^]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)


def navigate(_app: Sphinx, page: str, source: list[str]) -> None:
    """Make navigation of the index: its sections, and the first link of each of their items."""
    if page == root_doc:
        for section in _SECTION.finditer(source[0]):
            pages = "\n".join(f"{title} <{path}>" for title, path in _PAGE.findall(section["items"]))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section['title']}\n\n{pages}\n```\n"


def name_folders(_app: Sphinx, page: str, source: list[str]) -> None:
    """Show a link to a folder of the repository as its name: the site has none."""

    def name(link: re.Match[str]) -> str:
        return link[1] if (ROOT / page).parent.joinpath(link[2]).is_dir() else link[0]

    source[0] = _LINK.sub(name, source[0])


def note_anchors(app: Sphinx, doctree: nodes.document) -> None:
    """Let links lead to a page's own anchors too, as each rule of the contract has one: MyST knows headings alone."""
    known = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for raw in doctree.findall(nodes.raw):
        known.update((anchor, (0, anchor, anchor)) for anchor in _ANCHOR.findall(raw.astext()))


def setup(app: Sphinx) -> None:
    """Add all this to the build."""
    app.connect("source-read", navigate)
    app.connect("source-read", name_folders)
    app.connect("doctree-read", note_anchors)
    app.add_lexer("mermaid", TextLexer)  # a diagram is shown as it is written

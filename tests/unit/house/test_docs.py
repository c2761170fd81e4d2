"""The docs say what the code says: generated pages are fresh, links lead somewhere, every page has its place."""

import importlib
import json
import pkgutil
import re
import runpy
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from postroom import _wire
from postroom._wire.nouns import Noun

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "sdk/README.md", *sorted(DOCS.rglob("*.md"))]
GENERATOR = runpy.run_path(str(DOCS / "generate.py"))
DOCUMENTS = ("openapi/daemon.json", "openapi/broker.json")
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})


def tokens(page: Path) -> Iterator[Token]:
    for block in MARKDOWN.parse(page.read_text()):
        yield block
        yield from block.children or ()


def links(page: Path) -> list[str]:
    found = [token.attrs.get("href", token.attrs.get("src")) for token in tokens(page)]
    return [str(target) for target in found if target and not re.match(r"[a-z]+:", str(target))]


@cache  # many links lead to one page
def anchors(page: Path) -> set[str]:
    """Return what a link to the page may end with: its headings, as GitHub makes anchors of them, and its own."""
    found: list[str] = []
    blocks = MARKDOWN.parse(page.read_text())
    for opening, inline in pairwise(blocks):
        if opening.type == "heading_open":
            said = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", said.lower()).replace(" ", "-")
            found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return {*found, *re.findall(r'<a id="([^"]+)">', page.read_text())}


@pytest.mark.parametrize("name", GENERATOR["PAGES"])
def test_a_generated_page_is_what_the_code_says(name):
    assert (DOCS / name).read_text() == GENERATOR["PAGES"][name](), "run `make docs`"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_field_parameter_and_header_of_an_api_has_a_text(name):
    document = json.loads((DOCS / name).read_text())
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    silent = [
        f"{kind}.{field}"
        for kind, schema in document["components"]["schemas"].items()
        for field, shape in schema.get("properties", {}).items()
        if not shape.get("description")
    ]
    silent += [one["name"] for each in operations for one in each["parameters"] if not one["description"]]
    assert silent == [], "say in sdk/postroom/_wire/fields.toml what it means"
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)


def test_every_text_for_a_field_is_used():
    kinds: dict[str, set[str]] = {}
    for name in (*DOCUMENTS, "schemas.json"):
        found = json.loads((DOCS / name).read_text())
        for kind, schema in (found.get("$defs") or found["components"]["schemas"]).items():
            kinds.setdefault(kind.partition("_")[0], set()).update(schema.get("properties", {}))
        for methods in found.get("paths", {}).values():
            for operation in methods.values():
                kinds.setdefault("", set()).update(one["name"] for one in operation["parameters"])
    texts = tomllib.loads((ROOT / "sdk/postroom/_wire/fields.toml").read_text())
    known = {field for fields in kinds.values() for field in fields}
    own = {
        f"{kind}.{field}": field in kinds.get(kind, ())
        for kind, said in texts.items()
        if isinstance(said, dict)
        for field in said
    }
    assert [name for name, said in texts.items() if isinstance(said, str) and name not in known] == []
    assert [name for name, used in own.items() if not used] == []


def test_every_noun_that_has_verbs_is_on_that_page():
    """Wherever its table is."""
    values = [
        value
        for module in pkgutil.iter_modules(_wire.__path__, "postroom._wire.")
        for value in vars(importlib.import_module(module.name)).values()
    ]
    found = [one for value in values for one in (value.values() if isinstance(value, dict) else [value])]
    paths = {noun.path for noun in found if isinstance(noun, Noun) and noun.verbs}
    assert len(paths) > 5
    page = (ROOT / "docs/verbs.md").read_text()
    assert sorted(path for path in paths if f"`{path}`" not in page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_an_anchor_in_it(page):
    dead = []
    for target in links(page):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(target)
    assert dead == []


def test_every_page_has_a_place_in_the_index():
    listed = {(DOCS / target.partition("#")[0]).resolve() for target in links(DOCS / "index.md")}
    assert [page.name for page in DOCS.rglob("*.md") if page not in {*listed, DOCS / "index.md"}] == []

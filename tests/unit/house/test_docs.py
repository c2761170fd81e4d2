"""The docs say what the code says: generated pages are fresh, links lead somewhere."""

import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

from postroom import _wire
from postroom._wire.nouns import Noun

ROOT = Path(__file__).parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_configuration_reference_is_what_the_types_say():
    generator = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generator["CONFIGURATION"].read_text() == generator["configuration"](), "run `make docs`"


def test_the_page_of_verbs_is_what_the_tables_say():
    generator = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert generator["VERBS"].read_text() == generator["verbs"](), "run `make docs`"


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
def test_every_relative_link_leads_to_a_file(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []

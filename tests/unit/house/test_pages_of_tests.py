"""The pages that name the tests of what they say name tests that there are: one that is renamed takes its row along."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("page", "at_least"), [("security", 50), ("compatibility", 10)])
def test_every_test_that_a_page_names_exists(page: str, at_least: int) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / f"{page}.md").read_text()))
    sources = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"def (test_\w+)\(", sources))
    assert len(named) > at_least
    assert sorted(named - there) == []

"""The threat table names tests that there are: a test that is renamed takes its row along."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_threat_table_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/security.md").read_text()))
    sources = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"def (test_\w+)\(", sources))
    assert len(named) > 50
    assert sorted(named - there) == []

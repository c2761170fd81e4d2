"""The contract is numbered, and whatever cites a rule cites one that exists."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTRACT = ROOT / "docs/contract"
PAGES = sorted(page for page in CONTRACT.glob("*.md") if page.name != "README.md")

RULE = re.compile(r'^- <a id="([a-z-]+-\d+)"></a>\*\*([a-z-]+-\d+)\*\* \S', re.MULTILINE)
CITATION = re.compile(r"docs/contract/([\w-]+\.md)#([a-z0-9-]+)")
LINK = re.compile(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)")


def rules(page: Path) -> list[str]:
    return [anchor for anchor, _ in RULE.findall(page.read_text())]


def texts() -> dict[str, str]:
    """Return the text of every file of the repository, by its path; files that are not text are left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {}
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and b"\0" not in (content := (ROOT / name).read_bytes()):
            found[name] = content.decode(errors="replace")
    return found


TEXTS = texts()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_item_of_a_page_is_a_rule_with_its_own_id(page: Path):
    items = re.findall(r"^- .*", page.read_text(), re.MULTILINE)
    assert [item for item in items if not RULE.match(item)] == []
    anchors = RULE.findall(page.read_text())
    assert [pair for pair in anchors if pair[0] != pair[1]] == []
    assert [anchor for anchor, _ in anchors if anchor.rpartition("-")[0] != page.stem] == []
    assert len(set(anchors)) == len(anchors) > 20


def test_every_citation_of_a_rule_leads_to_it():
    known = {(page.name, rule) for page in PAGES for rule in rules(page)}
    missing = {name: set(CITATION.findall(text)) - known for name, text in TEXTS.items()}
    assert {name: sorted(pairs) for name, pairs in missing.items() if pairs} == {}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_rule_leads_to_it(page: Path):
    for target, anchor in LINK.findall(page.read_text()):
        there = (page.parent / target).resolve() if target else page
        if there.parent == CONTRACT:
            assert anchor in rules(there), f"{target}#{anchor}"

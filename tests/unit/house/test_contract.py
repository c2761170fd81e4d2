"""The contract is numbered, and comments and documents cite nothing that this repository does not have."""

import ast
import io
import os
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTRACT = ROOT / "docs/contract"
PAGES = sorted(page for page in CONTRACT.glob("*.md") if page.name != "README.md")

RULE = re.compile(r'^- <a id="([a-z-]+-\d+)"></a>\*\*([a-z-]+-\d+)\*\* \S', re.MULTILINE)
CITATION = re.compile(r"docs/contract/([\w-]+\.md)#([a-z0-9-]+)")
CODE = re.compile(
    r"""(?:\brefuse|(?<!Schema)\.of|\bproblem_of|\b_malformed)\((?:\d+,\s|position,\s[^,]+,\s)?\s*"([a-z0-9_]+)\""""
)
LINK = re.compile(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)")

# How comments name documents that are not here. "Seed" by itself is a number that a random run begins with.
ABSENT = re.compile(
    r"""
    \bspec\ [\w-]+\.md | \bthe\ spec\b
    | \b[Ss]eed\ (?:§|[\w-]*[a-z]-|DriftQ) | \b[Tt]he\ seed's\b | \bDriftQ\b
    | (?<!RFC\ \d{4}\ )§
    | \b(?:CMD|EVT|QRY|PORT)-\d | \bSDS- | (?<!['"])\bPOL-\d
    | \b[Aa]mendments?\b
    """,
    re.VERBOSE,
)
# A file below a folder of the repository; or, by its name alone, a document, a script or a module.
FILE = re.compile(r"(?<![\w/.$~{}*%:-])((?:[\w.-]+/)+[\w.-]*\w\.[a-z]{1,10}|[\w-]+\.(?:md|lua|py))\b(?![\w*/(])")


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
ENDS = {name.split("/", parts)[-1] for name in TEXTS for parts in range(name.count("/") + 1)}  # of paths, and these
FOLDERS = {name.partition("/")[0] for name in TEXTS if "/" in name}


def prose(name: str) -> Iterator[tuple[int, str]]:
    """Yield what a file says to its readers, comments and docstrings or all of it, with the number of its line."""
    text = TEXTS[name]
    if name.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        return
    mark = {".sql": "--", ".lua": "--", ".md": ""}.get(Path(name).suffix, "#")
    for number, line in enumerate(text.splitlines(), 1):
        if mark in line:
            yield number, line[line.index(mark) :]


def is_there(named: str, name: str) -> bool:
    """Tell whether what the file `name` names exists: from the root, from its own folder, or from the room it is in."""
    from_there = os.path.normpath(Path(name).parent / named)
    return named in ENDS or from_there in TEXTS or (ROOT / named).is_file()  # a picture is no text


def is_missing(named: str, name: str) -> bool:
    return is_ours(named, name) and not is_there(named, name)


def is_ours(named: str, name: str) -> bool:
    """Tell whether what the file `name` names must be in the repository; a guide has its readers write files too."""
    if "NNNN" in named:  # stands for a migration's number
        return False
    folder, _, rest = named.rpartition("/")
    if rest.endswith((".md", ".lua")):
        return True
    if name.endswith(".md") and not folder:
        return False
    return named.partition("/")[0] in FOLDERS or rest.endswith((".py", ".sql", ".lua"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_item_of_a_page_is_a_rule_with_its_own_id(page: Path):
    items = re.findall(r"^- .*", page.read_text(), re.MULTILINE)
    assert [item for item in items if not RULE.match(item)] == []
    anchors = RULE.findall(page.read_text())
    assert [pair for pair in anchors if pair[0] != pair[1]] == []
    assert [anchor for anchor, _ in anchors if anchor.rpartition("-")[0] != page.stem] == []
    assert len(set(anchors)) == len(anchors) > 20


def test_every_code_that_a_server_answers_is_in_the_contract():
    """What programs switch on is a promise (docs/contract/send.md#send-103, docs/contract/accept.md#accept-48)."""
    listed = {code for page in PAGES for code in re.findall(r"`(\w+)`", page.read_text())}
    servers = ("ipc/", "outbox/", "inbox/", "broker_client/", "broker/", "daemon/", "sdk/postroom/chassis/routes.py")
    names = ("message", "cloudevents", "names", "nouns", "ids", "once")
    shared = (
        *(f"sdk/postroom/_wire/{name}.py" for name in names),
        "sdk/postroom/ledger/operations.py",  # what the broker does to jobs
        *(f"sdk/postroom/delivery/{name}.py" for name in ("durables", "dead_letters/operations", "http/addresses")),
    )
    answered = {
        code: name
        for name, text in TEXTS.items()
        if name.endswith(".py") and name.startswith((*servers, *shared))
        for code in CODE.findall(text)
    }
    assert {code: name for code, name in answered.items() if code not in listed} == {}
    assert len(answered) > 80


def test_every_code_that_has_a_status_is_that_of_an_error():
    table = "sdk/postroom/errors.py"
    others = "".join(
        text for name, text in TEXTS.items() if name.endswith(".py") and not name.startswith("tests/") and name != table
    )
    codes = re.findall(r'^    "([a-z]\w+)": \d{3},$', TEXTS[table], re.MULTILINE)
    assert [code for code in codes if f'"{code}"' not in others] == []
    assert len(codes) > 30


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


def test_nothing_cites_a_document_that_is_not_here():
    own = str(Path(__file__).relative_to(ROOT))
    cited = [
        f"{name}:{number}: {line.strip()}"
        for name, text in TEXTS.items()
        if name != own and not name.startswith("docs/contract/") and not name.endswith(".lock")
        for number, line in enumerate(text.splitlines(), 1)
        if ABSENT.search(line)
    ]
    assert cited == []


def test_every_file_that_a_comment_or_a_document_names_exists():
    missing = [
        f"{name}:{number}: {named}"
        for name, text in TEXTS.items()
        if not name.endswith((".ndjson", ".lock"))
        and any(is_missing(named, name) for named in FILE.findall(text))  # else it need not be taken apart
        for number, said in prose(name)
        for named in FILE.findall(said)
        if is_missing(named, name)
    ]
    assert missing == []

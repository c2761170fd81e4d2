import re
from pathlib import Path

import pytest

from postroom._wire.sql import Queries

ROOT = Path(__file__).parents[3]


def test_queries_are_found_by_name_with_their_description():
    queries = Queries("-- name: one\n-- The first.\nSELECT 1;\n\n-- name: two\n-- The second.\nSELECT 2;\n")
    assert dict(queries) == {
        "one": "-- name: one\n-- The first.\nSELECT 1;",
        "two": "-- name: two\n-- The second.\nSELECT 2;",
    }


@pytest.mark.parametrize(
    "text", ["-- name: one\nSELECT 1;", "-- name: a\n-- A.\nSELECT 1;\n-- name: a\n-- B.\nSELECT 2;"]
)
def test_a_query_without_description_or_with_a_name_twice_is_refused(text):
    with pytest.raises(ValueError, match="no description"):
        Queries(text)


def test_an_unknown_name_is_an_error():
    with pytest.raises(KeyError):
        Queries("-- name: one\n-- The first.\nSELECT 1;")["two"]


def test_no_placeholder_is_numbered():
    """Python 3.12.0 to 3.12.3 warns of one that is given a sequence (Ubuntu 24.04 has 3.12.3)."""
    files = [file for room in ("outbox", "inbox", "sdk") for file in (ROOT / room).rglob("*.sql")]
    assert files
    assert [file.name for file in files if re.search(r"\?[0-9]", file.read_text())] == []

import pytest

from postroom._wire.sql import Queries


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

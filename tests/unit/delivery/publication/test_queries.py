"""All tables answer to the same queries, and every query is used."""

from __future__ import annotations

import re
from pathlib import Path

from postroom.delivery import publication
from postroom.delivery.publication.postgres import DELIVERIES, EVENTS, LETTERS, QUERIES

SOURCE = "".join(file.read_text() for file in Path(publication.__file__).parent.glob("*.py"))
DROPPED = {"drop", "find_dropped", "list_dropped"}  # dead letters have verbs of their own
ONLY_EVENTS = {"prune"}  # deliveries go with their messages
ONLY_DELIVERIES = {"has_broker", "horizon", "list_meshes"}
ONLY_LETTERS = {"list_contexts"}


def test_deliveries_and_letters_are_published_by_the_same_queries_as_events() -> None:
    assert set(EVENTS.queries) - ONLY_EVENTS == set(DELIVERIES.queries) - ONLY_DELIVERIES
    assert set(EVENTS.queries) - ONLY_EVENTS - DROPPED == set(LETTERS.queries) - ONLY_LETTERS


def test_every_query_is_used() -> None:
    upkeep = (Path(publication.__file__).parents[2] / "worker/upkeep.py").read_text()
    queries = {*EVENTS.queries, *DELIVERIES.queries, *LETTERS.queries, *QUERIES}
    found = {name for name in queries if re.search(rf'"{name}"', SOURCE + upkeep)}
    found |= {f"find_{loss}" for loss in re.findall(r'"(\w+)"', SOURCE)}
    assert queries - found == set()


def test_no_word_is_left_unsaid_in_a_query() -> None:
    for table in (EVENTS, DELIVERIES, LETTERS):
        for query in table.queries.values():
            assert re.findall(r"(?<![:\w]):[a-z]+", re.sub("^--.*$", "", query, flags=re.MULTILINE)) == []

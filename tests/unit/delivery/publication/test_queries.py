"""All tables answer to the same queries, and every query is used."""

from __future__ import annotations

import re
from pathlib import Path

from postroom.delivery import publication
from postroom.delivery.publication.postgres import DELIVERIES, EVENTS, LETTERS, QUERIES, REPLAYS, TABLES

SOURCE = "".join(file.read_text() for file in Path(publication.__file__).parent.glob("*.py"))
DROPPED = {"drop", "find_dropped", "list_dropped"}  # dead letters have verbs of their own
PRUNED = {"prune"}  # deliveries go with their messages, and letters stay
ONLY_DELIVERIES = {"has_broker", "horizon", "list_meshes"}
ONLY_LETTERS = {"list_contexts"}
ONLY_REPLAYS = {"keep"}


def test_all_tables_are_published_by_the_same_queries_as_events() -> None:
    assert set(EVENTS.queries) - PRUNED == set(DELIVERIES.queries) - ONLY_DELIVERIES
    assert set(EVENTS.queries) - PRUNED - DROPPED == set(LETTERS.queries) - ONLY_LETTERS
    assert set(EVENTS.queries) == set(REPLAYS.queries) - ONLY_REPLAYS


def test_every_query_is_used() -> None:
    upkeep = (Path(publication.__file__).parents[2] / "worker/upkeep.py").read_text()
    queries = {*(name for table in TABLES for name in table.queries), *QUERIES}
    found = {name for name in queries if re.search(rf'"{name}"', SOURCE + upkeep)}
    found |= {f"find_{loss}" for loss in re.findall(r'"(\w+)"', SOURCE)}
    assert queries - found == set()


def test_no_word_is_left_unsaid_in_a_query() -> None:
    for table in TABLES:
        for query in table.queries.values():
            assert re.findall(r"(?<![:\w]):[a-z]+", re.sub("^--.*$", "", query, flags=re.MULTILINE)) == []

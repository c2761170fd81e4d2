"""All sources answer to the same queries, and every query is used."""

from __future__ import annotations

import re
from pathlib import Path

from postroom.chassis.sql import load_queries
from postroom.delivery import publishing
from postroom.delivery.publishing import DELIVERIES, EVENTS, LETTERS

SOURCE = "".join(file.read_text() for file in Path(publishing.__file__).parent.glob("*.py"))
ONLY_EVENTS = {"prune"}  # deliveries go with their messages
ONLY_DELIVERIES = {"has_broker", "list_meshes"}
ONLY_LETTERS = {"list_contexts"}


def test_deliveries_and_letters_are_published_by_the_same_queries_as_events() -> None:
    assert set(EVENTS.queries) - ONLY_EVENTS == set(DELIVERIES.queries) - ONLY_DELIVERIES
    assert set(EVENTS.queries) - ONLY_EVENTS == set(LETTERS.queries) - ONLY_LETTERS


def test_every_query_is_used() -> None:
    upkeep = (Path(publishing.__file__).parents[2] / "worker/upkeep.py").read_text()
    queries = {
        *EVENTS.queries,
        *DELIVERIES.queries,
        *LETTERS.queries,
        *load_queries(publishing.__package__, "record.sql"),
    }
    assert {name for name in queries if not re.search(rf'"{name}"', SOURCE + upkeep)} == set()

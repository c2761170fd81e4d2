"""Counts and times, as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from postroom._wire.words import ago, counted, span, when


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("message",), "0 messages"),
        (1, ("message",), "1 message"),
        (2_005, ("dead letter",), "2,005 dead letters"),
        (2, ("delivery",), "2 deliveries"),
        (1, ("delivery",), "1 delivery"),
        (3, ("key",), "3 keys"),
        (1, ("message waits", "messages wait"), "1 message waits"),
        (2, ("message waits", "messages wait"), "2 messages wait"),
    ],
)
def test_one_thing_is_not_several(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "40 ms"), (3.21, "3.2 s"), (45, "45 s"), (720, "12 min"), (18_000, "5 h"), (9e5, "10 d")],
)
def test_a_time_has_the_unit_that_people_would_use(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_a_moment_is_written_in_utc_wherever_it_was_said() -> None:
    assert when(datetime.fromisoformat("2026-01-31T13:00:04.7+01:00")) == "2026-01-31 12:00:04Z"


def test_what_has_yet_to_be_is_no_time_ago() -> None:
    assert [ago(None), ago(datetime.now(UTC) + timedelta(hours=1))] == [None, "0 ms"]
    assert ago(datetime.now(UTC) - timedelta(hours=5, minutes=1)) == "5 h"

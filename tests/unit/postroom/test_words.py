"""Counts and times, as people read them."""

from __future__ import annotations

import pytest

from postroom._wire.words import counted, span


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

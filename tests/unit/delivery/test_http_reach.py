"""A handler that cannot be reached is tried again after pauses that grow, by one call at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from postroom.delivery.http import handler
from postroom.delivery.http.handler import PAUSES, Reach
from postroom.delivery.http.webhooks import WebhookConsumer


def test_calls_pause_longer_each_time_and_one_at_a_time_finds_out_whether_somebody_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(handler, "time", SimpleNamespace(monotonic=lambda: now))
    reach = Reach("http://x/")
    assert reach.room is None
    for missed in range(1, 4):
        with reach.turn() as wait:
            assert wait == 0
            assert reach.room == (0 if missed > 1 else None)
            pause = reach.missed("no connection", now)
        assert PAUSES.first * 2 ** (missed - 1) / 2 <= pause <= PAUSES.first * 2 ** (missed - 1)
        with reach.turn() as wait:
            assert (reach.room, wait > 0) == (0, True)
        now += pause
        assert reach.room == 1
    assert reach.away_seconds > 0
    reach.reached()
    assert (reach.room, reach.error, reach.away_seconds) == (None, None, 0)


def test_calls_that_were_under_way_together_count_once_even_if_the_last_fail_during_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a handler stands still for a moment, and each connection to it takes its time to fail."""
    now = began = 1000.0
    monkeypatch.setattr(handler, "time", SimpleNamespace(monotonic=lambda: now))
    reach = Reach("http://x/")
    now += 1.5
    now += reach.missed("no connection", began)
    with reach.turn() as wait:
        assert wait == 0
        for _ in range(63):
            assert reach.missed("no connection", began) == 0
        assert PAUSES.first <= reach.missed("no connection", now) <= 2 * PAUSES.first


@pytest.mark.parametrize("room", [None, 0, 1])
def test_a_webhook_has_the_room_of_its_handler(room: int | None) -> None:
    consumer: Any = object.__new__(WebhookConsumer)
    consumer.handler = SimpleNamespace(reach=SimpleNamespace(room=room))
    assert consumer.room == room

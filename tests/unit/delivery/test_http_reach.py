"""A handler that cannot be reached is tried again after pauses that grow, by one call at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from postroom.delivery.http import handler
from postroom.delivery.http.handler import PAUSES, Reach


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
            pause = reach.missed("no connection")
        assert PAUSES.first * 2 ** (missed - 1) / 2 <= pause <= PAUSES.first * 2 ** (missed - 1)
        with reach.turn() as wait:
            assert (reach.room, wait > 0) == (0, True)
        now += pause
        assert reach.room == 1
    assert reach.away_seconds > 0
    reach.reached()
    assert (reach.room, reach.error, reach.away_seconds) == (None, None, 0)

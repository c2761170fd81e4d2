"""Whether the clock of a database is believed, where that clock and the time that passes are the test's."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from postroom.chassis.clock import DatabaseClock

HOUR = 3600.0
YEARS = 10 * 365 * 24 * HOUR


class Postgres:
    """A database that is asked for its time: what has passed since the start of the process, and how far it is off."""

    def __init__(self, ahead: float = 0) -> None:
        self.start = time.time()
        self.passed = 0.0
        self.ahead = ahead
        self.clock = DatabaseClock(lambda: self.passed)

    async def fetchval(self, _query: str) -> datetime:
        return datetime.fromtimestamp(self.start + self.passed + self.ahead, UTC)

    async def confirmed(self, **changes: float) -> bool:
        for name, value in changes.items():
            setattr(self, name, value)
        database: Any = self
        return await self.clock.is_confirmed(database)


@pytest.mark.parametrize("jump", [YEARS, -YEARS, 2 * HOUR])
async def test_a_clock_that_jumps_is_believed_once_it_is_back(jump: float) -> None:
    postgres = Postgres()
    assert await postgres.confirmed()
    for day in (1, 2):
        assert await postgres.confirmed(passed=day * 24 * HOUR, ahead=30)
        assert not await postgres.confirmed(ahead=jump)
        assert not await postgres.confirmed(passed=day * 24 * HOUR + 600)
        assert await postgres.confirmed(ahead=0)


async def test_a_clock_that_goes_on_for_an_hour_is_believed_whatever_it_was_before() -> None:
    postgres = Postgres(ahead=YEARS)
    assert not await postgres.confirmed()
    assert not await postgres.confirmed(passed=HOUR - 1)
    assert await postgres.confirmed(passed=HOUR)
    assert await postgres.confirmed(passed=HOUR + 1)
    assert not await postgres.confirmed(passed=HOUR + 2, ahead=0)


async def test_a_clock_that_jumps_again_is_in_doubt_for_another_hour() -> None:
    postgres = Postgres(ahead=YEARS)
    assert not await postgres.confirmed()
    assert not await postgres.confirmed(passed=HOUR, ahead=2 * YEARS)
    assert not await postgres.confirmed(passed=2 * HOUR - 1)
    assert await postgres.confirmed(passed=2 * HOUR)

"""Clocks that are wrong: of a database, and of a host."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from typing import Final, Self

from postroom.chassis.clock import DatabaseClock

_YEARS: Final = 10 * 365 * 86_400.0


def clock_ahead() -> DatabaseClock:
    """Return the clock of a database that has jumped ahead by ten years since this process began."""
    clock = DatabaseClock()
    clock._offset -= _YEARS
    return clock


class Ahead(datetime):
    """The clock of a host that is a day ahead, for a module that reads it as `datetime`."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(days=1)

"""Clocks of a database that are wrong."""

from __future__ import annotations

from typing import Final

from postroom.chassis.clock import DatabaseClock

_YEARS: Final = 10 * 365 * 86_400.0


def clock_ahead() -> DatabaseClock:
    """Return the clock of a database that has jumped ahead by ten years since this process began."""
    clock = DatabaseClock()
    clock._offset -= _YEARS
    return clock

"""The daemon's clock, held against the broker's: what may expire by it, and what may be posted.

A clock may be wrong by years, for seconds or for good, and a message that dies of it is lost. So a row expires by a
clock alone that the broker's last answer (its `Date`) agrees with to within the safety margin of the window, and by
none once that answer is older than the margin: whatever is wrong by then, the next answer tells.
"""

from __future__ import annotations

from typing import NamedTuple

from postroom.retry import read_date


class _Answer(NamedTuple):
    """When an answer came, and what its `Date` said: both ms since the epoch, each by its own clock."""

    local: int
    date: int


class ConfirmedClock:
    """What the broker's last answer said of the clock; times in ms since the epoch."""

    def __init__(self) -> None:
        self._last: _Answer | None = None

    def answered(self, date: str | None, now: int) -> None:
        """Note an answer with the header `Date`; one without says nothing, and takes back nothing."""
        if (moment := read_date(date)) is not None:
            self._last = _Answer(now, moment)

    def is_confirmed(self, now: int, margin: int) -> bool:
        """Tell whether the last answer is recent, and agrees with the clock; the clock has not gone back since."""
        return (
            self._last is not None
            and 0 <= now - self._last.local <= margin
            and abs(self._last.date - self._last.local) <= margin
        )

    def is_stale(self, now: int, margin: int) -> bool:
        """Tell whether the broker has to be asked before anything is known of the clock."""
        return self._last is None or not 0 <= now - self._last.local <= margin

    def estimate(self, now: int) -> int:
        """Return the time that it is by the broker's clock, as far as the last answer tells."""
        return now if self._last is None else now + self._last.date - self._last.local

"""The clock of a database, and whether it may be believed where something is deleted or given up because it is old.

It may be years ahead for a moment, and what is deleted by it then is lost. A process has no better clock to ask, but it
knows how much time has passed since its start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Final

import structlog

from postroom._wire.sql import load_queries
from postroom.chassis.postgres import Connection, Pool

_log = structlog.get_logger(__name__)

_QUERIES: Final = load_queries("postroom.chassis", "clock.sql")
_MARGIN: Final = 60.0  # seconds by which two clocks that are right may differ
_DOUBT_SECONDS: Final = 3600.0  # after which a clock that goes on steadily is believed, whatever it was before
# The seconds that have passed, also while the host slept.
_elapsed: Final = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def now(database: Pool | Connection) -> datetime:
    """Return the time of a database, by which it notes when something happened."""
    moment: datetime = await database.fetchval(_QUERIES["now"])
    return moment


class DatabaseClock:
    """The clock of one database, compared with this process's own at its start and the time that has passed since."""

    def __init__(self, elapsed: Callable[[], float] = _elapsed) -> None:
        self._elapsed = elapsed
        self._offset = time.time() - elapsed()
        self._doubted: tuple[float, float] | None = None  # the offset since a jump, and when that was found

    async def is_confirmed(self, database: Pool | Connection) -> bool:
        """Return whether it agrees to within a minute, or has gone on steadily for an hour since it did not."""
        moment, passed = (await now(database)).timestamp(), self._elapsed()
        offset = moment - passed
        if self._doubted is None or abs(offset - self._doubted[0]) > _MARGIN:
            self._doubted = offset, passed
        since = self._doubted[1]
        if abs(offset - self._offset) <= _MARGIN or passed - since >= _DOUBT_SECONDS:
            self._offset, self._doubted = offset, None
            return True
        if since == passed:
            _log.warning("clock_not_confirmed", ahead_seconds=round(offset - self._offset))
        return False

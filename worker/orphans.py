"""The orphan check of every night: one worker of those that share a database runs it, and all of them tell of it.

It looks for what an accept must have written and did not (`postroom broker orphan-check` is the same by hand). A worker
that was down at night makes up for it. What was found stays in `/health` and the metrics until a check finds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import asyncpg
import msgspec
import structlog
from msgspec import Meta

from broker.orphans import LastCheck, check_if_due, last_check
from chassis.exits import Fatal
from chassis.postgres import UNREACHABLE, Pool

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 60.0
_AFTER_FAILURE_SECONDS: Final = 600.0
_LATE: Final = timedelta(hours=26)  # after which somebody should know that it has not run
_DAY: Final = timedelta(days=1)


class OrphanCheckSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """When the database is checked for what is incomplete."""

    enabled: Annotated[bool, Meta(description="whether this worker takes part in it, and tells what was found")] = True
    hour: Annotated[int, Meta(ge=0, le=23, description="the hour of the day, in UTC, at which it begins")] = 3


def _now() -> datetime:
    return datetime.now(UTC)


class OrphanCheck:
    """Checks a broker's database every night: `run` it as a task."""

    def __init__(
        self,
        pool: Pool,
        url: str,
        settings: OrphanCheckSettings,
        *,
        events_kept: timedelta,
        clock: Callable[[], datetime] = _now,
    ) -> None:
        self.last: LastCheck | None = None
        self._pool = pool
        self._url = url
        self._settings = settings
        self._events_kept = events_kept
        self._clock = clock
        self._since = clock()
        self._trouble = "no worker was there at that hour"

    async def run(self) -> None:
        """Look until cancelled whether a check is due; what fails is tried again later."""
        while True:
            pause = _LOOK_SECONDS
            try:
                await self.look()
            except (Fatal, asyncpg.PostgresError, *UNREACHABLE) as error:
                self._trouble = str(error) or type(error).__name__
                _log.warning("orphan_check_failed", error=self._trouble)
                pause = _AFTER_FAILURE_SECONDS
            await asyncio.sleep(pause)

    async def look(self) -> None:
        """Check where it is due and nobody else is at it, and read what the last check found."""
        self.last = await last_check(self._pool)
        due = self._due()
        if self.last is not None and self.last.at >= due:
            return
        self.last = await check_if_due(self._url, due, events_kept=self._events_kept)
        if self.last is not None and self.last.at >= due:
            report = _log.error if self.last.violations else _log.info
            report("orphans_checked", violations={kind: rows for kind, rows, _ in self.last.violations})

    def reasons(self) -> list[str]:
        """Say what it found, or that it has not run for long."""
        at = self._since if self.last is None else self.last.at
        found = [] if self.last is None else self.last.violations
        reasons = []
        if found:
            kinds = ", ".join(f"{violation.kind} ({violation.rows})" for violation in found)
            reasons.append(
                f"the orphan check of {at:%Y-%m-%d %H:%M}Z found rows that are incomplete: {kinds}; "
                "`postroom broker orphan-check` names their messages"
            )
        if self._clock() - at > _LATE:
            reasons.append(f"the orphan check has not run since {at:%Y-%m-%d %H:%M}Z: {self._trouble}")
        return reasons

    def _due(self) -> datetime:
        """Return the last moment at which a check was to begin."""
        now = self._clock()
        tonight = now.replace(hour=self._settings.hour, minute=0, second=0, microsecond=0)
        return tonight if tonight <= now else tonight - _DAY

"""The orphan check: does every accept have all its rows, and every row its accept (docs/contract/accept.md#accept-38).

It reads one snapshot, so that it may run during accepts and sweeps; each violation is a bug or a damaged database. One
of the workers that share a database runs it every night (`postroom broker orphan-check` does it by hand), and all of
them report what it found in `/health` and the metrics until a check finds nothing. A worker that was down at night
makes up for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Final, NamedTuple
from uuid import UUID

import asyncpg
import msgspec
import structlog
from msgspec import Meta

from postroom._wire.accept import MIN_DEDUPE_DAYS
from postroom._wire.sql import load_queries
from postroom._wire.words import when
from postroom.chassis.clock import now
from postroom.chassis.exits import Fatal
from postroom.chassis.postgres import POSTGRES_ERRORS, Connection, Pool, connected, why_waiting

_log = structlog.get_logger(__name__)

_QUERIES: Final = load_queries("postroom.worker", "orphans.sql")
_ID_LIFE: Final = timedelta(days=MIN_DEDUPE_DAYS)  # no broker forgets an id earlier, whatever its config was
_LOOK_SECONDS: Final = 60.0
_LATE: Final = timedelta(hours=26)  # after which an operator should know that it has not run
_DAY: Final = timedelta(days=1)


class Violation(NamedTuple):
    """A kind of violation, how many rows show it, and up to ten of their messages."""

    kind: str
    rows: int
    examples: list[UUID]


_decode: Final = msgspec.json.Decoder(list[Violation]).decode


class LastCheck(NamedTuple):
    """The last check: when it began, and what it found."""

    at: datetime
    violations: list[Violation]


class OrphanCheckSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """When the database is checked for incomplete rows."""

    enabled: Annotated[bool, Meta(description="whether this worker runs the check and reports its result")] = True
    hour: Annotated[int, Meta(ge=0, le=23, description="the hour of the day, in UTC, at which it begins")] = 3


class OrphanCheck:
    """Checks a broker's database every night: `run` it as a task."""

    def __init__(
        self,
        pool: Pool,
        url: str,
        settings: OrphanCheckSettings,
        *,
        events_kept: timedelta,
        clock: Callable[[], datetime] = partial(datetime.now, UTC),  # noqa: B008 - it is called later
    ) -> None:
        self.last: LastCheck | None = None
        self._pool = pool
        self._url = url
        self._settings = settings
        self._events_kept = events_kept
        self._clock = clock
        self._since = clock()
        self._trouble = "no worker ran at that hour"

    async def run(self) -> None:
        """Look every minute, until cancelled, whether a check is due; one that failed is still due."""
        while True:
            try:
                await self.look()
            except (Fatal, *POSTGRES_ERRORS) as error:
                self._trouble = why_waiting(error)
                _log.warning("orphan_check_failed", error=self._trouble)
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Check where that is due and no other worker does it, and read what the last check found."""
        self.last = await last_check(self._pool)
        moment = await now(self._pool)
        tonight = moment.replace(hour=self._settings.hour, minute=0, second=0, microsecond=0)
        due = tonight if tonight <= moment else tonight - _DAY  # the last time at which a check should have begun
        if self.last is not None and self.last.at >= due:
            return
        self.last = await check_if_due(self._url, due, events_kept=self._events_kept)
        if self.last is not None and self.last.at >= due:
            report = _log.error if self.last.violations else _log.info
            report("orphans_checked", violations={kind: rows for kind, rows, _ in self.last.violations})

    @property
    def at(self) -> datetime:
        """When the last check began; where there was none, when this worker did."""
        return self._since if self.last is None else self.last.at

    def reasons(self) -> list[str]:
        """Return what it found, and whether it has not run for long."""
        at = self.at
        found = [] if self.last is None else self.last.violations
        reasons = []
        if found:
            kinds = ", ".join(f"{violation.kind} ({violation.rows})" for violation in found)
            advice = "`postroom broker orphan-check` lists their messages"
            reasons.append(f"the orphan check of {when(at)} found rows that are incomplete: {kinds}; {advice}")
        if self._clock() - at > _LATE:
            reasons.append(f"the orphan check has not run since {when(at)}: {self._trouble}")
        return reasons


async def check_if_due(url: str, due: datetime, *, events_kept: timedelta) -> LastCheck | None:
    """Check where that was not done since `due`, unless another process does it now; return the last check.

    Raises `Fatal` where Postgres refuses the connection.
    """
    async with connected(url) as connection:
        is_leader = await connection.fetchval(_QUERIES["lead_checking"])
        last = await last_check(connection)
        if is_leader and (last is None or last.at < due):
            last = await check(connection, events_kept)
        return last


async def last_check(connection: Connection | Pool) -> LastCheck | None:
    """Return what the last check found, None where there was none."""
    row = await connection.fetchrow(_QUERIES["last_check"])
    return None if row is None else LastCheck(row["checked_at"], _decode(row["violations"]))


async def check(connection: Connection, events_kept: timedelta) -> LastCheck:
    """Find the orphans, and record them where the database can be written."""
    began = await now(connection)
    done = LastCheck(began, await find_orphans(connection, events_kept=events_kept))
    with suppress(asyncpg.ReadOnlySQLTransactionError, asyncpg.InsufficientPrivilegeError):  # a replica, for example
        await connection.execute(_QUERIES["record_check"], began, msgspec.json.encode(done.violations).decode())
    return done


async def find_orphans(connection: Connection, *, events_kept: timedelta) -> list[Violation]:
    """Return every violation, by kind; an empty list is the only good answer.

    A published event is pruned after `events_kept` at the earliest: only a younger message must still have its own.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        rows = await connection.fetch(_QUERIES["find_orphans"], events_kept, _ID_LIFE)
    return [Violation(*row) for row in rows]

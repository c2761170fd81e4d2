"""The orphan check: does every accept have all its rows, and every row its accept (docs/contract/accept.md#accept-38).

It reads one snapshot, so that it may run beside accepts and sweeps; each violation is a bug or a damaged database. What
the last one found is kept, for whoever is asked how the database is.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

import asyncpg
import msgspec

from broker.config import MIN_DEDUPE_DAYS
from broker.database import QUERIES, check_version
from chassis.postgres import Connection, Pool, connected

_ID_LIFE: Final = timedelta(days=MIN_DEDUPE_DAYS)  # no broker forgets an id earlier, whatever its config was


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


async def check(url: str, *, events_kept: timedelta) -> list[Violation]:
    """Return every violation in the database at `url`, and keep them where that may be written.

    Raises `Fatal`, also where its schema is not this program's.
    """
    async with connected(url) as connection:
        await check_version(connection)
        return (await _check(connection, events_kept)).violations


async def check_if_due(url: str, due: datetime, *, events_kept: timedelta) -> LastCheck | None:
    """Check where that was not done since `due`, unless another process is at it; return the last check there is.

    Raises `Fatal` as `check` does.
    """
    async with connected(url) as connection:
        await check_version(connection)
        is_leader = await connection.fetchval(QUERIES["lead_checking"])
        last = await last_check(connection)
        if is_leader and (last is None or last.at < due):
            last = await _check(connection, events_kept)
        return last


async def last_check(connection: Connection | Pool) -> LastCheck | None:
    """Return what the last check found, None where there was none."""
    row = await connection.fetchrow(QUERIES["last_check"])
    return None if row is None else LastCheck(row["checked_at"], _decode(row["violations"]))


async def _check(connection: Connection, events_kept: timedelta) -> LastCheck:
    began = datetime.now(UTC)
    done = LastCheck(began, await find_orphans(connection, events_kept=events_kept))
    with suppress(asyncpg.ReadOnlySQLTransactionError, asyncpg.InsufficientPrivilegeError):  # as of a replica
        await connection.execute(QUERIES["record_check"], began, msgspec.json.encode(done.violations).decode())
    return done


async def find_orphans(connection: Connection, *, events_kept: timedelta) -> list[Violation]:
    """Return every violation, by kind; an empty list is the only good answer.

    A published event is pruned after `events_kept` at the earliest: only a younger message must still have its own.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        rows = await connection.fetch(QUERIES["find_orphans"], events_kept, _ID_LIFE)
    return [Violation(*row) for row in rows]

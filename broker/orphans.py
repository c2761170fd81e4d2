"""The orphan check: does every accept have all its rows, and every row its accept (spec accept.md; seed §4.7.3).

It reads one snapshot, so that it may run beside accepts and sweeps; each violation is a bug or a damaged database.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final, NamedTuple
from uuid import UUID

from broker.config import MIN_DEDUPE_DAYS
from broker.database import QUERIES, check_version
from chassis.postgres import Connection, connected

_ID_LIFE: Final = timedelta(days=MIN_DEDUPE_DAYS)  # no broker forgets an id earlier, whatever its config was


class Violation(NamedTuple):
    """A kind of violation, how many rows show it, and up to ten of their messages."""

    kind: str
    rows: int
    examples: list[UUID]


async def check(url: str, *, events_kept: timedelta) -> list[Violation]:
    """Return every violation in the database at `url`; raises `Fatal`, also where its schema is not this program's."""
    async with connected(url) as connection:
        await check_version(connection)
        return await find_orphans(connection, events_kept=events_kept)


async def find_orphans(connection: Connection, *, events_kept: timedelta) -> list[Violation]:
    """Return every violation, by kind; an empty list is the only good answer.

    A published event is pruned after `events_kept` at the earliest: only a younger message must still have its own.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        rows = await connection.fetch(QUERIES["find_orphans"], events_kept, _ID_LIFE)
    return [Violation(*row) for row in rows]

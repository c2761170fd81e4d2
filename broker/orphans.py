"""The orphan check: does every accept have all its rows, and every row its accept (spec accept.md; seed §4.7.3).

It reads one snapshot, so that it may run beside accepts and sweeps; each violation is a bug or a damaged database.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from broker.database import QUERIES, check_version
from chassis.postgres import Connection, connected


class Violation(NamedTuple):
    """A kind of violation, how many rows show it, and up to ten of their messages."""

    kind: str
    rows: int
    examples: list[UUID]


async def check(url: str) -> list[Violation]:
    """Return every violation in the database at `url`; raises `Fatal`, also where its schema is not this program's."""
    async with connected(url) as connection:
        await check_version(connection)
        return await find_orphans(connection)


async def find_orphans(connection: Connection) -> list[Violation]:
    """Return every violation, by kind; an empty list is the only good answer."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        return [Violation(*row) for row in await connection.fetch(QUERIES["find_orphans"])]

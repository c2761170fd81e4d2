"""What operators see and do about rows that are, or are not, in their streams.

What JetStream refuses, since no stream accepts it or it is too large, holds up its aggregate (of deliveries: its
recipient) until somebody removes the cause, and is then published. What can never be published is dropped: an event
leaves the outbox and is kept whole, a delivery is noted, and its message stays in the history; who dropped it, and why,
is kept with it.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from postroom._wire.unpublished import (
    Dropped,
    Failing,
    FailingPage,
    PublishedFilter,
    Redriven,
    RefusedFilter,
    SourceBacklog,
)
from postroom.chassis.postgres import Connection
from postroom.delivery.errors import not_failing
from postroom.delivery.publishing.postgres import DELIVERIES, EVENTS, LETTERS, Table

LIMIT: Final = 1000  # that are listed, or that one request drops
TABLES: Final = (EVENTS, DELIVERIES, LETTERS)
_STEP: Final = 5000  # rows of one table that one transaction has published again
_UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ID: Final = {EVENTS.name: re.compile(_UUID), DELIVERIES.name: re.compile(_UUID + r"\.[0-9]{1,9}")}


async def list_failing(connection: Connection, table: Table, context: str | None = None) -> FailingPage:
    """Return the oldest of a table that are refused, of one context or of all."""
    rows = await connection.fetch(table.queries["list_failing"], context, LIMIT + 1)
    return FailingPage(failing=[Failing(**row) for row in rows[:LIMIT]], more=len(rows) > LIMIT)


async def find_failing(
    connection: Connection, table: Table, wanted: RefusedFilter, context: str | None, after: str | None
) -> tuple[list[str], str | None]:
    """Return the ids of those that are wanted and refused, from behind one on, and the last of them if there are more.

    Raises `NotFound` where one that is named is not refused.
    """
    values = context, wanted.subject, wanted.older_than_seconds, wanted.ids, after, LIMIT + 1
    ids = [row["id"] for row in await connection.fetch(table.queries["find_failing"], *values)]
    for text in wanted.ids or ():
        if text not in ids:
            raise not_failing(table.name, text)
    return ids[:LIMIT], ids[LIMIT - 1] if len(ids) > LIMIT else None


async def drop_failing(connection: Connection, table: Table, ids: Sequence[str], *, actor: str, reason: str) -> None:
    """Drop them in the caller's transaction; raises `NotFound`, and is to drop none, where one is not refused."""
    for text in ids:
        if _ID[table.name].fullmatch(text) is None:
            raise not_failing(table.name, text)
    dropped = {row["id"] for row in await connection.fetch(table.queries["drop"], ids, actor, reason)}
    for text in ids:
        if text not in dropped:
            raise not_failing(table.name, text)


async def list_dropped(connection: Connection, table: Table) -> list[Dropped]:
    """Return what was dropped last, oldest first."""
    return [Dropped(**row) for row in await connection.fetch(table.queries["list_dropped"], LIMIT)]


async def list_backlogs(
    connection: Connection, context: str | None = None, *, tables: Sequence[Table] = TABLES
) -> list[SourceBacklog]:
    """Return what waits to be published of each table, of one context or of all."""
    found = [(table, await connection.fetchrow(table.queries["backlog"], context)) for table in tables]
    return [SourceBacklog(source=table.name, **dict(row)) for table, row in found if row is not None]


async def redrive(
    connection: Connection,
    wanted: PublishedFilter,
    *,
    until: datetime,
    dry_run: bool = False,
    tables: Sequence[Table] = TABLES,
) -> tuple[list[Redriven], bool]:
    """Have what was published before `until` and is wanted published again, in the caller's transaction.

    Says how many of each table, at most some thousand, and whether there are more; a dry run counts them all.
    """
    found, more = [], False
    for table in tables:
        bounds = wanted.since, until, wanted.stream, wanted.confirmed, None if dry_run else _STEP
        keys = [row[0] for row in await connection.fetch(table.queries["find_since"], *bounds)]
        if not dry_run:
            await connection.execute(table.queries["requeue"], keys)
            more |= len(keys) == _STEP
        found.append(Redriven(table.name, len(keys)))
    return found, more

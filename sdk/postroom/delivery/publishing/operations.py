"""What operators see and do about rows that are, or are not, in their streams.

What no stream takes, or is too large, holds up its aggregate (of deliveries: its recipient) until somebody mends the
cause, and then goes by itself. What can never go is dropped: an event leaves the outbox and is kept whole, a delivery
is noted, and its message stays in the history; who dropped it, and why, stands beside it.

What is published again leaves a row in `postroom.operator_log`, in the same transaction; the broker, which has rows
dropped, keeps its own.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from postroom._wire.unpublished import Dropped, Failing
from postroom.chassis.postgres import Connection
from postroom.delivery.errors import not_failing
from postroom.delivery.publishing.postgres import DELIVERIES, EVENTS, QUERIES, PostgresSource, Table, now

LIMIT: Final = 1000  # that are listed
_UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ID: Final = {EVENTS.name: re.compile(_UUID), DELIVERIES.name: re.compile(_UUID + r"\.[0-9]{1,9}")}


class Redriven(msgspec.Struct, frozen=True):
    """How many messages of one source are published again, or would be."""

    source: str
    messages: int


async def list_failing(connection: Connection, table: Table, context: str | None = None) -> list[Failing]:
    """Return the oldest of a table that are refused, of one context or of all."""
    return [Failing(**row) for row in await connection.fetch(table.queries["list_failing"], context, LIMIT)]


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


async def redrive(
    sources: Sequence[PostgresSource],
    *,
    actor: str,
    since: datetime,
    stream: str | None = None,
    confirmed: bool = False,
    dry_run: bool = False,
) -> list[Redriven]:
    """Publish again what was published from `since` on, into `stream` or any, by hand; say how many of each source.

    What is known to be handled is left out unless `confirmed`. A worker does the publishing.
    """
    pool = sources[0].pool
    async with pool.acquire() as connection, connection.transaction():
        bounds = since, await now(connection), stream, confirmed
        if dry_run:
            found = [
                len(await connection.fetch(source.table.queries["find_since"], *bounds, None)) for source in sources
            ]
        else:
            found = [await source.requeue(connection, "find_since", *bounds) for source in sources]
            messages = ", ".join(f"{count} {source.name}" for source, count in zip(sources, found, strict=True))
            subject = f"{messages} published into {stream or 'any stream'} since {since.isoformat()}"
            await connection.execute(QUERIES["log_operation"], actor, "redrive", subject, None)
    return [Redriven(source.name, messages) for source, messages in zip(sources, found, strict=True)]

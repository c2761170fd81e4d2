"""What an operator sees and does in an application's database: the same as a broker does in its own, without a server.

Every change is logged in the database itself, in its own transaction, with who made it: the user that runs the program
and the role that Postgres let in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from postroom._wire.nouns import LogLine, LogPage, LogQuery, Result
from postroom._wire.unpublished import (
    SOURCES,
    UNPUBLISHED,
    DroppedLog,
    FailingPage,
    PublishedFilter,
    Redriven,
    RefusedFilter,
    SourcePage,
    redriven,
)
from postroom.chassis.postgres import Connection, acting, check_version, connected
from postroom.delivery.applications import INSTALL, ROOMS
from postroom.delivery.applications.installation import QUERIES
from postroom.delivery.publishing import EVENTS, LETTERS
from postroom.delivery.publishing.operations import (
    drop_failing,
    find_failing,
    list_backlogs,
    list_dropped,
    list_failing,
    redrive,
)
from postroom.delivery.publishing.postgres import now

_TABLES: Final = (EVENTS, LETTERS)


class Application:
    """A database of an application, asked as a broker is asked about its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def backlogs(self, mesh: str | None = None) -> SourcePage:
        """Return what waits to be published, of one mesh or of all."""
        return SourcePage(sources=await list_backlogs(self._connection, mesh, tables=_TABLES))

    async def failing(self, mesh: str | None = None) -> FailingPage:
        """Return the events that JetStream refuses."""
        return await list_failing(self._connection, EVENTS, mesh)

    async def dropped(self) -> DroppedLog:
        """Return the events that operators dropped."""
        return DroppedLog(dropped=await list_dropped(self._connection, EVENTS))

    async def drop(
        self, wanted: RefusedFilter, mesh: str | None = None, *, reason: str, dry_run: bool = False
    ) -> Result[str]:
        """Drop events that are refused, a thousand at a time; raises `NotFound` where one that is named is not."""
        noun = UNPUBLISHED[EVENTS.name]
        done: list[str] = []
        after: str | None = ""
        while after is not None:
            async with self._connection.transaction():
                ids, after = await find_failing(self._connection, EVENTS, wanted, mesh, after)
                if not dry_run:
                    await drop_failing(self._connection, EVENTS, ids, actor=acting(self._connection), reason=reason)
                    for one in ids:
                        await self._keep_log("drop", noun.name, one, noun.verbs["drop"].done, reason)
            done += ids
        return Result(dry_run=dry_run, done=done, failed=[])

    async def redrive(self, wanted: PublishedFilter, *, reason: str, dry_run: bool = False) -> Result[Redriven]:
        """Have what was published, until now, and is wanted published again, part by part."""
        until = await now(self._connection)
        done: list[Redriven] = []
        more = True
        while more:
            async with self._connection.transaction():
                found, more = await redrive(self._connection, wanted, until=until, dry_run=dry_run, tables=_TABLES)
                done += found
                if not dry_run:
                    await self._keep_log("redrive", SOURCES.name, wanted.key, redriven(found), reason)
        return Result(dry_run=dry_run, done=done, failed=[])

    async def log(self, query: LogQuery) -> LogPage:
        """Return what operators did here, the latest first; none of it is about a mesh."""
        if query.mesh is not None:
            return LogPage(lines=[])
        wanted = query.noun, query.verb, query.actor, query.key, query.since, query.cursor, query.limit + 1
        rows = await self._connection.fetch(QUERIES["list_operations"], *wanted)
        lines = [LogLine(**dict(list(row.items())[1:])) for row in rows[: query.limit]]
        return LogPage(lines=lines, next_cursor=rows[-2]["id"] if len(rows) > query.limit else None)

    async def _keep_log(self, verb: str, noun: str, key: str, outcome: str, reason: str) -> None:
        words = acting(self._connection), verb, noun, key, outcome, reason
        await self._connection.execute(QUERIES["log_operation"], *words)


@asynccontextmanager
async def open_application(url: str) -> AsyncIterator[Application]:
    """Open the database of an application; raises `Fatal`: 69 where it can't be reached, 78 without its tables."""
    async with connected(url) as connection:
        await check_version(connection, *ROOMS, migrate_with=INSTALL)
        yield Application(connection)

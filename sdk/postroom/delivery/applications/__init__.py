"""An application's own database: the event outbox next to its tables, and the keys of what its handlers have handled.

It has the tables of delivery, as the broker's database does, and those that are only of use without a broker's tables
(its migrations). `postroom outbox install` creates them, in the schemas `postroom` and `postroom_once`, and changes
nothing else in the database (docs/contract/delivery.md#delivery-90). An operator sees and does there what a broker
offers for its own database, without a server.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

from postroom import delivery
from postroom._wire.nouns import LogLine, LogPage, LogQuery, Result
from postroom._wire.sql import load_queries
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
from postroom.chassis.clock import now
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import (
    Connection,
    Pool,
    acting,
    check_server,
    check_version,
    close_pool,
    connected,
    migrate,
    open_pool,
)
from postroom.delivery.publication.postgres import (
    EFFECTS,
    EVENTS,
    LETTERS,
    find_failing,
    is_declared,
    list_backlogs,
    list_dropped,
    list_failing,
    not_done,
    redrive,
)
from postroom.errors import NotFound, PostroomError
from postroom.once.postgres import PostgresStore

ROOM: Final = __name__
ROOMS: Final = (delivery.ROOM, ROOM)
INSTALL: Final = "postroom outbox install"  # creates the tables, or updates them
QUERIES: Final = load_queries(__package__)
_TABLES: Final = (EVENTS, LETTERS)


async def install(url: str, *, roles: Sequence[str] = (), meshes: Sequence[str] = ()) -> list[str]:
    """Create the tables in the database at `url`, or update them, and let `roles` emit; repeating it changes nothing.

    `meshes` are those that may be emitted to until a worker knows more. Returns the migrations that were applied.
    Raises `Fatal`: 69 where Postgres can't be reached, 77 where the role of `url` is not allowed to, 78 where the
    database, a role or a mesh cannot be used.
    """
    async with connected(url) as connection:
        has_broker = await _check(connection, roles)
        if meshes and has_broker:
            sentence = "this is a broker's database, which knows its meshes: omit --mesh"
            raise Fatal(Exit.USAGE, sentence)
    applied = await migrate(url, *((ROOM,) if has_broker else ROOMS))
    pool = await open_pool(url, name="postroom-install", connections=1)
    try:
        await PostgresStore(pool).prepare()
    except PostroomError as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    finally:
        await close_pool(pool)
    async with connected(url) as connection, connection.transaction():
        for role in roles:
            await connection.execute(await connection.fetchval(QUERIES["write_grants"], role))
        await connection.execute(QUERIES["add_meshes"], list(meshes))
    return applied


async def know_meshes(pool: Pool, meshes: Sequence[str]) -> None:
    """Allow emitting to `meshes` and to no others; an empty list allows any."""
    await pool.execute(QUERIES["know_meshes"], meshes)


async def _check(connection: Connection, roles: Sequence[str]) -> bool:
    """Return whether the database has a broker's tables; raises `Fatal` (78) where nothing can be installed."""
    check_server(connection)
    if await connection.fetchval(QUERIES["foreign_schema"]):
        sentence = "the schema postroom of this database is not ours: rename it (ALTER SCHEMA postroom RENAME TO …)"
        raise Fatal(Exit.CONFIG, sentence)
    for role in roles:
        if not await connection.fetchval(QUERIES["role_exists"], role):
            raise Fatal(Exit.CONFIG, f"there is no role {role} in this Postgres: create it first (CREATE ROLE)")
    has_broker: bool = await connection.fetchval(QUERIES["has_broker"])
    if has_broker:
        await check_version(connection, delivery.ROOM, migrate_with="postroom broker migrate")
    return has_broker


class Application:
    """A database of an application, with the operations that a broker has for its own.

    Every change is logged in the database itself, in its own transaction, with its actor: the user that runs the
    program and the role that it connected as.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def backlogs(self, mesh: str | None = None) -> SourcePage:
        """Return what waits to be published, of one mesh or of all; raises `NotFound` where it cannot be one."""
        await self._check_mesh(mesh)
        return SourcePage(sources=await list_backlogs(self._connection, mesh, tables=_TABLES))

    async def failing(self, mesh: str | None = None) -> FailingPage:
        """Return the events that JetStream refuses; raises as `backlogs` does."""
        await self._check_mesh(mesh)
        return await list_failing(self._connection, EVENTS, mesh)

    async def dropped(self) -> DroppedLog:
        """Return the events that operators dropped."""
        return DroppedLog(dropped=await list_dropped(self._connection, EVENTS))

    async def change(
        self, verb: str, wanted: RefusedFilter, mesh: str | None = None, *, reason: str, dry_run: bool = False
    ) -> Result[str]:
        """Do a verb to refused events, a thousand at a time."""
        noun = UNPUBLISHED[EVENTS.name]
        await self._check_mesh(mesh)
        done: list[str] = []
        after: str | None = ""
        while after is not None:
            async with self._connection.transaction():
                ids, after = await find_failing(self._connection, EVENTS, wanted, mesh, after)
                if not dry_run:
                    actor = acting(self._connection)
                    ids = await EFFECTS[verb](self._connection, EVENTS, ids, actor=actor, reason=reason)
                    for one in ids:
                        await self._keep_log(verb, noun.name, one, noun.verbs[verb].done, reason)
            done += ids
        return Result(dry_run=dry_run, done=done, failed=await not_done(self._connection, EVENTS, wanted, done))

    async def redrive(self, wanted: PublishedFilter, *, reason: str, dry_run: bool = False) -> Result[Redriven]:
        """Have wanted messages that were published by now published again, in steps."""
        until = await now(self._connection)
        done: list[Redriven] = []
        after: datetime | None = None
        while after is not None or not done:
            async with self._connection.transaction():
                found, after = await redrive(
                    self._connection, wanted, until=until, after=after, dry_run=dry_run, tables=_TABLES
                )
                done += found
                if not dry_run:
                    await self._keep_log("redrive", SOURCES.name, wanted.key(until), redriven(found), reason)
        return Result(dry_run=dry_run, done=done, failed=[])

    async def log(self, query: LogQuery) -> LogPage:
        """Return what operators did here, the latest first; none of it is about a mesh."""
        if query.mesh is not None:
            return LogPage(lines=[])
        since = query.earliest(await now(self._connection))
        wanted = query.noun, query.verb, query.actor, query.key, since, query.cursor, query.limit + 1
        rows = await self._connection.fetch(QUERIES["list_operations"], *wanted)
        lines = [LogLine(**dict(list(row.items())[1:])) for row in rows[: query.limit]]
        return LogPage(lines=lines, next_cursor=rows[-2]["id"] if len(rows) > query.limit else None)

    async def _check_mesh(self, mesh: str | None) -> None:
        """Raise `NotFound` where nothing can have been emitted to a mesh: an empty list would read as good news."""
        if mesh is None or await is_declared(self._connection, mesh):
            return
        if await self._connection.fetchval(QUERIES["is_unknown"], mesh):
            sentence = f"there is no mesh {mesh!r} among those of this outbox: `postroom mesh list` shows all"
            raise NotFound.of("mesh_not_found", sentence)

    async def _keep_log(self, verb: str, noun: str, key: str, outcome: str, reason: str) -> None:
        words = acting(self._connection), verb, noun, key, outcome, reason
        await self._connection.execute(QUERIES["log_operation"], *words)


@asynccontextmanager
async def open_application(url: str) -> AsyncIterator[Application]:
    """Open the database of an application; raises `Fatal`: 69 where it can't be reached, 78 without its tables."""
    async with connected(url) as connection:
        await check_version(connection, *ROOMS, migrate_with=INSTALL)
        yield Application(connection)

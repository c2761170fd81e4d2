"""Postgres for every room: connections and pools whose failures to open are sentences, and migrations.

A room's migrations are its numbered files: forward only, each in one transaction under an advisory lock. Any number of
processes may migrate at once: one does it, the others wait and find nothing left to do. Programs keep running
meanwhile, also on the version before and after their own; so a migration that waits for their locks soon gives up, and
tries again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg
import structlog
from asyncpg.pool import PoolConnectionProxy

from postroom._wire.sql import (
    UNUSABLE,
    leave_read_only,
    load_queries,
    migrations,
    runs_on,
    unusable_file,
    why_failed,
    why_refused,
)
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import give_up, this_user

_log = structlog.get_logger(__name__)

_QUERIES: Final = load_queries("postroom.chassis", "migrations.sql")

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]"
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

CONNECT_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 5.0  # that a program which stops waits for a Postgres that does not answer
_PROBE_SECONDS: Final = 1.0  # between two probes whether it does
_OLDEST: Final = 16  # the first major version of Postgres that has everything that is used
_REST_PER_SLICE: Final = 4  # the rest after a slice of a sweep, in durations of that slice
_LOCK_ATTEMPTS: Final = 60  # of a migration
_LOCK_REST_SECONDS: Final = 0.5  # between two, in which those that waited behind it have a turn
_COMMAND_SECONDS: Final = 20.0  # above the server's own statement_timeout, which answers more clearly
_SERVER_SETTINGS: Final = {
    "statement_timeout": "15s",
    "lock_timeout": "10s",
    "timezone": "UTC",
    "default_transaction_isolation": "read committed",  # what correctness rests on, whatever the database's default is
    # A plan without nested loops looks so dear to it that it would compile each accept, for seconds.
    "jit": "off",
}
_TIMEOUTS: Final = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
_PATIENTLY: Final = _SERVER_SETTINGS | dict.fromkeys(_TIMEOUTS, "0")  # a migration, a check, or a held snapshot

# What asyncpg, the socket and the deadline raise when the server cannot be asked, or no longer answers.
# (`InternalClientError`: the pool has handed out a connection that is about to end and does not know it yet.)
UNREACHABLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
)

_open: Final[dict[Pool, str]] = {}  # the pools of this process, and what they lead to

POSTGRES_ERRORS: Final = (*UNREACHABLE, asyncpg.PostgresError)  # whatever it fails with

# What Postgres raises for values that it refuses: an invalid text, one that is too long, one against a constraint.
# The same values are refused again, however often they are sent.
REFUSED: Final = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError)

# What Postgres raises for a name that is in use: a migration makes each of its own only once.
_TAKEN: Final = (asyncpg.DuplicateSchemaError, asyncpg.DuplicateTableError, asyncpg.DuplicateFunctionError)

# What comes through a pooler that gives each transaction another connection, or that does not take our settings.
_POOLED: Final = (
    asyncpg.DuplicatePreparedStatementError,
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.ProtocolViolationError,
)

# The exit code of an error; a server that starts or stops counts as one that cannot be reached.
_EXITS: Final[Sequence[tuple[tuple[type[Exception], ...], Exit]]] = (
    (_POOLED, Exit.CONFIG),
    (UNREACHABLE, Exit.UNAVAILABLE),
    ((asyncpg.CannotConnectNowError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError), Exit.UNAVAILABLE),
    ((asyncpg.TooManyConnectionsError, asyncpg.ReadOnlySQLTransactionError), Exit.TRY_AGAIN),
    ((asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError), Exit.CONFIG),
    ((asyncpg.InsufficientPrivilegeError,), Exit.NOT_PERMITTED),
    (_TAKEN, Exit.CONFIG),
)
_SENTENCES: Final[Mapping[Exit | type[Exception], str]] = {
    asyncpg.TooManyConnectionsError: (
        "the database takes no more connections: raise its max_connections or the role's limit, or run fewer programs"
    ),
    asyncpg.ReadOnlySQLTransactionError: (
        "the database takes no writes: name the primary in database_url, or all hosts and target_session_attrs=primary"
    ),
    **dict.fromkeys(_POOLED, "a pooler such as PgBouncer is in front of the database: name Postgres in database_url"),
    **dict.fromkeys(_TAKEN, "the database has things of another program under our names: use one of Postroom's own"),
    Exit.UNAVAILABLE: "cannot open the database (database_url)",
    Exit.CONFIG: "the database refused the login: correct database_url, or create the role or the database",
    Exit.NOT_PERMITTED: "the role of database_url lacks the permission for this: grant it",
    Exit.FAILED: "the database refused",
}
# What Postgres raises for an option of a URL that it does not have, or that no session may set
_BAD_OPTION: Final = (
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
)


def why_waiting(error: Exception) -> str:
    """Say in words why a loop waits: `error` ended its round, which is one of Postgres or a sentence already."""
    return f"Postgres failed: {why_failed(error)}" if isinstance(error, POSTGRES_ERRORS) else str(error)


def uuid_of(text: object) -> UUID | None:
    """Read a UUID; None for anything else."""
    try:
        return UUID(text) if isinstance(text, str) else None
    except ValueError:
        return None


async def connect(url: str) -> asyncpg.Connection[asyncpg.Record]:
    """Open one connection, which may take as long as it needs, whatever the role or the database has set.

    Raises `Fatal` as `fatal_errors` says, and 78 where `url` is not a Postgres URL.
    """
    with _fatal_when_closed(url):
        return await asyncpg.connect(url, timeout=CONNECT_SECONDS, server_settings=_PATIENTLY)


def acting(connection: Connection) -> str:
    """Return who acts over a connection, for a log of what operators did: `alice as postroom`.

    The first is the user that runs the program, as the system knows it, the second the role that logged in, as Postgres
    reports it. Neither comes from the environment.
    """
    return f"{this_user()} as {connection.get_settings().session_authorization}"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Lend a connection of its own to a program's one task; raises `Fatal` as `fatal_errors` says, to its end."""
    connection = await connect(url)
    with fatal_errors():
        try:
            yield connection
        finally:
            await connection.close()


async def open_pool(
    url: str,
    *,
    name: str,
    connections: int,
    kept: int = 1,
    settings: Mapping[str, str] | None = None,
    on_connect: Callable[[Connection], Coroutine[Any, Any, None]] | None = None,
    **more: Any,
) -> Pool:
    """Open a pool of at most `connections`, of which `kept` stay open while they are idle.

    Postgres knows it as `name`, and `on_connect` is called with each connection before it is used for the first time.
    `more` are options of asyncpg. Raises `Fatal` as `connect` does.
    """
    with _fatal_when_closed(url):
        pool = await asyncpg.create_pool(
            url,
            min_size=kept,
            max_size=connections,
            init=on_connect,
            reset=leave_read_only,
            timeout=CONNECT_SECONDS,
            command_timeout=_COMMAND_SECONDS,
            server_settings={"application_name": name, **_SERVER_SETTINGS, **(settings or {})},
            **more,
        )
    _open[pool] = url
    return pool


def _leave_to_parent() -> None:
    """Give up the connections in a forked child: one that outlives its killed parent would keep transactions open."""
    for pool in _open:
        for holder in pool._holders:  # type: ignore[attr-defined] # noqa: SLF001 - asyncpg has no other way to them
            if holder.is_connected():
                give_up(holder._con._transport.get_extra_info("socket").fileno())  # noqa: SLF001


os.register_at_fork(after_in_child=_leave_to_parent)


async def close_pool(pool: Pool) -> None:
    """Close it, and wait for what still runs on it: not for long, since a server that hangs must not keep a program."""
    with suppress(*UNREACHABLE):
        async with asyncio.timeout(CONNECT_SECONDS):
            await pool.close()
    _open.pop(pool, None)


@asynccontextmanager
async def letting_go(stop: asyncio.Event) -> AsyncIterator[None]:
    """From `stop` on, break off what waits for a Postgres that has not answered for 5 s, until the block ends.

    What was begun there is rolled back, or done again by the next process that claims it, as after a crash.
    """
    letting = asyncio.create_task(_let_go(stop), name="letting go")
    try:
        yield
    finally:
        letting.cancel()
        await asyncio.wait({letting})


async def _let_go(stop: asyncio.Event) -> None:
    await stop.wait()
    since = time.monotonic()
    heard = dict.fromkeys(_open.values(), since)
    while True:
        for url in heard:
            if await _answers(url):
                heard[url] = time.monotonic()
            elif time.monotonic() - heard[url] >= _STOP_SECONDS:
                for pool in [pool for pool, leads_to in _open.items() if leads_to == url]:
                    _log.warning("postgres_not_waited_for", seconds=_STOP_SECONDS)
                    del _open[pool]
                    pool.terminate()
        await asyncio.sleep(_PROBE_SECONDS)


async def _answers(url: str) -> bool:
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            connection = await asyncpg.connect(url)
    except UNREACHABLE:
        return False
    except asyncpg.PostgresError:
        return True  # it answers with a refusal
    connection.terminate()
    return True


async def open_rooms(
    url: str, *rooms: str, name: str, connections: int, settings: Mapping[str, str] | None = None
) -> Pool:
    """Open a pool as `open_pool` does, and check that the program runs on the tables of `rooms`; the caller closes it.

    They are in the broker's database, or in one of a service's own that has nothing but them. Raises `Fatal`: 69 where
    Postgres can't be reached, 78 where the program does not run on the tables.
    """
    pool = await open_pool(url, name=name, connections=connections, settings=settings)
    try:
        async with pool.acquire() as connection:
            await check_version(connection, *rooms, migrate_with="postroom broker migrate")
    except BaseException:
        await close_pool(pool)
        raise
    return pool


async def count_changed(database: Pool | Connection, query: str, *values: Any) -> int:
    """Execute a statement that writes; return how many rows it changed."""
    return int((await database.execute(query, *values)).rpartition(" ")[2])


async def rest_since(started: float) -> None:
    """Rest four times as long as the slice of a sweep since `started` (monotonic) took, so that others have a turn."""
    await asyncio.sleep(_REST_PER_SLICE * (time.monotonic() - started))


@contextmanager
def fatal_errors() -> Iterator[None]:
    """Turn errors of Postgres into `Fatal`, for programs that cannot go on without it.

    69 where it can't be reached, 75 where it is full or read-only, 78 where it knows no such role, password or
    database, has things of others under our names, or is behind a pooler of transactions, 77 where the role may not do
    what the program does, 1 for anything else.
    """
    try:
        yield
    except asyncpg.ClientConfigurationError as error:
        raise Fatal(Exit.CONFIG, why_refused(error)) from error
    except POSTGRES_ERRORS as error:
        code = next((code for kinds, code in _EXITS if isinstance(error, kinds)), Exit.FAILED)
        kind = type(error) if type(error) in _SENTENCES else code
        raise Fatal(code, f"{_SENTENCES[kind]}: {why_failed(error)}") from error


@contextmanager
def _fatal_when_closed(url: str) -> Iterator[None]:
    if (missing := unusable_file(url)) is not None:
        raise Fatal(Exit.CONFIG, missing)
    try:
        with fatal_errors():
            try:
                yield
            except _BAD_OPTION as error:
                raise Fatal(Exit.CONFIG, f"Postgres refuses an option of database_url: {error}; remove it") from error
    except UNUSABLE as error:
        raise Fatal(Exit.CONFIG, why_refused(error)) from error


async def migrate(url: str, *rooms: str) -> list[str]:
    """Bring the tables of `rooms` (packages) to this program's version, one after the other; return what was applied.

    A database that is one version newer is left as it is. Raises `Fatal` as `fatal_errors` says, 78 where it is newer
    than that or on an older server, and 75 where a long transaction held the lock of a table for too long.
    """
    applied = []
    async with connected(url) as connection:
        check_server(connection)
        async with connection.transaction():
            await connection.execute(_QUERIES["lock_migrations"])
            await connection.execute(_QUERIES["prepare_migrations"])
        for room in rooms:
            for version, name, sql in migrations(room):
                for _ in range(_LOCK_ATTEMPTS):
                    try:
                        if await _take_step(connection, room, version, name, sql):
                            applied.append(f"{_name(room)}/{name}")
                        break
                    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                        _log.info("migration_waits", room=_name(room), migration=name, reason="a table is in use")
                        await asyncio.sleep(_LOCK_REST_SECONDS)
                else:
                    busy = f"the migration {_name(room)}/{name} cannot lock a table that a long transaction uses"
                    raise Fatal(Exit.TRY_AGAIN, f"{busy}: end that transaction, or try again later")
    return applied


async def _take_step(connection: Connection, room: str, version: int, name: str, sql: str) -> bool:
    """Apply a migration unless the database has it; return whether it did."""
    async with connection.transaction():
        await connection.execute(_QUERIES["lock_migrations"])
        found = await schema_version(connection, room)
        if found > (known := _known(room)) and not runs_on(found, known):
            raise _mismatch(room, found, known)
        if found >= version:
            return False
        await connection.execute(_QUERIES["wait_briefly"])
        await connection.execute(sql)
        await connection.execute(_QUERIES["record_migration"], _name(room), version, name)
        return True


def check_server(connection: Connection) -> None:
    """Raise `Fatal` (78) for a Postgres that is too old for Postroom."""
    if (version := connection.get_server_version()).major < _OLDEST:
        sentence = f"this is Postgres {version.major}, and Postroom needs {_OLDEST} or newer"
        raise Fatal(Exit.CONFIG, f"{sentence}: upgrade the server, or name another in database_url")


async def check_version(connection: Connection, *rooms: str, migrate_with: str) -> None:
    """Raise `Fatal` (78) unless this program runs on the server and on the tables of `rooms`, and say what to do."""
    check_server(connection)
    for room in rooms:
        found, known = await schema_version(connection, room), _known(room)
        if not runs_on(found, known):
            raise _mismatch(room, found, known, migrate_with)
        if found < known:
            _log.info("schema_is_older", room=_name(room), found=found, known=known, advice=f"run `{migrate_with}`")


async def schema_version(connection: Connection, room: str) -> int:
    """Return the number of a room's newest migration that the database has; 0 where it has none."""
    if not await connection.fetchval(_QUERIES["has_migrations"]):
        return 0
    return int(await connection.fetchval(_QUERIES["schema_version"], _name(room)))


def _name(room: str) -> str:
    """Return a package's name in the database: a room keeps it when it moves."""
    return room.rpartition(".")[2]


def _known(room: str) -> int:
    """Return the version of a room's tables that this program was written for."""
    return max(version for version, _, _ in migrations(room))


def _mismatch(room: str, found: int, known: int, migrate_with: str = "") -> Fatal:
    supported = ", ".join(str(version) for version in (known - 1, known, known + 1) if runs_on(version, known))
    sentence = f"the database has version {found} of the {_name(room)} schema, this program supports {supported}"
    advice = "upgrade the program" if found > known else f"run `{migrate_with}` first"
    return Fatal(Exit.CONFIG, f"{sentence}: {advice}")

"""Postgres: the two pools of a broker, the version check, and the one place where its errors become answers.

Accepting has a pool of its own, so that readers can't starve it, and so that its connections can plan for batches: the
planner cannot know how long the arrays of a batch are, would guess a handful of rows and join a thousand messages with
nested loops, so these are off there. Readers look rows up by key and need them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Self, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from chassis.exits import Exit, Fatal
from chassis.sql import load_queries, migrations
from postroom.errors import InvalidMessage, TryAgain

QUERIES: Final = load_queries("broker")

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]"

_READING_CONNECTIONS: Final = 4
_CONNECT_SECONDS: Final = 5.0
_COMMAND_SECONDS: Final = 20.0  # above the server's own statement_timeout, which answers more clearly
_SERVER_SETTINGS: Final = {
    "application_name": "postroom-broker",
    "statement_timeout": "15s",
    "lock_timeout": "10s",
    "timezone": "UTC",
}

# What asyncpg, the socket and the deadline raise when the server cannot be asked, or no longer answers.
UNREACHABLE: Final = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError)


class Database:
    """The pools; `accepting` for the accept transaction and its look-ups, `reading` for everything else."""

    def __init__(self, accepting: asyncpg.Pool[asyncpg.Record], reading: asyncpg.Pool[asyncpg.Record]) -> None:
        self.accepting = accepting
        self.reading = reading

    @classmethod
    async def open(cls, url: str, *, connections: int) -> Self:
        """Connect and check the schema's version.

        Raises `Fatal`: 69 where Postgres can't be reached, 78 where its schema is not this program's.
        """
        reading = await _pool(url, _READING_CONNECTIONS, {})
        try:
            async with reading.acquire() as connection:
                await check_version(connection)
            accepting = await _pool(url, connections, {"enable_nestloop": "off"})
        except BaseException:
            await reading.close()
            raise
        return cls(accepting, reading)

    async def close(self) -> None:
        """Close both pools, waiting for what still runs on them."""
        await asyncio.gather(self.accepting.close(), self.reading.close())

    async def ping(self) -> None:
        """Ask Postgres for an answer; raises one of `UNREACHABLE` where there is none."""
        async with self.accepting.acquire(timeout=_CONNECT_SECONDS) as connection:
            await connection.execute(QUERIES["ping"])

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Connection]:
        """Lend a connection for reading or administration.

        Postgres away is a 503 that may be retried; a name that Postgres has no characters for is a 400.
        """
        try:
            async with unavailable_as_503(), self.reading.acquire(timeout=_CONNECT_SECONDS) as connection:
                yield connection
        except asyncpg.CharacterNotInRepertoireError as error:
            raise InvalidMessage.of(400, "nul_character", "a name in the request holds a NUL character") from error


@asynccontextmanager
async def unavailable_as_503() -> AsyncIterator[None]:
    """Turn what Postgres fails with into a retryable 503; no detail of the failure leaves the broker."""
    try:
        yield
    except (*UNREACHABLE, asyncpg.OperatorInterventionError, asyncpg.InsufficientResourcesError) as error:
        raise _unavailable() from error


def _unavailable() -> TryAgain:
    return TryAgain.of(
        503, "database_unavailable", "the broker cannot reach its database: try again", retryable=True, retry_after=1.0
    )


async def connect(url: str) -> asyncpg.Connection[asyncpg.Record]:
    """Open one connection outside the pools; raises `Fatal` as `Database.open` does."""
    with _fatal_when_closed():
        return await asyncpg.connect(url, timeout=_CONNECT_SECONDS)


async def _pool(url: str, size: int, settings: dict[str, str]) -> asyncpg.Pool[asyncpg.Record]:
    with _fatal_when_closed():
        return await asyncpg.create_pool(
            url,
            min_size=1,
            max_size=size,
            timeout=_CONNECT_SECONDS,
            command_timeout=_COMMAND_SECONDS,
            server_settings={**_SERVER_SETTINGS, **settings},
        )


@contextmanager
def _fatal_when_closed() -> Iterator[None]:
    try:
        yield
    except (asyncpg.ClientConfigurationError, ValueError) as error:
        raise Fatal(Exit.CONFIG, "database_url is not a Postgres URL (postgresql://user@host/database)") from error
    except (*UNREACHABLE, asyncpg.PostgresError) as error:
        sentence = f"cannot open the database (database_url): {type(error).__name__}: {error}"
        raise Fatal(Exit.UNAVAILABLE, sentence) from error


async def check_version(connection: Connection) -> None:
    """Raise `Fatal` (78) unless the schema is this program's, and say what to do."""
    found, known = await schema_version(connection), len(migrations("broker"))
    if found > known:
        what = "upgrade the program"
    elif found < known:
        what = "run `postroom broker migrate` first"
    else:
        return
    raise Fatal(Exit.CONFIG, f"the database has schema version {found}, this program needs {known}: {what}")


async def schema_version(connection: Connection) -> int:
    """Return the number of the newest migration that the database has; 0 where it has none."""
    if not await connection.fetchval(QUERIES["has_migrations"]):
        return 0
    version: Any = await connection.fetchval(QUERIES["schema_version"])
    return int(version)

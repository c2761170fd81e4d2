"""Keys in Postgres, for any number of hosts, whose clocks need not agree: that of Postgres decides about leases."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final, Self, cast

import asyncpg
import msgspec

from postroom._wire.once import KeptKey, KeyNote, KeysQuery
from postroom._wire.sql import UNUSABLE, leave_read_only, load_queries, read_sql, runs_on, why_failed, why_refused
from postroom.claims.postgres import PostgresClaims
from postroom.once.model import PARTS, Scope, absent, check_loop, check_process, table, unavailable, unusable

_VERSION: Final = 1
_QUERIES: Final = load_queries("postroom.once", "sql/postgres.sql")
_SCHEMA: Final = read_sql("postroom.once", "sql/postgres_schema.sql")
_CONNECTIONS: Final = 4
_CONNECT_SECONDS: Final = 5.0
_COMMAND_SECONDS: Final = 5.0

# Errors that pass: no connection, a server that stops, is full or a standby, a deadlock, a lock that took too long.
_PASSING: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the connection ends as it is handed out
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.ReadOnlySQLTransactionError,
)


class PostgresStore(PostgresClaims):
    """A `Store` on a pool, which it doesn't close unless it opened it."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], *, owned: bool = False) -> None:
        super().__init__(table("postroom_once.idempotency_keys"), PARTS, self._timed)
        self._pool = pool
        self._owned = owned
        self._process: int | None = os.getpid()  # that may use it; None once it is closed
        self._loop: asyncio.AbstractEventLoop | None = None  # where it is used

    @classmethod
    async def open(cls, url: str, *, create: bool = True) -> Self:
        """Connect, and create the schema `postroom_once` where it is missing.

        Raises `Unavailable` where Postgres can't be reached, `PostroomError` where its schema is of another version, or
        may not be created; without `create`, `NotFound` where it is missing.
        """
        try:
            async with _mapped():
                pool = await asyncpg.create_pool(
                    url,
                    min_size=1,
                    max_size=_CONNECTIONS,
                    reset=leave_read_only,
                    timeout=_CONNECT_SECONDS,
                    command_timeout=_COMMAND_SECONDS,
                )
        except UNUSABLE as error:
            raise unusable(why_refused(error, "its address")) from error
        store = cls(pool, owned=True)
        try:
            await store.prepare(create=create)
        except BaseException:
            await store.close()
            raise
        return store

    async def prepare(self, *, create: bool = True) -> None:
        """Create the schema where it is missing, and check its version; without `create`, raises `NotFound`."""
        self._loop = check_loop(self._loop)
        async with _mapped(), self._pool.acquire() as connection:
            version = await connection.fetchval(_QUERIES["version"])
            if version is None and create:
                async with connection.transaction(isolation="read_committed", readonly=False):
                    await connection.execute(_QUERIES["lock_schema"])
                    version = await connection.fetchval(_QUERIES["version"])  # another process may have been first
                    if version is None:
                        await connection.execute(_SCHEMA)
                        return
        if not is_ours(version):
            raise absent("this database")

    async def is_there(self) -> bool:
        """Return whether the schema exists; raises `PostroomError` where it is of another version."""
        self._loop = check_loop(self._loop)
        async with _mapped():
            version = await self._pool.fetchval(_QUERIES["version"])
        return is_ours(version)

    async def now(self) -> datetime:
        """See `Store.now`."""
        ((moment,),) = await self._run(_QUERIES["now"])
        return cast("datetime", moment)

    async def purge(self, age: float, limit: int) -> int:
        """See `Store.purge`."""
        return len(await self._run(_QUERIES["purge"], timedelta(seconds=age), limit))

    async def find(self, wanted: KeysQuery) -> list[KeptKey]:
        """See `Store.find`."""
        return [KeptKey(**dict(row)) for row in await self._run(_QUERIES["find"], *msgspec.structs.astuple(wanted))]

    async def forget(self, scope: Scope, actor: str, reason: str) -> bool:
        """See `Store.forget`."""
        return bool(await self._run(_QUERIES["forget"], *scope.columns, actor, reason))

    async def forgotten(self, scope: Scope) -> list[KeyNote]:
        """See `Store.forgotten`."""
        return [KeyNote(**dict(row)) for row in await self._run(_QUERIES["forgotten"], *scope.columns)]

    async def close(self) -> None:
        """See `Store.close`."""
        if self._owned and self._process == os.getpid():
            self._process = None
            await self._pool.close()

    async def _timed(self, query: str, *values: Any) -> tuple[list[asyncpg.Record], float]:
        started = time.monotonic()
        return await self._run(query, *values), started

    async def _run(self, query: str, *values: Any) -> list[asyncpg.Record]:
        """Run one step as a transaction of the isolation level that it is written for, whatever the database's default.

        Under a higher one, a key that another worker takes at the same moment would be an error instead of held.
        """
        check_process(self._process)
        self._loop = check_loop(self._loop)
        async with (
            _mapped(),
            self._pool.acquire() as connection,
            connection.transaction(isolation="read_committed", readonly=False),
        ):
            return await connection.fetch(query, *values)


def is_ours(version: str | None) -> bool:
    """Return whether a schema exists, by its version; raises `PostroomError` for one that is not supported."""
    if version is None:
        return False
    number = version.removeprefix("version ")
    if not (number.isdecimal() and runs_on(int(number), _VERSION)):
        needed = f"this program supports version {_VERSION} and {_VERSION + 1}"
        raise unusable(f"its schema is {version}, {needed}: install the program's newer version")
    return True


@asynccontextmanager
async def _mapped() -> AsyncIterator[None]:
    try:
        yield
    except _PASSING as error:
        raise unavailable(error) from error
    except asyncpg.PostgresError as error:
        raise unusable(why_failed(error)) from error

"""Keys in Postgres, for any number of hosts; its clock decides about leases, so that theirs need not agree."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final, Self

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from postroom.once.errors import unavailable, unusable
from postroom.once.model import LEASE_EXPIRED, Result, Row, Scope
from postroom.sql import load_queries, read_sql

VERSION: Final = "version 1"
_QUERIES: Final = load_queries("postroom.once", "sql/postgres.sql")
_SCHEMA: Final = read_sql("postroom.once", "sql/postgres_schema.sql")
_CONNECTIONS: Final = 4
_CONNECT_SECONDS: Final = 5.0
_COMMAND_SECONDS: Final = 5.0

# What passes: no connection, a server that stops or is full, a deadlock, a lock that took too long.
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
)


class PostgresStore:
    """A `Store` on a pool, which it doesn't close unless it opened it."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], *, owned: bool = False) -> None:
        self._pool = pool
        self._owned = owned

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect, and create the schema `postroom_once` where there is none.

        Raises `Unavailable` where Postgres can't be reached, `PostroomError` where its schema is of another version, or
        may not be created.
        """
        store = cls(await _connect(url), owned=True)
        try:
            await store.prepare()
        except BaseException:
            await store.close()
            raise
        return store

    async def prepare(self) -> None:
        """Create the schema where there is none, and check its version."""
        async with _mapped(), self._pool.acquire() as connection:
            version = await connection.fetchval(_QUERIES["version"])
            if version is None:
                version = await _create(connection)
        if version != VERSION:
            raise unusable(f"its schema is {version}, this program knows {VERSION}: install the same version")

    async def is_there(self) -> bool:
        """Tell whether the schema is there; raises `PostroomError` where it is of another version."""
        async with _mapped():
            version = await self._pool.fetchval(_QUERIES["version"])
        if version not in (None, VERSION):
            raise unusable(f"its schema is {version}, this program knows {VERSION}: install the same version")
        return version is not None

    async def take(self, scope: Scope, owner: str, lease: float) -> Row | None:
        """See `Store.take`."""
        return _row(await self._fetch("take", scope, owner, timedelta(seconds=lease), LEASE_EXPIRED))

    async def look(self, scope: Scope) -> Row | None:
        """See `Store.look`."""
        return _row(await self._fetch("look", scope))

    async def renew(self, scope: Scope, owner: str, lease: float) -> datetime | None:
        """See `Store.renew`."""
        row = await self._fetch("renew", scope, owner, timedelta(seconds=lease))
        until: datetime | None = row["lease_until"] if row else None
        return until

    async def commit(self, scope: Scope, owner: str, result: Result) -> bool:
        """See `Store.commit`."""
        return await self._fetch("settle", scope, owner, "COMMITTED", None, *result) is not None

    async def fail(self, scope: Scope, owner: str, error: str) -> bool:
        """See `Store.fail`."""
        return await self._fetch("settle", scope, owner, "FAILED", error, None, None) is not None

    async def purge(self, age: float, limit: int) -> int:
        """See `Store.purge`."""
        async with _mapped():
            return int(await self._pool.fetchval(_QUERIES["purge"], timedelta(seconds=age), limit))

    async def close(self) -> None:
        """See `Store.close`."""
        if self._owned:
            await self._pool.close()

    async def _fetch(self, query: str, scope: Scope, *values: Any) -> asyncpg.Record | None:
        key = (scope.tenant, scope.topic, scope.group or "", scope.key)
        async with _mapped():
            return await self._pool.fetchrow(_QUERIES[query], *key, *values)


async def _connect(url: str) -> asyncpg.Pool[asyncpg.Record]:
    try:
        async with _mapped():
            return await asyncpg.create_pool(
                url, min_size=1, max_size=_CONNECTIONS, timeout=_CONNECT_SECONDS, command_timeout=_COMMAND_SECONDS
            )
    except ValueError as error:
        raise unusable("its address is no Postgres URL (postgresql://user@host/database)") from error


async def _create(connection: PoolConnectionProxy[asyncpg.Record]) -> str:
    """Create the schema unless another process does just now; return its version."""
    async with connection.transaction():
        await connection.execute(_QUERIES["lock_schema"])
        version: str | None = await connection.fetchval(_QUERIES["version"])
        if version is None:
            await connection.execute(_SCHEMA)
    return version or VERSION


@asynccontextmanager
async def _mapped() -> AsyncIterator[None]:
    """Turn what Postgres fails with into errors of ours."""
    try:
        yield
    except _PASSING as error:
        raise unavailable(error) from error
    except asyncpg.PostgresError as error:
        raise unusable(f"{type(error).__name__}: {error}") from error


def _row(record: asyncpg.Record | None) -> Row | None:
    if record is None:
        return None
    state, owner, attempts, until, last_error, encoding, data, now = record
    return Row(state, owner, attempts, until, last_error, Result(encoding, data) if encoding else None, now)

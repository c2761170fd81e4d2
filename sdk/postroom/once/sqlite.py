"""Keys in one SQLite file, for the processes of one host, or in the memory of one; its clock decides about leases.

The standard library's `sqlite3` on a thread of its own is all it needs, and so much of the chassis as needs no more
(`postroom.chassis.sqlite`): a step is one short transaction, for which a dependency would bring nothing. The file has a
rollback journal, since several processes write (see sql/sqlite.sql).
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from postroom._wire.sql import load_queries
from postroom.chassis.exits import Fatal
from postroom.chassis.sqlite import Damaged, Schema, open_writer, transaction
from postroom.once.model import (
    LEASE_EXPIRED,
    Encoding,
    Forgotten,
    KeptKey,
    KeyFilter,
    Result,
    Row,
    Scope,
    State,
    absent,
    unavailable,
    unusable,
)

T = TypeVar("T")

_SCHEMA: Final = Schema.of("postroom.once", "PSRO", "sql/sqlite_schema.sql")
_QUERIES: Final = load_queries("postroom.once", "sql/sqlite.sql")


class SqliteStore:
    """A `Store` in the file `path`, or in memory without one. `clock` gives seconds since the epoch."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._thread = None if path is None else ThreadPoolExecutor(1, thread_name_prefix="idempotency registry")
        self._db: sqlite3.Connection | None = None

    @classmethod
    async def open(cls, path: Path | None, clock: Callable[[], float] = time.time, *, create: bool = True) -> Self:
        """Open the file, and create it (mode 0600) where there is none.

        Raises `Unavailable` where it can't be opened just now, `PostroomError` where it is another program's, or newer;
        without `create`, `NotFound` where there is none.
        """
        store = cls(path, clock)
        try:
            await store._on_thread(partial(store._open, create=create))
        except BaseException:
            await store.close()
            raise
        return store

    async def take(self, scope: Scope, owner: str, lease: float) -> Row | None:
        """See `Store.take`."""
        values = {"owner": owner, "lease_expired": LEASE_EXPIRED}
        return await self._run(lambda db: self._row(db, "take", scope, values, lease))

    async def look(self, scope: Scope) -> Row | None:
        """See `Store.look`."""
        return await self._run(lambda db: self._row(db, "look", scope, {}))

    async def renew(self, scope: Scope, owner: str, lease: float) -> datetime | None:
        """See `Store.renew`."""
        found = await self._run(lambda db: self._execute(db, "renew", {**_key(scope), "owner": owner}, lease)[0])
        return _moment(found[0][0]) if found else None

    async def commit(self, scope: Scope, owner: str, result: Result) -> bool:
        """See `Store.commit`."""
        values = {"state": "COMMITTED", "error": None, "encoding": result.encoding, "result": result.data}
        return await self._settle(scope, owner, values)

    async def fail(self, scope: Scope, owner: str, error: str) -> bool:
        """See `Store.fail`."""
        return await self._settle(scope, owner, {"state": "FAILED", "error": error, "encoding": None, "result": None})

    async def purge(self, age: float, limit: int) -> int:
        """See `Store.purge`."""
        values = {"before": _milliseconds(self._clock() - age), "limit": limit}
        rows, _ = await self._run(lambda db: self._execute(db, "purge", values))
        return len(rows)

    async def find(self, wanted: KeyFilter, limit: int) -> list[KeptKey]:
        """See `Store.find`."""
        rows, _ = await self._run(lambda db: self._execute(db, "find", {**wanted._asdict(), "limit": limit}))
        return [_kept(row) for row in rows]

    async def forget(self, scope: Scope, actor: str, reason: str) -> bool:
        """See `Store.forget`."""
        return await self._run(lambda db: self._forget(db, {**_key(scope), "actor": actor, "reason": reason}))

    async def forgotten(self, scope: Scope) -> list[Forgotten]:
        """See `Store.forgotten`."""
        rows, _ = await self._run(lambda db: self._execute(db, "forgotten", _key(scope)))
        return [Forgotten(_moment(at), *rest) for at, *rest in rows]

    async def close(self) -> None:
        """See `Store.close`."""
        if self._db is not None:
            db, self._db = self._db, None
            await self._on_thread(db.close)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def _settle(self, scope: Scope, owner: str, values: dict[str, Any]) -> bool:
        rows, _ = await self._run(lambda db: self._execute(db, "settle", {**_key(scope), "owner": owner, **values}))
        return bool(rows)

    async def _run(self, step: Callable[[sqlite3.Connection], T]) -> T:
        return await self._on_thread(lambda: step(self._db or self._open()))

    async def _on_thread(self, call: Callable[[], T]) -> T:
        try:
            if self._thread is None:  # memory keeps nobody waiting
                return call()
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except sqlite3.OperationalError as error:
            raise unavailable(error) from error
        except (sqlite3.DatabaseError, Damaged, OSError) as error:
            raise unusable(f"{self._path}: {error}") from error
        except Fatal as error:  # another program's file, or a newer one
            raise unusable(str(error)) from error

    def _open(self, *, create: bool = True) -> sqlite3.Connection:
        if self._path is None:
            self._db = sqlite3.connect(":memory:", isolation_level=None)
            _SCHEMA.migrate(self._db, Path(":memory:"))
            return self._db
        if not create and not self._path.exists():
            raise absent(str(self._path))
        self._db = open_writer(self._path, _SCHEMA, pragmas=_QUERIES["pragmas"])
        return self._db

    def _row(
        self, db: sqlite3.Connection, query: str, scope: Scope, values: dict[str, Any], lease: float = 0.0
    ) -> Row | None:
        rows, now = self._execute(db, query, {**_key(scope), **values}, lease)
        return _row_of(rows[0], now) if rows else None

    def _forget(self, db: sqlite3.Connection, values: dict[str, Any]) -> bool:
        with transaction(db):
            logged = db.execute(_QUERIES["log_forgotten"], {**values, "now": _milliseconds(self._clock())}).fetchall()
            if logged:
                db.execute(_QUERIES["forget"], values)
        return bool(logged)

    def _execute(
        self, db: sqlite3.Connection, query: str, values: dict[str, Any], lease: float = 0.0
    ) -> tuple[list[tuple[Any, ...]], float]:
        """Run one query in a transaction; the clock is read once the lock is there."""
        with transaction(db):
            now = self._clock()
            times = {"now": _milliseconds(now), "until": _milliseconds(now + lease)}
            return db.execute(_QUERIES[query], {**values, **times}).fetchall(), now


def _key(scope: Scope) -> dict[str, Any]:
    return {"tenant": scope.tenant, "topic": scope.topic, "group": scope.group or "", "key": scope.key}


def _row_of(values: tuple[Any, ...], now: float) -> Row:
    state: State
    encoding: Encoding | None
    state, owner, attempts, until, last_error, encoding, data = values
    result = Result(encoding, data) if encoding is not None else None
    return Row(state, owner, attempts, None if until is None else _moment(until), last_error, result, _moment_of(now))


def _kept(row: tuple[Any, ...]) -> KeptKey:
    tenant, topic, group, key, state, owner, attempts, *times, last_error = row
    begun_at, lease_until, settled_at = (None if moment is None else _moment(moment) for moment in times)
    assert begun_at is not None  # noqa: S101 - a column that is never null
    scope = Scope(tenant, topic, key, group or None)
    return KeptKey(scope, state, owner, attempts, begun_at, lease_until, settled_at, last_error)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _moment(milliseconds: int) -> datetime:
    return _moment_of(milliseconds / 1000)


def _moment_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)

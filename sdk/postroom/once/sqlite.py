"""Keys in one SQLite file, for the processes of one host; the host's clock decides about leases.

The standard library's `sqlite3` on a thread of its own is all it needs: a step is one short transaction, for which a
dependency would bring nothing. The file has a rollback journal, since several processes write (see sql/sqlite.sql).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from postroom._wire.sql import load_queries, read_sql
from postroom.once.errors import absent, unavailable, unusable
from postroom.once.model import LEASE_EXPIRED, Encoding, Forgotten, KeptKey, KeyFilter, Result, Row, Scope, State

T = TypeVar("T")

VERSION: Final = 1
APPLICATION_ID: Final = int.from_bytes(b"PSRO", "big")  # in the file's header
_QUERIES: Final = load_queries("postroom.once", "sql/sqlite.sql")
_SCHEMA: Final = read_sql("postroom.once", "sql/sqlite_schema.sql")


class SqliteStore:
    """A `Store` in the file `path`. `clock` gives seconds since the epoch."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="idempotency registry")
        self._db: sqlite3.Connection | None = None

    @classmethod
    async def open(cls, path: Path, clock: Callable[[], float] = time.time, *, create: bool = True) -> Self:
        """Open the file, and create it (mode 0600) where there is none.

        Raises `Unavailable` where it can't be opened just now, `PostroomError` where it is another program's, or newer;
        without `create`, `NotFound` where there is none.
        """
        store = cls(path, clock)
        try:
            await store._run(store._open, create=create)
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
            await asyncio.get_running_loop().run_in_executor(self._thread, db.close)
        self._thread.shutdown(wait=False)

    async def _settle(self, scope: Scope, owner: str, values: dict[str, Any]) -> bool:
        rows, _ = await self._run(lambda db: self._execute(db, "settle", {**_key(scope), "owner": owner, **values}))
        return bool(rows)

    async def _run(self, step: Callable[[sqlite3.Connection], T], *, create: bool = True) -> T:
        def run() -> T:
            if not create and not self._path.exists():
                raise absent(str(self._path))
            return step(self._connection())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except sqlite3.OperationalError as error:
            raise unavailable(error) from error
        except (sqlite3.DatabaseError, OSError) as error:
            raise unusable(f"{self._path}: {error}") from error

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        return self._db

    def _open(self, db: sqlite3.Connection) -> None:
        db.executescript(_QUERIES["pragmas"])
        with _Transaction(db):
            (version,), (application,) = (
                db.execute(_QUERIES[name]).fetchone() for name in ("user_version", "application_id")
            )
            if application not in (0, APPLICATION_ID) or (version and not application):
                raise unusable(f"{self._path} is an SQLite file of another program: use another file")
            if version > VERSION:
                raise unusable(f"{self._path} has version {version}, this program supports {VERSION}: upgrade it")
            if version == 0:
                for statement in _statements(_SCHEMA):
                    db.execute(statement)

    def _row(
        self, db: sqlite3.Connection, query: str, scope: Scope, values: dict[str, Any], lease: float = 0.0
    ) -> Row | None:
        rows, now = self._execute(db, query, {**_key(scope), **values}, lease)
        return _row_of(rows[0], now) if rows else None

    def _forget(self, db: sqlite3.Connection, values: dict[str, Any]) -> bool:
        with _Transaction(db):
            logged = db.execute(_QUERIES["log_forgotten"], {**values, "now": _milliseconds(self._clock())}).fetchall()
            if logged:
                db.execute(_QUERIES["forget"], values)
        return bool(logged)

    def _execute(
        self, db: sqlite3.Connection, query: str, values: dict[str, Any], lease: float = 0.0
    ) -> tuple[list[tuple[Any, ...]], float]:
        """Run one query in a transaction; the clock is read once the lock is there."""
        with _Transaction(db):
            now = self._clock()
            times = {"now": _milliseconds(now), "until": _milliseconds(now + lease)}
            return db.execute(_QUERIES[query], {**values, **times}).fetchall(), now


class _Transaction:
    """`BEGIN IMMEDIATE … COMMIT`, or a rollback."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute(_QUERIES["begin"])

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self._db.execute(_QUERIES["commit" if kind is None else "rollback"])
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute(_QUERIES["rollback"])
            raise


def _statements(script: str) -> list[str]:
    """Split a script at its statements: `executescript` would commit in between."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements


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

"""Keys in one SQLite file, for the processes of one host, or in the memory of one; its clock decides about leases.

It needs only the standard library's `sqlite3`, on a thread of its own, and the part of the chassis that needs no more
(`postroom.chassis.sqlite`): a step is one short transaction, for which a dependency would bring nothing. The file has a
rollback journal, since several processes write (see sql/sqlite.sql).
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec

from postroom._wire.moment import from_milliseconds
from postroom._wire.once import KeptKey, KeyNote, KeysQuery
from postroom._wire.sql import load_queries
from postroom.chassis.exits import Fatal
from postroom.chassis.ownership import is_there, why_refused
from postroom.chassis.sqlite import Damaged, Schema, open_writer, patiently, transaction
from postroom.claims.sqlite import SqliteClaims, milliseconds
from postroom.once.model import PARTS, Scope, absent, check_loop, check_process, table, unavailable, unusable

T = TypeVar("T")

_SCHEMA: Final = Schema.of("postroom.once", "PSRO", "sql/sqlite_schema.sql")
_QUERIES: Final = load_queries("postroom.once", "sql/sqlite.sql")
_ANOTHER_FILE: Final = (sqlite3.SQLITE_READONLY_DBMOVED, sqlite3.SQLITE_ERROR)


class SqliteStore(SqliteClaims):
    """A `Store` in the file `path`, or in memory without one. `clock` gives seconds since the epoch."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        super().__init__(table("idempotency_keys"), PARTS, self._step)
        self._path = path
        self._clock = clock
        self._thread = None if path is None else ThreadPoolExecutor(1, thread_name_prefix="idempotency registry")
        self._db: sqlite3.Connection | None = None
        self._opened: os.stat_result | None = None  # its file
        self._process: int | None = os.getpid()  # that may use it; None once it is closed
        self._loop: asyncio.AbstractEventLoop | None = None  # where it is used

    @classmethod
    async def open(cls, path: Path | None, clock: Callable[[], float] = time.time, *, create: bool = True) -> Self:
        """Open the file, and create it (mode 0600) where it is missing.

        Raises `Unavailable` where it can't be opened just now, `PostroomError` where it is another program's, or newer;
        without `create`, `NotFound` where it is missing.
        """
        store = cls(path, clock)
        try:
            await store._on_thread(partial(store._open, create=create))
        except BaseException:
            await store.close()
            raise
        return store

    async def now(self) -> datetime:
        """See `Store.now`."""
        return from_milliseconds(milliseconds(self._clock()))

    async def purge(self, age: float, limit: int) -> int:
        """See `Store.purge`."""
        return len(await self._rows("purge", {"before": milliseconds(self._clock() - age), "limit": limit}))

    async def find(self, wanted: KeysQuery) -> list[KeptKey]:
        """See `Store.find`."""
        found = []
        for row in await self._rows("find", msgspec.structs.asdict(wanted)):
            kept = dict(zip(KeptKey.__struct_fields__, row, strict=True))
            for name in ("begun_at", "lease_until", "settled_at"):
                kept[name] = from_milliseconds(kept[name])
            found.append(KeptKey(**kept))
        return found

    async def forget(self, scope: Scope, actor: str, reason: str) -> bool:
        """See `Store.forget`."""

        def step(db: sqlite3.Connection, now: float) -> bool:
            values = {**self._named(scope.columns), "actor": actor, "reason": reason, "now": milliseconds(now)}
            db.execute(self._steps["set_back"], values)
            logged = db.execute(_QUERIES["log_forgotten"], values).fetchall()
            if logged:
                db.execute(_QUERIES["forget"], values)
            return bool(logged)

        return await self._step(step)

    async def forgotten(self, scope: Scope) -> list[KeyNote]:
        """See `Store.forgotten`."""
        rows = await self._rows("forgotten", self._named(scope.columns))
        notes = (dict(zip(KeyNote.__struct_fields__, row, strict=True)) for row in rows)
        return [KeyNote(**{**note, "at": from_milliseconds(note["at"])}) for note in notes]

    async def close(self) -> None:
        """See `Store.close`."""
        if self._process != os.getpid():
            return
        if self._db is not None:
            await self._on_thread(self._shut)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._process = None

    async def _rows(self, query: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        return await self._step(lambda db, _: db.execute(_QUERIES[query], values).fetchall())

    async def _step(self, step: Callable[[sqlite3.Connection, float], T]) -> T:
        """Run a step in a transaction; the clock is read once it has the lock."""

        def locked() -> T:
            if self._db is not None and self._moved():
                self._shut()
            db = self._db or self._open(create=False)
            with transaction(db):
                return step(db, self._clock())

        def run() -> T:
            try:
                return patiently(locked)
            except sqlite3.OperationalError as error:
                # Its file was replaced just now, or emptied, and has no tables: nothing was written.
                if getattr(error, "sqlite_errorcode", None) not in _ANOTHER_FILE:
                    raise
                self._shut()
                return patiently(locked)

        return await self._on_thread(run)

    def _shut(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _moved(self) -> bool:
        if self._path is None or self._opened is None:
            return False
        try:
            return not os.path.samestat(self._opened, self._path.stat())
        except FileNotFoundError:
            return True

    async def _on_thread(self, call: Callable[[], T]) -> T:
        check_process(self._process)
        self._loop = check_loop(self._loop)
        try:
            if self._thread is None:  # in memory no step blocks
                return call()
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except sqlite3.OperationalError as error:
            raise unavailable(error) from error
        except (sqlite3.DatabaseError, Damaged) as error:
            raise unusable(f"{self._path}: {error}") from error
        except OSError as error:
            raise unusable(why_refused(error, f"look at {self._path}")) from error
        except Fatal as error:  # another program's file, or a newer one
            raise unusable(str(error)) from error

    def _open(self, *, create: bool = True) -> sqlite3.Connection:
        if self._path is None:
            self._db = sqlite3.connect(":memory:", isolation_level=None)
            _SCHEMA.migrate(self._db, Path(":memory:"))
            return self._db
        if not create and not is_there(self._path):
            raise absent(str(self._path))
        was_opened = self._opened is not None
        self._db = open_writer(self._path, _SCHEMA, pragmas=_QUERIES["pragmas"], was_opened=was_opened)
        self._db.execute(_QUERIES["wait_briefly"])
        self._opened = self._path.stat()
        return self._db

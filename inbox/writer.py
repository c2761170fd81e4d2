"""The one writer: what waits while one transaction is on its way to the disk shares the next."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from inbox.errors import broken, from_sqlite, unavailable
from postroom.chassis.sqlite import QUERIES, Connection, is_broken

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_CHECKPOINT_AT: Final = 4 * 1024 * 1024  # bytes of the WAL
_RESTART_AT: Final = 16 * 1024 * 1024  # bytes; beyond it the readers are waited for

_log = structlog.get_logger(__name__)


class _Waiting(NamedTuple):
    work: Work[Any]
    future: asyncio.Future[Any]


class Writer:
    """Owns the write connection; `submit` is how anything gets into the file."""

    def __init__(self, connection: Connection, path: Path, failed: asyncio.Event) -> None:
        self._connection = connection
        self._path = path
        self._wal = Path(f"{path}-wal")
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._stopping = False
        self._failed = failed  # set where the file breaks, here or under a reader
        self.clean = False  # after `close`: whether everything lies in the file itself
        self._task = asyncio.create_task(self._run(), name="inbox writer")

    async def submit(self, work: Work[T]) -> T:
        """Run `work` in a transaction and return what it returns, once that is on disk.

        It may share the transaction with others, and runs again, alone, where one of them fails. Raises `PostroomError`
        where nothing was written, `Broken` where that is not known.
        """
        if self._stopping or self._failed.is_set():
            raise unavailable("it is being closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(work, future))
        self._wake.set()
        return await future

    async def close(self) -> None:
        """Finish what is queued, empty the log and close the connection; a second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        await self._task
        self.clean = not self._failed.is_set() and await self._checkpoint("checkpoint_truncate")
        await self._connection.close()

    async def _run(self) -> None:
        while not self._stopping or self._waiting:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            group = list(self._waiting)
            self._waiting.clear()
            await self._commit(group)

    async def _commit(self, group: list[_Waiting]) -> None:
        try:
            outcomes = await self._connection.run(partial(_transact, [each.work for each in group]))
        except sqlite3.Error as error:
            await self._fail(group, error)
            return
        except Exception as error:  # noqa: BLE001 - whoever submitted it shall have it
            await self._alone(group, error)
            return
        for each, outcome in zip(group, outcomes, strict=True):
            _settle(each.future, outcome)
        if self._wal_bytes() > _CHECKPOINT_AT:
            await self._checkpoint("checkpoint_restart" if self._wal_bytes() > _RESTART_AT else "checkpoint")

    async def _fail(self, group: list[_Waiting], error: sqlite3.Error) -> None:
        """End the inbox where the file broke; let anything else fail alone."""
        if not is_broken(error):
            await self._alone(group, from_sqlite(error))
            return
        self._failed.set()
        _log.error("inbox_failed", file=str(self._path), error=str(error))
        for each in (*group, *self._waiting):
            _settle(each.future, broken(self._path, error))
        self._waiting.clear()

    async def _alone(self, group: list[_Waiting], error: Exception) -> None:
        if len(group) == 1:
            _settle(group[0].future, error)
            return
        for each in group:
            await self._commit([each])

    async def _checkpoint(self, how: str) -> bool:
        try:
            await self._connection.run(lambda db: db.execute(QUERIES[how]).fetchall())
        except sqlite3.Error as error:
            _log.warning("checkpoint_failed", file=str(self._path), error=str(error))
            return False
        return True

    def _wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0


def _transact(group: Sequence[Work[Any]], db: sqlite3.Connection) -> list[Any]:
    db.execute(QUERIES["begin"])
    try:
        outcomes = [work(db) for work in group]
        db.execute(QUERIES["commit"])
    except BaseException:
        if db.in_transaction:
            db.execute(QUERIES["rollback"])
        raise
    return outcomes


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # whoever submitted it went away
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

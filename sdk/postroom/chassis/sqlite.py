"""The connections to an SQLite file: the one that writes and checkpoints, and the ones that only read.

Common Pythons link SQLite 3.40.1, whose WAL-reset bug can corrupt a file when one connection writes while another
checkpoints. So one connection does both, and readers are opened read-only.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import aiosqlite

from postroom.chassis.exits import Exit
from postroom.chassis.ownership import open_private, refuse_link
from postroom.chassis.sql import load_queries

T = TypeVar("T")

QUERIES: Final = load_queries("postroom.chassis", "sqlite.sql")
PARTS: Final = ("", "-wal", "-shm")  # of an SQLite file
_STATEMENTS: Final = 256  # prepared statements a connection keeps
_PRIMARY: Final = 0xFF  # the primary result code within an extended one
_BROKEN: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PROTOCOL,
    }
)


class Connection(aiosqlite.Connection):
    """An aiosqlite connection that runs a whole function on its thread.

    aiosqlite has a coroutine per statement, each a hop to its thread and back. A transaction is one hop here: `run`
    hands a function over through the same queue that those coroutines use (`_execute`), for which aiosqlite has no
    public name. The thread is a daemon thread, so that a process that fails ends, whatever it left open.
    """

    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, iter_chunk_size=1)
        self._thread.daemon = True

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call `function` with the SQLite connection on its thread and return what it returns."""
        result: T = await self._execute(function, self._conn)  # type: ignore[no-untyped-call]
        return result


async def open_writer(path: Path) -> Connection:
    """Open the write connection; a new file gets mode 0600, which its WAL inherits. Raises `OSError` for a link."""
    for part in PARTS:
        refuse_link(Path(f"{path}{part}"))
    os.close(open_private(path))
    return await _open(f"{path.as_uri()}?mode=rw", QUERIES["write_pragmas"])


async def open_reader(path: Path) -> Connection:
    """Open a read-only connection."""
    return await _open(f"{path.as_uri()}?mode=ro", QUERIES["read_pragmas"])


async def _open(uri: str, pragmas: str) -> Connection:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=_STATEMENTS)

    connection = Connection(connect)
    await connection
    try:
        await connection.run(lambda db: db.executescript(pragmas))
    except BaseException:
        await connection.close()
        raise
    return connection


def in_snapshot(db: sqlite3.Connection, read: Callable[[], T]) -> T:
    """Call `read` in one read transaction, so that all its queries see the same rows; return what it returns."""
    db.execute(QUERIES["begin_read"])
    try:
        return read()
    finally:
        db.execute(QUERIES["rollback"])


def result_code(error: BaseException) -> int:
    """Return SQLite's primary result code of `error`, 0 where it has none."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & _PRIMARY


def is_broken(error: BaseException) -> bool:
    """Tell whether the file or the disk can no longer be trusted after `error`."""
    return result_code(error) in _BROKEN


def is_damage(error: BaseException) -> bool:
    """Tell whether `error` says that the file's content is wrong."""
    return result_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: BaseException) -> bool:
    """Tell whether `error` says that the disk is full."""
    number = error.errno if isinstance(error, OSError) else None
    return result_code(error) == sqlite3.SQLITE_FULL or number in (errno.ENOSPC, errno.EDQUOT)


def exit_after(error: sqlite3.Error | OSError) -> Exit:
    """Return how a start ends that `error` forbids: 75 for a full disk and 74 for a failing one, else 78."""
    if is_full(error):
        return Exit.TRY_AGAIN
    if result_code(error) == sqlite3.SQLITE_IOERR or (isinstance(error, OSError) and error.errno == errno.EIO):
        return Exit.IO_ERROR
    return Exit.CONFIG


def exit_after_opening(path: Path, error: sqlite3.Error | OSError) -> Exit:
    """Return the same where the file at `path` could not be opened.

    Why it can't open or create one of its files SQLite does not say: a full disk and a wrong owner are one error code.
    So each is opened once more; where that works by now, a further start works too.
    """
    if result_code(error) != sqlite3.SQLITE_CANTOPEN:
        return exit_after(error)
    try:
        for part in PARTS:
            os.close(open_private(Path(f"{path}{part}")))
    except OSError as cause:
        return exit_after(cause)
    return Exit.TRY_AGAIN

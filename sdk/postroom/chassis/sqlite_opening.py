"""Opening an SQLite file that one process owns: whether it is sound, ours, and of a version that this program knows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sqlite import QUERIES, Connection, exit_after_opening, is_damage, open_writer
from postroom.chassis.sqlite_file import OwnedFile

_ADVICE: Final = {Exit.TRY_AGAIN: "the space on its disk", Exit.IO_ERROR: "its disk, and the space on it"}

Migrate = Callable[[sqlite3.Connection, Path], None]


class Damaged(Exception):
    """The file's content is wrong; the text is the first fault that was found."""


async def open_owned(file: OwnedFile, migrate: Migrate) -> Connection:
    """Open, check after an unclean stop, and migrate the file; from here on it counts as in use.

    Raises `Damaged`, or `Fatal`: 78 for a file that only somebody's hand can make usable, 75 or 74 where the disk is
    full or fails.
    """
    try:
        return await _open(file, migrate)
    except (sqlite3.DatabaseError, OSError) as error:
        if is_damage(error):
            raise Damaged(str(error)) from error
        raise _unusable(file.path, error) from error


async def _open(file: OwnedFile, migrate: Migrate) -> Connection:
    connection = await open_writer(file.path)
    try:
        if file.unclean:
            await connection.run(_check)
        await connection.run(partial(_migrate, migrate, file.path))
        file.begin()
    except BaseException:
        await connection.close()
        raise
    return connection


def _check(db: sqlite3.Connection) -> None:
    (verdict,) = db.execute(QUERIES["quick_check"]).fetchone()
    if verdict != "ok":
        raise Damaged(verdict)


def _migrate(migrate: Migrate, path: Path, db: sqlite3.Connection) -> None:
    migrate(db, path)


def _unusable(path: Path, error: sqlite3.DatabaseError | OSError) -> Fatal:
    code = exit_after_opening(path, error)
    reason = error.strerror if isinstance(error, OSError) else error
    return Fatal(code, f"cannot open {path}: {reason}; check {_ADVICE.get(code, 'its owner, its mode and the disk')}")

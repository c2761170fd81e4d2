"""Opening the outbox file: whether it is sound, ours, and of a version that this program knows."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path
from typing import Final

from chassis.exits import Exit, Fatal
from outbox.connection import QUERIES, Connection, open_writer
from outbox.directory import StateDirectory
from outbox.errors import exit_after, is_damage
from outbox.migrate import migrate

_ADVICE: Final = {Exit.TRY_AGAIN: "the space on its disk", Exit.IO_ERROR: "its disk, and the space on it"}


async def open_file(state: StateDirectory) -> Connection:
    """Open, check and migrate the file; from here on the directory counts as in use.

    Raises `Fatal`: 78 for a file that only somebody's hand can make usable, 75 or 74 where the disk is full or fails.
    """
    if not state.database.exists() and state.damaged is not None:
        raise _cut_short(state.database, state.damaged)
    try:
        return await _open(state)
    except (sqlite3.DatabaseError, OSError) as error:
        raise _unusable(state.database, error) from error


async def _open(state: StateDirectory) -> Connection:
    connection = await open_writer(state.database)
    try:
        if state.unclean:
            await connection.run(partial(_check, state.database))
        await connection.run(partial(migrate, path=state.database))
        state.begin()
    except BaseException:
        await connection.close()
        raise
    return connection


def _check(path: Path, db: sqlite3.Connection) -> None:
    (verdict,) = db.execute(QUERIES["quick_check"]).fetchone()
    if verdict != "ok":
        raise _damaged(path, verdict)


def _unusable(path: Path, error: sqlite3.DatabaseError | OSError) -> Fatal:
    if is_damage(error):
        return _damaged(path, str(error))
    code = exit_after(error)
    return Fatal(code, f"cannot open {path}: {error}; check {_ADVICE.get(code, 'its owner, its mode and the disk')}")


def _cut_short(path: Path, damaged: Path) -> Fatal:
    return Fatal(
        Exit.CONFIG,
        f"there is no {path}, but {damaged.name} was set aside beside it: run `postroom outbox recover`, which saves "
        "its rows, so that no id that was used is taken for a new one",
    )


def _damaged(path: Path, fault: str) -> Fatal:
    return Fatal(
        Exit.CONFIG,
        f"{path} is damaged ({fault}): run `postroom outbox recover`, which sets it aside and saves the rows",
    )

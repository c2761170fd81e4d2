"""Opening the outbox file: whether it is sound, ours, and of a version that this program knows."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path

from chassis.exits import Exit, Fatal
from outbox.connection import QUERIES, Connection, open_writer
from outbox.directory import StateDirectory
from outbox.errors import is_damage
from outbox.migrate import migrate


async def open_file(state: StateDirectory) -> Connection:
    """Open, check and migrate the file; from here on the directory counts as in use."""
    if not state.database.exists() and state.damaged is not None:
        raise _cut_short(state.database, state.damaged)
    try:
        connection = await open_writer(state.database)
    except sqlite3.DatabaseError as error:
        raise _unusable(state.database, error) from error
    try:
        if state.unclean:
            await connection.run(partial(_check, state.database))
        await connection.run(partial(migrate, path=state.database))
    except BaseException:
        await connection.close()
        raise
    state.begin()
    return connection


def _check(path: Path, db: sqlite3.Connection) -> None:
    try:
        (verdict,) = db.execute(QUERIES["quick_check"]).fetchone()
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from error
    if verdict != "ok":
        raise _damaged(path, verdict)


def _unusable(path: Path, error: sqlite3.DatabaseError) -> Fatal:
    if is_damage(error):
        return _damaged(path, str(error))
    return Fatal(Exit.CONFIG, f"cannot open {path}: {error}; check its owner, its mode and the disk")


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

"""Opening the outbox file: a damaged one is an operator's to save, since the ids in it must stay used."""

from __future__ import annotations

import os
import pwd
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Final

from outbox.model import Caller
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sql import load_queries
from postroom.chassis.sqlite import Damaged, Schema, open_writer
from postroom.chassis.store import Connection, OwnedFile, unusable

SCHEMA: Final = Schema.of("outbox", "PSTR")
_QUERIES: Final = load_queries("outbox", "sql/recover.sql")


async def open_file(file: OwnedFile, *, accept_lost_ids: bool = False) -> Connection:
    """Open, check and migrate the file; from here on it counts as in use.

    With `accept_lost_ids` whoever runs the process accepts that ids may be taken again that a recovery could not save.

    Raises `Fatal`: 78 for a file that only somebody's hand can make usable, or that ids were lost of, 75 or 74 where
    the disk is full or fails.
    """
    if not file.path.exists() and file.damaged is not None:
        raise _cut_short(file.path, file.damaged)
    try:
        connection = await Connection.open(partial(open_writer, file.path, SCHEMA, check=file.unclean))
        file.begin()
    except Damaged as fault:
        raise _damaged(file.path, str(fault)) from fault
    except (sqlite3.Error, OSError) as error:
        raise unusable(file.path, error) from error
    try:
        await connection.run(partial(_accept if accept_lost_ids else _refuse_lost, file.path))
    except BaseException:
        await connection.close()
        raise
    return connection


def _refuse_lost(path: Path, db: sqlite3.Connection) -> None:
    recoveries, missing = db.execute(_QUERIES["unaccepted"]).fetchone()
    if recoveries:
        rows = "an unknown number of rows is" if missing is None else f"{missing} rows are"
        raise Fatal(
            Exit.CONFIG,
            f"{rows} missing since {path} was recovered, and their ids may be used again: check what was lost (the "
            "broker has what it accepted), then start once with `postroom daemon run --accept-lost-ids`",
        )


def _accept(_path: Path, db: sqlite3.Connection) -> None:
    actor = Caller(os.getuid(), os.getgid(), _user_name())
    db.execute(_QUERIES["accept"], {"now": time.time_ns() // 1_000_000, "actor": str(actor)})


def _user_name() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def _cut_short(path: Path, damaged: Path) -> Fatal:
    return Fatal(
        Exit.CONFIG,
        f"there is no {path}, but {damaged.name} was set aside next to it: run `postroom outbox recover`, which saves "
        "its rows, so that no used id is taken for a new one",
    )


def _damaged(path: Path, fault: str) -> Fatal:
    return Fatal(
        Exit.CONFIG,
        f"{path} is damaged ({fault}): run `postroom outbox recover`, which sets it aside and saves the rows",
    )

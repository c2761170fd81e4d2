"""Opening the inbox file: a damaged one is set aside, since the broker's history can fill a new one."""

from __future__ import annotations

import sqlite3
from functools import partial
from typing import Final

import structlog

from inbox.migrate import migrate
from postroom.chassis.sql import load_queries
from postroom.chassis.sqlite import QUERIES as SQLITE
from postroom.chassis.sqlite import Connection
from postroom.chassis.sqlite_file import OwnedFile, set_aside
from postroom.chassis.sqlite_opening import Damaged, open_owned

_QUERIES: Final = load_queries("inbox", "sql/write.sql")

_log = structlog.get_logger(__name__)


async def open_file(file: OwnedFile, *, now: int, new_id: str) -> Connection:
    """Open the file, or a new one in the place of a damaged one, which is renamed and never overwritten.

    A new file gets `new_id`, and is due to be refilled where another was set aside. `now` is in ms since the epoch.
    Raises `Fatal` for a file of another program or of a newer one, and where the disk is full or fails.
    """
    try:
        connection = await open_owned(file, migrate)
    except Damaged as fault:
        aside = set_aside(file.path, now)
        _log.error("inbox_damaged", fault=str(fault), set_aside=aside.name, advice="it is refilled from the broker")
        connection = await open_owned(file, migrate)
    try:
        await connection.run(
            partial(_create, {"id": new_id, "created_at": now, "refill_after": None if file.damaged is None else 0})
        )
    except BaseException:
        await connection.close()
        raise
    return connection


def _create(values: dict[str, object], db: sqlite3.Connection) -> None:
    db.execute(SQLITE["begin"])
    try:
        db.execute(_QUERIES["create_file"], values)
        db.execute(_QUERIES["first_position"], values)
        db.execute(SQLITE["commit"])
    except BaseException:
        db.execute(SQLITE["rollback"])
        raise

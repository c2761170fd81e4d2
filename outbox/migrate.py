"""Bring an outbox file to the schema of this program: numbered steps, forward only, each in one transaction."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from chassis.exits import Exit, Fatal
from chassis.sql import migrations
from outbox.connection import QUERIES

APPLICATION_ID: Final = int.from_bytes(b"PSTR", "big")  # in the file's header
MIGRATIONS: Final = migrations("outbox")
NEWEST: Final = len(MIGRATIONS)


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Run the migrations that the file lacks; each ends by setting `user_version` to its own number.

    Raises `Fatal` (78) for a file that is newer than the program or that is not an outbox.
    """
    version = _version(db, path)
    for number, _, script in MIGRATIONS:
        if number > version:
            _run(db, script)


def _version(db: sqlite3.Connection, path: Path) -> int:
    (version,) = db.execute(QUERIES["user_version"]).fetchone()
    (application,) = db.execute(QUERIES["application_id"]).fetchone()
    if application not in (0, APPLICATION_ID):
        raise Fatal(Exit.CONFIG, f"{path} is an SQLite file of another program: move it away")
    if version > NEWEST:
        raise Fatal(
            Exit.CONFIG,
            f"{path} has schema version {version}, this program knows {NEWEST}: install the newer program again",
        )
    return int(version)


def _run(db: sqlite3.Connection, script: str) -> None:
    try:
        db.executescript(f"{QUERIES['begin']}\n{script}\n{QUERIES['commit']}")
    except BaseException:
        if db.in_transaction:
            db.execute(QUERIES["rollback"])
        raise

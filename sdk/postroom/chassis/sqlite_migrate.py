"""Bring an SQLite file to the schema of this program: numbered steps, forward only, each in one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sqlite import QUERIES


def migrate(db: sqlite3.Connection, path: Path, *, steps: Sequence[tuple[int, str, str]], application_id: int) -> None:
    """Run those of `steps` (`chassis.sql.migrations`) that the file lacks; each ends by setting `user_version`.

    Raises `Fatal` (78) for a file that is newer than the program or that has another `application_id`.
    """
    version = _version(db, path, len(steps), application_id)
    for number, _, script in steps:
        if number > version:
            _run(db, script)


def _version(db: sqlite3.Connection, path: Path, newest: int, application_id: int) -> int:
    (version,) = db.execute(QUERIES["user_version"]).fetchone()
    (application,) = db.execute(QUERIES["application_id"]).fetchone()
    if application not in (0, application_id):
        raise Fatal(Exit.CONFIG, f"{path} is an SQLite file of another program: move it to another directory")
    if version > newest:
        raise Fatal(
            Exit.CONFIG,
            f"{path} has schema version {version}, this program supports up to "
            f"{newest}: install the newer program again",
        )
    return int(version)


def _run(db: sqlite3.Connection, script: str) -> None:
    try:
        db.executescript(f"{QUERIES['begin']}\n{script}\n{QUERIES['commit']}")
    except BaseException:
        if db.in_transaction:
            db.execute(QUERIES["rollback"])
        raise

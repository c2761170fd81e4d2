"""Bring an outbox file to the schema of this program."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from postroom.chassis import sqlite_migrate
from postroom.chassis.sql import migrations

APPLICATION_ID: Final = int.from_bytes(b"PSTR", "big")  # in the file's header
MIGRATIONS: Final = migrations("outbox")
NEWEST: Final = len(MIGRATIONS)


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Run the migrations that the file lacks; raises `Fatal` (78) for one that is newer or that is not an outbox."""
    sqlite_migrate.migrate(db, path, steps=MIGRATIONS, application_id=APPLICATION_ID)

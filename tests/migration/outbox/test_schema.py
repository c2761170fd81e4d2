"""schema.sql and the migrations lead to the same file."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from outbox.migrate import APPLICATION_ID, NEWEST, migrate
from postroom.chassis.sql import migrations, read_sql


def described(db: sqlite3.Connection) -> tuple[object, ...]:
    objects = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
    headers = tuple(db.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "application_id"))
    return objects, headers, db.execute("SELECT * FROM tally").fetchall()


def test_the_schema_and_the_migrations_are_equal() -> None:
    with closing(sqlite3.connect(":memory:")) as whole, closing(sqlite3.connect(":memory:")) as stepwise:
        whole.executescript(read_sql("outbox", "schema.sql"))
        migrate(stepwise, Path("outbox.db"))
        assert described(whole) == described(stepwise)


def test_each_migration_sets_its_own_number() -> None:
    for number, name, script in migrations("outbox"):
        assert re.findall(r"^PRAGMA user_version = (\d+);", script, re.MULTILINE) == [str(number)], name


def test_migrating_twice_changes_nothing() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        migrate(db, Path("outbox.db"))
        before = described(db)
        migrate(db, Path("outbox.db"))
        assert described(db) == before
        assert db.execute("PRAGMA user_version").fetchone() == (NEWEST,)
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def test_a_migration_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "CREATE TABLE half (x); INSERT INTO nowhere VALUES (1); PRAGMA user_version = 2;"
    monkeypatch.setattr("outbox.migrate.MIGRATIONS", [*migrations("outbox"), (2, "0002_wrong", script)])
    with closing(sqlite3.connect(":memory:")) as db:
        with pytest.raises(sqlite3.OperationalError, match="nowhere"):
            migrate(db, Path("outbox.db"))
        assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'half'").fetchone() == (0,)
        assert db.execute("PRAGMA user_version").fetchone() == (1,)

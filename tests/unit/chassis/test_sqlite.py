import errno
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from inbox import SCHEMA as INBOX
from outbox.model import SCHEMA as OUTBOX
from postroom.chassis.exits import Exit
from postroom.chassis.sqlite import Schema, exit_after, is_broken, is_damage
from postroom.delivery.agents.store import SCHEMA as EVENTS


def failure(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code  # type: ignore[misc]
    return error


@pytest.mark.parametrize(
    "code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_CORRUPT]
)
def test_a_failing_disk_leaves_a_file_that_cannot_be_trusted(code: int) -> None:
    assert is_broken(failure(code))


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CONSTRAINT_CHECK])
def test_what_passes_leaves_the_file_as_it_was(code: int) -> None:
    assert not is_broken(failure(code))


def test_an_error_without_a_code_is_nobodys_fault() -> None:
    assert not is_broken(ValueError())
    assert not is_damage(sqlite3.ProgrammingError())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (failure(sqlite3.SQLITE_BUSY), Exit.UNAVAILABLE),
        (failure(sqlite3.SQLITE_FULL), Exit.TRY_AGAIN),
        (OSError(errno.ENOSPC, "no space"), Exit.TRY_AGAIN),
        (failure(sqlite3.SQLITE_IOERR_WRITE), Exit.IO_ERROR),
        (OSError(errno.EIO, "on fire"), Exit.IO_ERROR),
        (failure(sqlite3.SQLITE_CANTOPEN), Exit.CONFIG),
        (failure(sqlite3.SQLITE_READONLY_DIRECTORY), Exit.CONFIG),
        (PermissionError(errno.EACCES, "not yours"), Exit.CONFIG),
    ],
)
def test_a_start_that_time_may_mend_is_tried_again(error: sqlite3.Error | OSError, code: Exit) -> None:
    assert exit_after(error) == code


@pytest.mark.parametrize("schema", [INBOX, OUTBOX, EVENTS], ids=["inbox", "outbox", "events"])
def test_a_schema_marks_its_file_and_is_applied_once(schema: Schema) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        for _ in range(2):
            schema.migrate(db, Path("a.db"))
            assert db.execute("PRAGMA user_version").fetchone() == (schema.version,)
            assert db.execute("PRAGMA application_id").fetchone() == (schema.application_id,)

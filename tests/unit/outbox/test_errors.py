import errno
import sqlite3

import pytest

from chassis.exits import Exit
from outbox.errors import exit_after, from_sqlite, is_broken, is_damage, write_failed
from postroom.errors import PostroomError, TryAgain


def failure(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code  # type: ignore[misc]
    return error


@pytest.mark.parametrize(
    "code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_CORRUPT]
)
def test_a_failing_disk_ends_the_outbox(code: int) -> None:
    assert is_broken(failure(code))


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CONSTRAINT_CHECK])
def test_what_passes_does_not_end_the_outbox(code: int) -> None:
    assert not is_broken(failure(code))


def test_an_error_without_a_code_is_nobodys_fault() -> None:
    assert not is_broken(ValueError())
    assert not is_damage(sqlite3.ProgrammingError())


@pytest.mark.parametrize(
    ("code", "status", "word"),
    [(sqlite3.SQLITE_FULL, 507, "disk_full"), (sqlite3.SQLITE_BUSY_SNAPSHOT, 503, "outbox_busy")],
)
def test_a_passing_error_may_be_tried_again(code: int, status: int, word: str) -> None:
    error = from_sqlite(failure(code))
    assert isinstance(error, TryAgain)
    assert (error.problem.status, error.code, error.retryable) == (status, word, True)


def test_a_constraint_is_an_error_of_the_program() -> None:
    error = from_sqlite(failure(sqlite3.SQLITE_CONSTRAINT_CHECK))
    assert isinstance(error, PostroomError)
    assert (error.problem.status, error.retryable) == (500, False)


def test_an_error_that_is_not_sqlites_stays_what_it_is() -> None:
    error = KeyError("x")
    assert from_sqlite(error) is error


def test_a_failed_write_names_the_file_and_exits_74(tmp_path) -> None:
    fatal = write_failed(tmp_path / "outbox.db", OSError("disk on fire"))
    assert fatal.exit_code == Exit.IO_ERROR == 74
    assert "outbox.db" in str(fatal)
    assert "disk on fire" in str(fatal)


@pytest.mark.parametrize(
    ("error", "code"),
    [
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

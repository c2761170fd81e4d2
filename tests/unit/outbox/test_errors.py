import sqlite3

import pytest

from outbox.errors import from_sqlite, write_failed
from postroom.chassis.exits import Exit
from postroom.errors import PostroomError, TryAgain


def failure(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code  # type: ignore[misc]
    return error


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

"""SQLite, on one connection: opening a file of ours, its schema, its transactions, and what its errors mean.

Common Pythons link SQLite 3.40.1, whose WAL-reset bug can corrupt a file when one connection writes while another
checkpoints. So one connection does both (`postroom.chassis.store`), and readers are opened read-only.

It needs nothing but the standard library, so that `postroom.once` needs no more either.
"""

import errno
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

from postroom._wire.sql import load_queries, migrations, read_sql, runs_on
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import create_private, refuse_link
from postroom.chassis.wal import check_log

T = TypeVar("T")

QUERIES: Final = load_queries("postroom.chassis", "sqlite.sql")
PARTS: Final = ("", "-wal", "-shm")  # of an SQLite file
_STATEMENTS: Final = 256  # prepared statements a connection keeps
_PRIMARY: Final = 0xFF  # the primary result code within an extended one
_LOCKED_SECONDS: Final = 5.0  # as the busy timeout
_PAUSE_SECONDS: Final = 0.002
_BROKEN: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PROTOCOL,
    }
)


class Schema(NamedTuple):
    """What a kind of file holds: numbered steps, forward only, and the mark of the kind in the file's header.

    `own_page`, if there is one, never changes, and by it a log is recognised as another file's (`Log.is_of_another`).

    The first step is `schema.sql`, the others are the package's migrations, from 0002 on. Each ends by setting
    `user_version` to its number.
    """

    application_id: int
    steps: Mapping[int, str]
    own_page: int = 0

    @classmethod
    def of(cls, package: str, mark: str, file: str = "schema.sql", *, own_page: int = 0) -> Self:
        """Read the schema of `package`; `mark` is four letters."""
        later = {version: sql for version, _, sql in migrations(package, first=2)}
        return cls(int.from_bytes(mark.encode("ascii"), "big"), {1: read_sql(package, file)} | later, own_page)

    @property
    def version(self) -> int:
        """The number of the last step."""
        return max(self.steps)

    def version_of(self, db: sqlite3.Connection, path: Path, *, may_be_new: bool = True) -> int:
        """Return the file's version, 0 for a new one; raises `Fatal` (78) where it is another program's, or too new.

        `Damaged` for one without a version that cannot be new.
        """
        ((version,), (application,)) = (
            db.execute(QUERIES[name]).fetchone() for name in ("user_version", "application_id")
        )
        if application not in (0, self.application_id) or (version and not application):
            raise Fatal(Exit.CONFIG, f"{path} is an SQLite file of another program: take another, or move it away")
        if version > self.version and not runs_on(version, self.version):
            known = f"{path} has schema version {version}, this program supports up to {self.version + 1}"
            raise Fatal(Exit.CONFIG, f"{known}: install the newer program again")
        if not version and not may_be_new:
            raise Damaged("it is empty, though it was in use")
        return int(version)

    def migrate(self, db: sqlite3.Connection, path: Path) -> None:
        """Take the steps that the file lacks, in one transaction, however many processes open it at once."""
        if self.version_of(db, path) >= self.version:
            return
        with transaction(db):
            version = self.version_of(db, path)
            for script in (self.steps[number] for number in sorted(self.steps) if number > version):
                statement = ""
                for line in script.splitlines(keepends=True):  # by statements: `executescript` would commit before it
                    statement += line
                    if sqlite3.complete_statement(statement):
                        db.execute(statement)
                        statement = ""


def open_writer(
    path: Path, schema: Schema, *, pragmas: str | None = None, check: bool = False, was_opened: bool = False
) -> sqlite3.Connection:
    """Open the connection that writes to a file, and bring the file to its schema; a new one gets mode 0600.

    Its log is always checked, and with `check` all of it. One that `was_opened` before and has no schema was emptied,
    or its log was removed, which had all of it. A file that is refused stays as it is, and so does its log.

    Raises `Damaged`, `Fatal` (78) as `Schema` does, `sqlite3.Error`, and `OSError`, also for a link in its place.
    """
    for part in PARTS:
        refuse_link(Path(f"{path}{part}"))
    refuse_log_alone(path)
    may_be_new = not was_opened or not path.exists()
    create_private(path)
    if damage := check_log(path, schema.own_page):
        raise Damaged(damage)
    try:
        db = _connect(path, "rw")
        try:
            schema.version_of(db, path, may_be_new=may_be_new)
            # a file that another program writes to is refused a log at once, whatever the busy timeout
            patiently(lambda: db.executescript(pragmas or QUERIES["write_pragmas"]))
            if check:
                quick_check(db)
            schema.migrate(db, path)
        except BaseException:
            db.close()
            raise
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            raise Damaged(str(error)) from error
        raise
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that only reads; raises `Damaged` where only the log is there."""
    refuse_log_alone(path)
    db = _connect(path, "ro")
    db.executescript(QUERIES["read_pragmas"])
    return db


def log_alone(path: Path) -> bool:
    """Return whether only the log of a file is there, or an empty file beside it."""
    log = Path(f"{path}-wal")
    return log.exists() and (not path.exists() or (log.stat().st_size > 0 and not path.stat().st_size))


def refuse_log_alone(path: Path) -> None:
    """Raise `Damaged` for a log without its file: SQLite would delete it, even where it only reads."""
    if log_alone(path):
        raise Damaged(f"it is gone or empty, but its log {path.name}-wal is there; put the file back if you have it")


def open_copy(path: Path) -> sqlite3.Connection:
    """Open an empty file for a copy of another, which the thread of a store writes."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.executescript(QUERIES["copy_pragmas"])
    return db


def open_still(path: Path) -> sqlite3.Connection:
    """Open a whole file that nothing writes, without creating a log next to it."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)


def quick_check(db: sqlite3.Connection) -> None:
    """Raise `Damaged` with the first fault of a file, if it has any."""
    (verdict,) = db.execute(QUERIES["quick_check"]).fetchone()
    if verdict != "ok":
        raise Damaged(verdict.rpartition("\n")[2])  # the lines before it name the file


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=_STATEMENTS)


def patiently(call: Callable[[], T]) -> T:
    """Call `call` until no other program has the file locked, for 5 s at most, and return what it returns.

    SQLite's own wait looks again after up to 0.1 s. Between writers that are busy all the time a file is free for far
    shorter moments, and one that finds none of them waits for as long as the others are busy.
    """
    deadline = time.monotonic() + _LOCKED_SECONDS
    while True:
        try:
            return call()
        except sqlite3.OperationalError as error:
            if not is_locked(error) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block writes, all or nothing."""
    try:
        db.execute(QUERIES["begin"])
        yield
        db.execute(QUERIES["commit"])
    except BaseException:
        if db.in_transaction:
            db.execute(QUERIES["rollback"])
        raise


def in_snapshot(db: sqlite3.Connection, read: Callable[[], T]) -> T:
    """Call `read` in one read transaction, so that all its queries see the same rows; return what it returns."""
    db.execute(QUERIES["begin_read"])
    try:
        return read()
    finally:
        db.execute(QUERIES["rollback"])


class Damaged(Exception):
    """The file's content is wrong; the text is the first fault that was found."""


def result_code(error: BaseException) -> int:
    """Return SQLite's primary result code of `error`, 0 where it has none."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & _PRIMARY


def is_broken(error: BaseException) -> bool:
    """Return whether the file or the disk can no longer be trusted after `error`."""
    return result_code(error) in _BROKEN


def is_damage(error: BaseException) -> bool:
    """Return whether `error` says that the file's content is wrong."""
    return result_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_locked(error: BaseException) -> bool:
    """Return whether `error` says that another connection has the file locked."""
    return result_code(error) == sqlite3.SQLITE_BUSY


def is_full(error: BaseException) -> bool:
    """Return whether `error` says that the disk is full."""
    number = error.errno if isinstance(error, OSError) else None
    return result_code(error) == sqlite3.SQLITE_FULL or number in (errno.ENOSPC, errno.EDQUOT)


def exit_after(error: sqlite3.Error | OSError) -> Exit:
    """Return the exit code of a start that fails with `error`: 78 where only an operator can help.

    75 for a full disk, 74 for a failing one, and 69 for a file that another program has locked.
    """
    if is_locked(error):
        return Exit.UNAVAILABLE
    if is_full(error):
        return Exit.TRY_AGAIN
    if result_code(error) == sqlite3.SQLITE_IOERR or (isinstance(error, OSError) and error.errno == errno.EIO):
        return Exit.IO_ERROR
    return Exit.CONFIG


def exit_after_opening(path: Path, error: sqlite3.Error | OSError) -> Exit:
    """Return the same where the file at `path` could not be opened.

    SQLite has one error code for every reason, a full disk and a wrong owner alike. So each of its files is created
    where it is missing; once that works, another start will too.
    """
    if result_code(error) != sqlite3.SQLITE_CANTOPEN:
        return exit_after(error)
    try:
        for part in PARTS:
            create_private(Path(f"{path}{part}"))
    except OSError as cause:
        return exit_after(cause)
    return Exit.TRY_AGAIN

"""A store: one SQLite file of ours, from its lock to its close. Rooms bring a schema, SQL, and their operations.

    store = await Store.open(OwnedFile(directory, "inbox"), SCHEMA, ANSWERS, damaged=…, prepare=…)
    count = await store.write(lambda db: db.execute(…).rowcount)
    rows = await store.read(lambda db: db.execute(…).fetchall())
    await store.close()

What it owns:

lock        `OwnedFile`: one process has the file from start to end, and the next one knows whether it stopped in order.
            Processes that share a file (an agent's) take turns instead, and pass its path; what they do here, from
            opening to closing, they do in a turn.
opening     no link is followed, others' and newer files are refused, the log is checked, and after an unclean stop all
            of the file; then it is brought to its schema.
writing     one connection on a thread of its own writes and checkpoints (`postroom.chassis.sqlite` says why).
            Operations share a transaction: while one is on its way to the disk the next group gathers, so a lone
            operation waits for one fsync and a thousand concurrent ones share it. Each is answered after the commit,
            and fares as if it had been alone: where one fails, everything is undone and each runs again by itself.
checkpoints after the answers, and every MiB: SQLite's own would run inside a commit, before its answers, and every
            4 MB, for which everybody waits 13 to 18 ms. Here it is 5 to 7 ms, which mostly pass while the event loop
            reads the next requests. A log that readers keep from starting over waits for them once it is large, but
            briefly.
failure     a full disk refuses what does not fit, and nothing has changed. After any other error of the disk or the
            file it is not known whether the transaction happened: every waiting operation fails with that, `failed` is
            set, and the store takes nothing any more. The same where the file is no longer at its path after a commit.
copying     a copy is made through the same connection, a few pages at a time, and groups are written between them.
            SQLite keeps the copy up to date with what they change. So there is no long read, which would keep the log
            from starting over, and at its end the copy is what the file is at that moment.
close       what is queued is finished, the log emptied; `clean` says whether all of it lies in the file itself.

The thread goes from one group to the next by itself, as long as any waits: coming back to the event loop in between
would take as long as the transaction, since the loop finishes first what it has in hand.
"""

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

import aiosqlite
import structlog

from postroom.chassis import sqlite
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import hand_over, open_private, private_directory, why_refused

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Work = Callable[[sqlite3.Connection], T]
Outcome = Any  # what an operation returns, or the exception that it fails with

WAL_LIMIT: Final = 64 * 1024 * 1024  # bytes; docs/contract/send.md#send-46
CHECKPOINT_BYTES: Final = 1024 * 1024  # that the log gathers, about
_RESTART_AT: Final = WAL_LIMIT // 4  # bytes; beyond it the readers are waited for
_GROUPS_A_CHECKPOINT: Final = 4  # of large groups: after each one it would cost as much as the group
_GROUP: Final = 1000  # operations of a transaction
_COPIED_AT_ONCE: Final = 64  # pages of a copy: some 0.3 ms for which everybody waits
_COMMIT_BYTES: Final = 4 * 4096  # that a small transaction adds to the log, about
_STALLED_AFTER: Final = 30.0  # seconds that one transaction may take before the store counts as stuck
_STATE_WIDTH: Final = 20  # characters of a lock file: always the same, so that one write replaces another
_CLOSED: Final = "closed"
_ADVICE: Final = {
    Exit.UNAVAILABLE: "which other program has it open",
    Exit.TRY_AGAIN: "the space on its disk",
    Exit.IO_ERROR: "its disk, and the space on it",
}

_log = structlog.get_logger(__name__)


class OwnedFile:
    """A locked `<directory>/<name>.db`; `unclean` says that its last owner did not stop in order.

    The process that owns the file holds `<name>.lock`, next to it, with flock(2); that has the process's id in it until
    a clean stop writes `closed` over it. A lock file with an id that no process holds means that the last owner was
    killed. Either is written once the file has its schema (`was_opened`), so one without any has lost it. Where there
    was no lock file, the file has had no owner (`is_first`).
    """

    def __init__(self, directory: Path, name: str, *, may_be_anothers: bool = False) -> None:
        """Create the directory (0700) if need be and take the lock; raises `Fatal` where another process holds it.

        The same where others own the directory or may write to it; `may_be_anothers` lets root work for its owner.
        """
        self._ended = False
        self.path = directory.resolve() / f"{name}.db"
        try:
            private_directory(directory, may_be_anothers=may_be_anothers)
            lock = directory / f"{name}.lock"
            self.is_first = not lock.exists()
            self._lock = open_private(lock)
            if may_be_anothers:
                hand_over(self._lock, directory)
        except OSError as error:
            why = why_refused(error, "configure another")
            raise Fatal(sqlite.exit_after(error), f"cannot use the state directory {directory}: {why}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = self._read()
            os.close(self._lock)
            detail = f"the state directory {directory} is in use by process {owner}: stop it first"
            raise Fatal(Exit.UNAVAILABLE, detail) from error
        self.was_opened = bool(self._read())
        self.unclean = self._read() not in ("", _CLOSED)

    @property
    def damaged(self) -> Path | None:
        """The file that was set aside last, if any."""
        aside = {file.name.rpartition("-")[2]: file for file in self.path.parent.glob(f"{self.path.name}.damaged-*")}
        times = [time for time in aside if time.isdigit()]  # the others are WALs
        return aside[max(times, key=int)] if times else None

    def clear(self, now: int) -> Path | None:
        """Set aside what there is of the file; returns where the file is then, None where there was none.

        SQLite would read a log that lies there alone into any new file: one that a kill left behind follows its file.
        """
        if self.path.exists():
            return set_aside(self.path, now)
        damaged = self.damaged
        if damaged is None or Path(f"{damaged}-wal").exists():
            set_aside(self.path, now)
        else:
            move(self.path, damaged)
        return None

    def begin(self) -> None:
        """Note on disk which process has the file, and that it is open."""
        self._write(str(os.getpid()))

    def end(self, *, clean: bool) -> None:
        """Unlock; a `clean` end says that the file needs no check. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if clean:
            with contextlib.suppress(OSError):  # then the next start checks the file
                self._write(_CLOSED)
        os.close(self._lock)

    def _write(self, state: str) -> None:
        os.pwrite(self._lock, f"{state:<{_STATE_WIDTH}}".encode(), 0)
        os.fsync(self._lock)

    def _read(self) -> str:
        return os.pread(self._lock, _STATE_WIDTH, 0).decode("ascii", "replace").strip()


def set_aside(database: Path, now: int) -> Path:
    """Rename the file with its WAL to `<name>.damaged-<now>` (ms); the name is new, so nothing is ever overwritten."""
    while (damaged := database.with_name(f"{database.name}.damaged-{now}")).exists():
        now += 1
    move(database, damaged)
    return damaged


def move(database: Path, destination: Path) -> None:
    """Rename the parts of an SQLite file, the database first: without it nothing opens the others."""
    for part in sqlite.PARTS:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{database}{part}").rename(f"{destination}{part}")


def remove(database: Path) -> None:
    """Remove what there is of an SQLite file."""
    for part in sqlite.PARTS:
        Path(f"{database}{part}").unlink(missing_ok=True)


class Connection(aiosqlite.Connection):
    """An aiosqlite connection that runs a whole function on its thread.

    aiosqlite has a coroutine per statement, each a hop to its thread and back. A transaction is one hop here: `run`
    hands a function over through the same queue that those coroutines use (`_execute`, with `_conn`), for which
    aiosqlite has no public name. The thread (`_thread`) is a daemon thread, so that a process that fails ends, whatever
    it left open. These are all the private names of aiosqlite; a test pins them, and its upper bound.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connect, iter_chunk_size=1)
        self._thread.daemon = True

    @classmethod
    async def open(cls, connect: Callable[[], sqlite3.Connection]) -> Self:
        """Return a connection that `connect` made on its thread, or raise what that raised."""
        connection = cls(connect)
        try:
            await connection
        except BaseException:
            connection._thread.join()  # now: its last callback must not reach a loop that is closed
            raise
        return connection

    async def run(self, function: Work[T]) -> T:
        """Call `function` with the SQLite connection on its thread and return what it returns."""
        result: T = await self._execute(function, self._conn)  # type: ignore[no-untyped-call]
        return result


class Answers(NamedTuple):
    """The errors that a room raises for an operation that was not done."""

    refused: Callable[[Exception], Exception]  # it failed with this by itself, and nothing of it was written
    unknown: Callable[[Path, Exception], Exception]  # the file or the disk failed: nobody knows whether it was done
    closed: Callable[[], Exception]  # the store takes nothing any more


class Operation(Protocol[T_co]):
    """Something that a transaction does."""

    def run(self, transaction: Any) -> T_co:
        """Do it on the connection's thread; the store's `Transactor` passes `transaction`."""


class Write(NamedTuple):
    """A function of the connection, as an operation."""

    run: Work[Any]
    size: int  # bytes that it adds to the log, about


class Submission(NamedTuple):
    """An operation, and the future of its caller."""

    number: int  # in the order of arrival
    operation: Any
    future: asyncio.Future[Any]


class Queue:
    """The operations that wait: the loop appends, the connection's thread takes."""

    def __init__(self) -> None:
        self._number = 0
        self._arrived: deque[Submission] = deque()
        self._patient: deque[Submission] = deque()  # go with whatever comes next

    def __bool__(self) -> bool:
        return bool(self._arrived)

    def append(self, operation: Any, future: asyncio.Future[Any], *, patient: bool = False) -> None:
        """Put an operation at the end; a patient one waits for another."""
        self._number += 1
        (self._patient if patient else self._arrived).append(Submission(self._number, operation, future))

    def flush(self) -> None:
        """Make the patient ones wait no longer."""
        self._arrived.extend(self.take_patient())

    def take_patient(self) -> list[Submission]:
        """Take the patient ones."""
        taken = []
        with contextlib.suppress(IndexError):  # the loop and the thread may take at once
            while True:
                taken.append(self._patient.popleft())
        return taken

    def take(self, most: int) -> list[Submission]:
        """Take the next group, of `most` operations and the patient ones."""
        return self.take_patient() + [self._arrived.popleft() for _ in range(min(most, len(self._arrived)))]

    def drain(self) -> Iterable[Submission]:
        """Take everything."""
        return self.take(len(self._arrived))


class Transactor:
    """Runs groups of operations on the connection's thread: here `Write`s, each with the connection."""

    def __init__(self) -> None:
        self.logged = 0  # bytes that its transactions have added to the log since it was made, about

    def transact(self, db: sqlite3.Connection, group: Sequence[Any]) -> list[Outcome]:
        """Run a group in one transaction; returns the outcome of each once that is on disk, or undoes it and raises."""
        with sqlite.transaction(db):
            outcomes = [write.run(db) for write in group]
        self.logged += _COMMIT_BYTES + sum(write.size for write in group)
        return outcomes

    def alone(self, operation: Any, attempt: Callable[[Any], Outcome]) -> Outcome:
        """Run an operation, or each of its parts, in a transaction of its own with `attempt`."""
        return attempt(operation)

    @property
    def has_chores(self) -> bool:
        """Whether there is something to do although no operation waits."""
        return False

    @property
    def chores_in(self) -> float | None:
        """Seconds after which there may be, if no operation comes before; None for never."""
        return None

    def do_chores(self, db: sqlite3.Connection) -> None:
        """Do the chores; operations wait for it. What this raises fails the store."""


class Moved(Exception):
    """The file that is open is no longer at its path."""


class Store:
    """An open store; any task of one event loop may call it."""

    def __init__(
        self,
        file: OwnedFile | Path,
        connection: Connection,
        reader: Connection | None,
        answers: Answers,
        *,
        transactor: Transactor | None = None,
        queue: Queue | None = None,
        group: int = _GROUP,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self._owned = file if isinstance(file, OwnedFile) else None
        self.path = file if isinstance(file, Path) else file.path
        self._connection = connection
        self._reader = reader
        self._answers = answers
        self._transactor = transactor or Transactor()
        self._waiting = Queue() if queue is None else queue
        self._group = group
        self._checkpoint_bytes = checkpoint_bytes
        self._inode = self.path.stat().st_ino
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._stopping = False
        self._closed = False
        self._busy_since: float | None = None
        self._lacked_space = False  # at the last write
        self._moved = 0  # of what the transactor logged: moved into the file
        self.failed = asyncio.Event()  # set once the file or the disk failed
        self.failure: Exception | None = None  # with what
        self.transactions = 0  # committed
        self.operations = 0  # answered
        self._task = asyncio.create_task(self._run(), name=f"{self.path.stem} writer")

    @classmethod
    async def open(
        cls,
        file: OwnedFile | Path,
        schema: sqlite.Schema,
        answers: Answers,
        *,
        prepare: Work[object],
        damaged: Callable[[Path, str], None],
        was_opened: bool = False,
        **options: Any,
    ) -> Self:
        """Open, check and migrate the file, and call `prepare` in a transaction before everything else.

        `damaged` is called with what is wrong with a file: it raises, or moves that away for a new one. `was_opened`
        says of a shared file that it has been open before; an owned one knows that by itself. `options` are the
        constructor's. An owned file is unlocked where this raises: `Fatal`, 78 for a file that has to be repaired by
        hand, 69 for one that another program has locked, 75 or 74 where the disk is full or fails, or what `prepare`
        and `damaged` raise.
        """
        owned = file if isinstance(file, OwnedFile) else None
        path = file if isinstance(file, Path) else file.path
        unclean, was_opened = (False, was_opened) if owned is None else (owned.unclean, owned.was_opened)
        connect = partial(sqlite.open_writer, path, schema, check=unclean, was_opened=was_opened)
        async with contextlib.AsyncExitStack() as undo:
            if owned is not None:
                undo.callback(owned.end, clean=False)
            try:
                try:
                    connection = await Connection.open(connect)
                except sqlite.Damaged as fault:
                    damaged(path, str(fault))
                    connection = await Connection.open(connect)
                undo.push_async_callback(connection.close)
                if owned is not None:
                    owned.begin()

                def begin(db: sqlite3.Connection) -> None:
                    with sqlite.transaction(db):
                        prepare(db)

                await connection.run(begin)
                reader = None
                if owned is not None:
                    reader = await Connection.open(partial(sqlite.open_reader, path))
            except (sqlite3.Error, OSError) as error:
                code = sqlite.exit_after_opening(path, error)
                reason = error.strerror if isinstance(error, OSError) else error
                advice = _ADVICE.get(code, "its owner, its mode and the disk")
                raise Fatal(code, f"cannot open {path}: {reason}; check {advice}") from error
            undo.pop_all()
        return cls(file, connection, reader, answers, **options)

    async def close(self) -> None:
        """Finish what is queued, empty the log and close the file; a second call does nothing."""
        first = not self._closed
        self._closed = self._stopping = True
        self._flush()
        if first and self._reader is not None:
            await self._reader.close()
        await self._task
        if first:
            clean = self.failure is None
            if clean:
                try:
                    await self._connection.run(lambda db: db.execute(sqlite.QUERIES["checkpoint_truncate"]).fetchall())
                except sqlite3.Error as error:
                    clean = False
                    advice = "the next start continues"
                    _log.warning("checkpoint_failed", error=str(error), wal_bytes=self.wal_bytes, advice=advice)
            await self._connection.close()
            if self._owned is not None:
                self._owned.end(clean=clean)

    @property
    def healthy(self) -> bool:
        """Whether it takes operations and gets on with them."""
        stalled = self._busy_since is not None and time.monotonic() - self._busy_since > _STALLED_AFTER
        return self.failure is None and not self._stopping and not stalled

    @property
    def disk_full(self) -> bool:
        """Whether the last write was refused for want of space, and there is still hardly any."""
        if not self._lacked_space:
            return False
        try:
            disk = os.statvfs(self.path.parent)
        except OSError:  # it was removed, which fails the store
            return False
        return disk.f_bavail * disk.f_frsize < CHECKPOINT_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes of the file; one that was moved fails the store, since a program that starts again does not see it."""
        try:
            return self._size()
        except Moved as error:
            self._end(error)
            raise self._answers.unknown(self.path, error) from error

    @property
    def wal_bytes(self) -> int:
        """Bytes of the write-ahead log on disk."""
        try:
            return Path(f"{self.path}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def submit(self, operation: Operation[T], *, patience: float = 0.0) -> asyncio.Future[T]:
        """Queue `operation`; the future is done when its transaction is on disk, or has one of the room's errors.

        For up to `patience` seconds it waits for a transaction that is made anyway.
        """
        if self.failure is not None:
            raise self._answers.unknown(self.path, self.failure)
        if self._stopping:
            raise self._answers.closed()
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(operation, future, patient=patience > 0)
        if patience > 0:
            self._loop.call_later(patience, self._flush)
        else:
            self._wake.set()
        return future

    async def write(self, work: Work[T], size: int = 0) -> T:
        """Submit a function of the connection that adds about `size` bytes, and return what it returns.

        It runs again, alone, where another of its group fails.
        """
        future: asyncio.Future[T] = self.submit(Write(work, size))
        return await future

    async def read(self, work: Work[T]) -> T:
        """Call a function with the connection that only reads, beside the writing; keep its transactions short."""
        if self._reader is None or self._closed:
            raise self._answers.closed()
        try:
            return await self._reader.run(work)
        except sqlite3.Error as error:
            if sqlite.is_broken(error):
                self._end(error)
            raise self._answers.refused(error) from error

    async def run(self, work: Work[T]) -> T:
        """Call a function with the connection that writes, between two groups."""
        return await self._connection.run(work)

    async def copy(self, target: sqlite3.Connection, go_on: Callable[[], None]) -> None:
        """Copy the file into the empty one of `target`, as it is when this returns.

        `go_on` is called on the connection's thread between a few pages and the next, and ends the copy with what it
        raises. Raises the room's `closed` where the store closes meanwhile, `sqlite3.Error` for a copy that can't be
        written.
        """

        def work(db: sqlite3.Connection) -> None:
            def write_between(*_: int) -> None:
                if self._stopping or not self._drain(db):
                    raise self._answers.closed()
                go_on()

            db.backup(target, pages=_COPIED_AT_ONCE, progress=write_between)

        await self._connection.run(work)

    async def _run(self) -> None:
        while not (self._stopping and not self._waiting):
            if self._waiting or self._transactor.has_chores:
                await self._connection.run(self._drain)
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._transactor.chores_in)

    # On the connection's thread

    def _drain(self, db: sqlite3.Connection) -> bool:
        """Commit group after group until none waits, or one fails: False. Each is answered by the loop, in order."""
        while self._waiting or (self._transactor.has_chores and not self._stopping):
            self._busy_since = time.monotonic()
            logged = self._transactor.logged
            group = self._waiting.take(self._group) if self._waiting else []
            try:
                outcomes = self._commit(group, db) if group else []
                self._size()
                if self._owned is not None:
                    self._loop.call_soon_threadsafe(self._answer, group, outcomes)
                    group = []
                self._transactor.do_chores(db)
                self._checkpoint(db, self._transactor.logged - logged)
            except Exception as error:  # noqa: BLE001 - every waiter must hear of it, and the store must end
                self._loop.call_soon_threadsafe(self._fail, group, error)
                return False
            finally:
                self._busy_since = None
            if self._owned is None:  # the process with the next turn may write as soon as this one is answered
                self._loop.call_soon_threadsafe(self._answer, group, outcomes)
        return True

    def _size(self) -> int:
        """Return how large the file is; raises `Moved`."""
        with contextlib.suppress(FileNotFoundError):
            status = self.path.stat()
            if status.st_ino == self._inode:
                return status.st_size
        raise Moved("it was removed or replaced while it was open, so put it back")

    def _commit(self, group: list[Submission], db: sqlite3.Connection) -> list[Outcome]:
        """Run the group in one transaction, or each alone where that fails; raises where the file is to blame."""
        try:
            return self._transact(db, [waiting.operation for waiting in group])
        except Exception as error:  # any other: its operation fails alone
            if sqlite.is_broken(error):
                raise
            attempt = partial(self._attempt, db)
            return [self._transactor.alone(waiting.operation, attempt) for waiting in group]

    def _transact(self, db: sqlite3.Connection, operations: Sequence[Any]) -> list[Outcome]:
        before = db.total_changes
        outcomes = self._transactor.transact(db, operations)
        if db.total_changes > before:  # one that changes nothing needs no space
            self._lacked_space = False
        return outcomes

    def _attempt(self, db: sqlite3.Connection, operation: Any) -> Outcome:
        try:
            return self._transact(db, [operation])[0]
        except Exception as error:
            if sqlite.is_broken(error):
                raise
            self._lacked_space = self._lacked_space or sqlite.is_full(error)
            return self._answers.refused(error)

    def _checkpoint(self, db: sqlite3.Connection, last: int) -> None:
        """Move the log into the file once it holds enough; more after a large group, which logged `last` bytes.

        With a restart it waits for the readers, briefly, so that the log starts over although there are always some.
        """
        if self._transactor.logged - self._moved < max(
            self._checkpoint_bytes, min(_GROUPS_A_CHECKPOINT * last, _RESTART_AT // 2)
        ):
            return
        try:
            if restart := self.wal_bytes > _RESTART_AT:
                db.execute(sqlite.QUERIES["wait_briefly"])
            _, frames, moved = db.execute(sqlite.QUERIES["checkpoint_restart" if restart else "checkpoint"]).fetchone()
            if restart:
                db.execute(sqlite.QUERIES["wait"])
        except sqlite3.Error as error:
            if sqlite.is_broken(error):
                raise
            # A full disk, say: the log keeps what was committed, and the next transaction tries again.
            _log.warning("checkpoint_failed", file=str(self.path), error=str(error), wal_bytes=self.wal_bytes)
            return
        self._moved = self._transactor.logged
        if frames > moved and self.wal_bytes > _RESTART_AT:
            reason = "a reader blocks it"
            _log.warning(
                "wal_not_emptied", file=str(self.path), wal_bytes=self.wal_bytes, limit=WAL_LIMIT, reason=reason
            )

    # On the loop

    def _flush(self) -> None:
        self._waiting.flush()
        self._wake.set()

    def _answer(self, group: list[Submission], outcomes: list[Outcome]) -> None:
        if group:
            self.transactions += 1
            self.operations += len(group)
            for waiting, outcome in zip(group, outcomes, strict=True):
                _settle(waiting.future, outcome)

    def _fail(self, group: list[Submission], error: Exception) -> None:
        """Fail every operation that waits, and take nothing any more."""
        for waiting in (*group, *self._waiting.drain()):
            _settle(waiting.future, self._answers.unknown(self.path, error))
        self._end(error)

    def _end(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._stopping = True
        _log.critical("store_failed", file=str(self.path), exc_info=error)
        self.failed.set()
        self._wake.set()


def _settle(future: asyncio.Future[Any], outcome: Outcome) -> None:
    if future.done():  # the caller has cancelled it
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

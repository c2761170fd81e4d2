"""The one writer: it gathers operations, commits them in groups, answers, and checkpoints.

While one transaction is on its way to the disk the next group gathers, so a lone send waits for one fsync and a
thousand concurrent ones share it. The connection's thread goes from one group to the next by itself, as long as any
waits: coming back to the event loop in between would take as long as the transaction, since the loop finishes first
what it has in hand. A transaction is few steps of SQLite, each of which gives the interpreter lock away and waits to
get it back from a busy loop.

Whose operations wait is looked at before a group is made: where there are several callers each has its part of it, in
rotation, and none more than `PART_ROWS`, so that a caller with a few large batches does not make the others wait for
all of them. A caller that is alone fills the group.

Checkpoints run on the same connection (`postroom.chassis.sqlite`). SQLite's own would run inside a commit, before its
answers, and every 4 MB: everybody waits 13 to 18 ms for one. Here they run after the group has been answered, and
every 1 MiB (`outbox.checkpoint_bytes`): 5 to 7 ms, which mostly pass while the event loop reads the next requests.
They cost a tenth of the throughput instead of a twentieth. A group of batches writes more than that by itself: several
of them share a checkpoint.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from outbox.accepting import Accept
from outbox.errors import outcome_unknown, stopped, write_failed
from outbox.settings import OutboxSettings
from outbox.transact import Transactor
from outbox.transaction import Operation
from postroom.chassis.exits import Fatal
from postroom.chassis.sqlite import QUERIES, is_broken, is_full
from postroom.chassis.store import Connection

T = TypeVar("T")

WAL_LIMIT: Final = 64 * 1024 * 1024  # bytes; docs/contract/send.md#send-46
WARN_AT: Final = 0.8  # of max_bytes
_RESTART_AT: Final = WAL_LIMIT // 4  # bytes; beyond it the readers are waited for
_GROUPS_A_CHECKPOINT: Final = 4  # of large groups: after each one it would cost as much as the group
_PRUNE_SECONDS: Final = 0.02  # that slices of a prune may take between two groups
_PRUNE_AGAIN_SECONDS: Final = 5.0  # after one that could not be
PART_ROWS: Final = 64  # of a group that one caller may fill beside others: a millisecond
_PRESENT_SECONDS: Final = 60.0  # after its last send, in which a caller counts as one that others share with
_STALLED_AFTER: Final = 30.0  # seconds that one transaction may take before the writer counts as stuck

_log = structlog.get_logger(__name__)


class Waiting(NamedTuple):
    """An operation, and the future of who waits for it."""

    number: int  # in the order of arrival
    operation: Operation[Any]
    future: asyncio.Future[Any]


class Queue:
    """What waits, in a line for each caller; the loop appends, the connection's thread takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._number = 0
        self._arrived: deque[Waiting] = deque()
        self._lines: dict[int | None, deque[Waiting]] = {}  # the thread's own
        self._clock = clock
        self._callers: dict[int, float] = {}  # when each was last seen

    def __bool__(self) -> bool:
        return bool(self._arrived or self._lines)

    def append(self, operation: Operation[Any], future: asyncio.Future[Any]) -> None:
        """Put an operation at the end of its caller's line."""
        self._number += 1
        self._arrived.append(Waiting(self._number, operation, future))

    def take(self, most: int) -> list[Waiting]:
        """Take operations of `most` rows together, and at least one, each caller's first, then each one's next.

        They are returned in the order in which they came.
        """
        self._sort()
        if len(self._lines) == 1:
            return self._take_of_one(most)
        most_each = min(most, PART_ROWS) if len(self._callers) > 1 else most
        group: list[Waiting] = []
        taken: dict[int | None, int] = {}
        rows = 0
        going = True
        while going:
            going = False
            for caller, line in list(self._lines.items()):
                size = line[0].operation.rows
                has_its_part = caller in taken and taken[caller] + size > most_each
                if group and (has_its_part or rows + size > most):
                    continue
                group.append(line.popleft())
                del self._lines[caller]
                if line:
                    self._lines[caller] = line  # behind the others, whom the next group may have room for first
                taken[caller] = taken.get(caller, 0) + size
                rows += size
                going = True
        return sorted(group, key=itemgetter(0))

    def _take_of_one(self, most: int) -> list[Waiting]:
        """Take as much where one caller alone waits."""
        ((caller, line),) = self._lines.items()
        group = [line.popleft()]
        rows = group[0].operation.rows
        most = min(most, PART_ROWS) if len(self._callers) > 1 else most
        while line and (rows := rows + line[0].operation.rows) <= most:
            group.append(line.popleft())
        if not line:
            del self._lines[caller]
        return group

    def drain(self) -> Iterator[Waiting]:
        """Take everything."""
        self._sort()
        for line in self._lines.values():
            yield from line
        self._lines.clear()

    def _sort(self) -> None:
        now = self._clock()
        arrived, lines = self._arrived, self._lines
        while arrived:
            waiting = arrived.popleft()
            caller = waiting.operation.caller.uid if isinstance(waiting.operation, Accept) else None
            if (line := lines.get(caller)) is None:
                line = lines[caller] = deque()
            line.append(waiting)
        self._callers |= {caller: now for caller in lines if caller is not None}
        for caller, seen in list(self._callers.items()):
            if now - seen > _PRESENT_SECONDS:
                del self._callers[caller]


class Writer:
    """Owns the write connection; `submit` is how anything gets into the file."""

    def __init__(self, connection: Connection, path: Path, transactor: Transactor, settings: OutboxSettings) -> None:
        self._connection = connection
        self._path = path
        self._transactor = transactor
        self.confirm_clock = transactor.confirm_clock
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._waiting = Queue()
        self._wake = asyncio.Event()
        self._stopping = False
        self._closed = False
        self.clean = False  # after `close`: whether everything lies in the file itself
        self._warned = False
        self._prune_after = 0.0  # by the monotonic clock
        self._busy_since: float | None = None
        self._wal = Path(f"{path}-wal")
        self.failed = asyncio.Event()
        self.failure: Fatal | None = None
        self.transactions = 0  # committed
        self.operations = 0  # answered
        self._task = asyncio.create_task(self._run(), name="outbox writer")

    @property
    def wal_bytes(self) -> int:
        """Bytes of the write-ahead log on disk."""
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def healthy(self) -> bool:
        """Whether the writer takes operations and gets on with them."""
        stalled = self._busy_since is not None and time.monotonic() - self._busy_since > _STALLED_AFTER
        return self.failure is None and not self._stopping and not stalled

    def submit(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Queue `operation`; the future is done when its transaction is on disk, or with the error it failed with."""
        if self.failure is not None:
            raise outcome_unknown()
        if self._stopping:
            raise stopped()
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(operation, future)
        self._wake.set()
        return future

    async def close(self) -> None:
        """Finish what is queued, checkpoint and close the connection. A second call does nothing."""
        first = not self._closed
        self._closed = self._stopping = True
        self._wake.set()
        await self._task
        if first:
            self.clean = self.failure is None and await self._empty_log()
            await self._connection.close()

    async def _run(self) -> None:
        while not (self._stopping and not self._waiting):
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._connection.run(self._drain)

    # On the connection's thread

    def _drain(self, db: sqlite3.Connection) -> None:
        """Commit group after group until none waits, or one fails; each is answered by the loop, in order."""
        going = True
        while going and (self._waiting or (self._may_prune() and not self._stopping)):
            self._busy_since = time.monotonic()
            before = self._transactor.space.waiting
            going = not self._waiting or self._commit(self._waiting.take(self._settings.max_group_rows), db)
            going = going and self._prune(db, self._transactor.space.waiting - before) and self._checkpoint(db)
            self._busy_since = None

    def _commit(self, group: list[Waiting], db: sqlite3.Connection) -> bool:
        """Run the group's transaction and have everybody answered; False where the file can be used no more."""
        try:
            outcomes = self._transactor.run([waiting.operation for waiting in group], db)
        except Exception as error:  # noqa: BLE001 - every waiter must hear of it, and the process must end
            self._loop.call_soon_threadsafe(self._fail, group, error)
            return False
        self._loop.call_soon_threadsafe(self._answer, group, outcomes)
        return True

    def _may_prune(self) -> bool:
        return self._transactor.short and time.monotonic() >= self._prune_after

    def _prune(self, db: sqlite3.Connection, added: int) -> bool:
        """Where room is short, make twice the room that was added, in slices; False where the file can be used no more.

        Whoever waits meanwhile waits for a slice, or for as many as take `_PRUNE_SECONDS`.
        """
        made, until = 0, time.monotonic() + _PRUNE_SECONDS
        while self._may_prune() and (not made or (made < 2 * added and time.monotonic() < until)):
            try:
                freed = self._transactor.prune(db)
            except Exception as error:  # noqa: BLE001 - what it was decides whether the file is used on
                if not is_full(error):
                    self._loop.call_soon_threadsafe(self._fail, [], error)
                    return False
                _log.warning("not_pruned", error=str(error), advice="free some space on the disk of the outbox")
                freed = 0
            if not freed:
                self._prune_after = time.monotonic() + _PRUNE_AGAIN_SECONDS
            made += freed
        return True

    def _checkpoint(self, db: sqlite3.Connection) -> bool:
        """Move the log into the file once it holds enough; False where the file can be used no more."""
        if self._transactor.logged_bytes < self._checkpoint_bytes():
            return True
        try:
            restart = self.wal_bytes > _RESTART_AT
            frames, moved = self._transactor.checkpoint(db, restart=restart)
        except sqlite3.Error as error:
            if is_broken(error):
                self._loop.call_soon_threadsafe(self._fail, [], error)
                return False
            # A full disk, say: the log keeps what was committed, and the next transaction tries again.
            _log.warning("checkpoint_failed", error=str(error), wal_bytes=self.wal_bytes)
            return True
        if frames > moved and self.wal_bytes > _RESTART_AT:
            _log.warning("wal_not_emptied", wal_bytes=self.wal_bytes, limit=WAL_LIMIT, reason="a reader blocks it")
        return True

    def _checkpoint_bytes(self) -> int:
        """Return how much the log may hold; more after a large group, and never what a reader would be waited for."""
        groups = _GROUPS_A_CHECKPOINT * self._transactor.last_bytes
        return max(self._settings.checkpoint_bytes, min(groups, _RESTART_AT // 2))

    # On the loop

    def _answer(self, group: list[Waiting], outcomes: list[Any]) -> None:
        """Tell everybody of a committed group what became of their operation."""
        self.transactions += 1
        self.operations += len(group)
        for waiting, outcome in zip(group, outcomes, strict=True):
            _settle(waiting.future, outcome)
        self._watch_size()

    def _watch_size(self) -> None:
        """Warn once when what waits passes 80 % of its limit, and again only after it was below."""
        used, limit = self._transactor.space.waiting, self._settings.max_bytes
        beyond = used > limit * WARN_AT
        if beyond and not self._warned:
            _log.warning(
                "outbox_filling_up",
                waiting_bytes=used,
                max_bytes=limit,
                advice="drain, requeue or abort dead rows, or raise the limit",
            )
        self._warned = beyond

    def _fail(self, group: list[Waiting], error: Exception) -> None:
        """Give everybody who waits the same answer, and take nothing any more."""
        self.failure = write_failed(self._path, error)
        self._stopping = True
        _log.critical("outbox_write_failed", file=str(self._path), exc_info=error)
        for waiting in (*group, *self._waiting.drain()):
            _settle(waiting.future, outcome_unknown())
        self.failed.set()

    async def _empty_log(self) -> bool:
        try:
            await self._connection.run(_truncate)
        except sqlite3.Error as error:
            _log.warning(
                "checkpoint_failed", error=str(error), wal_bytes=self.wal_bytes, advice="the next start continues"
            )
            return False
        return True


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # its caller went away
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _truncate(db: sqlite3.Connection) -> None:
    db.execute(QUERIES["checkpoint_truncate"]).fetchall()

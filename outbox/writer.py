"""The outbox's part of the store's thread: which operations share a transaction, and what they run in.

A group runs without savepoints, which would cost two steps an operation. If anything but a `PostroomError` is raised
before the commit, every operation of it, every send, runs again in a transaction of its own, and the one at fault fails
alone (docs/contract/send.md#send-43). A transaction is few steps of SQLite, each of which releases the interpreter lock
and waits to get it back from a busy loop.

A group is shared by the callers that wait: where there are several each has its part, in rotation, and none more than
`PART_ROWS`. A caller that is alone fills the group.
"""

import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import structlog

from outbox.accept import Accept, accept_group
from outbox.relay import Own, WalkedPast, shorten_waits
from outbox.settled import following, last_id, prune, read_salt
from outbox.transaction import Operation, Space, Step, Transaction, headroom_of, last_dated, read_space, room_of
from postroom.chassis import store
from postroom.chassis.sqlite import QUERIES, is_full, transaction
from postroom.chassis.store import Outcome, Submission
from postroom.errors import PostroomError

_WARN_AT: Final = 0.8  # of max_bytes
_LEAST_PAYLOAD: Final = len('{"to":"dm:a"}')
PART_ROWS: Final = 64  # of a group that one caller may fill while there are others: a millisecond
_PRESENT_SECONDS: Final = 60.0  # after its last send, in which a caller counts as present
_SET_BACK: Final = 60_000  # ms that the clock may go back before the waits of rows are checked
_SHORT_AT: Final = 0.9  # of max_bytes: from here on payloads of settled rows are pruned early, between sends
_PRESSING_AT: Final = 0.95  # of max_bytes: from here on sends wait for that
_PAUSE_SECONDS: Final = 0.1  # since the last send: to prune a row costs the processor as much as to accept one
_ENOUGH_AT: Final = 0.8  # of max_bytes: until this much is left
_PRUNED_AT_ONCE: Final = 200  # rows: some 2 ms for which operations wait
_PRUNE_SECONDS: Final = 0.02  # that slices of a prune may take between two groups
_PRUNE_AGAIN_SECONDS: Final = 5.0  # after one that failed
_EVER: Final = 2**62  # ms since the epoch

_log = structlog.get_logger(__name__)


class Queue(store.Queue):
    """The operations that wait, in a line for each caller."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._lines: dict[int | None, deque[Submission]] = {}  # the thread's own
        self._clock = clock
        self._callers: dict[int, float] = {}  # when each was last seen

    def __bool__(self) -> bool:
        return bool(self._arrived or self._lines)

    def take(self, most: int) -> list[Submission]:
        """Take operations of `most` rows together, and at least one, each caller's first, then each one's next.

        They are returned in the order in which they came, behind the patient ones.
        """
        self._sort()
        if len(self._lines) == 1:
            return self.take_patient() + self._take_of_one(most)
        most_each = min(most, PART_ROWS) if len(self._callers) > 1 else most
        group: list[Submission] = []
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
                    self._lines[caller] = line  # after the others, which come first in the next group
                taken[caller] = taken.get(caller, 0) + size
                rows += size
                going = True
        return self.take_patient() + sorted(group, key=itemgetter(0))

    def _take_of_one(self, most: int) -> list[Submission]:
        """Take operations where only one caller waits."""
        ((caller, line),) = self._lines.items()
        group = [line.popleft()]
        rows = group[0].operation.rows
        most = min(most, PART_ROWS) if len(self._callers) > 1 else most
        while line and (rows := rows + line[0].operation.rows) <= most:
            group.append(line.popleft())
        if not line:
            del self._lines[caller]
        return group

    def drain(self) -> Iterator[Submission]:
        """Take everything."""
        self.flush()
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


class Transactor(store.Transactor):
    """Runs groups of the outbox's operations, each in a `Transaction`, and makes room between them."""

    def __init__(
        self,
        *,
        clock: Callable[[], int],
        steady_clock: Callable[[], int],
        earliest: int,
        new_ids: Callable[[int], list[str]],
        max_bytes: int,
        walked: WalkedPast,
    ) -> None:
        super().__init__()
        self._clock, self._steady_clock = clock, steady_clock
        self._started = steady_clock()
        self._before = ""  # the id of the last row before this start
        self._new_ids = new_ids
        self._max_bytes = max_bytes
        self._walked = walked
        self._latest = sys.maxsize  # the last time that was seen; before a start the clock may have been anywhere
        self._clock_is_confirmed = False
        self._dated = earliest  # when the last row was enqueued
        self._salt = b""
        self._last_id = ""  # of a row
        self._accepted_at = 0.0  # by the monotonic clock
        self._short = self._pressing = False
        self._added = 0  # bytes of room that were taken since the last chores
        self._prune_after = 0.0  # by the monotonic clock
        self._warned = False
        self.space = Space(0, 0, 0)  # the use of the file after the last transaction

    def start(self, db: sqlite3.Connection) -> None:
        """Read the state of the file, before everything else."""
        self._salt = read_salt(db)
        self._last_id = self._before = last_id(db)
        self._dated = max(self._dated, last_dated(db))
        self.space = read_space(db)

    def own(self) -> Own:
        """Return which rows were accepted since the start, and when that was by the clock as it is now."""
        return Own(self._before, self._clock() - (self._steady_clock() - self._started))

    def confirm_clock(self) -> None:
        """Date new rows by the clock until it is set back: a trusted source of the time has agreed with it."""
        self._clock_is_confirmed = True

    def transact(self, db: sqlite3.Connection, group: Sequence[Operation[Any]]) -> list[Outcome]:
        """Run a group in order, neighbouring sends together; a `PostroomError` of one is its outcome alone."""
        try:
            with transaction(db):
                now = self._clock()
                set_back = now < self._latest - _SET_BACK
                self._clock_is_confirmed = self._clock_is_confirmed and not set_back
                here = Transaction(
                    db,
                    now=now,
                    dated=now if self._clock_is_confirmed else max(now, self._dated),
                    new_ids=self._next_ids,
                    space=self.space,
                    salt=self._salt,
                    max_bytes=self._max_bytes,
                )
                if set_back:
                    shorten_waits(here, self._walked, seen=self._latest < sys.maxsize)
                outcomes: list[Outcome] = []
                for is_accept, neighbours in groupby(group, key=lambda operation: isinstance(operation, Accept)):
                    if is_accept:
                        self._accepted_at = time.monotonic()
                        outcomes += accept_group(here, list(neighbours))  # type: ignore[arg-type]
                    else:
                        for operation in neighbours:
                            try:
                                outcomes.append(operation.run(here))
                            except PostroomError as error:  # nothing has changed yet
                                outcomes.append(error)
                here.write_counters()
        except BaseException:
            self._walked.forget()  # rows that a claim walked past or took may be back
            raise
        self._latest = here.now
        self._dated = here.dated
        space = here.space
        self._added += space.waiting - self.space.waiting
        self.space = space
        self.logged += here.logged_bytes
        beyond = self.filling_up
        if beyond and not self._warned:  # and again only after it was below
            _log.warning(
                "outbox_filling_up",
                waiting_bytes=self.space.waiting,
                max_bytes=self._max_bytes,
                advice="drain, requeue or abort dead rows, or raise the limit",
            )
        self._warned = beyond
        return outcomes

    @property
    def filling_up(self) -> bool:
        """Whether the waiting rows take so much room that there will soon be none."""
        return self.space.waiting > self._max_bytes * _WARN_AT

    @property
    def full(self) -> bool:
        """Whether there is no room for any new row."""
        return room_of(_LEAST_PAYLOAD) > headroom_of(self._max_bytes, self.space)

    def _next_ids(self, count: int) -> list[str]:
        """Mint ids that are greater than every row's, also where the clock was set back before this start."""
        fresh = self._new_ids(count)
        for place, each in enumerate(fresh):
            if each > self._last_id:
                self._last_id = fresh[-1]
                break
            fresh[place] = self._last_id = following(self._last_id)
        return fresh

    def alone(self, operation: Operation[Any], attempt: Callable[[Any], Outcome]) -> Outcome:
        """Run an operation in a transaction of its own, and each send in one."""
        if not isinstance(operation, Accept):
            return attempt(operation)
        outcomes = [attempt(Accept.of((send,), operation.caller)) for send in operation.sends]
        return [outcome if isinstance(outcome, Exception) else outcome[0] for outcome in outcomes]

    @property
    def has_chores(self) -> bool:
        """Whether room is short, something can be pruned, and it is time to."""
        used = (self.space.waiting + self.space.kept) / self._max_bytes
        kept, now = self.space.kept > 0, time.monotonic()
        self._short = kept and used > (_ENOUGH_AT if self._short else _SHORT_AT)
        self._pressing = kept and used > (_ENOUGH_AT if self._pressing else _PRESSING_AT)
        pause = now - self._accepted_at > _PAUSE_SECONDS
        return (self._pressing or (self._short and pause)) and now >= self._prune_after

    @property
    def chores_in(self) -> float | None:
        """The pause after the last send, where room is short."""
        return _PAUSE_SECONDS if self._short else None

    def do_chores(self, db: sqlite3.Connection) -> None:
        """Where room is short, make some in a slice; where it is pressing, twice the room that was added, in slices.

        Operations wait for one slice, or for as many as take `_PRUNE_SECONDS`.
        """
        added, self._added = self._added, 0
        made, until = 0, time.monotonic() + _PRUNE_SECONDS
        while self.has_chores and (not made or (self._pressing and made < 2 * added and time.monotonic() < until)):
            before = self.space.kept
            db.execute(QUERIES["sync_later"])  # after a power cut it is done again
            try:
                self.transact(db, [Step(partial(prune, _EVER, 0, _PRUNED_AT_ONCE))])
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                _log.warning("not_pruned", error=str(error), advice="free some space on the disk of the outbox")
            finally:
                db.execute(QUERIES["sync"])
            freed = before - self.space.kept
            if not freed:
                self._prune_after = time.monotonic() + _PRUNE_AGAIN_SECONDS
            made += freed

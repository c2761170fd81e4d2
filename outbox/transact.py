"""Running a group of operations in one transaction, each as if it had its own (docs/contract/send.md#send-43).

The group runs without savepoints, which would cost two steps an operation. Where anything but a `PostroomError` goes
wrong before the commit, the whole transaction is undone and every operation, every send, runs again in a transaction
of its own: what is at fault fails alone. A commit that fails because the disk is full has written nothing and is
treated alike; one that fails with an I/O error may have happened, and ends the outbox.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final

from outbox.accepting import Accept, accept_group
from outbox.errors import from_sqlite
from outbox.relaying import WalkedPast, shorten_waits
from outbox.settled import Prune, following, last_id, read_salt
from outbox.transaction import Operation, Space, Transaction, last_dated, read_space
from postroom.chassis.sqlite import QUERIES, is_broken
from postroom.errors import PostroomError

_SET_BACK: Final = 60_000  # ms that the clock may go back without a look at what waits by it
_SHORT_AT: Final = 0.9  # of max_bytes: from here on payloads of settled rows go before their time
_ENOUGH_AT: Final = 0.8  # of max_bytes: until this much is left
_PRUNED_AT_ONCE: Final = 200  # rows: some 2 ms for which everybody waits
_EVER: Final = 2**62  # ms since the epoch

Outcome = Any  # what the operation returns, or the exception it raises


class WriteFailed(Exception):
    """The file or the disk failed: whether the transaction happened is not known."""


class Transactor:
    """Runs groups on the connection's thread; knows nothing of the event loop."""

    def __init__(
        self, *, clock: Callable[[], int], new_id: Callable[[], str], max_bytes: int, walked: WalkedPast
    ) -> None:
        self._clock = clock
        self._new_id = new_id
        self._max_bytes = max_bytes
        self._walked = walked
        self._latest = sys.maxsize  # the last time that was seen; before a start the clock may have been anywhere
        self._clock_is_confirmed = False
        self._dated = 0  # when the last row was enqueued
        self._salt = b""
        self._last_id = ""  # of a row
        self._short = False
        self.space = Space(0, 0, 0)  # what of the file is used, after the last transaction
        self.last_bytes = 0  # about what the last transaction added to the WAL
        self.logged_bytes = 0  # about what the WAL holds that a checkpoint has not moved

    def start(self, db: sqlite3.Connection) -> None:
        """Read what it needs to know of the file; comes before everything else."""
        self._salt = read_salt(db)
        self._last_id = last_id(db)
        self._dated = last_dated(db)
        self.space = read_space(db)

    def confirm_clock(self) -> None:
        """Date new rows by the clock until it is set back: somebody who knows the time has agreed with it."""
        self._clock_is_confirmed = True

    @property
    def short(self) -> bool:
        """Whether there is too little room, and something that need not be kept."""
        used, most = self.space.waiting + self.space.kept, self._max_bytes
        self._short = self.space.kept > 0 and used > most * (_ENOUGH_AT if self._short else _SHORT_AT)
        return self._short

    def prune(self, db: sqlite3.Connection) -> int:
        """Move the oldest settled rows and drop their payloads; returns the room that is free for it.

        It is not synced: after a power cut it is done again.
        """
        before = self.space.kept
        db.execute(QUERIES["sync_later"])
        try:
            self._transact(db, [Prune(_EVER, 0, _PRUNED_AT_ONCE)])
        finally:
            db.execute(QUERIES["sync"])
        return before - self.space.kept

    def run(self, group: Sequence[Operation[Any]], db: sqlite3.Connection) -> list[Outcome]:
        """Run `group` in one transaction and return an outcome per operation; raises `WriteFailed`."""
        try:
            return self._transact(db, group)
        except WriteFailed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, its operation shall fail alone
            if len(group) == 1 and not isinstance(group[0], Accept):
                return [from_sqlite(error)]
            return [self._alone(db, operation) for operation in group]

    def _alone(self, db: sqlite3.Connection, operation: Operation[Any]) -> Outcome:
        if isinstance(operation, Accept):
            return [self._send_alone(db, Accept.of((send,), operation.caller)) for send in operation.sends]
        return self.run([operation], db)[0]

    def _send_alone(self, db: sqlite3.Connection, send: Accept) -> Outcome:
        try:
            return self._transact(db, [send])[0][0]
        except WriteFailed:
            raise
        except Exception as error:  # noqa: BLE001 - the same
            return from_sqlite(error)

    def _transact(self, db: sqlite3.Connection, group: Sequence[Operation[Any]]) -> list[Outcome]:
        try:
            db.execute(QUERIES["begin"])
            now = self._clock()
            set_back = now < self._latest - _SET_BACK
            self._clock_is_confirmed = self._clock_is_confirmed and not set_back
            transaction = Transaction(
                db,
                now=now,
                dated=now if self._clock_is_confirmed else max(now, self._dated),
                new_id=self._next_id,
                space=self.space,
                salt=self._salt,
                max_bytes=self._max_bytes,
            )
            if set_back:
                shorten_waits(transaction, self._walked)
            outcomes = _run_all(transaction, group)
            transaction.write_counters()
            db.execute(QUERIES["commit"])
        except BaseException as error:
            self._undo(db)
            if is_broken(error):
                raise WriteFailed(str(error)) from error
            raise
        self._latest = transaction.now
        self._dated = transaction.dated
        self.space = transaction.space
        self.last_bytes = transaction.logged_bytes
        self.logged_bytes += transaction.logged_bytes
        return outcomes

    def checkpoint(self, db: sqlite3.Connection, *, restart: bool) -> tuple[int, int]:
        """Move the WAL into the file as far as readers allow; returns its frames, and how many of them were moved.

        With `restart` it waits for the readers, briefly, so that the WAL starts anew although they never cease.
        """
        if restart:
            db.execute(QUERIES["wait_briefly"])
        _, frames, moved = db.execute(QUERIES["checkpoint_restart" if restart else "checkpoint"]).fetchone()
        if restart:
            db.execute(QUERIES["wait"])
        self.logged_bytes = 0
        return frames, moved

    def _next_id(self) -> str:
        """Mint an id that is greater than every row's, also where the clock was set back before this start."""
        fresh = self._new_id()
        self._last_id = fresh if fresh > self._last_id else following(self._last_id)
        return self._last_id

    def _undo(self, db: sqlite3.Connection) -> None:
        self._walked.forget()  # rows that a claim walked past or took may be back
        if db.in_transaction:
            db.execute(QUERIES["rollback"])


def _run_all(transaction: Transaction, group: Sequence[Operation[Any]]) -> list[Outcome]:
    """Run the operations in order, neighbouring sends together."""
    outcomes: list[Outcome] = []
    for is_accept, neighbours in groupby(group, key=_is_accept):
        if is_accept:
            outcomes += accept_group(transaction, list(neighbours))  # type: ignore[arg-type]
        else:
            outcomes += [_run(transaction, operation) for operation in neighbours]
    return outcomes


def _is_accept(operation: Operation[Any]) -> bool:
    return isinstance(operation, Accept)


def _run(transaction: Transaction, operation: Operation[Any]) -> Outcome:
    try:
        return operation.run(transaction)
    except PostroomError as error:  # nothing has changed yet
        return error

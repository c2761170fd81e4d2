"""One write transaction, as the operations see it: the connection, the time, fresh ids, and the counters' changes."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from chassis.sql import load_queries
from chassis.sqlite import QUERIES
from postroom.sends import RowStatus

_COUNT: Final = load_queries("outbox", "sql/count.sql")["count"]
FULL_AT: Final = 0.95  # of max_bytes: new messages are refused
_MOVED_BYTES: Final = 256  # rows that change their state lie side by side, 16 to a page
_COMMIT_BYTES: Final = 7 * 4096  # a page in each table, one in each index, the counters
T_co = TypeVar("T_co", covariant=True)


class Transaction:
    """What an operation runs in. `now` is one moment for all of it, in ms since the epoch."""

    __slots__ = ("_changes", "db", "logged_bytes", "max_bytes", "new_id", "now", "used_bytes")

    def __init__(
        self, db: sqlite3.Connection, *, now: int, new_id: Callable[[], str], used_bytes: int, max_bytes: int
    ) -> None:
        self.db = db
        self.now = now
        self.new_id = new_id
        self.used_bytes = used_bytes  # of the file: an estimate that `measure` corrects
        self.logged_bytes = _COMMIT_BYTES  # about what the transaction adds to the WAL
        self.max_bytes = max_bytes
        self._changes: Counter[str] = Counter()

    @property
    def headroom(self) -> int:
        """How many bytes of new payload the transaction may still write."""
        return int(self.max_bytes * FULL_AT) - self.used_bytes

    def execute(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> int:
        """Run a writing statement; returns how many rows it changed."""
        return self.db.execute(query, parameters).rowcount

    def value(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """Return the only column of the only row: a set of rows comes as one JSON text, one step for all of them."""
        return self.db.execute(query, parameters).fetchone()[0]

    def measure(self) -> None:
        """Replace the running estimate of the used bytes by what the file says."""
        self.used_bytes = self.value(QUERIES["used_bytes"])

    def moved(self, before: RowStatus | None, after: RowStatus, rows: int) -> None:
        """Count `rows` that went from one state to another; None for new ones."""
        if before is not None:
            self._changes[before] -= rows
            self.logged_bytes += rows * _MOVED_BYTES
        self._changes[after] += rows

    def payload_grew(self, size: int) -> None:
        """Count bytes of payload, negative for pruned ones."""
        self._changes["payload_bytes"] += size
        self.used_bytes += max(size, 0)
        self.logged_bytes += max(size, 0)

    def write_counters(self) -> None:
        """Add what was counted to the kept counters, in one statement."""
        if any(self._changes.values()):
            names = ("pending", "inflight", "done", "dead", "aborted", "payload_bytes")
            self.db.execute(_COUNT, {name: self._changes[name] for name in names})


class Operation(Protocol[T_co]):
    """Something the writer runs inside a transaction.

    It raises a `PostroomError` only before it has changed anything; after any other error the writer undoes it.
    """

    @property
    def rows(self) -> int:
        """How many rows it may write, at most; a large payload counts as several."""

    def run(self, transaction: Transaction) -> T_co:
        """Do it; runs on the connection's thread."""

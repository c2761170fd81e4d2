"""One write transaction, as the operations see it: the connection, the time, fresh ids, and the counters' changes."""

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from outbox.model import DUE, WAITING
from postroom._wire.message import Priority
from postroom._wire.sends import RowStatus
from postroom._wire.sql import load_queries

_QUERIES: Final = load_queries("outbox", "sql/count.sql")
FULL_AT: Final = 0.95  # of max_bytes: new messages are refused
_MOVED_BYTES: Final = 256  # rows that change their state lie side by side, 16 to a page
_COMMIT_BYTES: Final = 7 * 4096  # a page in each table, one in each index, the counters
_INSERT_ROWS: Final = 1024  # most rows of a statement: a step of SQLite's, after which the loop may hold the lock again
_INSERT_STEP: Final = 64  # more than this many rows go in multiples of it, so that few statements are kept prepared
_LARGEST_CELL: Final = 4061  # bytes of a payload that lies whole in its page
_ROW_BYTES: Final = 320  # of a row without its payload, with its entries in the indexes
_PLACES: Final = re.compile(r"\((\?, )*\?\)")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Space(NamedTuple):
    """The use of the file, in bytes as `room_of` counts them, and the next number and key."""

    waiting: int  # pending, inflight and dead rows: what max_bytes limits
    kept: int  # done and aborted rows that still have their payload
    moved: int  # rows that were moved to `outbox_settled`
    next_seq: int | None = None  # of the next row, where the newest one was moved
    highest_key: int = -1  # of a moved row's id


def headroom_of(max_bytes: int, space: Space) -> int:
    """Return how much room new rows may still take: done rows never count, since they make room for new ones."""
    return int(max_bytes * FULL_AT) - space.waiting


def read_space(db: sqlite3.Connection) -> Space:
    """Return the use of the file."""
    waiting, kept, moved, newest, newest_moved, highest_key = db.execute(_QUERIES["space"]).fetchone()
    return Space(waiting, kept, moved, newest_moved + 1 if newest_moved > newest else None, highest_key)


def last_dated(db: sqlite3.Connection) -> int:
    """Return when the newest row was enqueued, in ms since the epoch; 0 for an empty outbox."""
    (dated,) = db.execute(_QUERIES["dated"]).fetchone()
    return int(dated)


class Transaction:
    """What an operation runs in. `now` is one moment for all of it, in ms since the epoch.

    `dated` is when the rows that it writes are enqueued: `now`, but never before the last one while the clock is not
    confirmed. A row that a wrong clock dated years back would be too old to be sent once the clock is right.
    """

    __slots__ = (
        *("_changes", "_space", "dated", "db", "highest_key", "logged_bytes", "max_bytes"),
        *("new_ids", "next_seq", "now", "salt"),
    )

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        now: int,
        dated: int,
        new_ids: Callable[[int], list[str]],
        space: Space,
        salt: bytes,
        max_bytes: int,
    ) -> None:
        self.db = db
        self.now = now
        self.dated = dated
        self.new_ids = new_ids
        self.salt = salt  # of the keys of moved rows (outbox/settled.py)
        self.next_seq = space.next_seq
        self.highest_key = space.highest_key
        self.logged_bytes = _COMMIT_BYTES  # about what the transaction adds to the WAL
        self.max_bytes = max_bytes
        self._space = space
        self._changes: Counter[str] = Counter()

    @property
    def headroom(self) -> int:
        """How much room new rows may still take."""
        return headroom_of(self.max_bytes, self.space)

    @property
    def space(self) -> Space:
        """The current use of the file."""
        waiting, kept, moved, *_ = self._space
        changes = self._changes
        return Space(
            waiting + changes["waiting_room"],
            kept + changes["kept_room"],
            moved + changes["moved"],
            self.next_seq,
            self.highest_key,
        )

    def lane(self, priority: Priority, due: int) -> int:
        """Return the lane of a pending row that is not held, see schema.sql; `due` is in ms."""
        return WAITING if due > self.now else DUE[priority]

    def execute(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> int:
        """Run a writing statement; returns how many rows it changed."""
        return self.db.execute(query, parameters).rowcount

    def value(self, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """Return the only column of the only row: a set of rows comes as one JSON text, one step for all of them."""
        return self.db.execute(query, parameters).fetchone()[0]

    def insert(self, query: str, rows: Sequence[tuple[object, ...]]) -> tuple[int, int]:
        """Insert rows by a query for one, many in a statement; returns how many, and the last rowid."""
        inserted = last = 0
        while rows:
            count = min(len(rows) - len(rows) % _INSERT_STEP, _INSERT_ROWS) if len(rows) > _INSERT_STEP else len(rows)
            cursor = self.db.execute(_repeated(query, count), list(chain.from_iterable(rows[:count])))
            inserted += cursor.rowcount
            last = cursor.lastrowid or 0
            rows = rows[count:]
        return inserted, last

    def added(self, rows: int, payload_bytes: int, room: int) -> None:
        """Count new rows, which are pending."""
        self._changes["pending"] += rows
        self._changes["payload_bytes"] += payload_bytes
        self._changes["waiting_room"] += room
        self.logged_bytes += payload_bytes

    def changed(self, before: RowStatus, after: RowStatus, rows: int, settled_room: int = 0) -> None:
        """Count `rows` that went from one state to another; `settled_room` is theirs where they no longer wait."""
        self._changes[before] -= rows
        self._changes[after] += rows
        self._changes["waiting_room"] -= settled_room
        self._changes["kept_room"] += settled_room
        self.logged_bytes += rows * _MOVED_BYTES

    def moved(self, rows: int, payload_bytes: int, room: int) -> None:
        """Count settled rows that were moved to `outbox_settled`."""
        self._changes["moved"] += rows
        self._changes["payload_bytes"] -= payload_bytes
        self._changes["kept_room"] -= room
        self.logged_bytes += 2 * rows * _MOVED_BYTES

    def write_counters(self) -> None:
        """Add what was counted to the stored counters, in one statement."""
        if any(self._changes.values()):
            self.db.execute(_QUERIES["count"], {name: self._changes[name] for name in _COUNTERS})


_COUNTERS: Final = (
    *("pending", "inflight", "done", "dead", "aborted"),
    *("payload_bytes", "moved", "waiting_room", "kept_room"),
)


@lru_cache(maxsize=4096)
def room_of(payload_bytes: int) -> int:
    """Return the bytes of the file that a row takes with its payload: the column `room` of schema.sql, and why.

    In a page of 4096 bytes a payload takes its share of the 4088 that cells may have. One of more than 4061 bytes
    leaves a rest of 489 to 4061 there, and further pages take 4092 of it each.
    """
    if payload_bytes <= _LARGEST_CELL:
        return _ROW_BYTES + 4096 // (4088 // (payload_bytes + 10))
    rest = (payload_bytes - 489) % 4092
    return _ROW_BYTES + (payload_bytes + 30) // 4092 * 4096 + 4096 // (4088 // (499 + (rest if rest <= 3572 else 0)))  # noqa: PLR2004 - the docstring


@lru_cache(maxsize=4 * (_INSERT_STEP + _INSERT_ROWS // _INSERT_STEP))
def _repeated(query: str, rows: int) -> str:
    """Return the query with its group of values repeated: one step of SQLite for all of them."""
    return _PLACES.sub(lambda places: ", ".join([places[0]] * rows), query)


class Step(NamedTuple, Generic[T]):
    """An operation that is one function; it may write `rows` at most."""

    run: Callable[[Transaction], T]
    rows: int = 1


class Operation(Protocol[T_co]):
    """Something the writer runs inside a transaction.

    It raises a `PostroomError` only before it has changed anything; after any other error the writer undoes it.
    """

    @property
    def rows(self) -> int:
        """How many rows it may write, at most; a large payload counts as several."""

    def run(self, transaction: Transaction) -> T_co:
        """Do it; runs on the connection's thread."""

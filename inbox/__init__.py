"""The SQLite inbox: what a daemon has received, once each, for local readers to page through and to follow.

One object owns the file, and answers every query. It takes a `HistoryMessage` and returns a `StoredMessage`; an
operator configures `InboxSettings`. Its errors, each with its sentence, and what SQLite's errors become are at the end.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self, TypeVar

import msgspec
import structlog

from postroom._wire.administration import HistoryMessage
from postroom._wire.ids import new_id, now_ms
from postroom._wire.moment import from_milliseconds
from postroom._wire.nouns import invalid_cursor
from postroom._wire.sql import load_queries
from postroom.chassis import sqlite
from postroom.chassis.sqlite import is_full
from postroom.chassis.store import Answers, OwnedFile, Store, set_aside
from postroom.errors import InvalidMessage, PostroomError, TryAgain

__all__ = ["Broken", "Durable", "Inbox", "InboxSettings", "MessageFilter", "Page", "StoredMessage", "unavailable"]

T = TypeVar("T")

NAME: Final = "inbox"  # of its files
SCHEMA: Final = sqlite.Schema.of("inbox", "PSTI")
_READ: Final = load_queries("inbox", "sql/read.sql")
_WRITE: Final = load_queries("inbox", "sql/write.sql")
_PAGE_BYTES: Final = 8 * 1024 * 1024  # of messages, after which a page ends
_ROW_BYTES: Final = 1024  # about what a message adds to the log besides itself
_PRUNED_AT_ONCE: Final = 1000  # messages
_DIGITS: Final = 18  # fewer than a 64-bit integer may have
_encode: Final = msgspec.json.Encoder().encode

_log = structlog.get_logger(__name__)


class InboxSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long received messages are kept, and how the live stream behaves."""

    retention_days: Annotated[
        float, msgspec.Meta(gt=0, le=3650, description="Age at which a received message is deleted, in days.")
    ] = 30
    readers: Annotated[
        int, msgspec.Meta(ge=1, le=10_000, description="Readers of the live stream at once; one more is refused (429).")
    ] = 256
    heartbeat_seconds: Annotated[
        float,
        msgspec.Meta(gt=0, le=300, description="Silence after which the live stream sends a comment, in seconds."),
    ] = 15


class MessageFilter(NamedTuple):
    """Which messages a reader wants; what is set must hold."""

    sender: str | None = None
    destination: str | None = None


class StoredMessage(NamedTuple):
    """A row of the inbox."""

    position: int
    received_at: int  # ms since the epoch
    message: bytes  # an encoded `HistoryMessage`

    def encoded(self) -> bytes:
        """Return the JSON of the `InboxMessage`, on one line: the stored message with two more fields."""
        moment = from_milliseconds(self.received_at).isoformat(timespec="milliseconds")
        return b'{"position":%d,"received_at":"%s",%s' % (self.position, moment.encode(), self.message[1:])


class Received(NamedTuple):
    """The place of a message in the inbox, and when it came."""

    position: int
    received_at: int  # ms since the epoch
    broker_message_id: str


class Durable(NamedTuple):
    """What NATS says of a durable consumer of the file."""

    name: str
    created: str  # when: one of the same name that was created again is another
    delivered: int  # number of its last delivery
    acknowledged: int  # number up to which all its deliveries are acknowledged
    opening: str | None  # `Inbox.opening` when the file was last opened for it


class Page(NamedTuple):
    """Some messages in order, and the position after which the next page begins: None where these are the last.

    `deleted_to` is the last position that retention has deleted: None where it has deleted none.
    """

    messages: list[StoredMessage]
    next_after: int | None
    deleted_to: int | None


_EVERYTHING: Final = MessageFilter()


class Inbox:
    """What one daemon has received (docs/contract/delivery.md#delivery-80). Any task of one event loop may call it.

    A message is here once, by mesh, sender and client_message_id, however often it is filed. Positions grow, also past
    a file that was set aside. Each method raises `PostroomError`: 507 `disk_full` while the disk is full, 503
    `inbox_unavailable` once it is being closed; the writing ones `Broken` where the file failed: close it then, and the
    next `open` checks it.
    """

    def __init__(
        self, store: Store, state: tuple[str, int | None, int], clock: Callable[[], int], new_id: Callable[[], str]
    ) -> None:
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._arrived = asyncio.Event()
        self.failed = store.failed  # set once the file or the disk failed
        self.id = state[0]  # of the file: a new one has another
        self.opening = new_id()  # which the file and its consumer note: what they say tells a copy of either
        self.refill_after = state[1]  # history_id to refill from; None: no refill is needed
        self.refill_due = asyncio.Event()
        if self.refill_after is not None:
            self.refill_due.set()
        self._doubted = bool(state[2])  # the file had a consumer, and `holds` has not yet said that it is not older
        self._consumer: str | None = None  # whose deliveries are filed

    @classmethod
    async def open(
        cls, directory: Path, *, clock: Callable[[], int] = now_ms, new_id: Callable[[], str] = new_id
    ) -> Self:
        """Lock the file in `directory`, check it after an unclean stop, migrate it.

        A damaged one is renamed, never overwritten. A new one in its place, or in that of one that was removed, has to
        be refilled from the broker's history. Raises `Fatal`: 69 where another process owns it, 78 for one that is
        newer than the program or not an inbox, 75 or 74 while the disk is full or fails.
        """
        file, now = OwnedFile(directory, NAME), clock()

        def damaged(path: Path, fault: str) -> None:
            aside = set_aside(path, now)
            _log.error("inbox_damaged", fault=fault, set_aside=aside.name, advice="it is refilled from the broker")

        def create(db: sqlite3.Connection) -> None:
            refill_after = None if file.is_first else 0
            db.execute(_WRITE["create_file"], {"id": new_id(), "created_at": now, "refill_after": refill_after})
            db.execute(_WRITE["first_position"], {"created_at": now})

        store = await Store.open(file, SCHEMA, ANSWERS, prepare=create, damaged=damaged)
        return cls(store, await store.read(lambda db: db.execute(_READ["file"]).fetchone()), clock, new_id)

    async def close(self) -> None:
        """Finish what is queued and close; what was filed stays. A second call does nothing."""
        self._wake_readers()
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def holds(self, consumer: Durable) -> bool:
        """Return whether all is here that a durable consumer of its has acknowledged; then that has to note `opening`.

        A file without all of it is an older copy: its number of deliveries is behind, or it was opened since. So is the
        consumer of a NATS store that was put back, of which the file knows no better. It becomes a file of its own:
        with a new id, due to be refilled, its positions above all that were given. Then it has to be opened again. Of
        one with all of it, `file` notes the deliveries from here on. One whose consumer was lost while it was closed
        may be an older copy too: it is due to be refilled in the same way, under its id.
        """
        values = consumer._asdict() | {"id": self._new_id(), "now": self._clock(), "new_opening": self.opening}

        def look(db: sqlite3.Connection) -> tuple[bool, bool]:
            known, delivered, *openings = db.execute(_READ["consumer"], values).fetchone() or (None, 0)
            if known == consumer.created:
                older = consumer.acknowledged > delivered or consumer.opening not in openings
            else:
                older = consumer.acknowledged > 0 or consumer.opening is not None
            lost = not older and self._consumer is None and known not in (None, consumer.created)
            db.execute(_WRITE["begin_again" if older else "begin_opening"], values)
            if older or lost:
                db.execute(_WRITE["refill"])
                db.execute(_WRITE["pass_positions"], values)
            return not older, lost

        whole, lost = await self._store.write(look)
        self._consumer = consumer.name
        self._doubted = self._doubted and not whole
        if lost:
            _log.warning("inbox_consumer_lost", consumer=consumer.name, advice="the inbox is refilled from the broker")
            self.refill_after = 0
            self.refill_due.set()
        return whole

    async def file(self, messages: Sequence[HistoryMessage], delivered: int = 0) -> int:
        """Write those that are new, also among what retention has deleted; returns how many, once on disk.

        `delivered` is the number of the last delivery that brought them, which `holds` compares.
        """
        now = self._clock()
        rows: list[dict[str, Any]] = [
            {
                "mesh": message.mesh,
                "sender": message.sender,
                "client_message_id": message.client_message_id,
                "broker_message_id": message.broker_message_id,
                "history_id": message.history_id,
                "destination": message.to,
                # never before the broker accepted it: retention would take what a clock that was behind had dated
                "received_at": max(now, int(message.accepted_at.astimezone(UTC).timestamp() * 1000)),
                "message": _encode(message),
            }
            for message in messages
        ]
        size = sum(len(row["message"]) + _ROW_BYTES for row in rows)

        def write(db: sqlite3.Connection) -> int:
            db.execute(_WRITE["delivered_to"], {"name": self._consumer, "delivered": delivered})
            return db.executemany(_WRITE["file"], rows).rowcount if rows else 0

        new = await self._store.write(write, size)
        if new:
            self._wake_readers()
        return new

    async def refilled_to(self, history_id: int | None) -> None:
        """Note how far the refill has come; None: it is done."""
        await self._store.write(lambda db: db.execute(_WRITE["refilled_to"], {"refill_after": history_id}))
        self.refill_after = history_id
        if history_id is None:
            self.refill_due.clear()

    async def prune(self, received_before: int) -> int:
        """Delete what was received before a moment (ms since the epoch); returns how many."""
        total = 0
        while pruned := await self._store.write(partial(_prune, received_before), _PRUNED_AT_ONCE * _ROW_BYTES):
            total += pruned
        return total

    async def page(
        self, cursor: str | None, since: int | None, limit: int, wanted: MessageFilter = _EVERYTHING
    ) -> Page:
        """Return up to `limit` messages, oldest first: after a cursor, else received at `since` (ms) or later.

        Fewer where they are large.
        """
        if cursor is not None:
            after = _number(cursor, invalid_cursor)
        else:
            after = 0 if since is None else await self._read(_before, since)
        return await self._read(_page, after, limit, wanted, _PAGE_BYTES)

    async def start(self, event_id: str | None, since: int | None) -> int:
        """Return the position after which a live stream begins: an event's id, else `since` (ms), else the end.

        Raises `InvalidMessage` for an id that was never issued, `TryAgain` (503) where `holds` has yet to say whether.
        """
        newest = await self._read(_newest)
        if event_id is not None:
            position = _number(event_id, invalid_event_id)
            if position > newest:
                raise unavailable("it may be an older copy") if self._doubted else invalid_event_id()
            return position
        return newest if since is None else await self._read(_before, since)

    async def following(
        self, after: int, limit: int, wanted: MessageFilter = _EVERYTHING, *, most_bytes: int = _PAGE_BYTES
    ) -> tuple[list[StoredMessage], int]:
        """Return up to `limit` messages after a position, and the position to continue from; without waiting for any.

        Fewer where they have more than `most_bytes` together.
        """

        def read(db: sqlite3.Connection) -> tuple[list[StoredMessage], int]:
            page = _page(db, after, limit, wanted, most_bytes)
            return page.messages, max(after, _newest(db)) if page.next_after is None else page.next_after

        return await self._read(read)

    async def received(self, mesh: str, sender: str, client_message_id: str) -> Received | None:
        """Return the place of a message, None where it is not here."""
        wanted = {"mesh": mesh, "sender": sender, "client_message_id": client_message_id}
        row = await self._read(lambda db: db.execute(_READ["received"], wanted).fetchone())
        return None if row is None else Received(*row)

    def arrival(self) -> asyncio.Event:
        """Return an event that is set when something is filed after this call, or the inbox is closed."""
        return self._arrived

    @property
    def used_bytes(self) -> int:
        """Bytes of the file."""
        return self._store.file_bytes

    async def _read(self, read: Callable[..., T], *arguments: Any) -> T:
        """Call `read` with the connection and `arguments`: all its queries see the same rows."""
        return await self._store.read(lambda db: sqlite.in_snapshot(db, lambda: read(db, *arguments)))

    def _wake_readers(self) -> None:
        """Wake the readers that wait now; later ones wait for a new event."""
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()


def _prune(before: int, db: sqlite3.Connection) -> int:
    (last,) = db.execute(_WRITE["old"], {"before": before, "limit": _PRUNED_AT_ONCE}).fetchone()
    if last is None:
        return 0
    values = {"before": before, "last": last}
    db.execute(_WRITE["note_pruned"], values)
    return db.execute(_WRITE["prune"], values).rowcount


def _page(db: sqlite3.Connection, after: int, limit: int, wanted: MessageFilter, most_bytes: int) -> Page:
    query = "page" if wanted.destination is None else "page_of_destination"
    query = query if wanted.sender is None else "page_of_sender"
    (deleted_to,) = db.execute(_READ["deleted_to"]).fetchone()
    messages: list[StoredMessage] = []
    size = 0
    for row in db.execute(_READ[query], {"after": after, "limit": limit + 1, **wanted._asdict()}):
        if len(messages) == limit or size > most_bytes:
            return Page(messages, messages[-1].position, deleted_to)
        messages.append(StoredMessage(*row))
        size += len(messages[-1].message)
    return Page(messages, None, deleted_to)


def _before(db: sqlite3.Connection, since: int) -> int:
    """Return the position before the first message that was received at `since` (ms) or later."""
    first = db.execute(_READ["since"], {"since": since}).fetchone()[0]
    return _newest(db) if first is None else int(first)


def _newest(db: sqlite3.Connection) -> int:
    """Return the last position that was issued."""
    return int(db.execute(_READ["newest"]).fetchone()[0])


def _number(text: str, refusal: Callable[[], PostroomError]) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise refusal()
    return int(text)


class Broken(Exception):
    """The file or the disk can no longer be trusted: the inbox has to be closed, and opened again."""


def from_sqlite(error: Exception) -> Exception:
    """Map an error that leaves the file as it was; one that is not SQLite's is returned as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    if is_full(error):
        detail = "the disk is full: nothing was written to the inbox; free some space"
        return TryAgain.of("disk_full", detail, retryable=True)
    return TryAgain.of("inbox_busy", f"the inbox cannot be used now: {error}; try again", retryable=True)


def unavailable(reason: str) -> TryAgain:
    """Return the error of every call while the inbox is not open."""
    detail = (
        f"the inbox is not open ({reason}): sends still work, and what is missing arrives later; see `postroom doctor`"
    )
    return TryAgain.of("inbox_unavailable", detail, retryable=True)


def broken(path: Path, error: Exception) -> Broken:
    """Return the error of a file that failed."""
    return Broken(f"{path} failed: {error}")


def invalid_event_id() -> InvalidMessage:
    """Return the error for an event id that no stream of this daemon issued."""
    detail = "the Last-Event-ID was not issued by this daemon: omit it, or ask for messages `since` a time"
    return InvalidMessage.of("invalid_event_id", detail, field="Last-Event-ID")


ANSWERS: Final = Answers(refused=from_sqlite, unknown=broken, closed=partial(unavailable, "it is being closed"))

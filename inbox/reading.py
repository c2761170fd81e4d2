"""Reading the inbox beside its writer: read-only, one short transaction at a time, so that the WAL can be emptied."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from inbox.errors import from_sqlite, unavailable
from inbox.model import MessageFilter, Page, StoredMessage
from postroom.chassis.sql import load_queries
from postroom.chassis.sqlite import Connection, in_snapshot, is_broken

T = TypeVar("T")

_QUERIES: Final = load_queries("inbox", "sql/read.sql")
PAGE_BYTES: Final = 8 * 1024 * 1024  # of messages, after which a page ends


class FileState(NamedTuple):
    """What the file says of itself: its id, and how far a refill has come where one is due."""

    id: str
    refill_after: int | None  # history_id


class Reader:
    """Answers questions about messages from its own read-only connection; raises `PostroomError`."""

    def __init__(self, connection: Connection, failed: asyncio.Event) -> None:
        self._connection = connection
        self._failed = failed  # set where the file breaks, here or under the writer
        self._closed = False

    async def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._closed = True
        await self._connection.close()

    async def state(self) -> FileState:
        """Say what the file says of itself."""
        return await self._run(lambda db: FileState(*db.execute(_QUERIES["file"]).fetchone()))

    async def newest(self) -> int:
        """Return the last position that was given."""
        return await self._run(_newest)

    async def before(self, since: int) -> int:
        """Return the position after which the messages begin that were received at `since` (ms) or later."""
        return await self._run(lambda db: in_snapshot(db, lambda: _before(db, since)))

    async def page(self, after: int, limit: int, wanted: MessageFilter) -> Page:
        """Return up to `limit` messages after a position, fewer where they are large."""
        return await self._run(lambda db: in_snapshot(db, partial(_page, db, after, limit, wanted)))

    async def following(
        self, after: int, limit: int, wanted: MessageFilter, most_bytes: int
    ) -> tuple[list[StoredMessage], int]:
        """Return the same, and the position up to which there is nothing else that is wanted."""
        return await self._run(lambda db: in_snapshot(db, partial(_following, db, after, limit, wanted, most_bytes)))

    async def oldest(self) -> int | None:
        """Return when the oldest message was received, in ms since the epoch."""
        return await self._run(lambda db: _value(db, "oldest"))

    async def _run(self, read: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise unavailable("it is being closed")
        try:
            return await self._connection.run(read)
        except sqlite3.Error as error:
            if is_broken(error):
                self._failed.set()
            raise from_sqlite(error) from error


def _following(
    db: sqlite3.Connection, after: int, limit: int, wanted: MessageFilter, most_bytes: int
) -> tuple[list[StoredMessage], int]:
    page = _page(db, after, limit, wanted, most_bytes)
    return page.messages, max(after, _newest(db)) if page.next_after is None else page.next_after


def _page(db: sqlite3.Connection, after: int, limit: int, wanted: MessageFilter, most_bytes: int = PAGE_BYTES) -> Page:
    values = {"after": after, "limit": limit + 1, **wanted._asdict()}
    messages: list[StoredMessage] = []
    size = 0
    for row in db.execute(_QUERIES[_query(wanted)], values):
        if len(messages) == limit or size > most_bytes:
            return Page(messages, messages[-1].position)
        messages.append(StoredMessage(*row))
        size += len(messages[-1].message)
    return Page(messages, None)


def _query(wanted: MessageFilter) -> str:
    if wanted.sender is not None:
        return "page_of_sender"
    return "page" if wanted.destination is None else "page_of_destination"


def _before(db: sqlite3.Connection, since: int) -> int:
    first = db.execute(_QUERIES["since"], {"since": since}).fetchone()[0]
    return _newest(db) if first is None else int(first)


def _newest(db: sqlite3.Connection) -> int:
    return int(_value(db, "newest"))


def _value(db: sqlite3.Connection, query: str) -> Any:
    return db.execute(_QUERIES[query]).fetchone()[0]

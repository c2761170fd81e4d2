"""The inbox as the rooms above use it: one object that owns the file, its writer and its reader."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from inbox.errors import invalid_cursor, invalid_event_id
from inbox.model import MessageFilter, Page, StoredMessage, row_of
from inbox.opening import open_file
from inbox.reading import PAGE_BYTES, FileState, Reader
from inbox.writer import Writer
from postroom._wire.administration import HistoryMessage
from postroom._wire.ids import new_id
from postroom.chassis.sql import load_queries
from postroom.chassis.sqlite import open_reader
from postroom.chassis.sqlite_file import OwnedFile
from postroom.errors import PostroomError

NAME: Final = "inbox"  # of its files
_QUERIES: Final = load_queries("inbox", "sql/write.sql")
_PRUNED_AT_ONCE: Final = 1000  # messages
_DIGITS: Final = 18  # fewer than a 64-bit integer may have
_EVERYTHING: Final = MessageFilter()


def now_ms() -> int:
    """Return the time in ms since the epoch."""
    return time.time_ns() // 1_000_000


class Inbox:
    """What one daemon has received (docs/contract/delivery.md#delivery-80). Any task of one event loop may call it.

    A message is here once, by mesh, sender and client_message_id, however often it is filed. Positions grow, also past
    a file that was set aside. Each method raises `PostroomError`: 507 `disk_full` while the disk is full, 503
    `inbox_unavailable` once it is being closed; the writing ones `Broken` where the file failed: close it then, and the
    next `open` checks it.
    """

    def __init__(
        self,
        file: OwnedFile,
        *,
        writer: Writer,
        reader: Reader,
        failed: asyncio.Event,
        state: FileState,
        clock: Callable[[], int],
    ) -> None:
        self._file = file
        self._writer = writer
        self._reader = reader
        self._clock = clock
        self.failed = failed  # set once the file or the disk failed
        self._arrived = asyncio.Event()
        self.id = state.id  # of the file: a new one has another
        self.refill_after = state.refill_after  # history_id to refill from; None: no refill is due

    @classmethod
    async def open(
        cls, directory: Path, *, clock: Callable[[], int] = now_ms, new_id: Callable[[], str] = new_id
    ) -> Self:
        """Lock the file in `directory`, check it after an unclean stop, migrate it; a damaged one is set aside.

        Raises `Fatal`: 69 where another process owns it, 78 for one that is newer than the program or no inbox, 75 or
        74 while the disk is full or fails.
        """
        async with contextlib.AsyncExitStack() as undo:
            file, failed = OwnedFile(directory, NAME), asyncio.Event()
            undo.callback(file.end, clean=False)
            writer = Writer(await open_file(file, now=clock(), new_id=new_id()), file.path, failed)
            undo.push_async_callback(writer.close)
            reader = Reader(await open_reader(file.path), failed)
            undo.push_async_callback(reader.close)
            state = await reader.state()
            undo.pop_all()
        return cls(file, writer=writer, reader=reader, failed=failed, state=state, clock=clock)

    async def close(self) -> None:
        """Finish what is queued and close; what was filed stays. A second call does nothing."""
        self._wake_readers()
        await self._reader.close()
        await self._writer.close()
        self._file.end(clean=self._writer.clean)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def file(self, messages: Sequence[HistoryMessage]) -> int:
        """Write those that are not here, nor were until retention took them; returns how many, once on disk."""
        now = self._clock()
        new = await self._writer.submit(partial(_file, [row_of(message, now) for message in messages]))
        if new:
            self._wake_readers()
        return new

    async def refilled_to(self, history_id: int | None) -> None:
        """Note how far the refill has come; None: it is done."""
        await self._writer.submit(lambda db: db.execute(_QUERIES["refilled_to"], {"refill_after": history_id}))
        self.refill_after = history_id

    async def prune(self, received_before: int) -> int:
        """Delete what was received before a moment (ms since the epoch); returns how many."""
        total = 0
        while pruned := await self._writer.submit(partial(_prune, received_before)):
            total += pruned
        return total

    async def page(
        self, cursor: str | None, since: int | None, limit: int, wanted: MessageFilter = _EVERYTHING
    ) -> Page:
        """Return up to `limit` messages, oldest first: after a cursor, else received at `since` (ms) or later."""
        if cursor is not None:
            after = _number(cursor, invalid_cursor)
        else:
            after = 0 if since is None else await self._reader.before(since)
        return await self._reader.page(after, limit, wanted)

    async def start(self, event_id: str | None, since: int | None) -> int:
        """Return the position after which a live stream begins: an event's id, else `since` (ms), else the end.

        Raises `InvalidMessage` for an id that was never given.
        """
        newest = await self._reader.newest()
        if event_id is not None:
            position = _number(event_id, invalid_event_id)
            if position > newest:
                raise invalid_event_id()
            return position
        return newest if since is None else await self._reader.before(since)

    async def following(
        self, after: int, limit: int, wanted: MessageFilter = _EVERYTHING, *, most_bytes: int = PAGE_BYTES
    ) -> tuple[list[StoredMessage], int]:
        """Return up to `limit` messages after a position, and the position to go on from; at once, even if none.

        Fewer where they have more than `most_bytes` together.
        """
        return await self._reader.following(after, limit, wanted, most_bytes)

    def arrival(self) -> asyncio.Event:
        """Return an event that is set when something is filed after this call, or the inbox is closed."""
        return self._arrived

    async def oldest(self) -> int | None:
        """Return when the oldest message was received, in ms since the epoch."""
        return await self._reader.oldest()

    @property
    def used_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.path.stat().st_size

    def _wake_readers(self) -> None:
        """Wake whoever waits now; who comes later gets an event of its own time."""
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()


def _file(rows: Sequence[dict[str, Any]], db: sqlite3.Connection) -> int:
    return db.executemany(_QUERIES["file"], rows).rowcount


def _prune(before: int, db: sqlite3.Connection) -> int:
    (last,) = db.execute(_QUERIES["old"], {"before": before, "limit": _PRUNED_AT_ONCE}).fetchone()
    if last is None:
        return 0
    values = {"before": before, "last": last}
    db.execute(_QUERIES["note_pruned"], values)
    return db.execute(_QUERIES["prune"], values).rowcount


def _number(text: str, refusal: Callable[[], PostroomError]) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise refusal()
    return int(text)

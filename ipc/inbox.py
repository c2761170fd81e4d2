"""`GET /v1/inbox` and `GET /v1/events`: what the daemon has received, by the page and as a live stream.

The id of each event of the stream is the message's position, so `Last-Event-ID` resumes where a reader was, without
loss or repetition; a stream begins with its starting position. Each reader takes its pages from the file at its own
pace: one that does not read delays no other, and is dropped (ipc/connection.py).
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
from aiohttp import hdrs, web

from inbox import MessageFilter, StoredMessage
from ipc.connection import Request, json_answer, stream_answer
from ipc.services import Services
from postroom._wire.message import check_destination
from postroom._wire.sends import EventsQuery, InboxQuery
from postroom._wire.transport import EVENT_STREAM
from postroom.chassis.routes import decode_query
from postroom.errors import InvalidMessage, NotPermitted, TryAgain

_PAGE: Final = 200  # messages read from the file at once
_PAGE_BYTES: Final = 256 * 1024  # of them, after which fewer are read
_RETRY_MS: Final = 1000  # after which a browser reconnects


class InboxRoutes:
    """The handlers of the inbox."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._counters = services.counters
        # by uid: one thread serves all readers
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    def _turn(self, request: Request) -> asyncio.Lock:
        return self._locks.setdefault(request.caller.uid, asyncio.Lock())

    async def list(self, request: Request) -> web.StreamResponse:
        """List received messages, oldest first and page by page."""
        query = decode_query(request, InboxQuery)
        wanted = MessageFilter(query.sender, check_destination(query.destination))
        async with self._turn(request):
            page = await self._services.inbox.opened().page(query.cursor, _ms(query.since), query.limit, wanted)
            await request.take_turn(_size(page.messages))
        answer: dict[str, object] = {"messages": [msgspec.Raw(stored.encoded()) for stored in page.messages]}
        if page.next_after is not None:
            answer["next_cursor"] = str(page.next_after)
        if page.deleted_to is not None:
            answer["deleted_to"] = page.deleted_to
        return json_answer(answer)

    async def events(self, request: Request) -> web.StreamResponse:
        """Stream messages as they are filed, until the reader disconnects or the daemon stops."""
        query = decode_query(request, EventsQuery)
        wanted = MessageFilter(query.sender, check_destination(query.destination))
        inbox = self._services.inbox.opened()
        with self._reader(request):
            async with self._turn(request):
                given = request.headers.getall("Last-Event-ID", ())  # two of them are, as one, no position
                after = await inbox.start(", ".join(given) if given else None, _ms(query.since))
            response = stream_answer(EVENT_STREAM, **{"Cache-Control": "no-store"})
            await response.prepare(request)
            if request.method == hdrs.METH_HEAD:
                return response
            await response.write(b"retry: %d\nid: %d\n\n" % (_RETRY_MS, after))
            end = request.connection.until_end()
            while not end.done():
                arrival = inbox.arrival()  # taken first: what is filed from here on sets it
                async with self._turn(request):
                    try:
                        request.check_again()
                        messages, after = await inbox.following(after, _PAGE, wanted, most_bytes=_PAGE_BYTES)
                    except (NotPermitted, TryAgain) as error:  # an answer cannot begin a second time
                        raise ConnectionResetError("its token is not valid, or the inbox was closed") from error
                if messages:
                    await request.take_turn(_size(messages))
                    form = b"id: %d\nevent: message\ndata: %s\n\n"
                    await response.write(b"".join(form % (each.position, each.encoded()) for each in messages))
                elif not await self._arrives(arrival, end):
                    await response.write(b": still here\nid: %d\n\n" % after)
        return response

    async def _arrives(self, arrival: asyncio.Event, end: asyncio.Future[None]) -> bool:
        """Wait for the next message, or the end of the connection; False where a heartbeat is due first."""
        waiting = asyncio.ensure_future(arrival.wait())
        ends: set[asyncio.Future[Any]] = {waiting, end}
        seconds = self._services.inbox_settings.heartbeat_seconds
        try:
            done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return bool(done)

    @contextmanager
    def _reader(self, request: Request) -> Iterator[None]:
        """Count a reader separately from the requests being answered."""
        with self._services.readers.holding(1, request.caller.uid):
            request.only_waits()
            self._counters.event_readers += 1
            self._counters.in_flight -= 1
            try:
                yield
            finally:
                self._counters.event_readers -= 1
                self._counters.in_flight += 1


def _size(messages: Sequence[StoredMessage]) -> int:
    return sum(len(each.message) for each in messages)


def _ms(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise InvalidMessage.of("invalid_query", "since needs a UTC offset, as in 2026-11-21T09:00:00Z", field="since")
    return int(moment.timestamp() * 1000)

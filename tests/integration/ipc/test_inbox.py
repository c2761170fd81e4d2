"""`GET /v1/inbox` and `GET /v1/events` on the wire: pages, event ids, heartbeats, and readers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from support.inboxes import Opened, message

from inbox import Inbox, InboxSettings
from ipc.peers import Policy
from ipc.shares import Limits
from postroom import AsyncClient, InboxQuery
from postroom._wire.sends import InboxMessage, InboxPage
from postroom.errors import TryAgain

OpenRoom = Callable[..., Awaitable[Any]]


@pytest.fixture
async def room(open_room: OpenRoom, inbox: Inbox) -> Any:
    return await open_room(inbox=Opened(inbox))


class Stream:
    """One reader of the live stream, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, room: Any, *headers: str, query: str = "", buffer: int = 2**20) -> Stream:
        reader, writer = await asyncio.open_unix_connection(str(room.path), limit=buffer)
        lines = [f"GET /v1/events{query} HTTP/1.1", "Host: localhost", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        return cls(reader, writer)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)

    async def event(self) -> dict[str, str]:
        """Return the fields of the next event."""
        size = int(await asyncio.wait_for(self._reader.readline(), 20), 16)
        text = (await self._reader.readexactly(size)).decode()
        await self._reader.readline()
        return dict(line.split(": ", 1) for line in text.splitlines() if line)

    async def rest(self) -> bytes:
        """Read to the end, or until the connection is dropped, and close."""
        try:
            return await asyncio.wait_for(self._reader.read(), 20)
        except ConnectionError:
            return b""
        finally:
            self.close()

    def close(self) -> None:
        self._writer.close()


async def test_pages_are_what_the_documented_types_say(room: Any, inbox: Inbox) -> None:
    await inbox.file([message(number) for number in range(1, 6)])
    first = msgspec.json.decode((await room.request("GET", "/v1/inbox?limit=3")).body, type=InboxPage)
    rest = await room.request("GET", f"/v1/inbox?limit=3&cursor={first.next_cursor}")
    second = msgspec.json.decode(rest.body, type=InboxPage)
    assert [each.history_id for each in (*first.messages, *second.messages)] == [1, 2, 3, 4, 5]
    assert (second.next_cursor, second.deleted_to) == (None, None)
    await inbox.prune(2**62)
    late = await room.request("GET", f"/v1/inbox?cursor={first.next_cursor}")
    assert msgspec.json.decode(late.body) == {"messages": [], "deleted_to": second.messages[-1].position}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("cursor=x", "invalid_cursor"),
        ("limit=0", "invalid_query"),
        ("limit=1001", "invalid_query"),
        ("since=yesterday", "invalid_query"),
        ("since=2026-11-21T09:00:00", "invalid_query"),
        ("since=3600", "invalid_query"),
        ("colour=red", "invalid_query"),
        ("sender=a&sender=b", "invalid_query"),
    ],
)
async def test_a_query_that_makes_no_sense_is_refused(room: Any, query: str, code: str) -> None:
    reply = await room.request("GET", f"/v1/inbox?{query}")
    assert (reply.status, msgspec.json.decode(reply.body)["code"]) == (400, code)


async def test_a_stream_tells_where_it_begins_and_then_each_message_with_its_position(room: Any, inbox: Inbox) -> None:
    await inbox.file([message(1)])
    (old,) = (await inbox.page(None, None, 10)).messages
    stream = await Stream.open(room)
    head = await stream.head()
    assert b"Content-Type: text/event-stream" in head
    assert (await stream.event())["id"] == str(old.position)
    await inbox.file([message(2)])
    event = await stream.event()
    decoded = msgspec.json.decode(event["data"], type=InboxMessage)
    assert (event["event"], decoded.history_id, str(decoded.position)) == ("message", 2, event["id"])
    stream.close()


async def test_a_stream_goes_on_after_the_last_event_id_over_another_time(room: Any, inbox: Inbox) -> None:
    await inbox.file([message(number) for number in range(1, 4)])
    first = (await inbox.page(None, None, 1)).messages[0]
    query = "?since=2020-01-01T00:00:00Z"
    stream = await Stream.open(room, f"Last-Event-ID: {first.position}", query=query)
    await stream.head()
    await stream.event()
    await inbox.file([message(4)])
    batch = await stream.event()
    assert msgspec.json.decode(batch["data"])["history_id"] in (3, 4)
    stream.close()


async def test_a_head_of_a_stream_ends_with_its_head(room: Any, inbox: Inbox) -> None:
    await inbox.file([message(1)])
    answer = await room.raw(b"HEAD /v1/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b"Content-Type: text/event-stream" in answer
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("event_id", ["", "x", "-1", "1.0", "9" * 18, "9" * 30])
async def test_an_event_id_that_no_stream_gave_is_refused(room: Any, event_id: str) -> None:
    stream = await Stream.open(room, f"Last-Event-ID: {event_id}", "Connection: close")
    answer = await stream.rest()
    assert b"400 Bad Request" in answer
    assert b"invalid_event_id" in answer


async def test_two_event_ids_are_refused(room: Any) -> None:
    stream = await Stream.open(room, "Last-Event-ID: 0", "Last-Event-ID: 0", "Connection: close")
    answer = await stream.rest()
    assert b"400 Bad Request" in answer
    assert b"invalid_event_id" in answer


async def test_a_silent_stream_sends_heartbeats(open_room: OpenRoom, inbox: Inbox) -> None:
    room = await open_room(inbox=Opened(inbox), inbox_settings=InboxSettings(heartbeat_seconds=0.05))
    stream = await Stream.open(room)
    await stream.head()
    begin = await stream.event()
    for _ in range(3):
        heartbeat = await stream.event()
        assert heartbeat == {"": "still here", "id": begin["id"]}
    stream.close()


async def test_a_reader_that_does_not_read_is_dropped_and_holds_up_nobody(room: Any, inbox: Inbox) -> None:
    lazy = await Stream.open(room, "Last-Event-ID: 0", buffer=1024)
    await lazy.head()
    body = "x" * 100_000
    busy = asyncio.create_task(read(room, 300))
    for number in range(1, 301):
        await inbox.file([message(number, body=body)])
    assert await busy == list(range(1, 301))
    loop = asyncio.get_running_loop()
    while not room.services.counters.dropped["reply_not_read"]:
        room.server.drop_overdue(loop.time() + 31)
        await asyncio.sleep(0)
    await lazy.rest()


async def read(room: Any, number: int) -> list[int]:
    found: list[int] = []
    async with AsyncClient(room.path) as client, aclosing(client.events(after=0)) as events:
        async for each in events:
            found.append(each.history_id)
            if len(found) == number:
                break
    return found


async def test_readers_are_limited_and_keep_no_send_out(open_room: OpenRoom, inbox: Inbox) -> None:
    room = await open_room(
        inbox=Opened(inbox), inbox_settings=InboxSettings(readers=3), limits=Limits(requests_in_flight=2)
    )
    streams = [await Stream.open(room) for _ in range(3)]
    for stream in streams:
        await stream.head()
    fourth = await Stream.open(room, "Connection: close")
    assert b"too_many_readers" in await fourth.rest()
    assert (await room.send({"to": "topic:orders", "body": "hello"})).status == 202
    streams[0].close()
    while room.services.counters.event_readers == 3:
        await inbox.file([message(room.services.counters.event_readers)])
        await asyncio.sleep(0)
    fifth = await Stream.open(room)
    assert b"200 OK" in await fifth.head()
    for stream in (*streams, fifth):
        stream.close()


async def test_a_stop_ends_the_streams_at_once(room: Any) -> None:
    stream = await Stream.open(room)
    await stream.head()
    await room.server.stop(10)
    await stream.rest()
    assert room.services.counters.event_readers == 0


async def test_a_client_that_follows_survives_an_inbox_that_is_closed(open_room: OpenRoom, inbox: Inbox) -> None:
    source = Opened(inbox)
    room = await open_room(inbox=source)
    reading = asyncio.create_task(read(room, 2))
    await inbox.file([message(1)])
    directory = inbox._store.path.parent
    await inbox.close()
    async with await Inbox.open(directory) as again:
        source._inbox = again
        await again.file([message(2)])
        assert await asyncio.wait_for(reading, 20) == [1, 2]


async def test_a_closed_inbox_is_a_503_that_may_be_tried_again(room: Any, inbox: Inbox) -> None:
    await inbox.close()
    async with AsyncClient(room.path, patience=0) as client:
        with pytest.raises(TryAgain) as refusal:
            await client.inbox(InboxQuery(sender="bob"))
    assert (refusal.value.code, refusal.value.retryable) == ("inbox_unavailable", True)


async def test_a_peer_that_may_not_call_reads_nothing(open_room: OpenRoom, inbox: Inbox) -> None:
    room = await open_room(inbox=Opened(inbox), policy=Policy([4711], [4711]))
    for target in ("/v1/inbox", "/v1/events"):
        reply = await room.request("GET", target)
        assert (reply.status, msgspec.json.decode(reply.body)["code"]) == (403, "peer_not_allowed")

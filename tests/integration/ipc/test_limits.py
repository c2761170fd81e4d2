"""Limits on size, count and time at the socket (docs/contract/send.md#send-27)."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from ipc.connection import Answer
from ipc.shares import Limits
from outbox.model import Caller

READY = b"GET /v1/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
SEND = b'{"to":"topic:orders","body":"hi"}'


async def test_one_request_too_many_is_a_429_that_says_when(open_room: Any) -> None:
    room = await open_room(limits=Limits(requests_in_flight=1))
    _, writer = await room.connect()
    writer.write(_head(3000) + b"{")
    await until(lambda: room.services.counters.in_flight > 0)
    refused = await room.request("GET", "/v1/ready")
    assert refused.status == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json["retryable"] is True
    writer.close()


async def test_waits_keep_no_send_out_and_one_too_many_is_a_429(open_room: Any) -> None:
    room = await open_room(limits=Limits(requests_in_flight=1, waits=2))
    await room.send({"to": "topic:a", "client_message_id": "k"})
    waiting = []
    for count in (1, 2):
        waiting.append(asyncio.create_task(room.request("GET", "/v1/sends/k?wait=60")))
        await until(lambda count=count: room.services.waits.held == count)
    assert (await room.send({"to": "topic:a"})).status == 202
    assert (await room.request("GET", "/v1/sends/k?wait=60")).status == 429
    await room.outbox.act("abort", "k", caller=Caller(0, 0), reason="test")
    assert [(await wait).json["status"] for wait in waiting] == ["aborted", "aborted"]
    assert room.services.waits.held == 0


async def test_a_wait_ends_when_its_caller_hangs_up(room: Any) -> None:
    await room.send({"to": "topic:a", "client_message_id": "k"})
    reader, writer = await room.connect()
    writer.write(b"GET /v1/sends/k?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: room.services.counters.in_flight > 0)
    writer.close()
    await until(lambda: not room.server.connections or bool(_drop(room)))
    await until(lambda: room.services.counters.in_flight == 0)
    assert await reader.read() == b""


def _drop(room: Any) -> int:
    room.server.drop_overdue(asyncio.get_running_loop().time())
    dropped: int = room.services.counters.dropped["caller_gone"]
    return dropped


async def test_a_wait_outlasts_a_half_close(room: Any) -> None:
    await room.send({"to": "topic:a", "client_message_id": "k"})
    waiting = asyncio.create_task(room.request("GET", "/v1/sends/k?wait=60"))
    await until(lambda: room.services.counters.in_flight > 0)
    await drop_after(room, 5)
    await room.outbox.act("abort", "k", caller=Caller(0, 0), reason="test")
    assert (await waiting).json["status"] == "aborted"


def _head(length: int, path: str = "/v1/send", media: str = "application/json") -> bytes:
    fields = f"Host: x\r\nContent-Type: {media}\r\nContent-Length: {length}\r\n"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode()


_SMALL = Limits(body_bytes=2048, request_bytes=4096, buffered_bytes=4096)


@pytest.mark.parametrize("path", ["/v1/send", "/v1/relay/pause", "/v1/outbox/abort"])
async def test_more_bytes_than_may_be_held_are_a_429_on_every_route(open_room: Any, path: str) -> None:
    room = await open_room(limits=_SMALL)
    _, first = await room.connect()
    first.write(_head(3000) + b" " * 2500)
    await until(lambda: room.services.budget.left == 4096 - 2500)
    second, writer = await room.connect()
    writer.write(_head(3000, path) + b" " * 2500)
    assert (await second.readline()).startswith(b"HTTP/1.1 429")
    first.close()
    writer.close()
    await until(lambda: room.services.budget.left == 4096)


@pytest.mark.parametrize(("above", "status"), [(0, b"202"), (1, b"413")])
@pytest.mark.parametrize("unusual", ["", "X-Read-By: aiohttp\r\n"])
async def test_a_request_that_arrives_whole_has_the_same_limit(
    open_room: Any, unusual: str, above: int, status: bytes
) -> None:
    room = await open_room(limits=Limits(body_bytes=2048, request_bytes=4096))
    size = 4096 + above
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n{unusual}"
    reply = await room.raw(f"POST /v1/send HTTP/1.1\r\n{fields}\r\n".encode() + SEND.ljust(size))
    assert reply.startswith(b"HTTP/1.1 " + status)
    assert (b"request_too_large" in reply) == bool(above)
    assert await room.rows() == 1 - above


async def test_bytes_that_are_only_promised_refuse_nobody(open_room: Any) -> None:
    room = await open_room(limits=_SMALL)
    slow = [await room.connect() for _ in range(20)]
    for _, writer in slow:
        writer.write(_head(4096) + b"{")
    await until(lambda: room.services.budget.left == 4096 - len(slow))
    reader, sender = await room.connect()
    sender.write(_head(len(SEND)) + SEND[:-1])
    await until(lambda: room.services.budget.left == 4096 - len(slow) - len(SEND) + 1)
    sender.write(SEND[-1:])
    assert (await reader.readline()).startswith(b"HTTP/1.1 202")
    for writer in (sender, *(writer for _, writer in slow)):
        writer.close()


@pytest.mark.parametrize(
    ("path", "media", "length"),
    [
        ("/v1/send", "application/json", "Content-Length: 3000"),
        ("/v1/send", "application/json", "Transfer-Encoding: chunked"),
        ("/v1/send/batch", "application/x-ndjson", "Content-Length: 3000"),
    ],
)
async def test_nobody_is_told_to_continue_while_there_is_no_room(
    open_room: Any, path: str, media: str, length: str
) -> None:
    room = await open_room(limits=_SMALL)
    _, first = await room.connect()
    first.write(_head(4096) + b" " * 4095)
    await until(lambda: room.services.budget.left == 1)
    room.services.budget.take(1)
    reader, writer = await room.connect()
    fields = f"Host: x\r\nContent-Type: {media}\r\n{length}\r\nExpect: 100-continue\r\n"
    writer.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 429")
    room.services.budget.give_back(1)
    first.close()
    writer.close()


async def test_a_send_draws_on_the_bytes_until_it_is_on_disk(open_room: Any, short_directory: Path) -> None:
    room = await open_room(limits=_SMALL)
    with closing(sqlite3.connect(short_directory / "s" / "outbox.db", isolation_level=None)) as slow_disk:
        slow_disk.execute("BEGIN IMMEDIATE")
        reader, first = await room.connect()
        first.write(_head(3000) + SEND.ljust(3000))
        await until(lambda: room.services.budget.left == 4096 - 3000)
        second, writer = await room.connect()
        writer.write(_head(2000) + SEND.ljust(2000))
        assert (await second.readline()).startswith(b"HTTP/1.1 429")
        slow_disk.execute("ROLLBACK")
    assert (await reader.readline()).startswith(b"HTTP/1.1 202")
    first.close()
    writer.close()
    assert (await room.rows(), room.services.budget.left) == (1, 4096)


async def test_unfinished_lines_of_batches_draw_on_the_same_bytes(open_room: Any) -> None:
    room = await open_room(limits=_SMALL)
    _, first = await room.connect()
    first.write(_head(9999, "/v1/send/batch", "application/x-ndjson") + b" " * 3000)
    await until(lambda: room.services.budget.left == 4096 - 3000)
    reader, second = await room.connect()
    second.write(_head(9999, "/v1/send/batch", "application/x-ndjson") + SEND + b"\n" + b" " * 3000)
    await reader.readuntil(b"queued")
    second.write(b"\n" + SEND + b"\n")
    refused = await reader.readuntil(b"queued")
    assert b'"code":"too_busy"' in refused
    assert b'"retryable":true' in refused
    assert await room.rows() == 2
    first.close()
    second.close()
    await until(lambda: room.services.budget.left == 4096)


async def drop_after(room: Any, seconds: float) -> None:
    """Sweep as if `seconds` had passed: the clock is handed in."""
    room.server.drop_overdue(asyncio.get_running_loop().time() + seconds)


async def test_a_head_that_does_not_come_to_an_end_is_dropped(room: Any) -> None:
    reader, writer = await room.connect()
    writer.write(b"GET /v1/re")
    await until(lambda: any(connection.idle_since for connection in room.server.connections))
    assert (await room.request("GET", "/v1/ready")).status == 200
    await drop_after(room, Limits().header_seconds - 1)
    writer.write(b"a")
    assert (await room.request("GET", "/v1/ready")).status == 200
    await drop_after(room, Limits().header_seconds + 1)
    assert await reader.read() == b""
    assert room.services.counters.dropped == {"head_too_slow": 1}
    writer.close()


@pytest.mark.parametrize(("seconds", "reason"), [(31, "body_stalled")])
async def test_a_body_that_stalls_is_dropped(room: Any, seconds: float, reason: str) -> None:
    reader, writer = await room.connect()
    writer.write(b"POST /v1/send HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
    await until(lambda: room.services.counters.in_flight > 0)
    await drop_after(room, seconds)
    assert await reader.read() == b""
    assert room.services.counters.dropped == {reason: 1}
    assert await room.rows() == 0
    writer.close()


async def test_a_body_that_drips_is_dropped_although_it_never_stalls(open_room: Any) -> None:
    room = await open_room(limits=Limits(stall_seconds=1000, body_seconds=30))
    reader, writer = await room.connect()
    writer.write(b"POST /v1/send HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
    await until(lambda: room.services.counters.in_flight > 0)
    await drop_after(room, 31)
    assert await reader.read() == b""
    assert room.services.counters.dropped == {"body_too_slow": 1}
    writer.close()


async def test_a_batch_may_take_its_time_as_long_as_lines_come(room: Any) -> None:
    reader, writer = await room.connect()
    writer.write(
        b"POST /v1/send/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\nContent-Length: 9999\r\n\r\n"
        + SEND
        + b"\n"
    )
    await reader.readuntil(b"queued")
    await drop_after(room, 29)
    writer.write(SEND + b"\n")
    await reader.readuntil(b"queued")
    writer.close()


async def test_a_line_of_a_batch_that_drips_is_dropped_although_it_never_stalls(open_room: Any) -> None:
    room = await open_room(limits=Limits(stall_seconds=1000, body_seconds=30))
    reader, writer = await room.connect()
    left = room.services.budget.left
    writer.write(_head(9999, "/v1/send/batch", "application/x-ndjson") + SEND + b"\n")
    await reader.readuntil(b"queued")
    await drop_after(room, 31)
    writer.write(b"{")
    await until(lambda: room.services.budget.left == left - 1)
    await drop_after(room, 29)
    assert room.services.counters.dropped == {}
    await drop_after(room, 31)
    await reader.read()
    assert room.services.counters.dropped == {"body_too_slow": 1}
    await until(lambda: room.services.budget.left == left)
    writer.close()


async def test_lines_that_wait_for_their_commit_draw_on_the_bytes_that_may_be_held(open_room: Any) -> None:
    room = await open_room(limits=_SMALL)
    reader, writer = await room.connect()
    lines = [SEND[:-2] + b" " * 1400 + SEND[-2:]] * 3
    writer.write(_head(9999, "/v1/send/batch", "application/x-ndjson") + b"\n".join(lines) + b"\n")
    answers = [await reader.readuntil(b'{"line":'), await reader.readuntil(b"}\n"), await reader.readuntil(b"}\n")]
    assert b"queued" in answers[1]
    assert b"queued" in answers[2]
    assert b"too_busy" in await reader.readuntil(b"retryable")
    writer.close()
    await until(lambda: room.services.budget.left == 4096)


async def test_an_idle_connection_is_closed_in_the_end(open_room: Any) -> None:
    room = await open_room(limits=Limits(idle_seconds=0.05))
    reader, writer = await room.connect()
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_answers_that_nobody_reads_do_not_pile_up(room: Any) -> None:
    """A caller pipelines 100,000 requests and reads nothing: the server stops reading, then drops the connection."""
    _, writer = await asyncio.open_unix_connection(str(room.path), limit=1024)
    flood = asyncio.create_task(_flood(writer, 100_000))
    await until(lambda: _blocked(room))
    (connection,) = room.server.connections
    assert connection.transport.get_write_buffer_size() < 1024 * 1024
    assert (await room.request("GET", "/v1/ready")).status == 200
    await drop_after(room, Limits().stall_seconds + 1)
    with pytest.raises(ConnectionError):
        await flood
    assert room.services.counters.dropped == {"reply_not_read": 1}


async def test_100_000_pipelined_requests_are_all_answered_in_order(room: Any) -> None:
    reader, writer = await room.connect()
    count = 100_000
    flood = asyncio.create_task(_flood(writer, count))
    answered = 0
    while answered < count:
        answered += (await reader.read(1 << 20)).count(b"HTTP/1.1 200 OK")
    await flood
    writer.close()
    assert answered == count


def _blocked(room: Any) -> bool:
    return any(connection.writing_paused for connection in room.server.connections)


async def _flood(writer: asyncio.StreamWriter, count: int) -> None:
    for _ in range(count // 1000):
        writer.write(READY * 1000)
        await writer.drain()


async def test_one_connection_too_many_takes_the_place_of_the_idlest(open_room: Any) -> None:
    room = await open_room(limits=Limits(connections=2))
    oldest, first = await room.connect()
    first.write(READY)
    await oldest.readuntil(b'{"ready":true}')
    newer, second = await room.connect()
    second.write(READY)
    await newer.readuntil(b'{"ready":true}')
    assert (await room.request("GET", "/v1/ready")).status == 200
    assert await oldest.read() == b""
    assert room.services.counters.dropped == {"too_many_connections": 1}
    second.write(READY)
    assert await newer.readuntil(b'{"ready":true}')
    first.close()
    second.close()


async def test_a_crowd_that_arrives_at_once_holds_no_more_connections_than_the_limit(open_room: Any) -> None:
    room = await open_room(limits=Limits(connections=8))
    with ExitStack() as closing:
        for _ in range(64):  # without a turn of the loop in between
            closing.enter_context(socket.socket(socket.AF_UNIX)).connect(str(room.path))
        assert (await room.request("GET", "/v1/ready")).status == 200
        assert room.services.counters.dropped["too_many_connections"] >= 64 - 8
        assert len(room.server.connections) <= 8


@contextmanager
def _few_descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_cap_on_connections_leaves_descriptors_for_everything_else() -> None:
    with _few_descriptors(256):
        assert Limits().connection_cap() < 200
    assert Limits(connections=10).connection_cap() == 10


async def test_an_answer_that_nobody_reads_is_kept_once(room: Any) -> None:
    """The transport keeps what is still to be read; five hundred such callers took another 100 MB for nothing."""
    _, writer = await asyncio.open_unix_connection(str(room.path), limit=1024)
    writer.write(b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
    await until(lambda: _blocked(room))
    sizes = [len(each.encode()) for each in gc.get_objects() if isinstance(each, Answer)]
    writer.transport.abort()
    await until(lambda: not room.server.connections)
    assert sizes
    assert max(sizes) < 10_000


async def test_a_healthy_caller_is_served_beside_500_slow_ones(room: Any) -> None:
    """Five hundred callers that drip a byte at a time; a healthy one gets a thousand answers before any is dropped."""
    async with AsyncExitStack() as closing:
        slow = [await _slow(room, closing) for _ in range(500)]
        reader, writer = await room.connect()
        for turn in range(1000):
            slow[turn % 500].send(b"a")
            writer.write(READY)
            await reader.readuntil(b'{"ready":true}')
        assert len(room.server.connections) == 501
        await drop_after(room, Limits().header_seconds + 1)
        assert room.services.counters.dropped == {"head_too_slow": 500}
        writer.write(READY)
        await reader.readuntil(b'{"ready":true}')
        writer.close()


async def test_a_healthy_callers_wait_hardly_depends_on_500_slow_ones(room: Any) -> None:
    async with AsyncExitStack() as closing:
        reader, writer = await room.connect()
        alone = await _median_wait(reader, writer)
        slow = [await _slow(room, closing) for _ in range(500)]
        for sock in slow:
            sock.send(b"a")
        crowded = await _median_wait(reader, writer)
        writer.close()
    assert crowded < 20 * alone


async def _slow(room: Any, closing: AsyncExitStack) -> socket.socket:
    sock = closing.enter_context(socket.socket(socket.AF_UNIX))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, str(room.path))
    sock.send(b"GET /v1/ready HTTP/1.1\r\nX: ")
    return sock


async def _median_wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    waits = []
    for _ in range(200):
        began = time.perf_counter()
        writer.write(READY)
        await reader.readuntil(b'{"ready":true}')
        waits.append(time.perf_counter() - began)
    return sorted(waits)[100]

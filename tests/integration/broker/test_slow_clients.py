"""Clients that never come to an end: each is dropped at its deadline (bad-input.md, "Before HTTP")."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from support.wire import MALFORMED, SECRET
from yarl import URL

from broker.config import BrokerConfig
from broker.server import open_services, serving
from postroom.chassis import listener

Message = Callable[..., dict[str, Any]]
OPENAPI = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
HOUR = 3600.0

Open = Callable[..., Awaitable[Any]]


@pytest.fixture
async def listen(migrated: BrokerConfig, short_directory: Path) -> AsyncIterator[Open]:
    """How to listen on a socket, patient but for the deadlines given; returns the services."""
    async with AsyncExitStack() as stack:

        async def start(**deadlines: float) -> Any:
            patient = {"header_seconds": HOUR, "body_seconds": HOUR, "stall_seconds": HOUR, "idle_seconds": HOUR}
            where = {"socket_path": short_directory / "broker.sock"}
            config = msgspec.structs.replace(migrated, **where, **(patient | deadlines))
            services = await stack.enter_async_context(open_services(config))
            await stack.enter_async_context(serving(services))
            return services

        yield start


def _dropped(services: Any, reason: str) -> float | None:
    value: float | None = services.metrics.registry.get_sample_value(
        "postroom_broker_connections_dropped_total", {"reason": reason}
    )
    return value


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head


async def test_a_head_that_does_not_come_to_an_end_is_dropped_and_a_healthy_client_is_not(listen: Open) -> None:
    services = await listen(header_seconds=0.01)
    healthy, asks = await asyncio.open_unix_connection(str(services.config.socket_path))
    asks.write(OPENAPI)
    assert (await _answer(healthy)).startswith(b"HTTP/1.1 200 ")
    reader, writer = await asyncio.open_unix_connection(str(services.config.socket_path))
    writer.write(b"GET /openapi.json HTTP/1.1\r\nX: ")
    assert await reader.read() == b""
    assert _dropped(services, "head_too_slow") == 1
    asks.write(OPENAPI)
    assert (await _answer(healthy)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    asks.close()


async def test_a_head_that_begins_with_the_connection_has_no_more_time_than_another(listen: Open) -> None:
    services = await listen(header_seconds=0.01)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(services.config.socket_path))
        peer.sendall(b"GET /openapi.json HTTP/1.1\r\nX: ")  # it is there before the broker takes the connection
        reader, writer = await asyncio.open_unix_connection(sock=peer)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
    assert _dropped(services, "head_too_slow") == 1


async def test_a_connection_too_many_takes_the_place_of_one_that_is_idle(listen: Open) -> None:
    services = await listen(max_connections=3)
    path = str(services.config.socket_path)
    opened = [await asyncio.open_unix_connection(path) for _ in range(50)]
    for _ in range(3):
        reader, writer = await asyncio.open_unix_connection(path)
        opened.append((reader, writer))
        writer.write(OPENAPI)
        assert (await _answer(reader)).startswith(b"HTTP/1.1 200 ")
    assert _dropped(services, "too_many_connections") == 50
    for _, writer in opened:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_connection_that_asks_nothing_is_closed(listen: Open) -> None:
    services = await listen(idle_seconds=0.01)
    reader, writer = await asyncio.open_unix_connection(str(services.config.socket_path))
    assert await reader.read() == b""
    writer.close()


async def test_a_client_that_does_not_read_its_answers_is_dropped(listen: Open) -> None:
    services = await listen(stall_seconds=0.01)
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, str(services.config.socket_path))
        await asyncio.get_running_loop().sock_sendall(client, OPENAPI * 1000)
        hang_up = select.poll()
        hang_up.register(client, 0)
        assert await asyncio.to_thread(hang_up.poll, 60_000)
    assert _dropped(services, "reply_not_read") == 1


async def test_who_has_not_read_for_longest_makes_room_where_too_much_is_unread(
    listen: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MOST_UNREAD", 500_000)
    services = await listen()
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            await loop.sock_connect(client, str(services.config.socket_path))
            await loop.sock_sendall(client, OPENAPI * 10)
        hang_up = select.poll()
        hang_up.register(clients[0], 0)
        assert await asyncio.to_thread(hang_up.poll, 60_000)
        reader, writer = await asyncio.open_unix_connection(str(services.config.socket_path))
        writer.write(OPENAPI)
        assert (await _answer(reader)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert (_dropped(services, "too_much_unread") or 0) >= 1


async def test_the_broker_repeats_no_malformed_head_in_an_answer_or_its_log(
    listen: Open, caplog: pytest.LogCaptureFixture
) -> None:
    services = await listen()
    with capture_logs() as lines:
        for name, request in MALFORMED.items():
            reader, writer = await asyncio.open_unix_connection(str(services.config.socket_path))
            writer.write(request)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 20)
            assert answer[:12] in (b"", b"HTTP/1.0 400", b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 404"), (
                name,
                answer,
            )
            assert SECRET.encode() not in answer, name
            assert not answer or b"application/problem+json" in answer, name
            writer.close()
    assert SECRET not in caplog.text + str(lines)


async def _asked(broker: Any, request: bytes) -> bytes:
    """What a caller gets that sends this, and that it has nothing more to say."""
    url = URL(broker.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(request)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


def _request(broker: Any, line: str, body: Any = None) -> bytes:
    data = b"" if body is None else msgspec.json.encode(body)
    fields = "Host: x", f"Authorization: Bearer {broker.tokens['demo', 'alice']}", f"Content-Length: {len(data)}"
    return "".join(f"{each}\r\n" for each in (line, *fields, "")).encode() + data


async def test_every_request_is_answered_that_came_before_a_half_close(exposed: Any) -> None:
    features = _request(exposed, "GET /v1/features HTTP/1.1")
    assert (await _asked(exposed, features)).count(b"HTTP/1.1 200 ") == 1
    assert (await _asked(exposed, features * 5)).count(b"HTTP/1.1 200 ") == 5


async def test_a_batch_whose_caller_may_be_gone_is_not_written_and_it_is_told(exposed: Any, message: Message) -> None:
    """Over TCP a half that was closed looks like a caller that has hung up (docs/contract/accept.md#accept-24)."""
    batch = {"messages": [message("id-1", "dm:alice")]}
    answer = await _asked(exposed, _request(exposed, "POST /v1/accept HTTP/1.1", batch))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"given_up" in answer
    assert (await exposed.member("alice").get("/v1/history")).body["messages"] == []


@pytest.mark.parametrize(("fields", "status"), [(100, 200), (101, 400)])
async def test_a_request_may_have_a_hundred_header_fields(exposed: Any, fields: int, status: int) -> None:
    more = "".join(f"\r\nX-{number}: x" for number in range(fields - 3))
    answer = await _asked(exposed, _request(exposed, f"GET /v1/features HTTP/1.1{more}"))
    assert answer.split(b" ", 2)[1] == str(status).encode()


async def test_another_version_of_http_is_refused(exposed: Any) -> None:
    answer = await _asked(exposed, _request(exposed, "GET /v1/features HTTP/2.0"))
    assert answer.startswith(b"HTTP/1.1 505 HTTP Version Not Supported\r\n")
    assert b"http_version_not_supported" in answer


@pytest.mark.parametrize("rest", ["", " HTTP/0.9", "#now HTTP/1.1"])
async def test_an_old_form_and_a_fragment_are_refused(exposed: Any, rest: str) -> None:
    answer = await _asked(exposed, _request(exposed, f"GET /v1/features{rest}"))
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"bad_request" in answer

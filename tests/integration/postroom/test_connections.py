"""How both clients keep connections, and what they say of a peer that does not keep to HTTP."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self
from uuid import UUID

import msgspec
import pytest
from aiohttp import web
from support.waiting import until
from support.wire import Serve, Talk

from postroom import (
    AsyncClient,
    BrokerClient,
    Client,
    InvalidMessage,
    PostroomError,
    SendResult,
    TryAgain,
    Unavailable,
)
from postroom._wire import connections
from postroom._wire.jobs import StartJob

Send = Callable[..., Awaitable[SendResult]]
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter

RESULT = b'{"client_message_id":"a","outbox_id":"r","status":"queued"}'
ACCEPTED = b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(RESULT),
    RESULT,
)
JOB = StartJob(mesh="demo", flow="f", first="a", id=UUID(int=1), request=msgspec.Raw(b"{}"))
LARGE = "x" * 4_000_000  # more than a socket takes at once


@pytest.fixture(params=["async", "blocking"])
def connect(request: pytest.FixtureRequest) -> Callable[..., object]:
    return AsyncClient if request.param == "async" else Blocking


class Blocking:
    """A blocking client as an asynchronous one: each call in a thread."""

    def __init__(self, *args: object, **options: object) -> None:
        self._client = Client(*args, **options)  # type: ignore[arg-type]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()

    async def send(self, *args: object, **options: object) -> SendResult:
        return await asyncio.to_thread(self._client.send, *args, **options)  # type: ignore[arg-type]

    async def health(self) -> object:
        return await asyncio.to_thread(self._client.health)


async def read_request(reader: Reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    return head + await reader.readexactly(length)


class Peer:
    """Answers well, and counts the connections and the requests on each."""

    def __init__(self, *, requests: int = 1_000_000, after: bytes = b"") -> None:
        self.counts: list[int] = []
        self._requests = requests  # on one connection, which is then closed
        self._after = after  # what follows each answer, unasked

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        number = len(self.counts)
        self.counts.append(0)
        while self.counts[number] < self._requests:
            await read_request(reader)
            self.counts[number] += 1
            writer.write(ACCEPTED + self._after)
            await writer.drain()


async def test_a_connection_is_kept_for_the_next_request(connect: type[AsyncClient], talk: Talk) -> None:
    peer = Peer()
    async with connect(await talk(peer)) as client:
        for _ in range(5):
            await client.send("topic:orders", "hello")
    assert peer.counts == [5]


async def test_requests_at_once_have_a_connection_each(connect: type[AsyncClient], talk: Talk) -> None:
    everybody = asyncio.Barrier(4)
    peer = Peer()

    async def together(reader: Reader, writer: Writer) -> None:
        await everybody.wait()
        await peer(reader, writer)

    async with connect(await talk(together)) as client, asyncio.timeout(30):
        for _ in range(3):
            await asyncio.gather(*(client.send("topic:orders", "hello") for _ in range(4)))
    assert len(peer.counts) == 4
    assert sum(peer.counts) == 12


async def test_a_peer_that_closes_between_requests_is_asked_over_another_connection(
    connect: type[AsyncClient], talk: Talk
) -> None:
    peer = Peer(requests=2)
    async with connect(await talk(peer), patience=0) as client:
        for _ in range(6):
            await client.send("topic:orders", "hello")
    assert peer.counts == [2, 2, 2]


async def test_a_peer_that_closes_when_the_next_request_comes_is_asked_over_another_connection(
    connect: type[AsyncClient], talk: Talk
) -> None:
    peer = Peer(requests=1)

    async def late(reader: Reader, writer: Writer) -> None:
        await peer(reader, writer)
        await read_request(reader)

    async with connect(await talk(late), patience=0) as client:
        for _ in range(3):
            await client.send("topic:orders", "hello")
    assert peer.counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (lambda broker: broker.accepted([]), b'{"answers":[]}'),
        (
            lambda broker: broker.start_job(JOB),
            b'{"id":"%b","mesh":"demo","flow":"f","started":true}' % str(JOB.id).encode(),
        ),
    ],
)
async def test_a_broker_that_closes_when_the_next_request_comes_is_asked_over_another_connection(
    ask: Callable[[BrokerClient], Awaitable[object]], body: bytes
) -> None:
    closed = 0

    async def late(reader: Reader, writer: Writer) -> None:
        nonlocal closed
        await read_request(reader)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        with suppress(asyncio.IncompleteReadError):  # at the end of the client
            await read_request(reader)
        writer.close()
        await writer.wait_closed()
        closed += 1

    async with await asyncio.start_server(late, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with BrokerClient(url, "a token", patience=0) as broker:
            for _ in range(3):
                await ask(broker)
        await until(lambda: closed == 3)


@pytest.mark.parametrize("after", [b" ", ACCEPTED, b"HTTP/1.1 500 No\r\n"])
async def test_what_comes_unasked_is_never_an_answer(connect: type[AsyncClient], talk: Talk, after: bytes) -> None:
    peer = Peer(after=after)
    async with connect(await talk(peer), patience=0) as client:
        for _ in range(3):
            await client.send("topic:orders", "hello")
    assert peer.counts == [1, 1, 1]


@pytest.mark.parametrize("first", [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", b"220 hello\r\n"])
async def test_an_answer_before_the_request_is_no_result(connect: type[AsyncClient], talk: Talk, first: bytes) -> None:
    async def hasty(_: Reader, writer: Writer) -> None:
        writer.write(first)
        await asyncio.sleep(30)

    async with connect(await talk(hasty), patience=0, timeout=5) as client:
        with pytest.raises(Unavailable):
            await client.send("topic:orders", "hello")


@pytest.mark.parametrize("hangs_up", [True, False])
@pytest.mark.parametrize(("status", "code"), [(413, "request_too_large"), (503, "outbox_failed")])
async def test_a_refusal_counts_before_the_request_is_read(
    connect: type[AsyncClient], talk: Talk, status: int, code: str, *, hangs_up: bool
) -> None:
    async def refuse(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        problem = b'{"type":"x","title":"x","status":%d,"detail":"x","code":"%b","retryable":false}'
        body = problem % (status, code.encode())
        head = b"HTTP/1.1 %d No\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (status, len(body)) + body)
        await writer.drain()
        if not hangs_up:
            await asyncio.sleep(30)

    async with connect(await talk(refuse), patience=0, timeout=5) as client:
        with pytest.raises((InvalidMessage, TryAgain)) as caught:
            await client.send("topic:orders", LARGE)
    assert caught.value.code == code


async def test_a_large_message_arrives_whole(connect: type[AsyncClient], talk: Talk) -> None:
    arrived = []

    async def slow(reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        arrived.append(await read_request(reader))
        writer.write(ACCEPTED)
        await writer.drain()

    async with connect(await talk(slow), patience=0) as client:
        await client.send("topic:orders", LARGE)
    assert LARGE.encode() in arrived[0]


def dribble() -> Iterator[bytes]:
    yield b"HTTP/1.1 202 Accepted\r\n"
    while True:
        yield b"X"


def headers() -> Iterator[bytes]:
    yield b"HTTP/1.1 202 Accepted\r\n"
    while True:
        yield b"A: b\r\n" * 1000


def interim() -> Iterator[bytes]:
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n" * 100


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([b""], "connection_lost"),
        ([ACCEPTED[:30]], "connection_lost"),
        ([ACCEPTED[:-1]], "connection_lost"),
        ([b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"], "connection_lost"),
        ([b"220 hello\r\n"], "not_understood"),
        ([b"\0" * 100_000], "not_understood"),
        ([ACCEPTED[:-len(RESULT)], b"<html>" * 100], "not_understood"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"], "not_understood"),
        ([b"HTTP/1.1 202 Accepted\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"], "not_understood"),
        ([b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"], "not_understood"),
        (headers(), "not_understood"),
        (interim(), "not_understood"),
    ],
)  # fmt: skip
async def test_whatever_a_peer_says_ends_in_an_error(
    connect: type[AsyncClient], talk: Talk, pieces: list[bytes], code: str
) -> None:
    async def say(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    async with connect(await talk(say), patience=0, timeout=20) as client:
        with pytest.raises(Unavailable) as caught:
            await client.send("topic:orders", "hello")
    assert caught.value.code == code


@pytest.mark.parametrize("said", [b"", ACCEPTED[:30], ACCEPTED[:-1], ACCEPTED[: -len(RESULT)]])
async def test_a_peer_that_falls_silent_is_given_up(connect: type[AsyncClient], talk: Talk, said: bytes) -> None:
    async def fall_silent(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(said)
        await asyncio.sleep(60)

    async with connect(await talk(fall_silent), patience=0, timeout=0.2) as client:
        with pytest.raises(Unavailable) as caught:
            await client.send("topic:orders", "hello")
    assert caught.value.code == "no_answer"


@pytest.mark.parametrize("reads", [True, False])
async def test_the_time_is_that_of_the_whole_exchange(connect: type[AsyncClient], talk: Talk, *, reads: bool) -> None:
    async def dawdle(reader: Reader, writer: Writer) -> None:
        if reads:
            await read_request(reader)
        for piece in dribble():
            writer.write(piece)
            await asyncio.sleep(0.02)

    async with connect(await talk(dawdle), patience=0, timeout=0.3) as client:
        with pytest.raises(Unavailable) as caught:
            await client.send("topic:orders", LARGE)
    assert caught.value.code == "no_answer"


async def test_a_client_waits_while_the_peers_backlog_is_full(
    connect: type[AsyncClient], short_directory: Path
) -> None:
    path = short_directory / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(path))
            async with connect(path, patience=0, timeout=0.2) as client:
                with pytest.raises(Unavailable) as caught:
                    await client.health()
    assert caught.value.code == "no_answer"


async def test_a_send_that_is_cancelled_leaves_no_answer_to_the_next(talk: Talk) -> None:
    asked: asyncio.Queue[bytes] = asyncio.Queue()
    go_on = asyncio.Event()

    async def answer_late(reader: Reader, writer: Writer) -> None:
        while True:
            request = await read_request(reader)
            message_id = request.partition(b'"client_message_id":"')[2][:1]
            asked.put_nowait(message_id)
            if message_id == b"1":
                await go_on.wait()
            writer.write(ACCEPTED.replace(b'"a"', b'"%b"' % message_id))
            await writer.drain()

    async with AsyncClient(await talk(answer_late), patience=0) as client:
        sending = asyncio.create_task(client.send("topic:orders", client_message_id="1"))
        assert await asked.get() == b"1"
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert sending.cancelled()
        go_on.set()
        for message_id in ("2", "3"):
            sent = await client.send("topic:orders", client_message_id=message_id)
            assert sent.client_message_id == message_id


async def test_a_send_that_is_cancelled_while_it_connects_leaves_nothing(short_directory: Path) -> None:
    async with AsyncClient(short_directory / "nobody.sock") as client:
        sending = asyncio.create_task(client.send("topic:orders"))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert not client._transport._pool._open  # type: ignore[attr-defined]


async def test_connections_that_nobody_needs_are_closed(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)
    ended = asyncio.Event()
    peer = Peer()

    async def until_end(reader: Reader, writer: Writer) -> None:
        try:
            await peer(reader, writer)
        finally:
            ended.set()

    async with AsyncClient(await talk(until_end)) as client:
        await client.send("topic:orders", "hello")
        await ended.wait()
        await client.send("topic:orders", "hello")
    assert peer.counts == [1, 1]


async def test_a_closed_client_closes_its_connections_and_says_so(connect: type[AsyncClient], talk: Talk) -> None:
    ended = asyncio.Event()

    async def until_end(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(ACCEPTED)
        await reader.read()
        ended.set()

    async with connect(await talk(until_end)) as client:
        await client.send("topic:orders", "hello")
    await ended.wait()
    with pytest.raises(RuntimeError, match="closed"):
        await client.send("topic:orders", "hello")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what a loop left open
async def test_a_client_is_closed_in_its_own_loop_or_when_that_has_ended(talk: Talk) -> None:
    path = await talk(Peer())
    async with AsyncClient(path) as client:
        await client.send("topic:a", "a")
        with pytest.raises(RuntimeError, match="belongs to another event loop: close it in that loop"):
            await asyncio.to_thread(asyncio.run, client.close())
        await client.send("topic:a", "a")

    other = AsyncClient(path)
    await asyncio.to_thread(asyncio.run, other.send("topic:a", "a"))
    await other.close()
    gc.collect()  # which warns of them here
    with pytest.raises(RuntimeError, match="this client is closed"):
        await other.send("topic:a", "a")


async def test_an_answer_that_nobody_takes_is_not_all_kept(serve: Serve) -> None:
    poured = 0

    async def pour(request: web.Request) -> web.StreamResponse:
        nonlocal poured
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 10_000 + b"\n")
            poured += 10_000

    async with AsyncClient(await serve(pour)) as client:
        rows = client.export()
        with pytest.raises(PostroomError):
            await anext(rows)
        async with client._transport.open("GET", "/", silence=5) as answer:
            before = -1
            while before != poured:  # until nothing is poured any more
                before = poured
                await asyncio.sleep(0.1)
            assert 0 < poured < 10_000_000
            assert await answer.read(5)


async def test_a_stream_that_is_left_early_leaves_no_paused_connection(talk: Talk) -> None:
    line = b" " * 999 + b"\n"
    body = line * 2000
    counts: list[int] = []

    async def export(reader: Reader, writer: Writer) -> None:
        counts.append(0)
        while True:
            request = await read_request(reader)
            counts[-1] += 1
            if request.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            else:
                writer.write(ACCEPTED)
            await writer.drain()

    async with AsyncClient(await talk(export), patience=0) as client:
        async with client._transport.open("GET", "/", silence=5) as answer:
            assert await answer.read(5)
        await client.send("topic:orders", "hello")
    assert counts == [1, 1]


async def test_threads_that_ask_at_once_get_their_own_answers(talk: Talk) -> None:
    async def echo(reader: Reader, writer: Writer) -> None:
        while True:
            request = await read_request(reader)
            message_id = request.partition(b'"client_message_id":"')[2].partition(b'"')[0]
            body = RESULT.replace(b'"a"', b'"%b"' % message_id)
            writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()

    wrong: list[str] = []

    def write(client: Client, thread: int) -> None:
        for number in range(50):
            message_id = f"{thread}-{number}"
            if client.send("topic:orders", client_message_id=message_id).client_message_id != message_id:
                wrong.append(message_id)

    with Client(await talk(echo)) as client:
        threads = [threading.Thread(target=write, args=(client, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        await until(lambda: not any(thread.is_alive() for thread in threads))
    assert wrong == []


async def test_a_send_amid_another_one_does_not_wait_for_it(talk: Talk) -> None:
    """As a signal handler or a destructor sends: at each point in turn where Python may run one."""

    def send_twice(client: Client, point: int) -> bool:
        """Send again at the `point`th begin of a function or end of one in C; False where the send ended before."""
        left = point

        def watch(_frame: FrameType, event: str, _called: object) -> None:
            nonlocal left
            if event in {"call", "c_return"}:
                if left == 0:
                    sys.setprofile(None)
                    client.send("topic:orders", "amid")
                left -= 1

        sys.setprofile(watch)
        client.send("topic:orders", "hello")
        sys.setprofile(None)
        return left < 0

    points: list[int] = []

    def send_everywhere(client: Client) -> None:
        client.send("topic:orders", "hello")  # imports what it needs
        while send_twice(client, len(points)):
            points.append(len(points))

    with Client(await talk(Peer())) as client:
        sending = threading.Thread(target=send_everywhere, args=(client,), daemon=True)
        sending.start()
        await until(lambda: not sending.is_alive())
    assert len(points) > 20

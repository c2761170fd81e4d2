"""`send_many` over peers that break off, refuse, hang, answer too little, too much or nonsense."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from support.wire import Serve, Speak

from postroom import (
    AsyncClient,
    BatchResult,
    InvalidMessage,
    PostroomError,
    SendRequest,
    SendResult,
    TryAgain,
    Unavailable,
)
from postroom._wire import batch
from postroom._wire.batch import MAX_AHEAD, MAX_WAITING
from postroom._wire.message import decode_request

NDJSON = {"Content-Type": "application/x-ndjson"}


def messages(count: int) -> list[SendRequest]:
    return [SendRequest(to="topic:orders", body=str(number)) for number in range(1, count + 1)]


class Peer:
    """Answers each line as a daemon would; `fault` may do something else with the n-th line (from 1) of all."""

    def __init__(self, fault: Callable[[int, web.Request], PostroomError | None] | None = None) -> None:
        self.fault = fault
        self.requests = 0
        self.lines = 0
        self.kept: Counter[str] = Counter()  # ids, and how often each came
        self.bodies: list[str | None] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        response = web.StreamResponse(headers=NDJSON)
        await response.prepare(request)
        number, rest = 0, b""
        async for piece in request.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                number += 1
                await response.write(msgspec.json.encode(self.answer(number, line, request)) + b"\n")
        return response

    def answer(self, number: int, line: bytes, request: web.Request) -> BatchResult:
        self.lines += 1
        if self.fault and (error := self.fault(self.lines, request)):
            return BatchResult(line=number, problem=error.problem)
        message = decode_request(line)
        assert message.client_message_id is not None
        self.kept[message.client_message_id] += 1
        self.bodies.append(message.body)
        result = SendResult(client_message_id=message.client_message_id, outbox_id="r", status="queued")
        return BatchResult(line=number, result=result)


async def run(path: Path, items: object, *, patience: float = 20, seconds: float = 10) -> list[BatchResult]:
    async with AsyncClient(path, patience=patience, timeout=seconds) as client:
        return [result async for result in client.send_many(items)]  # type: ignore[arg-type]


async def test_every_message_gets_its_result_in_order(serve: Serve) -> None:
    peer = Peer()
    results = await run(await serve(peer.handle), messages(3000))
    assert [result.line for result in results] == list(range(1, 3001))
    assert peer.bodies == [str(number) for number in range(1, 3001)]
    assert peer.requests == 1


async def test_no_messages_need_no_daemon(short_directory: Path) -> None:
    assert await run(short_directory / "nobody.sock", [], patience=0) == []


async def test_an_absent_daemon_ends_it(short_directory: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        await run(short_directory / "nobody.sock", messages(3), patience=0.1)
    assert caught.value.code == "daemon_absent"


async def test_answers_come_while_the_messages_still_go(serve: Serve) -> None:
    answered: asyncio.Queue[int] = asyncio.Queue()

    async def one_by_one() -> AsyncIterator[SendRequest]:
        for number in range(1, 6):
            yield SendRequest(to="topic:orders")
            assert await answered.get() == number

    peer = Peer()
    async with AsyncClient(await serve(peer.handle)) as client:
        async for result in client.send_many(one_by_one()):
            answered.put_nowait(result.line)
    assert peer.requests == 1


async def test_a_broken_connection_is_resumed_with_the_same_ids(serve: Serve) -> None:
    def break_off(line: int, request: web.Request) -> None:
        if line % 300 == 0 and request.transport is not None:
            request.transport.abort()

    peer = Peer(break_off)
    items = messages(2000)
    results = await run(await serve(peer.handle), items)
    assert sorted(result.line for result in results) == list(range(1, 2001))
    assert len(peer.kept) == 2000
    assert peer.requests > 1
    assert any(count > 1 for count in peer.kept.values())


async def test_a_daemon_that_ends_right_after_its_last_answer_leaves_no_error_behind(serve: Serve) -> None:
    class Ending(Peer):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers=NDJSON)
            await response.prepare(request)
            line, _ = await request.content.readchunk()
            await response.write(msgspec.json.encode(self.answer(1, line, request)) + b"\n")
            assert request.transport is not None
            request.transport.abort()
            return response

    lost: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    path = await serve(Ending().handle)
    assert [result.line for result in await run(path, messages(1), patience=0)] == [1]
    gc.collect()  # whose error nobody looked at is found now
    await asyncio.sleep(0)
    assert lost == []


async def test_a_request_that_broke_off_takes_no_more_messages(serve: Serve) -> None:
    broke = asyncio.Event()

    def break_off_once(line: int, request: web.Request) -> None:
        if line == 2 and request.transport is not None:
            request.transport.abort()
            broke.set()

    async def with_a_rest() -> AsyncIterator[SendRequest]:
        for message in messages(2):
            yield message
        await broke.wait()
        for message in messages(200):
            yield message
            await asyncio.sleep(0)  # one by one, so that a stale request could snatch some

    peer = Peer(break_off_once)
    async with asyncio.timeout(20):
        results = await run(await serve(peer.handle), with_a_rest(), seconds=5)
    assert [result.line for result in results] == list(range(1, 203))
    assert peer.requests == 2


async def test_a_line_that_is_told_to_wait_is_sent_again(serve: Serve) -> None:
    def refuse_some(line: int, _request: web.Request) -> PostroomError | None:
        busy = TryAgain.of("disk_full", "later", retryable=True, retry_after=0.01)
        return busy if line in {3, 4, 50} else None

    peer = Peer(refuse_some)
    results = await run(await serve(peer.handle), messages(100))
    assert sorted(result.line for result in results) == list(range(1, 101))
    assert all(result.problem is None for result in results)
    assert set(peer.kept.values()) == {1}


async def test_a_line_that_is_wrong_fails_alone(serve: Serve) -> None:
    def refuse_one(line: int, _request: web.Request) -> PostroomError | None:
        return InvalidMessage.of("invalid_field", "no") if line == 2 else None

    results = await run(await serve(Peer(refuse_one).handle), messages(4))
    assert [result.problem.code if result.problem else None for result in results] == [
        None,
        "invalid_field",
        None,
        None,
    ]


async def test_what_json_cannot_say_fails_alone_and_is_never_sent(serve: Serve) -> None:
    peer = Peer()
    items = [*messages(2), SendRequest(to="topic:orders", meta={"x": float("nan")}), *messages(1)]
    results = await run(await serve(peer.handle), items)
    problems = {result.line: result.problem for result in results}
    assert sorted(problems) == [1, 2, 3, 4]
    assert problems[3] is not None
    assert problems[3].code == "meta_not_canonical"
    assert peer.lines == 3


async def test_a_daemon_that_is_always_full_ends_it_with_its_error(serve: Serve) -> None:
    full = TryAgain.of("disk_full", "later", retryable=True, retry_after=0.01)
    with pytest.raises(TryAgain) as caught:
        await run(await serve(Peer(lambda _line, _request: full).handle), messages(10), patience=0.1)
    assert caught.value.code == "disk_full"


async def test_a_daemon_that_hangs_ends_it(serve: Serve) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=NDJSON)
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    with pytest.raises(Unavailable) as caught:
        await run(await serve(hang), messages(10), patience=0.1, seconds=0.1)
    assert caught.value.code == "no_answer"


ODD = {
    "no JSON": b"<html>\n",
    "two answers in one": b'{"line":1}{"line":2}\n',
    "neither result nor problem": b'{"line":1}\n',
    "more answers than lines": b'{"line":1,"problem":{"type":"x","title":"x","status":400,"detail":"x","code":"x",'
    b'"retryable":false}}\n' * 3,
    "an endless line": b"x" * 100_000,
}


@pytest.mark.parametrize("kind", ODD)
async def test_answers_that_are_not_ours_end_it(kind: str, speak: Speak) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"
    with pytest.raises(Unavailable) as caught:
        await run(await speak(head + ODD[kind]), messages(1))
    assert caught.value.code == "not_understood"


async def test_an_answer_that_ends_early_is_a_broken_connection(speak: Speak) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(Unavailable) as caught:
        await run(await speak(head), messages(1), patience=0.05)
    assert caught.value.code == "connection_lost"


async def test_a_daemon_that_does_not_read_is_not_run_over(serve: Serve) -> None:
    drawn = 0
    go_on = asyncio.Event()
    peer = Peer()

    def endless() -> Iterator[SendRequest]:
        nonlocal drawn
        while True:
            drawn += 1
            yield SendRequest(to="topic:orders", body="x" * 1000)

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=NDJSON)
        await response.prepare(request)
        await go_on.wait()
        return await peer.handle(request)

    async with AsyncClient(await serve(slow)) as client:
        stream = client.send_many(endless())
        first = asyncio.create_task(anext(stream))
        most = batch.WINDOW + MAX_WAITING + MAX_AHEAD
        seen = -1
        while seen != drawn:  # until nothing is drawn any more
            seen = drawn
            await asyncio.wait({first}, timeout=0.3)
        assert 0 < drawn <= most + 1024
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()


async def test_an_iterable_that_fails_says_so_after_what_it_gave(serve: Serve) -> None:
    def broken() -> Iterator[SendRequest]:
        yield from messages(5)
        raise LookupError("the source is gone")

    peer = Peer()
    results = []
    async with AsyncClient(await serve(peer.handle)) as client:
        stream = client.send_many(broken())
        results += [await anext(stream) for _ in range(5)]
        with pytest.raises(LookupError, match="gone"):
            await anext(stream)
    assert len(peer.kept) == len(results) == 5


async def test_a_reader_that_stops_early_leaves_nothing_running(serve: Serve) -> None:
    async with AsyncClient(await serve(Peer().handle)) as client:
        before = asyncio.all_tasks()
        stream = client.send_many(SendRequest(to="topic:orders") for _ in range(100_000))
        assert (await anext(stream)).line == 1
        await stream.aclose()
        assert not {task for task in asyncio.all_tasks() - before if "postroom" in repr(task.get_coro())}


async def test_an_idle_request_ends_and_the_next_line_opens_another(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "IDLE_SECONDS", 0.05)
    peer = Peer()
    ended = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = await peer.handle(request)
        ended.set()
        return response

    async def with_a_rest() -> AsyncIterator[SendRequest]:
        yield SendRequest(to="topic:orders")
        await ended.wait()
        yield SendRequest(to="topic:orders")

    results = await run(await serve(handle), with_a_rest())
    assert [result.line for result in results] == [1, 2]
    assert peer.requests == 2

"""No local caller can stop the others: what one uid may hold, and whose turn it is."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from support.inboxes import Opened, message
from support.waiting import until

import ipc.sends
from inbox import Inbox, InboxSettings
from ipc.peers import Policy
from ipc.shares import REQUEST, TURN, Budget, Limits
from postroom.errors import TryAgain

MALLORY, ALICE = 61_001, 61_002
SEND = {"to": "topic:orders", "body": "hi"}
NDJSON = "application/x-ndjson"

pytestmark = pytest.mark.usefixtures("uids")


def post(path: str, length: int, media: str = "application/json") -> bytes:
    fields = f"Host: x\r\nContent-Type: {media}\r\nContent-Length: {length}\r\n"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode()


@pytest.fixture
async def beside_alice(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Alice count as present, however long the test takes: who is alone has larger turns."""
    monkeypatch.setattr("ipc.shares._PRESENT_SECONDS", 3600)
    await room.request("GET", "/v1/ready", uid=ALICE)


@asynccontextmanager
async def held(room: Any, uid: int, count: int, data: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open connections that write `data` and read nothing."""
    connections = [await room.connect(uid, limit=1024) for _ in range(count)]
    for _, writer in connections:
        writer.write(data)
    yield [reader for reader, _ in connections]
    for _, writer in connections:
        writer.close()


async def test_who_holds_every_request_that_it_may_leaves_requests_to_others(open_room: Any) -> None:
    room = await open_room(limits=Limits(requests_in_flight=4))
    async with held(room, MALLORY, 4, post("/v1/send", 99) + b"{"):
        await until(lambda: room.server.requests.held == 4)
        assert (await room.request("POST", "/v1/send", SEND, uid=MALLORY)).status == 429
        assert (await room.request("POST", "/v1/send", SEND, uid=ALICE)).status == 202


async def test_who_waits_as_often_as_it_may_leaves_waits_to_others(open_room: Any) -> None:
    room = await open_room(limits=Limits(waits=4))
    for uid in (MALLORY, ALICE):
        await room.request("POST", "/v1/send", {**SEND, "client_message_id": f"of-{uid}"}, uid=uid)
    async with held(room, MALLORY, 4, b"GET /v1/sends/of-%d?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n" % MALLORY):
        await until(lambda: room.services.waits.held == 4)
        assert (await room.request("GET", f"/v1/sends/of-{MALLORY}?wait=9", uid=MALLORY)).status == 429
        assert (await room.request("GET", f"/v1/sends/of-{ALICE}?wait=0.01", uid=ALICE)).status == 200
        assert (await room.request("POST", "/v1/send", SEND, uid=MALLORY)).status == 202


@pytest.mark.parametrize("head", [post("/v1/send", 4096), post("/v1/send/batch", 4096, NDJSON)], ids=["body", "line"])
async def test_who_fills_all_the_memory_that_it_may_leaves_memory_to_others(open_room: Any, head: bytes) -> None:
    room = await open_room(limits=Limits(request_bytes=4096, body_bytes=2048, buffered_bytes=4096))
    async with held(room, MALLORY, 1, head + b" " * 4095):
        await until(lambda: room.services.budget.left == 1)
        assert (await room.request("POST", "/v1/send", SEND, uid=MALLORY)).status == 429
        assert (await room.request("POST", "/v1/send", SEND, uid=ALICE)).status == 202


def test_a_hundred_uids_together_hold_no_more_than_twice_what_one_may() -> None:
    budget = Budget(100)
    taken = [_all_that_it_may_have(budget, uid) for uid in range(100)]
    assert taken[:3] == [100, 50, 25]
    assert sum(taken) == budget.held <= 200
    for uid, count in enumerate(taken):
        budget.give_back(count, uid)
    assert _all_that_it_may_have(budget, 7) == 100


def _all_that_it_may_have(budget: Budget, uid: int) -> int:
    taken = 0
    with suppress(TryAgain):
        while True:
            budget.take(1, uid)
            taken += 1
    return taken


async def test_connections_of_one_uid_take_no_place_of_anothers(open_room: Any) -> None:
    room = await open_room(limits=Limits(connections=10))
    async with held(room, ALICE, 1, b"GET /v1/ready HTTP/1.1\r\nHost: x\r\n\r\n") as (mine,):
        await mine.readuntil(b"true}")
        async with held(room, MALLORY, 100, b"") as others:
            await asyncio.gather(*(reader.read() for reader in others[:-9]))
            assert not mine.at_eof()
            assert room.services.counters.connections == 10


@pytest.mark.parametrize("data", [post("/v1/send", 99) + b"{", b"GET /v1/re"], ids=["bodies", "heads"])
async def test_a_newcomer_finds_room_where_one_uid_keeps_all_connections_busy(open_room: Any, data: bytes) -> None:
    room = await open_room(limits=Limits(connections=10))
    async with held(room, MALLORY, 10, data):
        await until(lambda: room.services.counters.connections == 10)
        async with held(room, ALICE, 1, b"GET /v1/ready HTTP/1.1\r\nHost: x\r\n\r\n") as (mine,):
            await mine.readuntil(b"true}")
        assert room.services.counters.dropped == {"too_many_connections": 1}


@pytest.mark.parametrize(
    "line",
    [b'{"to":"topic:orders"}\n', b'{"to":"topic:orders","meta":{"a":[%b1]}}\n' % (b"1," * 5000), b"\n"],
    ids=["small lines", "many values", "empty lines"],
)
@pytest.mark.usefixtures("beside_alice")
async def test_a_batch_is_checked_a_turn_at_a_time(room: Any, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    turn = 0
    cut, checked, answered = Counter[int](), Counter[int](), Counter[int]()
    for where, name, note in (
        (ipc.sends.Splitter, "feed", lambda _, piece: cut.update({turn: len(piece)})),
        (ipc.sends, "prepare", lambda line, **_: checked.update({turn: len(line)})),
        (ipc.sends.Batch, "_result", lambda *_: answered.update({turn: 1})),
    ):
        monkeypatch.setattr(where, name, _counting(getattr(where, name), note))
    lines = line * min(300_000 // len(line), 10_000)
    sending = asyncio.create_task(room.request("POST", "/v1/send/batch", lines, {"Content-Type": NDJSON}, uid=MALLORY))
    while not sending.done():
        turn += 1
        await asyncio.sleep(0)
    assert len((await sending).lines) == lines.count(b"\n")
    assert max(checked.values()) <= TURN + len(line)
    assert max(cut.values()) <= 5 * TURN
    assert max(answered.values()) < 2 * TURN / ipc.sends._ANSWER  # what is left of a chunk, and a turn of the next


def _counting(function: Any, note: Callable[..., None]) -> Any:
    def counted(*values: Any, **options: Any) -> Any:
        note(*values, **options)
        return function(*values, **options)

    return counted


async def test_a_large_send_is_decoded_in_one_turn_and_checked_in_another(
    room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = 0
    done: Counter[int] = Counter()
    for name in ("decode_request", "prepare"):
        step = getattr(ipc.sends, name)
        monkeypatch.setattr(ipc.sends, name, _counting(step, lambda *_, **__: done.update({turn: 1})))
    large = {**SEND, "body": "x" * 100_000}
    sending = asyncio.gather(*(room.request("POST", "/v1/send", large, uid=MALLORY) for _ in range(4)))
    while not sending.done():
        turn += 1
        await asyncio.sleep(0)
    assert [reply.status for reply in await sending] == [202] * 4
    assert set(done.values()) == {1}


@pytest.mark.usefixtures("beside_alice")
async def test_requests_of_one_uid_are_begun_a_turn_at_a_time(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = 0
    begun: Counter[int] = Counter()
    monkeypatch.setattr(ipc.sends, "prepare", _counting(ipc.sends.prepare, lambda *_, **__: begun.update({turn: 1})))
    body = json.dumps(SEND).encode()
    writers = [(await room.connect(MALLORY))[1] for _ in range(50)]
    await until(lambda: room.services.counters.connections >= 50)
    for writer in writers:
        writer.write(post("/v1/send", len(body)) + body)
    while sum(begun.values()) < 50:
        turn += 1
        await asyncio.sleep(0)
    for writer in writers:
        writer.close()
    assert max(begun.values()) <= 2 * (TURN // REQUEST)


async def test_a_send_goes_past_everything_that_another_uid_has_in_hand(room: Any) -> None:
    """A send takes few turns of the loop, however much another uid has asked for before it."""
    batch = b'{"to":"topic:orders"}\n' * 20_000
    large = json.dumps({"to": "topic:orders", "meta": {"a": ["x" * 200] * 4000}}).encode()
    async with (
        held(room, MALLORY, 4, post("/v1/send/batch", len(batch), NDJSON) + batch),
        held(room, MALLORY, 4, (post("/v1/send", len(large)) + large) * 3),
        held(room, MALLORY, 4, b"GET /v1/ready HTTP/1.1\r\nHost: x\r\n\r\n" * 1000),
    ):
        await until(lambda: room.server.requests.held >= 6)
        before = room.outbox.progress
        assert (await room.request("POST", "/v1/send", SEND, uid=ALICE)).status == 202
        assert room.outbox.progress[1] - before[1] < 100
        assert room.server.requests.held >= 4


@pytest.mark.parametrize("path", ["/v1/inbox", "/v1/events?since=2020-01-01T00:00:00Z", "/v1/outbox?limit=1000"])
async def test_unread_answers_draw_on_their_readers_memory(open_room: Any, inbox: Inbox, path: str) -> None:
    limits, policy = Limits(buffered_bytes=2**20, request_bytes=2**20), Policy(operators=[MALLORY])
    room = await open_room(inbox=Opened(inbox), limits=limits, policy=policy)
    await inbox.file([message(n, body="x" * 100_000) for n in range(1, 9)])
    batch = b'{"to":"topic:orders"}\n' * 2_000
    assert (await room.request("POST", "/v1/send/batch", batch, headers={"Content-Type": NDJSON})).status == 200
    ask = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    dropped = room.services.counters.dropped
    async with held(room, MALLORY, 20, 4 * ask):
        await until(lambda: dropped["too_much_unread"] > 0)
        assert 0 < 2**20 - room.services.budget.left <= 2**20
        assert (await room.request("GET", "/v1/inbox?limit=1", uid=ALICE)).status == 200
    await until(lambda: room.services.budget.left == 2**20)


async def test_readers_of_one_uid_leave_the_live_stream_to_others(open_room: Any, inbox: Inbox) -> None:
    room = await open_room(inbox=Opened(inbox), inbox_settings=InboxSettings(readers=3))
    ask = b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n"
    async with held(room, MALLORY, 4, ask) as readers, held(room, ALICE, 1, ask) as (mine,):
        assert (await mine.readline()).split()[1] == b"200"
        heads = [(await reader.readline()).split()[1] for reader in readers]
        assert sorted(heads) == [b"200", b"200", b"200", b"429"]

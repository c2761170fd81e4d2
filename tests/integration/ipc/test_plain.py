"""A send is answered alike by either way: read by the connection itself, or by aiohttp (ipc/connection.py)."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from support.waiting import until
from support.wire import Reply, encode, parse

from ipc.peers import Policy, rotate
from ipc.shares import Limits
from outbox import OutboxSettings

MESSAGE = {"to": "topic:orders", "body": "hi"}
ROOT = Path(__file__).parents[3]
JSON = "application/json"
WAYS = {"plain": {}, "ordinary": {"X-Way": "ordinary"}}  # what a connection does not know, it leaves to aiohttp


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def send(way: str, body: Any = MESSAGE, **fields: str) -> bytes:
    """Write a send down, with `Idempotency_Key=…` as a field, so that it goes that way."""
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    head = encode("POST", "/v1/send", body, {"Connection": "keep-alive", **WAYS[way], **named})
    return head.replace(b"Connection: keep-alive\r\n", b"", 1)


async def connected(room: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and wait until the server waits for a request."""
    before = room.server.connections
    reader, writer = await room.connect(**options)
    await until(lambda: any(each not in before and not each.busy for each in room.server.connections))
    return reader, writer


async def answered(reader: asyncio.StreamReader) -> Reply:
    """Read one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    reply = parse(head)
    return (
        reply if reply.status == 204 else parse(head + await reader.readexactly(int(reply.headers["content-length"])))
    )


class Case(NamedTuple):
    """Sends on one connection, one after the other, and the statuses that they are answered with."""

    statuses: list[int]
    sends: list[tuple[Any, dict[str, str]]]
    room: dict[str, Any] = {}  # noqa: RUF012 - never changed
    is_plain: bool = True


def case(
    *statuses: int, body: Any = MESSAGE, room: dict[str, Any] | None = None, is_plain: bool = True, **fields: str
) -> Case:
    return Case(list(statuses), [(body, fields)] * len(statuses), room or {}, is_plain)


CASES = {
    "an id of the daemon's": case(202),
    "an id in the header": case(202, Idempotency_Key="k"),
    "an id in quotes": case(202, Idempotency_Key='"k"'),
    "an id in the body": case(202, body={**MESSAGE, "client_message_id": "k"}),
    "the same twice": case(202, 202, Idempotency_Key="k"),
    "other content": Case(
        [202, 409], [(MESSAGE, {"Idempotency_Key": "k"}), ({"to": "dm:bob"}, {"Idempotency_Key": "k"})]
    ),
    "a trace": case(202, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    "what clients say of themselves": case(202, User_Agent="curl/8", Accept="*/*", accept_encoding="gzip, br"),
    "a media type with its encoding": case(202, Content_Type="application/json; charset=utf-8"),
    "20 kB": case(202, body={"to": "topic:orders", "body": "é" * 3_300}),
    "no id": case(400, 400, Idempotency_Key="no id"),
    "no JSON": case(400, 202, body=b"nonsense")._replace(sends=[(b"nonsense", {}), (MESSAGE, {})]),
    "nothing": case(400, body=b""),
    "an unknown field": case(400, body={**MESSAGE, "colour": "red"}),
    "no destination": case(400, body={"to": "nowhere"}),
    "a key twice": case(400, body=b'{"to":"topic:a","to":"topic:a"}'),
    "another media type": case(415, 415, Content_Type="text/plain"),
    "no media type": case(415, Content_Type=""),
    "a destination that is not allowed": case(403, room={"destinations": ("dm:*",)}),
    "a peer that is not allowed": case(403, room={"policy": Policy([4_000_000], [4_000_000])}),
    "a body too large": case(413, body={"to": "topic:a", "body": "x" * 2000}, room={"limits": Limits(body_bytes=1024)}),
    "more bytes than may be held": case(
        429, 429, body={"to": "topic:a", "body": "x" * 3000}, room={"limits": Limits(buffered_bytes=1024)}
    ),
    "more than the outbox holds": case(
        *[202] * 9, 507, 507,
        body={"to": "topic:a", "body": "x" * 100_000}, room={"settings": OutboxSettings(max_bytes=1024 * 1024)},
        is_plain=False,  # it comes in pieces
    ),
    "fewer fields than it has": case(400, room={"limits": Limits(headers=2)}, is_plain=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_a_send_is_answered_alike_either_way(open_room: Any, name: str) -> None:
    found = {way: await _outcome(await open_room(name=way, **CASES[name].room), way, CASES[name]) for way in WAYS}
    assert found["plain"] == found["ordinary"]
    assert [status for status, *_ in found["plain"][0]] == CASES[name].statuses


async def _outcome(room: Any, way: str, case: Case) -> Any:
    """Return all that can be seen of the case, without what is another one each time."""
    reader, writer = await connected(room)
    replies = []
    for body, fields in case.sends:
        writer.write(send(way, body, **fields))
        reply = await answered(reader)
        del reply.headers["date"]
        replies.append((reply.status, _without_ids(reply.headers), _without_ids(reply.json)))
        await until(lambda: not room.services.counters.in_flight)
        if reply.headers.get("connection") == "close":
            assert await reader.read() == b""
            break
    assert not case.is_plain or room.server.requests_count == (0 if way == "plain" else len(replies))
    writer.close()
    await until(lambda: not room.services.counters.connections)
    counters, claimed = room.services.counters, await room.outbox.claim()
    kept = [(row.payload, row.fingerprint, row.destination) for row in claimed]
    held = (counters.in_flight, room.server.requests.held, room.services.budget.held)
    assert held == (0, 0, 0)
    return replies, counters.sends, counters.answers, counters.dropped, sum(counters.accept.counts), kept


def _without_ids(shown: Any) -> Any:
    return re.sub(r"[0-9A-Z]{26}|[0-9]{4}-[0-9T:.-]*Z", "…", json.dumps(shown))


async def test_a_repeated_send_meets_the_files_that_the_architecture_names(open_room: Any) -> None:
    met: set[str] = set()

    def note(frame: FrameType, *_: object) -> None:
        met.add(frame.f_code.co_filename)

    threading.setprofile(note)  # the outbox's thread begins under it
    try:
        room = await open_room()
        reader, writer = await connected(room)
        for _ in range(2):
            met.clear()
            sys.setprofile(note)
            writer.write(send("plain", Idempotency_Key="one-id"))
            reply = await answered(reader)
            sys.setprofile(None)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type] # as sys has it
    assert reply.headers["idempotent-replayed"] == "true"
    writer.close()
    table = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| (?:onto the socket|checked and answered|into the outbox) \| (.+) \|$", table, re.MULTILINE)
    named = {name for step in steps for name in re.findall(r"`([\w/]+\.py)`", step)}
    ours = {file.removeprefix(f"{ROOT}/") for file in met if file.startswith(f"{ROOT}/")}
    ours = {file for file in ours if not file.startswith((".venv/", "tests/"))}
    assert {file.removeprefix("sdk/postroom/") for file in ours} == {
        file.removeprefix("sdk/postroom/") for file in named
    }


async def test_a_send_in_pieces_is_answered(room: Any, way: str) -> None:
    whole = send(way)
    for size in (1, 40, len(whole) - 1):
        reader, writer = await connected(room)
        for start in range(0, len(whole), size):
            writer.write(whole[start : start + size])
            await asyncio.sleep(0)
        assert (await answered(reader)).status == 202
        writer.write(whole)
        assert (await answered(reader)).status == 202
        writer.close()


async def test_requests_that_come_together_are_answered_in_order(room: Any, way: str) -> None:
    reader, writer = await connected(room)
    keys = [f"k{number}" for number in range(100)]
    writer.write(b"".join(send(way, Idempotency_Key=key) for key in keys) + encode("GET", "/v1/sends/k7"))
    assert [(await answered(reader)).json["client_message_id"] for _ in keys] == keys
    assert (await answered(reader)).json["client_message_id"] == "k7"
    assert await reader.read() == b""
    writer.close()


async def test_what_comes_behind_a_send_waits_for_its_answer(room: Any, way: str, short_directory: Path) -> None:
    reader, writer = await connected(room)
    with stuck(short_directory):
        writer.write(send(way, Idempotency_Key="first"))
        await until(lambda: room.services.counters.in_flight > 0)
        for piece in (send(way, Idempotency_Key="second"), encode("GET", "/v1/sends/first")):
            writer.write(piece[:30])
            await asyncio.sleep(0.01)
            writer.write(piece[30:])
    assert [(await answered(reader)).json["client_message_id"] for _ in range(3)] == ["first", "second", "first"]
    writer.close()


async def test_other_requests_between_sends_leave_the_connection_usable(room: Any, way: str) -> None:
    reader, writer = await connected(room)
    asked = encode("GET", "/v1/sends/k").replace(b"Connection: close\r\n", b"")
    for status in (202, 200, 202, 200):
        await until(lambda: not any(connection.busy for connection in room.server.connections))
        writer.write(send(way, Idempotency_Key="k") if status == 202 else asked)
        assert (await answered(reader)).status == status
    assert room.server.requests_count == (2 if way == "plain" else 4)
    writer.close()


async def test_what_looks_like_a_send_within_another_request_is_none(room: Any) -> None:
    reader, writer = await connected(room)
    (connection,) = room.server.connections
    heard = connection.idle_since
    await asyncio.sleep(0.01)  # the loop's clock counts milliseconds
    writer.write(b"GET /v1/ready HTTP/1.1\r\nX: ")
    await until(lambda: connection.idle_since != heard)
    writer.write(send("plain"))
    assert (await answered(reader)).status in {200, 400}
    assert (await room.rows(), room.server.requests_count) == (0, 1)
    writer.close()


async def test_over_tcp_a_send_needs_the_token_either_way(open_room: Any, way: str, short_directory: Path) -> None:
    rotate(short_directory / "local.token")
    room = await open_room(token_file=short_directory / "local.token")
    reader, writer = await asyncio.open_connection("127.0.0.1", room.port)
    await until(lambda: any(not connection.busy for connection in room.server.connections))
    writer.write(send(way))
    assert (await answered(reader)).json["code"] == "unauthorized"
    assert await room.rows() == 0
    writer.close()


async def test_sends_count_as_requests_in_flight_and_bytes_held_until_they_are_on_disk(
    open_room: Any, way: str, short_directory: Path
) -> None:
    room = await open_room(limits=Limits(requests_in_flight=1))
    reader, writer = await connected(room)
    second, other = await connected(room)
    with stuck(short_directory):
        writer.write(send(way))
        await until(lambda: room.services.budget.held > 0)
        assert room.server.requests.held == 1
        other.write(send(way))
        refused = await answered(second)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert (await answered(reader)).status == 202
    other.write(send(way))
    assert (await answered(second)).status == 202
    for each in (writer, other):
        each.close()


async def test_a_send_is_answered_after_a_half_close(room: Any, way: str, short_directory: Path) -> None:
    reader, writer = await connected(room)
    with stuck(short_directory):
        writer.write(send(way))
        await until(lambda: room.services.counters.in_flight > 0)
        writer.write_eof()
        await asyncio.sleep(0.01)
    assert (await answered(reader)).status == 202
    assert await reader.read() == b""
    writer.close()


async def test_a_caller_that_vanishes_leaves_its_send_and_nothing_else(
    room: Any, way: str, short_directory: Path
) -> None:
    _, writer = await connected(room)
    with stuck(short_directory):
        writer.write(send(way))
        await until(lambda: room.services.counters.in_flight > 0)
        writer.transport.abort()
        await asyncio.sleep(0.01)
    await until(lambda: not room.services.counters.connections)
    await until(lambda: not room.services.counters.in_flight)
    assert (await room.rows(), room.server.requests.held, room.services.budget.held) == (1, 0, 0)


async def test_a_stop_waits_for_the_send_in_hand_and_closes(room: Any, way: str, short_directory: Path) -> None:
    reader, writer = await connected(room)
    idle, other = await connected(room)
    with stuck(short_directory):
        writer.write(send(way))
        await until(lambda: room.services.counters.in_flight > 0)
        stopping = asyncio.create_task(room.server.stop(30.0))
        await asyncio.sleep(0.01)
        assert not stopping.done()
    assert (await answered(reader)).status == 202
    assert await reader.read() == b""
    assert await idle.read() == b""
    await stopping
    writer.close()
    other.close()


async def test_a_stop_waits_no_longer_than_its_grace(room: Any, way: str, short_directory: Path) -> None:
    reader, writer = await connected(room)
    with stuck(short_directory):
        writer.write(send(way))
        await until(lambda: room.services.counters.in_flight > 0)
        await room.server.stop(0.01)
        assert await reader.read() == b""
    writer.close()


async def test_a_connection_that_idles_after_a_send_is_closed(open_room: Any, way: str, short_directory: Path) -> None:
    """But not while its send is on its way to the disk, however long that takes."""
    room = await open_room(limits=Limits(idle_seconds=0.05))
    reader, writer = await connected(room)
    with stuck(short_directory):
        writer.write(send(way))
        await asyncio.sleep(0.2)
    assert (await answered(reader)).status == 202
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert room.services.counters.dropped == {}
    writer.close()


async def test_a_caller_that_reads_no_answers_is_dropped(room: Any, way: str) -> None:
    _, writer = await connected(room, limit=1024)
    (connection,) = room.server.connections
    while not connection.writing_paused:
        sent = sum(room.services.counters.sends.values())
        writer.write(send(way))
        await until(
            lambda sent=sent: connection.writing_paused or sum(room.services.counters.sends.values()) > sent, pause=0
        )
    writer.write(send(way))
    await asyncio.sleep(0.01)
    kept = await room.rows()
    room.server.drop_overdue(asyncio.get_running_loop().time() + Limits().stall_seconds + 1)
    assert room.services.counters.dropped == {"reply_not_read": 1}
    await until(lambda: not room.services.counters.connections)
    await until(lambda: not room.services.counters.in_flight)
    assert await room.rows() == kept
    with suppress(ConnectionError):
        await writer.drain()
    writer.close()


@contextmanager
def stuck(directory: Path) -> Iterator[None]:
    """Keep the outbox from committing while the block lasts."""
    database = sqlite3.connect(directory / "s" / "outbox.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        database.execute("ROLLBACK")
        database.close()

"""Sending one message and many, and asking after them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import msgspec
import pytest
from support.waiting import until, until_so
from support.wire import encode, parse

from ipc.peers import Policy
from ipc.sends import CHUNK_LINES
from ipc.shares import Limits
from outbox import OutboxSettings
from outbox.model import Caller, Settlement, Verdict
from postroom import AsyncClient, SendRequest
from postroom._wire.message import Envelope, prepare
from postroom._wire.names import MESSAGE_ID
from postroom.chassis.ownership import user_name

NDJSON = {"Content-Type": "application/x-ndjson"}
LINE = {"to": "topic:orders", "body": "hi"}


async def test_a_send_without_an_id_gets_one(room: Any) -> None:
    first, second = (await room.send(LINE)).json, (await room.send(LINE)).json
    assert MESSAGE_ID.allows(first["client_message_id"])
    assert first["client_message_id"] < second["client_message_id"] or len(first["client_message_id"]) == 26
    assert await room.rows() == 2


async def test_what_is_kept_is_what_was_sent(room: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    message = {
        "to": "dm:bob", "body_base64": "AAEC", "meta": {"a": [1, "ü"]}, "priority": "now", "reply_to": "r1",
        "mentions": ["carol", "bob", "bob"],
    }  # fmt: skip
    assert (await room.send(message, traceparent=trace, idempotency_key="k")).status == 202
    (row,) = await room.outbox.claim()
    envelope = msgspec.json.decode(row.payload, type=Envelope)
    assert envelope.body_bytes() == b"\0\1\2"
    assert envelope.meta == {"a": [1, "ü"], "mentions": ["bob", "carol"]}
    assert (envelope.to, envelope.priority, envelope.reply_to, envelope.traceparent) == ("dm:bob", "now", "r1", trace)
    assert row.fingerprint == prepare(json.dumps(message).encode()).fingerprint


@pytest.mark.usefixtures("uids")
async def test_no_send_waits_for_the_name_of_its_user(open_room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of users that is away, such as an LDAP, may take half a minute to say so."""
    asked: list[int] = []

    def look_up(uid: int) -> None:
        asked.append(uid)
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", look_up)
    user_name.cache_clear()
    somebody = 4_000_001
    room = await open_room(policy=Policy(operators=[somebody]))
    sent = await room.request("POST", "/v1/send", LINE, uid=somebody)
    assert (sent.status, asked) == (202, [])
    held = await room.request("POST", f"/v1/outbox/{sent.json['outbox_id']}/hold", {"reason": "a test"}, uid=somebody)
    assert (held.status, asked) == (200, [somebody])


async def test_two_traceparents_count_as_none(room: Any) -> None:
    """As the W3C has it: which of them the message belongs to is anyone's guess."""
    first = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    second = "00-11111111111111111111111111111111-2222222222222222-01"
    lines = f"traceparent: {first}\r\nTraceparent: {second}\r\n".encode()
    requests = (
        encode("POST", "/v1/send", {"to": "topic:a"}, {}),
        encode("POST", "/v1/send/batch", b'{"to":"topic:a"}\n', {"Content-Type": "application/x-ndjson"}),
    )
    for request in requests:
        reply = parse(await room.raw(request.replace(b"\r\n", b"\r\n" + lines, 1)))
        assert reply.status in (200, 202)
    kept = [msgspec.json.decode(row.payload, type=Envelope) for row in await room.outbox.claim()]
    assert [envelope.traceparent for envelope in kept] == [None, None]


async def test_the_traceparent_of_a_batch_is_that_of_its_messages(room: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with AsyncClient(room.path) as client:
        sends = [SendRequest(to="topic:a", client_message_id=name) for name in "ab"]
        assert len([result async for result in client.send_many(sends, traceparent=trace)]) == 2
        (row,) = (await client.inspect("a")).chain
    assert [json.loads(one.payload)["traceparent"] for one in await room.outbox.claim()] == [trace, trace]
    assert row.traceparent == trace


async def test_a_large_body_is_taken_whole(room: Any) -> None:
    body = "é" * 400_000
    assert (await room.send({"to": "topic:a", "body": body}, idempotency_key="k")).status == 202
    (row,) = await room.outbox.claim()
    assert json.loads(row.payload)["body"] == body


async def test_a_destination_that_the_config_does_not_allow_is_a_403(open_room: Any) -> None:
    room = await open_room(destinations=("topic:orders*",))
    assert (await room.send({"to": "topic:orders_eu"})).status == 202
    refused = await room.send({"to": "dm:bob"})
    assert (refused.status, refused.json["code"], refused.json["field"]) == (403, "destination_not_allowed", "to")
    accepted, line = (await room.batch(LINE, {"to": "dm:bob"})).lines
    assert "result" in accepted
    assert line["problem"]["code"] == "destination_not_allowed"


async def test_what_is_known_is_answered_whatever_the_config_allows_by_now(open_room: Any) -> None:
    room = await open_room(destinations=("topic:orders*",))
    before = prepare(json.dumps({"to": "dm:bob", "body": "b", "client_message_id": "known"}).encode())
    await room.outbox.accept([before], Caller(os.getuid(), os.getgid()))
    other = {"to": "dm:bob", "body": "c"}
    again = await room.send({"to": "dm:bob", "body": "b"}, idempotency_key="known")
    assert (again.status, again.json["status"]) == (202, "queued")
    assert (await room.send(other, idempotency_key="known")).json["code"] == "idempotency_key_reused"
    assert (await room.send(other, idempotency_key="new")).json["code"] == "destination_not_allowed"
    lines = (
        await room.batch(
            {"to": "dm:bob", "body": "b", "client_message_id": "known"},
            {"to": "dm:bob", "client_message_id": "new"},
            {"to": "topic:orders", "client_message_id": "other"},
        )
    ).lines
    assert ["result" in line for line in lines] == [True, False, True]
    assert lines[1]["problem"]["code"] == "destination_not_allowed"
    assert await room.rows() == 2


async def test_lines_that_the_config_does_not_allow_have_their_turn_among_the_others(open_room: Any) -> None:
    room = await open_room(destinations=("topic:orders*",))
    message, elsewhere = {**LINE, "client_message_id": "k"}, {"to": "dm:bob", "client_message_id": "k"}
    lines = (await room.batch(elsewhere, message, elsewhere, message)).lines
    said = [line.get("problem", {}).get("code") for line in lines]
    assert said == ["destination_not_allowed", None, "idempotency_key_reused", None]
    assert await room.rows() == 1


async def test_a_full_outbox_is_a_507_for_what_is_new_and_answers_what_is_known(open_room: Any) -> None:
    room = await open_room(settings=OutboxSettings(max_bytes=1024 * 1024))
    await room.send({"to": "topic:a", "body": "first"}, idempotency_key="known")
    statuses = [(await room.send({"to": "topic:a", "body": "x" * 100_000})).status for _ in range(12)]
    assert statuses[0] == 202
    assert statuses[-1] == 507
    refused = await room.send({"to": "topic:a", "body": "x" * 100_000})
    assert refused.json["code"] == "outbox_full"
    assert refused.json["retryable"] is True
    assert (await room.send({"to": "topic:a", "body": "first"}, idempotency_key="known")).status == 202


async def test_where_a_send_is_now(room: Any) -> None:
    await room.send(LINE, idempotency_key="k")
    row = (await room.request("GET", "/v1/sends/k")).json
    assert (row["status"], row["destination"], row["attempts"]) == ("pending", "topic:orders", 0)
    assert "payload" not in row
    assert (await room.request("GET", "/v1/sends/unknown")).status == 404


@pytest.mark.parametrize("spelling", ["billing:invoice~1", "billing%3Ainvoice%7E1", "billing%3ainvoice%7e%31"])
async def test_an_id_in_a_path_may_be_percent_encoded(room: Any, spelling: str) -> None:
    row = (await room.send(LINE, idempotency_key="billing:invoice~1")).json["outbox_id"]
    assert (await room.request("GET", f"/v1/sends/{spelling}")).json["id"] == row
    assert (await room.request("GET", f"/v1/outbox/{spelling}")).json["row"]["id"] == row
    assert (await room.request("POST", f"/v1/outbox/{spelling}/hold", {"reason": "test"})).json["held"] is True


async def test_the_send_of_another_uid_is_not_there(open_room: Any) -> None:
    room = await open_room(policy=Policy(operators=[4_000_000]))
    await room.outbox.accept([prepare(b'{"to":"topic:a","client_message_id":"k"}')], Caller(54321, 54321))
    assert (await room.request("GET", "/v1/sends/k")).json["code"] == "send_not_found"


async def test_a_wait_ends_when_the_send_is_done(room: Any) -> None:
    await room.send(LINE, idempotency_key="k")
    waiting = asyncio.create_task(room.request("GET", "/v1/sends/k?wait=60"))
    (row,) = await room.outbox.claim()
    await room.outbox.settle([Settlement(row.row_id, Verdict.DONE, broker_message_id="B", history_id=1)])
    reply = (await waiting).json
    assert (reply["status"], reply["broker_message_id"], reply["history_id"]) == ("done", "B", 1)


@pytest.mark.parametrize("one", [True, False], ids=["one row", "many"])
async def test_a_wait_goes_on_while_operators_hold_release_and_flush_the_row(room: Any, *, one: bool) -> None:
    await room.send(LINE, idempotency_key="k")
    waiting = asyncio.create_task(room.request("GET", "/v1/sends/k?wait=60"))
    await until(lambda: room.outbox._watchers.any)
    for verb in ("hold", "release", "flush"):
        target, named = (f"k/{verb}", {}) if one else (verb, {"filter": {"ids": ["k"]}})
        assert (await room.request("POST", f"/v1/outbox/{target}", {"reason": "a test", **named})).status == 200
    (row,) = await room.outbox.claim()
    await room.outbox.settle([Settlement(row.row_id, Verdict.DONE, broker_message_id="B", history_id=1)])
    assert (await waiting).json["status"] == "done"


async def test_a_wait_whose_time_is_up_says_where_the_send_is(room: Any) -> None:
    await room.send(LINE, idempotency_key="k")
    assert (await room.request("GET", "/v1/sends/k?wait=0.01")).json["status"] == "pending"


async def ask(room: Any, **body: Any) -> Any:
    return await room.request("POST", "/v1/sends", body)


async def test_where_many_sends_are_now(room: Any) -> None:
    for key in ("a", "b"):
        await room.send(LINE, idempotency_key=key)
    reply = (await ask(room, client_message_ids=["b", "unknown", "a", "no id", "b"])).json

    assert [(row["client_message_id"], row["status"]) for row in reply["rows"]] == [("b", "pending"), ("a", "pending")]
    assert reply["missing"] == ["unknown", "no id"]


async def test_a_wait_for_many_ends_when_the_last_is_settled(room: Any) -> None:
    for key in ("done before", "a", "b"):
        await room.send(LINE, idempotency_key=key.replace(" ", "-"))
    first, *others = await room.outbox.claim()
    await room.outbox.settle([Settlement(first.row_id, Verdict.DONE, broker_message_id="A", history_id=1)])
    waiting = asyncio.create_task(ask(room, client_message_ids=["done-before", "a", "b"], wait=60))
    for number, row in enumerate(others, 2):
        assert not waiting.done()
        await room.outbox.settle([Settlement(row.row_id, Verdict.DONE, broker_message_id="B", history_id=number)])

    assert [row["history_id"] for row in (await waiting).json["rows"]] == [1, 2, 3]


async def test_a_wait_for_many_whose_time_is_up_says_where_they_are(room: Any) -> None:
    await room.send(LINE, idempotency_key="k")
    (row,) = (await ask(room, client_message_ids=["k"], wait=0.01)).json["rows"]
    assert row["status"] == "pending"


async def test_sends_of_another_uid_are_missing_to_who_asks_for_many(open_room: Any) -> None:
    room = await open_room(policy=Policy(operators=[4_000_000]))
    await room.outbox.accept([prepare(b'{"to":"topic:a","client_message_id":"k"}')], Caller(54321, 54321))
    assert (await ask(room, client_message_ids=["k"], wait=60)).json == {"rows": [], "missing": ["k"]}


@pytest.mark.parametrize(
    "body",
    [{}, {"client_message_ids": []}, {"client_message_ids": ["k"] * 1001}, {"client_message_ids": ["k"], "wait": 1e9}],
)
async def test_a_question_after_no_or_too_many_sends_is_refused(room: Any, body: dict[str, Any]) -> None:
    reply = await room.request("POST", "/v1/sends", body)
    assert (reply.status, reply.json["code"]) == (400, "invalid_field")


async def test_a_batch_answers_every_line_in_order_and_a_bad_line_fails_alone(room: Any) -> None:
    reply = await room.batch(LINE, b"nonsense\n", {"to": "nowhere"}, b"\n", LINE)
    assert reply.status == 200
    assert [line["line"] for line in reply.lines] == [1, 2, 3, 4, 5]
    assert ["result" in line for line in reply.lines] == [True, False, False, False, True]
    assert reply.lines[1]["problem"]["code"] == "invalid_json"
    assert reply.lines[2]["problem"]["field"] == "to"
    assert await room.rows() == 2


async def test_a_line_too_long_fails_alone(open_room: Any) -> None:
    room = await open_room(limits=Limits(body_bytes=2048, request_bytes=4096))
    reply = await room.batch(LINE, {**LINE, "body": "x" * 1_000_000}, LINE)
    assert [line.get("problem", {}).get("code") for line in reply.lines] == [None, "request_too_large", None]


async def test_the_last_line_needs_no_line_end_and_an_empty_batch_no_line(room: Any) -> None:
    assert len((await room.batch(json.dumps(LINE).encode())).lines) == 1
    assert (await room.batch()).lines == []


async def test_a_batch_of_another_media_type_is_a_415(room: Any) -> None:
    assert (await room.request("POST", "/v1/send/batch", LINE)).status == 415


async def test_results_come_while_the_request_still_goes_on(room: Any) -> None:
    reader, writer = await room.connect()
    writer.write(encode("POST", "/v1/send/batch", b"", NDJSON | {"Content-Length": "100000"}))
    for number in range(1, 4):
        writer.write(json.dumps(LINE).encode() + b"\n")
        result = await reader.readuntil(b"\n")
        while not result.startswith(b"{"):
            result = await reader.readuntil(b"\n")
        assert json.loads(result)["line"] == number
        assert await room.rows() == number
    writer.close()


async def test_lines_that_arrive_together_share_a_transaction(room: Any) -> None:
    before, _ = room.outbox.progress
    reply = await room.batch(*[LINE] * 5000)
    after, _ = room.outbox.progress
    assert [line["line"] for line in reply.lines] == list(range(1, 5001))
    assert after - before < 500
    assert await room.rows() == 5000


async def test_a_caller_that_reads_no_results_is_not_read_from(room: Any) -> None:
    """It streams for ever; memory stays flat since the server stops reading once its answers are not taken.

    What has been read by then is on disk: the store waits for no answer of the lines before it.
    """
    _, writer = await asyncio.open_unix_connection(str(room.path), limit=1024)
    writer.write(encode("POST", "/v1/send/batch", b"", NDJSON | {"Content-Length": str(2**40)}))
    line = json.dumps(LINE).encode() + b"\n"
    streaming = asyncio.create_task(_stream_for_ever(writer, line * 1000))
    await until(lambda: any(connection.writing_paused for connection in room.server.connections))
    answered = room.services.counters.sends
    kept = await until_so(room.rows, holds=lambda rows: rows > answered["queued"] + CHUNK_LINES)
    assert not streaming.done()
    room.server.drop_overdue(asyncio.get_running_loop().time() + 31)
    with pytest.raises(ConnectionError):
        await streaming
    assert await room.rows() <= kept + 3 * CHUNK_LINES


async def _stream_for_ever(writer: asyncio.StreamWriter, lines: bytes) -> None:
    while True:
        writer.write(lines)
        await writer.drain()


async def test_a_batch_that_breaks_off_keeps_what_was_answered(room: Any) -> None:
    reader, writer = await room.connect()
    writer.write(
        encode("POST", "/v1/send/batch", json.dumps(LINE).encode() + b"\n", NDJSON | {"Content-Length": "999"})
    )
    await reader.readuntil(b"queued")
    writer.transport.abort()
    await until(lambda: not room.services.counters.in_flight)
    assert await room.rows() == 1


@pytest.mark.parametrize("fields", ["Content-Length: 999", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("answered", [False, True])
async def test_what_came_of_a_batch_is_answered_though_a_half_close_cuts_it_off(
    room: Any, fields: str, *, answered: bool
) -> None:
    line = json.dumps(LINE).encode()
    parts = [line + b"\n", line[:-1] + b',"client_message_id":"k"}\n{"to"', b':"topic:orders","body":"h']
    head = f"POST /v1/send/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n{fields}\r\n\r\n"
    reader, writer = await room.connect()
    writer.write(head.encode())
    got = b""
    for number, part in enumerate(parts):
        writer.write(b"%x\r\n%b\r\n" % (len(part), part) if "chunked" in fields else part)
        if answered and number == 0:
            got = await reader.readuntil(b"queued")
    writer.write_eof()
    got += await asyncio.wait_for(reader.read(), 20)
    results = [
        json.loads(each) for each in got.split(b"\r\n") if each.startswith(b'{"line"') for each in each.splitlines()
    ]
    assert [each.get("problem", {}).get("code") for each in results] == [None, None, "invalid_json"]
    assert got.endswith(b"\r\n0\r\n\r\n")
    assert await room.rows() == 2
    writer.close()


async def test_broken_chunks_break_a_batch_off_without_a_second_answer(room: Any) -> None:
    head = b"POST /v1/send/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
    line = json.dumps(LINE).encode() + b"\n"
    reader, writer = await room.connect()
    writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(line), line))
    await reader.readuntil(b"queued")
    writer.write(b"zz\r\n")
    assert b"HTTP/1.1" not in await reader.read()
    writer.close()


async def test_the_counters_know_every_outcome(room: Any) -> None:
    await room.send(LINE, idempotency_key="k")
    await room.send(LINE, idempotency_key="k")
    await room.send({**LINE, "body": "other"}, idempotency_key="k")
    await room.send({"to": "nowhere"})
    counters = room.services.counters
    assert counters.sends == {"queued": 2, "idempotency_key_reused": 1, "invalid_destination": 1}
    assert sum(counters.accept.counts) == 2
    assert counters.in_flight == 0

"""Bad input at the socket: each line of the list gets a 4xx or a closed connection, and leaves no row behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.wire import MALFORMED, SECRET

from ipc.shares import Limits
from outbox.model import Caller, Settlement, Verdict
from postroom._wire.message import prepare

GOOD = b'{"to":"topic:orders","body":"hi"}'
HOST = b"Host: localhost\r\n"
TYPE = b"Content-Type: application/json\r\n"
NDJSON = b"Content-Type: application/x-ndjson\r\n"
EVENT = b"Content-Type: application/cloudevents+json"
CLOSED = 0  # no answer at all: the connection was closed


def post(body: bytes = GOOD, fields: bytes = b"", *, target: bytes = b"/v1/send", length: bytes | None = None) -> bytes:
    """Write a POST down, with whatever fields break it."""
    size = b"%d" % len(body) if length is None else length
    head = b"POST " + target + b" HTTP/1.1\r\n" + HOST + TYPE
    return head + b"Content-Length: " + size + b"\r\nConnection: close\r\n" + fields + b"\r\n" + body


def chunked(body: bytes, fields: bytes = b"") -> bytes:
    head = b"POST /v1/send HTTP/1.1\r\n" + HOST + TYPE + b"Transfer-Encoding: chunked\r\n"
    return head + fields + b"Connection: close\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else CLOSED


async def refuses(room: Any, request: bytes, expected: set[int]) -> bytes:
    """Send `request`, and check the answer, that nothing was written, and that the server lives."""
    answer: bytes = await room.raw(request)
    assert status_of(answer) in expected, answer[:300]
    if answer and b"application/problem+json" in answer:
        problem = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert problem["status"] == status_of(answer)
        assert problem["code"]
        assert problem["detail"]
    else:
        assert not answer
    assert await room.rows() == 0
    assert (await room.request("GET", "/v1/ready")).status == 200
    return answer


BEFORE_HTTP = {
    "nothing at all": b"",
    "one byte": b"P",
    "a MiB of NUL": b"\0" * 1024 * 1024,
    "a TLS hello": bytes.fromhex("160301020001000001fc0303") + b"\x11" * 500,
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lines that end in LF only": b"POST /v1/send HTTP/1.1\nHost: localhost\nContent-Length: 2\n\n{}",
    "a request line of 64 KiB": b"GET /" + b"a" * 65536 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
}


@pytest.mark.parametrize("name", BEFORE_HTTP)
async def test_what_is_not_http_is_refused(room: Any, name: str) -> None:
    await refuses(room, BEFORE_HTTP[name], {400, 415, CLOSED})


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (HOST + HOST, "Host, is there twice"),
        (HOST + TYPE + TYPE, "is there twice"),
        (b"X: 1\r\n", "has no Host header"),
        (HOST + b"".join(b"X-%d: 1\r\n" % n for n in range(101)), "too many header fields"),
    ],
    ids=["two hosts", "two types", "no host", "101 fields"],
)
async def test_a_head_that_is_refused_says_what_is_wrong(room: Any, head: bytes, sentence: str) -> None:
    answer = await refuses(room, b"GET /v1/ready HTTP/1.1\r\n" + head + b"Connection: close\r\n\r\n", {400})
    assert sentence in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


TARGETS = {
    "a wrong method": (b"PUT /v1/send HTTP/1.1", {405}),
    "a method of no standard": (b"BREW /v1/send HTTP/1.1", {400, 405}),
    "HEAD on a write": (b"HEAD /v1/send HTTP/1.1", {405}),
    "TRACE": (b"TRACE /v1/send HTTP/1.1", {405}),
    "CONNECT": (b"CONNECT localhost:80 HTTP/1.1", {400, 404, 405}),
    "an asterisk": (b"OPTIONS * HTTP/1.1", {400, 404, 405}),
    "two slashes": (b"GET //v1/ready HTTP/1.1", {404}),
    "an escaped letter": (b"GET /v1/%72eady HTTP/1.1", {404}),
    "a parent directory": (b"GET /v1/../v1/ready HTTP/1.1", {404}),
    "an empty target": (b"GET  HTTP/1.1", {400}),
    "no version": (b"GET /v1/ready", {400}),
    "HTTP/0.9": (b"GET /v1/ready HTTP/0.9", {400}),
    "a fragment": (b"GET /v1/ready#now HTTP/1.1", {400}),
    "an empty fragment": (b"GET /v1/ready# HTTP/1.1", {400}),
    "HTTP/2.0": (b"GET /v1/ready HTTP/2.0", {505}),
    "HTTP/3.7": (b"GET /v1/ready HTTP/3.7", {400}),
    "an unknown query parameter": (b"GET /v1/ready?x=1 HTTP/1.1", {400}),
    "a token in the query": (b"GET /v1/ready?access_token=abc HTTP/1.1", {400}),
    "a broken escape": (b"GET /v1/sends/%zz HTTP/1.1", {400, 404}),
    "an escaped NUL": (b"GET /v1/sends/%00 HTTP/1.1", {404}),
    "a wait without end": (b"GET /v1/sends/a?wait=1e9 HTTP/1.1", {400}),
    "a wait that is no number": (b"GET /v1/sends/a?wait=nan HTTP/1.1", {400}),
    "a wait twice": (b"GET /v1/sends/a?wait=1&wait=2 HTTP/1.1", {400}),
}


@pytest.mark.parametrize("name", TARGETS)
async def test_a_wrong_target_is_refused(room: Any, name: str) -> None:
    line, expected = TARGETS[name]
    answer = await room.raw(line + b"\r\n" + HOST + b"Connection: close\r\n\r\n")
    assert status_of(answer) in expected, answer[:200]
    assert (await room.request("GET", "/v1/ready")).status == 200


async def test_an_absolute_target_is_taken_as_the_standard_says(room: Any) -> None:
    reply = await room.request("GET", "http://localhost/v1/ready")
    assert reply.status == 200


HTTP = {
    "a length twice": (post(fields=b"Content-Length: 5\r\n"), {400}),
    "a length with a sign": (post(length=b"+5"), {400}),
    "a negative length": (post(length=b"-1"), {400}),
    "a length of 2^64": (post(length=b"18446744073709551616"), {400}),
    "a length and chunks": (post(fields=b"Transfer-Encoding: chunked\r\n"), {400}),
    "no length at all": (b"POST /v1/send HTTP/1.1\r\n" + HOST + TYPE + b"Connection: close\r\n\r\n", {400}),
    "a body shorter than its length": (post(length=b"1000"), {400, CLOSED}),
    "a body longer than its length": (post(length=b"10"), {400}),
    "a chunk size that is no number": (chunked(b"zz\r\n"), {400}),
    "a chunk without its end": (chunked(b"5\r\nhelloXX"), {400, CLOSED}),
    "a chunk extension of 64 KiB": (chunked(b"5;" + b"a" * 65536 + b"\r\nhello\r\n0\r\n\r\n"), {400}),
    "chunks that never end": (chunked(b"5\r\nhello\r\n"), {400, CLOSED}),
    "a transfer encoding of no standard": (
        b"POST /v1/send HTTP/1.1\r\n" + HOST + TYPE + b"Transfer-Encoding: cow\r\n\r\n",
        {400, CLOSED},
    ),
    "a NUL in a field name": (post(fields=b"X\0Y: 1\r\n"), {400}),
    "a CR in a field name": (post(fields=b"X\rY: 1\r\n"), {400}),
    "a folded field": (post(fields=b'X: 1\r\n  2\r\nIdempotency-Key: "\r\n'), {400}),
    "a space before the colon": (post(fields=b"X : 1\r\n"), {400}),
    "101 fields": (post(fields=b"".join(b"X-%d: 1\r\n" % n for n in range(101))), {400}),
    "a field of 64 KiB": (post(fields=b"X: " + b"a" * 65536 + b"\r\n"), {400}),
    "a gzip body": (post(b"\x1f\x8b" + b"\0" * 100, b"Content-Encoding: gzip\r\n"), {415}),
    "a deflate body": (post(fields=b"Content-Encoding: deflate\r\n"), {415}),
    "an unknown encoding": (post(fields=b"Content-Encoding: cow\r\n"), {415}),
    "two encodings": (post(fields=b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n"), {415}),
    "a transfer coding beside chunks": (
        chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)).replace(b"chunked", b"gzip, chunked"),
        {415},
    ),
    "two hosts": (post(fields=b"Host: evil.example\r\n"), {400}),
    "two media types": (post(fields=TYPE), {400}),
    "a batch under one id": (
        post(GOOD + b"\n", b"Idempotency-Key: k\r\n", target=b"/v1/send/batch").replace(TYPE, NDJSON),
        {400},
    ),
    "an event in UTF-16": (
        post(b"{}", target=b"/v1/cloudevents?to=topic:a").replace(TYPE, EVENT + b"; charset=utf-16\r\n"),
        {415},
    ),
}


@pytest.mark.parametrize("name", HTTP)
async def test_broken_http_is_refused(room: Any, name: str) -> None:
    request, expected = HTTP[name]
    await refuses(room, request, expected)


async def test_a_length_beyond_the_limit_is_refused_before_the_body_comes(room: Any) -> None:
    answer = await room.raw(post(length=b"9999999999"), half_close=False)
    assert status_of(answer) == 413
    assert await room.rows() == 0


@pytest.mark.parametrize(
    "media",
    ["text/plain", "application/xml", "application/json; charset=utf-16", "multipart/form-data", "", "x", "a/b/c"],
)
async def test_another_media_type_is_a_415(room: Any, media: str) -> None:
    request = post().replace(TYPE, b"Content-Type: " + media.encode() + b"\r\n" if media else b"")
    await refuses(room, request, {415})


async def test_an_expectation_that_can_be_met_is_met(room: Any) -> None:
    reader, writer = await room.connect()
    head = post(fields=b"Expect: 100-continue\r\n")
    writer.write(head[: -len(GOOD)])
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(GOOD)
    assert (await reader.read()).startswith(b"HTTP/1.1 202 ")
    writer.close()


@pytest.mark.parametrize("arrived", [0, len(GOOD)])
async def test_any_other_expectation_is_a_417_whatever_has_arrived(room: Any, arrived: int) -> None:
    reader, writer = await room.connect()
    request = post(fields=b"Expect: 200-maybe\r\n")
    writer.write(request[: len(request) - len(GOOD) + arrived])
    assert status_of(await reader.read()) == 417
    writer.close()
    assert status_of(await room.raw(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nExpect: more\r\n\r\n")) == 417


async def test_an_upgrade_is_declined_and_the_request_answered(room: Any) -> None:
    answer = await room.raw(post(fields=b"Upgrade: websocket\r\n").replace(b"close", b"Upgrade"), half_close=True)
    assert status_of(answer) == 202


async def test_a_request_is_answered_after_a_half_close(room: Any) -> None:
    assert status_of(await room.raw(post().replace(b"Connection: close\r\n", b""))) == 202


@pytest.mark.parametrize("unusual", [b"", b"X-Read-By: aiohttp\r\n"])
async def test_every_request_is_answered_that_came_before_a_half_close(room: Any, unusual: bytes) -> None:
    kept = [post(fields=b"Idempotency-Key: k%d\r\n" % n + unusual).replace(b"close", b"keep-alive") for n in range(5)]
    answer = await room.raw(b"".join(kept[:2]) + post(b"[]").replace(b"close", b"keep-alive") + b"".join(kept[2:]))
    assert [answer.count(b"HTTP/1.1 %d " % status) for status in (202, 400)] == [5, 1]
    assert await room.rows() == 5


@pytest.mark.parametrize("part", [b"POST /v1/send HT", post(length=b"99"), chunked(b"f\r\n{")])
@pytest.mark.parametrize("before", [1, 3])
async def test_what_came_whole_is_answered_though_a_half_close_cuts_off_the_next(
    room: Any, part: bytes, before: int
) -> None:
    kept = [post(fields=b"Idempotency-Key: k%d\r\n" % n).replace(b"close", b"keep-alive") for n in range(before)]
    answer = await room.raw(b"".join(kept) + part)
    assert (answer.count(b"HTTP/1.1 202 "), answer.count(b"HTTP/1.1 ")) == (before, before)
    assert await room.rows() == before


async def test_trailers_are_ignored(room: Any) -> None:
    size = b"%x" % len(GOOD)
    answer = await room.raw(chunked(size + b"\r\n" + GOOD + b"\r\n0\r\nX-Trailer: 1\r\n\r\n"))
    assert status_of(answer) in {202, 400}


META = b'{"to":"topic:orders","meta":{"a":%s}}'
JSON = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a string": b'"x"',
    "a number": b"7",
    "NaN": META % b"NaN",
    "Infinity": META % b"Infinity",
    "1e400": META % b"1e400",
    "an integer of 100,000 digits": META % (b"1" * 100_000),
    "an integer of 4,301 digits": META % (b"1" * 4301),
    "2^53 + 1": META % b"9007199254740993",
    "-2^53 - 1": META % b"-9007199254740993",
    "depth 100,000": META % (b"[" * 100_000 + b"]" * 100_000),
    "depth 65": META % (b"[" * 64 + b"1" + b"]" * 64),
    "a key twice": b'{"to":"topic:orders","to":"topic:orders"}',
    "a key twice, once escaped": b'{"to":"topic:orders","\\u0074o":"topic:orders"}',
    "a key twice with nothing": b'{"to":"topic:orders","body":"x","body":null}',
    "a key of meta twice": META % b'{"b":1,"b":1}',
    "a key of meta twice, deep": META % b'[{"b":{"c":[],"c":0}}]',
    "a lone surrogate": b'{"to":"topic:orders","body":"\\ud800"}',
    "a lone surrogate in meta": META % b'"\\udc00"',
    "NUL in the body": b'{"to":"topic:orders","body":"a\\u0000b"}',
    "NUL in meta": META % b'"a\\u0000b"',
    "NUL in a key of meta": META % b'{"\\u0000":1}',
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "trailing garbage": GOOD + b"x",
    "two documents": GOOD + b"\n" + GOOD,
    "invalid UTF-8": b'{"to":"topic:orders","body":"\xff\xfe"}',
    "UTF-16": GOOD.decode().encode("utf-16"),
    "an unknown field": b'{"to":"topic:orders","colour":"red"}',
    "a misspelt field": b'{"to":"topic:orders","priorty":"now"}',
    "no destination": b'{"body":"hi"}',
    "bad base64": b'{"to":"topic:orders","body_base64":"a"}',
    "base64 of another alphabet": b'{"to":"topic:orders","body_base64":"_-_-"}',
    "two bodies": b'{"to":"topic:orders","body":"a","body_base64":"YQ=="}',
    "reserved meta": b'{"to":"topic:orders","meta":{"mentions":["bob"]}}',
    **{
        f"{field} of a wrong type ({value.decode()})": b'{"to":"topic:orders","%s":%s}' % (field.encode(), value)
        for field, value in [
            ("body", b"1"),
            ("body", b"{}"),
            ("body_base64", b"[]"),
            ("meta", b"[]"),
            ("meta", b'"x"'),
            ("priority", b"1"),
            ("reply_to", b"{}"),
            ("mentions", b'"bob"'),
            ("mentions", b"[1]"),
            ("client_message_id", b"7"),
            ("not_before", b"7"),
            ("not_before", b"true"),
        ]
    },
    "a destination that is a number": b'{"to":7}',
}


@pytest.mark.parametrize("name", JSON)
async def test_json_that_cannot_be_taken_one_way_is_a_400(room: Any, name: str) -> None:
    await refuses(room, post(JSON[name]), {400})


async def test_a_million_keys_are_more_than_a_request_may_hold(room: Any) -> None:
    keys = b",".join(b'"k%d":1' % n for n in range(1_000_000))
    await refuses(room, post(META % (b"{" + keys + b"}")), {413})


async def test_an_operators_request_is_not_decoded_either_where_it_holds_that_many(room: Any) -> None:
    query = b'{"filter":{"ids":[' + b"1," * 1_000_000 + b"1]}}"
    answer = await refuses(room, post(query, target=b"/v1/outbox/abort"), {413})
    assert (b'"request_too_large"' in answer, b"meta" in answer) == (True, False)


@pytest.mark.parametrize(("above", "status"), [(-1, 202), (0, 202), (1, 413)])
async def test_a_body_at_its_limit_is_taken_and_one_above_refused(open_room: Any, above: int, status: int) -> None:
    room = await open_room(limits=Limits(body_bytes=2048, request_bytes=4096))
    reply = await room.send({"to": "topic:orders", "body": "x" * (2048 + above)})
    assert reply.status == status


@pytest.mark.parametrize("value", [b"-0", b"9007199254740992", b"-9007199254740992", b"[" * 63 + b"]" * 63])
async def test_what_the_fingerprint_can_just_see_is_taken(room: Any, value: bytes) -> None:
    assert status_of(await room.raw(post(META % value))) == 202


async def test_a_body_that_says_that_it_is_as_it_is_is_taken(room: Any) -> None:
    assert status_of(await room.raw(post(fields=b"Content-Encoding: Identity\r\n"))) == 202


FIELDS = {
    "an empty destination": {"to": ""},
    "a destination of 300 characters": {"to": "topic:" + "a" * 294},
    "an asterisk": {"to": "topic:*"},
    "a NATS wildcard": {"to": "queue:a.>"},
    "a parent directory": {"to": "topic:../etc"},
    "a newline": {"to": "topic:a\n"},
    "an unknown kind": {"to": "fax:orders"},
    "no kind": {"to": "orders"},
    "an unknown priority": {"to": "topic:a", "priority": "urgent"},
    "10,000 mentions": {"to": "topic:a", "mentions": [f"m{n}" for n in range(10_000)]},
    "a mention that is no member": {"to": "topic:a", "mentions": ["Bob!"]},
    "a time of the year -1": {"to": "topic:a", "not_before": "-0001-01-01T00:00:00Z"},
    "a time without an offset": {"to": "topic:a", "not_before": "2026-01-01T00:00:00"},
    "a time that is none": {"to": "topic:a", "not_before": "2026-02-30T00:00:00Z"},
    "a reply_to that is no id": {"to": "topic:a", "reply_to": "no id"},
}


@pytest.mark.parametrize("name", FIELDS)
async def test_a_field_out_of_its_rule_is_a_400_that_names_it(room: Any, name: str) -> None:
    answer = await refuses(room, post(json.dumps(FIELDS[name]).encode()), {400})
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["field"] in {*FIELDS[name]}


@pytest.mark.parametrize("moment", ["2001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
async def test_a_time_in_the_past_or_far_ahead_is_taken(room: Any, moment: str) -> None:
    assert (await room.send({"to": "topic:a", "not_before": moment})).status == 202


BAD_IDS = [
    "", " ", "a b", "a" * 129, "a\tb", "'", "*", ">", "$JS.", "a/b", "' or 1=1", "%", '"', '""', "ä",
]  # fmt: skip


@pytest.mark.parametrize("identifier", BAD_IDS)
@pytest.mark.parametrize("place", ["header", "body"])
async def test_what_is_no_id_is_a_400(room: Any, identifier: str, place: str) -> None:
    if place == "header":
        request = post(fields=f"Idempotency-Key: {identifier}\r\n".encode())
    else:
        request = post(json.dumps({"to": "topic:a", "client_message_id": identifier}).encode())
    await refuses(room, request, {400})


@pytest.mark.parametrize("control", [b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff"])
async def test_a_control_character_in_the_id_header_is_a_400(room: Any, control: bytes) -> None:
    await refuses(room, post(fields=b"Idempotency-Key: a" + control + b"b\r\n"), {400})


async def test_two_id_headers_are_a_400(room: Any) -> None:
    await refuses(room, post(fields=b"Idempotency-Key: a\r\nIdempotency-Key: a\r\n"), {400})


async def test_an_id_of_128_characters_is_taken(room: Any) -> None:
    assert (await room.send({"to": "topic:a"}, idempotency_key="a" * 128)).status == 202


async def test_the_header_wins_over_the_body_and_quotes_are_no_part_of_it(room: Any) -> None:
    quoted = await room.send({"to": "topic:a", "client_message_id": "b"}, idempotency_key='"h"')
    bare = await room.send({"to": "topic:a", "client_message_id": "b"}, idempotency_key="h")
    assert quoted.json["client_message_id"] == "h"
    assert bare.json["outbox_id"] == quoted.json["outbox_id"]


async def test_the_id_of_a_held_row_answers_like_any_pending_one(room: Any) -> None:
    row = (await room.send({"to": "topic:a", "client_message_id": "k"})).json["outbox_id"]
    await room.outbox.act("hold", row, caller=Caller(0, 0), reason="test")
    assert (await room.send({"to": "topic:a", "client_message_id": "k"})).status == 202
    assert (await room.send({"to": "topic:b", "client_message_id": "k"})).status == 409


async def test_an_fd_that_is_passed_along_is_closed(room: Any) -> None:
    """The kernel drops what a plain recv(2) has no room for; the test would hang if anyone kept the pipe's end."""

    def pass_along() -> bytes:
        reading, writing = os.pipe()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(room.path))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", writing))]
            sock.sendmsg([post()], rights)
            os.close(writing)
            answer = sock.recv(65536)
            assert os.read(reading, 1) == b""  # every copy of the writing end is gone
            os.close(reading)
        return answer

    assert status_of(await asyncio.to_thread(pass_along)) == 202


async def test_a_settled_id_is_never_sent_again(room: Any) -> None:
    await room.outbox.accept([prepare(b'{"to":"topic:a","client_message_id":"k"}')], Caller(0, 0))
    (row,) = await room.outbox.claim()
    await room.outbox.settle([Settlement(row.row_id, Verdict.DEAD, last_error="x: y")])
    assert (await room.send({"to": "topic:a", "client_message_id": "k"})).status == 409
    assert await room.outbox.claim() == []


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED)
async def test_no_malformed_head_is_repeated_in_the_answer_or_the_log(
    room: Any, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as lines:
        answer = await room.raw(request_)
    assert status_of(answer) in (CLOSED, 400, 404)
    assert SECRET.encode() not in answer
    assert SECRET not in caplog.text + str(lines)

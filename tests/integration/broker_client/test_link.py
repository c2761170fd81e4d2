"""The link against a broker that answers well, and against peers that answer in every bad way."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from contextlib import ExitStack

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.certificates import CERTIFICATE, KEY

from broker_client import BrokerClientSettings, BrokerLink, Failure, RequestFailed
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.logs import mask
from postroom.errors import InvalidMessage, NotFound

MIB = 1024 * 1024


async def failure_of(link, rows) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        await link.accept(rows)
    assert "tok-3c1f" not in str(caught.value)
    assert "tok-3c1f" not in caught.value.problem.detail
    return caught.value


def says(head: bytes, body: bytes = b""):
    async def talk(_reader, writer):
        writer.write(head + b"\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return talk


async def test_a_batch_is_posted_with_its_token_and_its_payload_as_it_lies_in_the_outbox(
    scripted_broker, link_to, claimed
):
    seen = []
    scripted_broker.judge = lambda items: (
        seen.extend(items)
        or [
            {
                "status": 201,
                "client_message_id": item["client_message_id"],
                "broker_message_id": "b-1",
                "history_id": 7,
                "duplicate": False,
            }
            for item in items
        ]
    )
    answers = await link_to(scripted_broker.url).accept(claimed(2))
    assert [answer.history_id for answer in answers] == [7, 7]
    assert scripted_broker.tokens == ["Bearer tok-3c1f"]
    assert seen[0] == {
        "client_message_id": "id-0",
        "request_fingerprint": "00" * 32,
        "message": {"to": "topic:orders", "body": "hello"},
    }


async def test_features_tell_whom_the_token_speaks_for(scripted_broker, link_to):
    features = await link_to(scripted_broker.url).features()
    assert (features.mesh, features.member) == ("demo", "alice")


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (400, Failure.REFUSED),
        (401, Failure.NOT_PERMITTED),
        (403, Failure.NOT_PERMITTED),
        (404, Failure.NOT_PERMITTED),
        (413, Failure.REFUSED),
        (429, Failure.NOT_NOW),
        (500, Failure.SERVER_ERROR),
        (502, Failure.SERVER_ERROR),
        (503, Failure.SERVER_ERROR),
        (207, Failure.GARBAGE),
        (300, Failure.GARBAGE),
    ],
)
async def test_each_status_of_a_whole_request_is_sorted(scripted_broker, link_to, claimed, status, failure):
    scripted_broker.judge = lambda _: web.json_response({"code": "why_not", "detail": "because"}, status=status)
    error = await failure_of(link_to(scripted_broker.url), claimed(1))
    assert error.failure is failure
    assert f"answered {status} (why_not): because" in str(error)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), ("31536000", 900), ("-1", 1), ("0", 1), ("soon", None), ("", None), ("nan", None), ("1e400", None)],
)
async def test_retry_after_of_a_whole_request_is_clamped(scripted_broker, link_to, claimed, header, seconds):
    scripted_broker.judge = lambda _: web.Response(status=503, headers={"Retry-After": header})
    assert (await failure_of(link_to(scripted_broker.url), claimed(1))).retry_after == seconds


async def test_a_redirect_is_garbage_and_nobody_follows_it(scripted_broker, link_to, claimed):
    followed = []

    async def elsewhere(request):
        followed.append(request.headers)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", elsewhere)
    async with TestServer(app) as other:
        for target in (str(other.make_url("/v1/accept")), "http://169.254.169.254/latest/meta-data"):
            for status in (301, 302, 303, 307, 308):
                scripted_broker.judge = lambda _, status=status, target=target: web.Response(
                    status=status, headers={"Location": target}
                )
                error = await failure_of(link_to(scripted_broker.url), claimed(1))
                assert error.failure is Failure.GARBAGE
    assert followed == []


def _answer(**change):
    answer = {"status": 201, "client_message_id": "id-0", "broker_message_id": "b", "history_id": 1} | change
    return {key: value for key, value in answer.items() if value is not None}


@pytest.mark.parametrize(
    "content",
    [
        b"<html><body>Welcome to the hotel's network</body></html>",
        b"",
        b"null",
        b"[]",
        b'{"answers": [{"status": 201, "client_mess',
        b'{"answers": null}',
        b'{"answers": []}',
        b'{"answers": ' + b"[" * 100_000,
        b"\xff\xfe{}",
        json.dumps({"answers": [_answer(), _answer()]}).encode(),
        json.dumps({"answers": [_answer(client_message_id="id-1")]}).encode(),
        json.dumps({"answers": [_answer(broker_message_id=None)]}).encode(),
        json.dumps({"answers": [_answer(broker_message_id="x" * 200)]}).encode(),
        json.dumps({"answers": [_answer(broker_message_id="a\0b")]}).encode(),
        json.dumps({"answers": [_answer(history_id=None)]}).encode(),
        json.dumps({"answers": [_answer(history_id=-1)]}).encode(),
        json.dumps({"answers": [_answer(history_id=2**63)]}).encode(),
        json.dumps({"answers": [_answer(history_id=10**40)]}).encode(),
        json.dumps({"answers": [_answer(status=0)]}).encode(),
        json.dumps({"answers": [_answer(status=302)]}).encode(),
        json.dumps({"answers": [_answer(status=204)]}).encode(),
        json.dumps({"answers": [_answer(status=600)]}).encode(),
        json.dumps({"answers": [_answer(status=400, problem="none")]}).encode(),
    ],
)
async def test_an_answer_that_makes_no_sense_is_garbage(scripted_broker, link_to, claimed, content):
    scripted_broker.judge = lambda _: web.Response(body=content, content_type="application/json")
    assert (await failure_of(link_to(scripted_broker.url), claimed(1))).failure is Failure.GARBAGE


async def test_a_problem_needs_no_more_than_the_relay_uses(scripted_broker, link_to, claimed):
    bare = {"status": 400, "client_message_id": "id-0"}
    scripted_broker.judge = lambda _: [
        bare | {"problem": {"code": "odd", "new": []}},
        _answer(client_message_id="id-1"),
    ]
    first, second = await link_to(scripted_broker.url).accept(claimed(2))
    assert (first.status, first.problem.code, second.status) == (400, "odd", 201)


async def test_too_few_answers_are_garbage(scripted_broker, link_to, claimed):
    scripted_broker.judge = lambda _: [_answer()]
    assert (await failure_of(link_to(scripted_broker.url), claimed(2))).failure is Failure.GARBAGE


async def test_answers_in_another_order_are_garbage(scripted_broker, link_to, claimed):
    scripted_broker.judge = lambda _: [_answer(client_message_id="id-1"), _answer()]
    assert (await failure_of(link_to(scripted_broker.url), claimed(2))).failure is Failure.GARBAGE


async def test_an_endless_answer_is_cut_off_at_the_limit(raw_upstream, link_to, claimed):
    sent = 0

    async def talk(_reader, writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent += 65536
            await writer.drain()

    link = link_to(await raw_upstream(talk), max_answer_bytes=MIB)
    assert (await failure_of(link, claimed(1))).failure is Failure.GARBAGE
    assert sent < 64 * MIB


async def test_a_compressed_answer_is_not_inflated(scripted_broker, link_to, claimed):
    bomb = web.Response(body=b" " * (8 * MIB))
    bomb.enable_compression(web.ContentCoding.gzip)
    scripted_broker.judge = lambda _: bomb
    error = await failure_of(link_to(scripted_broker.url, max_answer_bytes=MIB), claimed(1))
    assert error.failure is Failure.GARBAGE


async def test_a_slow_answer_ends_at_the_time_limit(raw_upstream, link_to, claimed):
    over = asyncio.Event()

    async def drip(_reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        writer.write(b" ")
        await over.wait()

    link = link_to(await raw_upstream(drip), request_seconds=0.1)
    assert (await failure_of(link, claimed(1))).failure is Failure.TIMED_OUT
    over.set()


async def test_a_peer_that_says_nothing_ends_at_the_time_limit(raw_upstream, link_to, claimed):
    over = asyncio.Event()

    async def silence(_reader, _writer):
        await over.wait()

    link = link_to(await raw_upstream(silence), request_seconds=0.1)
    assert (await failure_of(link, claimed(1))).failure is Failure.TIMED_OUT
    over.set()


@pytest.mark.parametrize(
    ("talk", "failures"),
    [
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 5"), {Failure.GARBAGE, Failure.BROKEN_OFF}),
        (says(b"220 mail.example.com ESMTP"), {Failure.GARBAGE, Failure.BROKEN_OFF}),
        (says(b"\x15\x03\x01\x00\x02\x02\x46"), {Failure.GARBAGE, Failure.BROKEN_OFF}),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000), {Failure.GARBAGE, Failure.BROKEN_OFF}),
        (says(b"HTTP/1.1 999999 OK"), {Failure.GARBAGE, Failure.BROKEN_OFF}),
    ],
)
async def test_what_is_no_http_is_an_error_like_any_other(raw_upstream, link_to, claimed, talk, failures):
    assert (await failure_of(link_to(await raw_upstream(talk)), claimed(1))).failure in failures


async def test_a_connection_that_ends_in_the_middle_of_an_answer_is_broken_off(raw_upstream, link_to, claimed):
    async def half(_reader, writer):
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"answers": [')
        await writer.drain()

    assert (await failure_of(link_to(await raw_upstream(half)), claimed(1))).failure is Failure.BROKEN_OFF


async def test_a_reset_connection_is_broken_off(raw_upstream, link_to, claimed):
    async def reset(_reader, writer):
        writer.transport.abort()

    assert (await failure_of(link_to(await raw_upstream(reset)), claimed(1))).failure is Failure.BROKEN_OFF


async def test_a_port_that_nobody_listens_on_is_unreachable(link_to, claimed, unused_tcp_port):
    error = await failure_of(link_to(f"http://127.0.0.1:{unused_tcp_port}"), claimed(1))
    assert error.failure is Failure.UNREACHABLE


async def test_a_connection_that_does_not_come_about_in_time_is_unreachable(link_to, claimed):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(4):  # more than its backlog has room for
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        link = link_to(f"http://127.0.0.1:{full.getsockname()[1]}", connect_seconds=0.1)
        error = await failure_of(link, claimed(1))
    assert (error.failure, str(error).endswith(": no answer within 0.1 s")) == (Failure.UNREACHABLE, True)


async def test_a_post_that_broke_off_is_not_sent_again_unasked(raw_upstream, link_to, claimed):
    posts = 0

    async def answer_one(reader, writer):
        nonlocal posts
        body = json.dumps({"answers": [_answer()]}).encode()
        for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body, b""):
            await reader.readuntil(b"}]}")
            posts += 1
            writer.write(answer)
        writer.transport.abort()

    link = link_to(await raw_upstream(answer_one))
    assert len(await link.accept(claimed(1))) == 1
    assert (await failure_of(link, claimed(1))).failure is Failure.BROKEN_OFF
    assert posts == 2


async def test_a_broker_that_repeats_the_token_does_not_get_it_into_the_error(scripted_broker, link_to, claimed):
    scripted_broker.judge = lambda _: web.json_response({"code": "bad", "detail": "your token tok-3c1f"}, status=401)
    assert "your token ********" in str(await failure_of(link_to(scripted_broker.url), claimed(1)))


async def test_a_replaced_token_file_is_read_again(scripted_broker, link_to, claimed, token_file):
    link = link_to(scripted_broker.url)
    await link.accept(claimed(1))
    before = link.identity()
    fresh = token_file.with_name("fresh")
    fresh.touch(mode=0o600)
    fresh.write_text("rotated\n")
    fresh.replace(token_file)
    await link.accept(claimed(1))
    assert scripted_broker.tokens == ["Bearer tok-3c1f", "Bearer rotated"]
    assert link.identity() != before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.unlink(),
        lambda file: file.write_text(""),
        lambda file: file.write_text("two words"),
        lambda file: file.write_text("injected\r\nX-Header: 1"),
        lambda file: file.write_text("z" * 10_000),
        lambda file: file.write_bytes(b"caf\xc3\xa9"),
        lambda file: file.chmod(0o644),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["missing", "empty", "two words", "line feed", "huge", "not ASCII", "open to everybody", "a directory"],
)
async def test_a_token_file_that_cannot_be_used_is_not_permitted_and_names_the_file(
    scripted_broker, link_to, claimed, token_file, spoil
):
    link = link_to(scripted_broker.url)
    spoil(token_file)
    error = await failure_of(link, claimed(1))
    assert error.failure is Failure.NOT_PERMITTED
    assert str(token_file) in str(error)
    assert mask(str(error)) == str(error)  # as the log of a daemon has it
    assert scripted_broker.tokens == []


@pytest.mark.parametrize(
    "url",
    [
        "broker.example.com",
        "ftp://broker.example.com",
        "https://",
        "https://alice:secret@broker.example.com",
        "https://broker.example.com/?token=secret",
        "https://broker.example.com:99999",
        "https://broker..example.com",
        "https://broker example.com",
        "http://broker.example.com",
    ],
)
def test_an_address_that_cannot_be_used_ends_the_process(tmp_path, url):
    with pytest.raises(Fatal, match=r"broker\.url \(POSTROOM_DAEMON_BROKER_URL\)|plaintext") as caught:
        BrokerLink(BrokerClientSettings(url=url, token_file=tmp_path / "token"))
    assert caught.value.exit_code is Exit.CONFIG
    assert "secret" not in str(caught.value)


def test_plain_http_to_another_host_is_a_choice(tmp_path):
    BrokerLink(BrokerClientSettings(url="http://broker:8080", token_file=tmp_path / "token", allow_plaintext=True))


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_file_that_cannot_be_used_ends_the_process(tmp_path, content):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(Fatal, match=r"broker\.ca_file"):
        BrokerLink(BrokerClientSettings(url="https://localhost", token_file=tmp_path / "token", ca_file=file))


async def test_a_broker_is_trusted_only_with_a_certificate_of_the_configured_authority(link_to, claimed):
    certificate = CERTIFICATE
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, KEY)

    async def accept(_request):
        return web.json_response({"answers": [_answer()]})

    app = web.Application()
    app.router.add_post("/v1/accept", accept)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    url = f"https://127.0.0.1:{server.port}"
    assert len(await link_to(url, ca_file=certificate).accept(claimed(1))) == 1
    failed = await failure_of(link_to(url), claimed(1))
    assert failed.failure is Failure.UNREACHABLE
    assert str(failed).endswith("name its authority in broker.ca_file")
    failed = await failure_of(link_to(url.replace("https", "http")), claimed(1))
    assert failed.failure is Failure.UNREACHABLE
    assert str(failed).endswith("it speaks TLS: start its URL with https://")
    await server.close()


async def test_the_members_subscriptions_are_the_brokers_to_keep(link_to):
    calls = []

    async def features(_request):
        return web.json_response({"mesh": "demo", "member": "alice", "max_batch": 10})

    async def topics(_request):
        topic = {"mesh": "demo", "name": "orders", "created_at": "2026-11-21T00:00:00Z", "subscribers": 2}
        return web.json_response({"topics": [topic]})

    async def subscribe(request):
        calls.append((request.method, request.path))
        if request.match_info["name"] == "absent":
            problem = {"type": "t", "title": "T", "status": 404, "code": "topic_not_found", "retryable": False}
            return web.json_response(problem | {"detail": "there is no topic absent"}, status=404)
        if request.method == "DELETE":
            return web.Response(status=204)
        subscription = {"mesh": "demo", "topic": "orders", "member": "alice", "created_at": "2026-11-21T00:00:00Z"}
        return web.json_response(subscription, status=201)

    app = web.Application()
    app.router.add_get("/v1/features", features)
    app.router.add_get("/v1/topics", topics)
    app.router.add_post("/v1/topics/{mesh}/{name}/subscriptions", subscribe)
    app.router.add_delete("/v1/topics/{mesh}/{name}/subscriptions/{member}", subscribe)
    async with TestServer(app) as server:
        link = link_to(str(server.make_url("")))
        assert [topic.name for topic in (await link.topics()).topics] == ["orders"]
        assert (await link.subscribe("orders")).member == "alice"
        await link.unsubscribe("orders")
        with pytest.raises(NotFound, match="no topic absent"):
            await link.subscribe("absent")
        with pytest.raises(InvalidMessage, match="`topic`") as refused:
            await link.subscribe("../members")
        assert refused.value.problem.field == "topic"
    path = "/v1/topics/demo/orders/subscriptions"
    assert calls[:2] == [("POST", path), ("DELETE", f"{path}/alice")]


async def test_closing_twice_is_harmless(scripted_broker, link_to, claimed):
    link = link_to(scripted_broker.url)
    await link.accept(claimed(1))
    await link.close()
    await link.close()

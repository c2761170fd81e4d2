"""What a client says of a peer that is absent, hangs, is another program or another version."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.certificates import CERTIFICATE, KEY
from support.wire import Serve, Speak

from postroom import AsyncClient, BrokerClient, NotPermitted, SendRequest, Unavailable
from postroom._wire import transport


def answer(body: bytes, status: str = "200 OK", media: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


PROBLEM = b'{"type":"x","title":"x","status":409,"detail":"x","code":"x","retryable":false}'
NEST = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
FOREIGN = {
    "html": answer(b"<html>hello</html>", media="text/html"),
    "half a document": answer(b'{"client_message_id": "x", "outb'),
    "nothing": answer(b""),
    "null": answer(b"null"),
    "another shape": answer(b'{"ok": true}'),
    "a wrong type": answer(b'{"client_message_id": 1, "outbox_id": "x", "status": "queued"}'),
    "an unknown status": answer(b'{"client_message_id": "a", "outbox_id": "x", "status": "eaten"}'),
    "invalid UTF-8": answer(b'{"client_message_id": "\xff", "outbox_id": "x", "status": "queued"}'),
    "a redirect": answer(b"", "302 Found", more="Location: http://169.254.169.254/\r\n"),
    "a page for an error": answer(b"<html>no</html>", "404 Not Found", "text/html"),
    "a problem of another status": answer(PROBLEM, "400 Bad Request", "application/problem+json"),
    "a problem that is none": answer(b"{}", "400 Bad Request", "application/problem+json"),
    "a nest": answer(NEST),
    "a problem that is a nest": answer(NEST, "400 Bad Request", "application/problem+json"),
    "not HTTP": b"220 mail.example.com ESMTP\r\n",
    "NULs": b"\0" * 1000,
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_an_answer_that_is_not_ours_is_said_to_be_so(kind: str, speak: Speak) -> None:
    path = await speak(FOREIGN[kind])
    async with AsyncClient(path, timeout=5, patience=0) as client:
        with pytest.raises(Unavailable) as caught:
            await client.send("topic:orders", "hello")
    assert caught.value.code == "not_understood"
    assert not caught.value.retryable
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("page", [b"<html>sign in</html>", b"<html>\nsign\nin\n</html>\n"])
async def test_a_page_in_place_of_a_stream_is_said_to_be_one(page: bytes, speak: Speak) -> None:
    """It was an export without a row, a backup of what is none, and a connection that broke again and again."""
    path = await speak(answer(page, media="text/html"))
    async with AsyncClient(path, timeout=5, patience=60) as client:
        for stream in (
            client.export(),
            client.backup(reason="nightly"),
            client.events(),
            client.send_many([SendRequest(to="topic:orders")]),
        ):
            with pytest.raises(Unavailable, match="it answered 200 as text/html, not as") as caught:
                await anext(stream)
            assert (caught.value.code, caught.value.retryable) == ("not_understood", False)


async def test_an_export_that_ends_within_a_row_is_not_one(speak: Speak) -> None:
    path = await speak(answer(b'{"id": "01M', media="application/x-ndjson"))
    async with AsyncClient(path, timeout=5, patience=0) as client:
        with pytest.raises(Unavailable) as caught:
            await anext(client.export())
    assert caught.value.code == "connection_lost"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", "connection_lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "connection_lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "connection_lost"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", "connection_lost"),
        (answer(b"<html>bad gateway</html>", "502 Bad Gateway", "text/html"), "not_understood"),
    ],
)
async def test_what_may_go_better_the_next_time_is_retryable(sent: bytes, code: str, speak: Speak) -> None:
    async with AsyncClient(await speak(sent), timeout=5, patience=0) as client:
        with pytest.raises(Unavailable) as caught:
            await client.health()
    assert (caught.value.code, caught.value.retryable) == (code, True)


async def test_an_endless_answer_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_ANSWER", 1024 * 1024)

    async def pour(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    async with AsyncClient(await serve(pour), timeout=30, patience=0) as client:
        with pytest.raises(Unavailable, match="larger than"):
            await client.health()


async def test_a_daemon_that_hangs_is_given_up_after_the_time_out(short_directory: Path) -> None:
    path = short_directory / "hung.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()  # the kernel accepts, nobody answers
        async with AsyncClient(path, timeout=0.1, patience=0) as client:
            with pytest.raises(Unavailable, match="did not answer in time") as caught:
                await client.send("topic:orders", "hello")
    assert caught.value.code == "no_answer"


@pytest.mark.parametrize("ends", [False, True], ids=["hangs", "ends"])
async def test_of_a_change_without_an_answer_it_is_said_that_it_may_have_happened_and_how_to_go_on(
    short_directory: Path, *, ends: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not ends:
                await reader.read()  # until the client gives up
        finally:
            writer.close()

    path = short_directory / "odd.sock"
    async with (
        await asyncio.start_unix_server(serve, path),
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        AsyncClient(path, timeout=0.2, patience=0) as client,
        BrokerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "a", timeout=0.2, patience=0) as broker,
    ):
        unknown = "it is not known whether the request took effect: "
        with pytest.raises(Unavailable, match=f"{unknown}repeat it, which is safe") as caught:
            await client.act("abort", "lost-1", reason="a test")
        assert caught.value.code == ("connection_lost" if ends else "no_answer")
        with pytest.raises(Unavailable, match=f"{unknown}`postroom topic webhook list orders` shows it if so"):
            await broker.create_webhook("demo", "orders", "https://example.com")
        for question in client.health(), client.send("topic:orders", "hello"):
            with pytest.raises(Unavailable) as caught:
                await question
            assert "took effect" not in str(caught.value)


async def test_a_daemon_that_hangs_is_not_followed_for_longer_than_the_time_out(short_directory: Path) -> None:
    path = short_directory / "hung.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        async with AsyncClient(path, timeout=0.1, patience=0) as client, asyncio.timeout(10):
            with pytest.raises(Unavailable, match="did not answer in time"):
                await anext(client.events())


async def test_an_absent_daemon_is_named_with_what_to_do(short_directory: Path) -> None:
    path = short_directory / "nobody.sock"
    async with AsyncClient(path, patience=0) as client:
        with pytest.raises(Unavailable) as caught:
            await client.send("topic:orders", "hello")
    assert caught.value.code == "daemon_absent"
    assert str(path) in str(caught.value)
    assert "postroom up" in str(caught.value)


async def test_a_stale_socket_is_an_absent_daemon(short_directory: Path) -> None:
    path = short_directory / "stale.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    async with AsyncClient(path, patience=0) as client:
        with pytest.raises(Unavailable) as caught:
            await client.health()
    assert caught.value.code == "daemon_absent"


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.mkdir()])
async def test_what_is_no_socket_is_an_absent_daemon(short_directory: Path, make: object) -> None:
    path = short_directory / "thing"
    make(path)  # type: ignore[operator]
    async with AsyncClient(path, patience=0) as client:
        with pytest.raises((Unavailable, NotPermitted)) as caught:
            await client.health()
    assert str(path) in str(caught.value)


async def test_a_path_longer_than_a_socket_may_have_is_said_at_once(short_directory: Path) -> None:
    with pytest.raises(Unavailable, match="limit is 107"):
        AsyncClient(short_directory / ("x" * 108))


async def test_a_broker_that_is_absent_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    async with BrokerClient(url, "token", patience=0) as client:
        with pytest.raises(Unavailable) as caught:
            await client.features()
    assert caught.value.code == "broker_absent"
    assert url in str(caught.value)


async def test_a_token_never_follows_a_redirect() -> None:
    seen: list[str] = []

    async def redirect(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        raise web.HTTPFound("/elsewhere")

    app = web.Application()
    app.router.add_get("/{path:.*}", redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with BrokerClient(f"http://127.0.0.1:{runner.addresses[0][1]}", "token", patience=0) as client:
            with pytest.raises(Unavailable):
                await client.features()
    finally:
        await runner.cleanup()
    assert seen == ["/v1/features"]


@pytest.fixture
async def features(request: pytest.FixtureRequest) -> AsyncIterator[TestServer]:
    """A broker that says what it supports, under /behind/a/proxy, with TLS where a test asks for it."""

    async def answer(asked: web.Request) -> web.Response:
        assert asked.headers["Authorization"] == "Bearer token"
        assert asked.host == f"127.0.0.1:{server.port}"
        return web.json_response({"mesh": "demo", "member": "alice", "max_batch": 10})

    app = web.Application()
    app.router.add_get("/behind/a/proxy/v1/features", answer)
    tls = None
    if request.param == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(CERTIFICATE, KEY)
    server = TestServer(app, scheme=request.param)
    await server.start_server(ssl=tls)
    yield server
    await server.close()


@pytest.mark.parametrize("features", ["http", "https"], indirect=True)
@pytest.mark.parametrize("end", ["", "/"])
async def test_a_broker_may_be_behind_a_path_and_tls(features: TestServer, end: str) -> None:
    url = str(features.make_url("/behind/a/proxy")) + end
    async with BrokerClient(url, "token", patience=0, ca_file=CERTIFICATE) as client:
        for _ in range(2):
            assert (await client.features()).mesh == "demo"


@pytest.mark.parametrize("features", ["https"], indirect=True)
async def test_a_broker_whose_certificate_nobody_signed_is_not_asked(features: TestServer) -> None:
    async with BrokerClient(str(features.make_url("/behind/a/proxy")), "token", patience=0) as client:
        with pytest.raises(Unavailable, match=r"^no safe connection .*: name its authority in SSL_CERT_FILE") as caught:
            await client.features()
    assert caught.value.code == "broker_absent"


@pytest.mark.parametrize(
    ("features", "wrong", "sentence"),
    [
        ("https", "http", r"^no broker at http://127.* \(it speaks TLS: start its URL with https://\): "),
        ("http", "https", r"^no broker at https://127.* \(it does not speak TLS: start its URL with http://, or "),
    ],
    indirect=["features"],
)
async def test_a_broker_that_is_asked_with_tls_or_without_by_mistake_is_said_to_be(
    features: TestServer, wrong: str, sentence: str
) -> None:
    url = features.make_url("/behind/a/proxy").with_scheme(wrong)
    async with BrokerClient(str(url), "token", patience=0) as client:
        with pytest.raises(Unavailable, match=sentence):
            await client.features()
        with pytest.raises(Unavailable, match=sentence):
            await client.create_topic("demo", "news")


@pytest.mark.parametrize("features", ["https"], indirect=True)
@pytest.mark.parametrize("file", ["/nowhere", str(KEY)])
async def test_a_file_of_authorities_that_cannot_be_used_is_named(
    features: TestServer, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", file)
    async with BrokerClient(str(features.make_url("/behind/a/proxy")), "token", patience=0) as client:
        with pytest.raises(Unavailable, match=f"SSL_CERT_FILE={file} is not a file of certificates in PEM"):
            await client.features()
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert (await client.features()).mesh == "demo"


@pytest.fixture
def proxy() -> Iterator[str]:
    """A proxy with TLS that answers plain HTTP with a page, as nginx does; yields its address."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE, KEY)
    page = b"<html>The plain HTTP request was sent to HTTPS port</html>"

    def serve() -> None:
        with suppress(OSError):  # it was shut down
            while True:
                peer, _ = listening.accept()
                with peer, suppress(ssl.SSLError, ConnectionError):
                    if peer.recv(1, socket.MSG_PEEK) == b"\x16":  # a handshake
                        tls.wrap_socket(peer, server_side=True).close()
                    else:
                        peer.recv(4096)
                        peer.sendall(answer(page, "400 Bad Request", "text/html", "Connection: close\r\n"))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


async def test_a_proxy_that_answers_plain_http_with_a_page_is_said_to_speak_tls(proxy: str) -> None:
    async with BrokerClient(proxy, "token", patience=0) as client:
        with pytest.raises(Unavailable, match=r"\(it speaks TLS: start its URL with https://\)"):
            await client.features()


@pytest.mark.parametrize(
    "url", ["", "nonsense", "ftp://x", "http://", "http://a:port", "http://a b", "http://a:secret@b"]
)
async def test_an_address_that_is_none_is_said_to_be_so_without_what_it_holds(url: str) -> None:
    async with BrokerClient(url, "token", patience=0) as client:
        with pytest.raises(
            Unavailable, match=r"^give the broker's address as .* POSTROOM_BROKER_URL, or --url$"
        ) as caught:
            await client.features()
    assert (caught.value.code, "secret" in str(caught.value)) == ("not_understood", False)


async def test_a_token_cannot_add_a_header() -> None:
    async with BrokerClient("http://127.0.0.1:9", "token\r\nX: y", patience=0) as client:
        with pytest.raises(ValueError, match="Authorization"):
            await client.features()

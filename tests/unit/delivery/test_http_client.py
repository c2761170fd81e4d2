"""What a handler's address and secret may be."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import pytest
from support.certificates import CERTIFICATE, KEY

from postroom.chassis.config import read_secret
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.http import client as http_client
from postroom.delivery.http.addresses import AddressInfo, Guard
from postroom.delivery.http.client import Answer, HandlerClient
from postroom.delivery.settings import ConsumerSettings, HandlerSettings, check_timeout


def refusal(settings: HandlerSettings) -> str:
    with pytest.raises(Fatal) as refused:
        HandlerClient(settings)
    assert refused.value.exit_code == Exit.CONFIG
    return str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "handler",
        "ftp://host/x",
        "http://",
        "http://user@host/",
        "http://host:99999/",
        "http://host:0/",
        "http://host/#p",
    ],
)
def test_an_address_that_cannot_be_posted_to_is_refused(url: str) -> None:
    assert "handler.url" in refusal(HandlerSettings(url=url))


def test_a_secret_is_what_the_file_holds_without_the_white_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  0123456789abcdef\n")
    file.chmod(0o600)

    assert read_secret(file, "the secret") == b"0123456789abcdef"


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    short, open_to_all = tmp_path / "short", tmp_path / "open"
    for file, mode in ((short, 0o600), (open_to_all, 0o604)):
        file.write_text("0123456789abcde" if file is short else "0123456789abcdef")
        file.chmod(mode)

    assert "fewer than 16" in refusal(HandlerSettings(url="http://host/", secret_file=short))
    assert "chmod 600" in refusal(HandlerSettings(url="http://host/", secret_file=open_to_all))
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    assert "not a regular file" in refusal(HandlerSettings(url="http://host/", secret_file=pipe))
    assert "not a regular file" in refusal(HandlerSettings(url="https://host/", ca_file=pipe))
    assert "No such file" in refusal(HandlerSettings(url="http://host/", secret_file=tmp_path / "none"))


def test_authorities_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "authorities.pem"
    file.write_text("nonsense")

    assert "handler.ca_file" in refusal(HandlerSettings(url="https://host/", ca_file=file))


@pytest.mark.parametrize("seconds", [30, 31])
def test_a_time_out_that_is_not_below_ack_wait_is_refused(seconds: float) -> None:
    consumer = ConsumerSettings(stream="S", durable="d", ack_wait_seconds=30)
    check_timeout(HandlerSettings(url="http://host/", timeout_seconds=29.9), consumer)
    with pytest.raises(Fatal, match=r"handler\.timeout_seconds") as refused:
        check_timeout(HandlerSettings(url="http://host/", timeout_seconds=seconds), consumer)
    assert refused.value.exit_code == Exit.CONFIG


async def _hang(_host: str, _port: int) -> list[AddressInfo]:
    """Ask a name server that never answers."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def _speak(url: str, guard: Guard | None = None, ca_file: Path | None = None) -> Answer:
    client = HandlerClient(HandlerSettings(url=url, timeout_seconds=1, ca_file=ca_file), guard=guard)
    try:
        return await client.call(b"{}", {})
    finally:
        await client.close()


async def test_what_was_never_connected_is_told_from_what_was_never_answered() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    hanging = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    (first, second) = (server.sockets[0].getsockname()[1] for server in (hanging, silent))
    answers = {
        "refused": await _speak("http://127.0.0.1:1/"),
        "no such name": await _speak("http://nobody.invalid/"),
        "a name server that hangs": await _speak("http://handler.example/", Guard(resolve=_hang)),
        "no TLS there": await _speak(f"https://127.0.0.1:{first}/"),
        "hangs up": await _speak(f"http://127.0.0.1:{first}/"),
        "says nothing": await _speak(f"http://127.0.0.1:{second}/"),
    }
    for server in (hanging, silent):
        server.close()
        await server.wait_closed()
    assert {why: answer.reached for why, answer in answers.items()} == {
        "refused": False,
        "no such name": False,
        "a name server that hangs": False,
        "no TLS there": False,
        "hangs up": True,
        "says nothing": True,
    }


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nbreaks off",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno size",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000,
    ],
)
async def test_an_answer_has_said_its_status_whatever_follows(answer: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        found = await _speak(f"http://127.0.0.1:{port}/")

    assert found.status in {200, 204}


async def test_a_handler_is_trusted_only_with_a_certificate_of_the_configured_authority() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    server = await asyncio.start_server(say, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    trusted = await _speak(url, ca_file=CERTIFICATE)
    untrusted = await _speak(url)
    server.close()

    assert (trusted.status, untrusted.status, untrusted.code) == (200, None, "handler_untrusted")
    assert not untrusted.reached
    assert untrusted.detail == (
        f"no safe connection to {url}: its certificate is not trusted (self-signed certificate): "
        "name its authority in handler.ca_file"
    )


async def test_a_file_of_the_usual_authorities_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")
    answer = await _speak("https://127.0.0.1:1/")
    assert answer.detail.endswith(": SSL_CERT_FILE=/nowhere is not a file of certificates in PEM: correct it")


async def test_why_no_safe_connection_could_be_opened_is_said_in_words() -> None:
    async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def answer_in_plain_text(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        writer.close()

    said = []
    for handler in (close, answer_in_plain_text):
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            said.append((await _speak(url)).detail.partition(f"{url}: ")[2])
    assert said == ["it closed the connection at once", "it does not speak TLS"]
    assert (await _speak("http://127.0.0.1:1/")).detail == "no connection to http://127.0.0.1:1/: Connection refused"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("", "/"),
        ("/handle/", "/handle/"),
        ("/a%20b/c d/ü?of=mine&x=a b", "/a%20b/c%20d/%C3%BC?of=mine&x=a%20b"),
        ("?only=this", "/?only=this"),
    ],
)
async def test_a_handlers_path_and_query_are_posted_to_as_they_are(url: str, target: str) -> None:
    lines = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(note, "127.0.0.1", 0) as server:
        await _speak(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{url}")

    assert lines == [f"POST {target} HTTP/1.1\r\n".encode()]


async def test_a_connection_that_idles_is_closed_before_the_server_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "_IDLE_SECONDS", 0.05)
    connections = 0
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = HandlerClient(HandlerSettings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"))
        await client.call(b"{}", {})
        await client.call(b"{}", {})
        assert connections == 1
        await ended.wait()
        await client.call(b"{}", {})
        await client.close()

    assert connections == 2

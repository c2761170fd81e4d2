"""The loopback TCP port: its token, and what keeps web pages out (docs/contract/send.md#send-6)."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.inboxes import Opened, message
from support.wire import Reply, encode, parse

from inbox import Inbox
from ipc.peers import GRACE_SECONDS, rotate
from postroom.chassis.ownership import replace_private


@pytest.fixture
def token_file(short_directory: Path) -> Path:
    file = short_directory / "local.token"
    rotate(file)
    return file


@pytest.fixture
async def room(open_room: Any, token_file: Path) -> Any:
    return await open_room(token_file=token_file)


@pytest.fixture
def token(token_file: Path) -> str:
    return token_file.read_text().strip()


async def ask(room: Any, target: str = "/v1/version", **headers: str) -> Reply:
    reader, writer = await asyncio.open_connection("127.0.0.1", room.port)
    fields = {"Host": f"127.0.0.1:{room.port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    writer.write(encode("GET", target, None, fields))
    reply = parse(await reader.read())
    writer.close()
    return reply


async def test_a_request_with_the_token_is_served(room: Any, token: str) -> None:
    assert (await ask(room, Authorization=f"Bearer {token}")).status == 200


@pytest.mark.parametrize("field", ["", "Bearer", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x"])
async def test_any_other_authorization_is_a_401(room: Any, token: str, field: str) -> None:
    headers = {"Authorization": field.format(token=token)} if field else {}
    reply = await ask(room, **headers)
    assert (reply.status, reply.json["code"]) == (401, "unauthorized")
    assert reply.headers["www-authenticate"] == "Bearer"


async def test_two_tokens_are_none(room: Any, token: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", room.port)
    given = f"Authorization: Bearer {token}\r\n".encode()
    head = encode("GET", "/v1/version", None, {"Host": "localhost", "Authorization": f"Bearer {token}"})
    writer.write(head.replace(given, given + b"Authorization: Bearer another\r\n"))
    reply = parse(await reader.read())
    writer.close()
    assert (reply.status, reply.json["code"]) == (401, "unauthorized")


async def test_an_authorization_that_is_no_text_is_a_401(room: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", room.port)
    head = encode("GET", "/v1/version", None, {"Host": "localhost", "Authorization": "Bearer ?"})
    writer.write(head.replace(b"Bearer ?", b"Bearer \xff"))
    reply = parse(await reader.read())
    writer.close()
    assert (reply.status, reply.json["code"]) == (401, "unauthorized")


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1", "[::1]:8080"])
async def test_the_host_may_name_this_machine(room: Any, token: str, host: str) -> None:
    assert (await ask(room, Host=host, Authorization=f"Bearer {token}")).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example@localhost",
        "localhost/x",
        "",
        "[",
    ],
)
async def test_a_foreign_host_is_a_403(room: Any, token: str, host: str) -> None:
    assert (await ask(room, Host=host, Authorization=f"Bearer {token}")).status in (400, 403)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Origin", "https://evil.example"),
        ("Origin", "null"),
        ("Referer", "https://evil.example/page"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ],
)
async def test_a_page_of_another_origin_is_a_403(room: Any, token: str, field: str, value: str) -> None:
    reply = await ask(room, **{field: value, "Authorization": f"Bearer {token}"})
    assert (reply.status, reply.json["code"]) == (403, "foreign_origin")


async def test_a_token_in_the_query_is_a_400_even_where_it_is_right(room: Any, token: str) -> None:
    reply = await ask(room, f"/v1/version?token={token}", Authorization=f"Bearer {token}")
    assert (reply.status, reply.json["code"]) == (400, "token_in_query")


async def test_a_rotation_refuses_neither_the_old_token_nor_the_new(
    room: Any, token: str, short_directory: Path
) -> None:
    rotate(short_directory / "local.token")
    fresh = (short_directory / "local.token").read_text().strip()
    assert fresh != token
    assert (await ask(room, Authorization=f"Bearer {token}")).status == 200
    assert (await ask(room, Authorization=f"Bearer {fresh}")).status == 200


async def test_a_stream_ends_with_its_token(open_room: Any, token_file: Path, token: str, inbox: Inbox) -> None:
    """What is open would else be read, and sent on, for as long as the thief of a token likes."""
    room = await open_room(token_file=token_file, inbox=Opened(inbox))
    given = f"Host: localhost\r\nAuthorization: Bearer {token}\r\n"
    reader, reading = await asyncio.open_connection("127.0.0.1", room.port)
    reading.write(f"GET /v1/events HTTP/1.1\r\n{given}\r\n".encode())
    await reader.readuntil(b"id: ")  # where it begins: what was filed before is not told
    await inbox.file([message(1)])
    await reader.readuntil(b"event: message")
    answers, sending = await asyncio.open_connection("127.0.0.1", room.port)
    head = f"POST /v1/send/batch HTTP/1.1\r\n{given}Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked"
    sending.write(f"{head}\r\n\r\n".encode() + chunk("first"))
    await answers.readuntil(b'"line":1')

    replace_private(token_file, "another-token-of-the-operator-who-ended-the-first\n")
    long_ago = time.time() - GRACE_SECONDS
    os.utime(token_file, (long_ago, long_ago))
    await inbox.file([message(2)])
    sending.write(chunk("second"))
    assert b"event: message" not in await rest(reader)
    assert b'"line":2' not in await rest(answers)
    assert await room.rows() == 1
    for writer in (reading, sending):
        writer.close()


def chunk(client_message_id: str) -> bytes:
    line = msgspec.json.encode({"to": "topic:orders", "body": "x", "client_message_id": client_message_id}) + b"\n"
    return f"{len(line):x}\r\n".encode() + line + b"\r\n"


async def rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""


async def test_the_unix_socket_needs_no_token(room: Any) -> None:
    assert (await room.request("GET", "/v1/version")).status == 200

"""What a handler's address and secret may be."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.abc
import pytest

from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.http.addresses import Guard
from postroom.delivery.http.client import Answer, HandlerClient, read_secret
from postroom.delivery.settings import ConsumerSettings, HandlerSettings, check_timeout


def refusal(settings: HandlerSettings) -> str:
    with pytest.raises(Fatal) as refused:
        HandlerClient(settings)
    assert refused.value.exit_code == Exit.CONFIG
    return str(refused.value)


@pytest.mark.parametrize(
    "url", ["", "handler", "ftp://host/x", "http://", "http://user@host/", "http://host:99999/", "http://host/#part"]
)
def test_an_address_that_cannot_be_posted_to_is_refused(url: str) -> None:
    assert "handler.url" in refusal(HandlerSettings(url=url))


def test_a_secret_is_what_the_file_holds_without_the_white_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  0123456789abcdef\n")
    file.chmod(0o600)

    assert read_secret(file) == b"0123456789abcdef"
    assert read_secret(None) is None


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    short, open_to_all = tmp_path / "short", tmp_path / "open"
    for file, mode in ((short, 0o600), (open_to_all, 0o604)):
        file.write_text("0123456789abcde" if file is short else "0123456789abcdef")
        file.chmod(mode)

    assert "fewer than 16" in refusal(HandlerSettings(url="http://host/", secret_file=short))
    assert "chmod 600" in refusal(HandlerSettings(url="http://host/", secret_file=open_to_all))
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


class _Hangs(aiohttp.abc.AbstractResolver):
    """A name server that never answers."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[Any]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError((host, port, family))

    async def close(self) -> None:
        pass


async def _speak(url: str, guard: Guard | None = None) -> Answer:
    client = HandlerClient(HandlerSettings(url=url, timeout_seconds=1), guard=guard)
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
        "a name server that hangs": await _speak("http://handler.example/", Guard(resolver=_Hangs())),
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

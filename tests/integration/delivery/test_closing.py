"""A connection to NATS uses TLS where it is asked to, comes back after any end, and is closed soon.

It ends with its process, whatever that has forked.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from msgspec.structs import replace
from nats.aio.client import Client
from nats.errors import NoRespondersError, OutboundBufferLimitError
from structlog.testing import capture_logs
from support.certificates import CERTIFICATE, KEY, LOCKED_KEY, private
from support.waiting import until, until_so

from embedded import EmbeddedNats
from postroom.chassis.exits import Fatal
from postroom.delivery.nats import NatsClient, connect, trouble_of
from postroom.delivery.publication.link import Link, Streams
from postroom.delivery.settings import NatsSettings
from postroom.errors import NotPermitted, PostroomError, Unavailable

MEBIBYTE = bytes(2**20)
MORE_THAN_IS_BUFFERED = 64


async def test_a_server_that_takes_nothing_more_holds_up_no_close(short_directory: Path) -> None:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    client = await connect(NatsSettings(url=server.url), name="test", patience=20)
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for _ in range(MORE_THAN_IS_BUFFERED):
            with suppress(OutboundBufferLimitError, TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.publish("any", MEBIBYTE)
        async with asyncio.timeout(30):
            await client.close()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        server.stop()
    assert client.is_closed


async def test_an_answer_to_a_flush_that_was_given_up_ends_no_subscription(connection: Client) -> None:
    heard = await connection.subscribe(subject := uuid4().hex)
    ping = asyncio.get_running_loop().create_future()
    await connection._send_ping(ping)
    ping.cancel()  # as `flush` does at its time-out
    await connection.publish(subject, b"after it")
    assert (await heard.next_msg(timeout=20)).data == b"after it"
    await connection.flush()


async def test_to_what_a_killed_program_had_forked_nothing_is_delivered(nats_url: str) -> None:
    script = """
import asyncio, os, signal, sys
from postroom.delivery.nats import NatsClient, connect, trouble_of
from postroom.delivery.settings import NatsSettings

async def main():
    client = await connect(NatsSettings(url=sys.argv[1]), name="killed")
    await client.subscribe(sys.argv[2])
    await client.flush()
    if child := os.fork():
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()

asyncio.run(main())
"""
    subject, heard = uuid4().hex, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, nats_url, subject, stdout=heard)
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    client = await connect(NatsSettings(url=nats_url), name="test")

    async def nobody_listens() -> bool:
        try:
            await client.request(subject, timeout=0.1)
        except NoRespondersError:
            return True
        except TimeoutError:
            return False
        return False

    try:
        await until_so(nobody_listens, "the server knows that it ended")
    finally:
        os.kill(child, signal.SIGKILL)
        await client.close()
        await process.communicate()
    assert process.returncode == -signal.SIGKILL


class NatsWithTLS(EmbeddedNats):
    """One that accepts connections without TLS as well, as while its clients are moved to it."""

    def _write(self, config: dict[str, Any]) -> None:
        certificate = {"cert_file": str(CERTIFICATE), "key_file": str(KEY)}
        super()._write({**config, "tls": certificate, "allow_non_tls": True})


async def test_no_password_is_sent_without_tls_where_the_url_or_the_ca_file_asks_for_it(short_directory: Path) -> None:
    trusted = CERTIFICATE
    plain, safe = EmbeddedNats(short_directory / "plain"), NatsWithTLS(short_directory / "safe")
    plain.start()
    safe.start()

    async def secured(server: EmbeddedNats, scheme: str, ca_file: Path | None = None) -> bool:
        settings = NatsSettings(url=server.url.replace("nats:", f"{scheme}:"), ca_file=ca_file)
        client = await connect(settings, name="test", patience=3)
        transport = client._transport  # type: ignore[union-attr]
        encrypted = transport._io_writer.get_extra_info("ssl_object") is not None
        await client.close()
        return encrypted

    try:
        assert await secured(safe, "tls", trusted)
        assert await secured(safe, "nats", trusted)
        assert not await secured(safe, "nats")
        for scheme, ca_file in (("tls", None), ("tls", trusted), ("nats", trusted)):
            with pytest.raises(Unavailable, match="connecting to NATS: it does not speak TLS"):
                await secured(plain, scheme, ca_file)
        with capture_logs() as log, pytest.raises(Unavailable, match=r"name its authority in nats\.ca_file"):
            await secured(safe, "tls")
        assert {line["error"] for line in log if line["event"] == "nats_error"} == {
            "its certificate is not trusted (self-signed certificate): name its authority in nats.ca_file"
        }
    finally:
        plain.stop()
        safe.stop()


async def test_a_connection_with_tls_ends_without_a_word_of_asyncio(
    short_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = NatsWithTLS(short_directory / "nats")
    server.start()
    settings = NatsSettings(url=server.url, ca_file=CERTIFICATE, reconnect_seconds=0.05)
    ended, refused = [await connect(settings, name="test", patience=20) for _ in range(2)]
    await refused.publish("$SYS.any", b"")
    await ended.close()
    server.stop()
    await until(lambda: not refused.is_connected)
    await refused.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]


class NatsForCertificates(EmbeddedNats):
    """One that answers only clients with a certificate of its authority."""

    def _write(self, config: dict[str, Any]) -> None:
        tls = {"cert_file": str(CERTIFICATE), "key_file": str(KEY), "ca_file": str(CERTIFICATE), "verify": True}
        super()._write({**config, "tls": tls})


async def test_a_server_that_asks_for_a_certificate_is_shown_that_of_the_settings(short_directory: Path) -> None:
    server = NatsForCertificates(short_directory / "nats")
    server.start()
    trusting = NatsSettings(url=server.url, ca_file=CERTIFICATE)
    try:
        settings = replace(trusting, cert_file=CERTIFICATE, key_file=private(KEY, short_directory))
        client = await connect(settings, name="test", patience=3)
        assert client.is_connected
        await client.close()
        with pytest.raises(Unavailable, match=r"set nats\.cert_file and nats\.key_file"):
            await connect(trusting, name="test", patience=3)
        locked = replace(settings, key_file=private(LOCKED_KEY, short_directory))
        with pytest.raises(Fatal, match=r"nats\.key_file .* has a passphrase"):
            await connect(locked, name="test", patience=3)
    finally:
        server.stop()


async def test_what_a_server_says_of_certificates_outlives_tries_that_are_just_hung_up(short_directory: Path) -> None:
    hung_up = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hung_up
        hung_up += 1
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.transport.abort()

    server = NatsForCertificates(short_directory / "nats")
    server.start()
    client = NatsClient(logged=False)
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as hanging_up:
        host, port = hanging_up.sockets[0].getsockname()
        settings = NatsSettings(
            url=f"{server.url},nats://{host}:{port}", ca_file=CERTIFICATE, reconnect_seconds=0.01, connect_seconds=5
        )
        connecting = asyncio.create_task(connect(settings, name="test", client=client))
        try:
            await until(lambda: "set nats.cert_file" in (trouble_of(client) or ""))
            said, tries = set(), hung_up
            while hung_up < tries + 3:
                said.add(trouble_of(client))
                await asyncio.sleep(0.001)
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            server.stop()
    assert said == {"NATS is unreachable: it asks for a certificate: set nats.cert_file and nats.key_file"}


@pytest.fixture
def server(short_directory: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    yield server
    server.stop()


class NatsWithAccounts(EmbeddedNats):
    """One whose users may each do less than this program asks for."""

    def url_of(self, user: str) -> str:
        return self.address.replace("//", f"//{user}:{user}@")

    def _write(self, config: dict[str, Any]) -> None:
        def user(name: str, **denied: str) -> dict[str, Any]:
            return {"user": name, "password": name, "permissions": {act: {"deny": it} for act, it in denied.items()}}

        users = [user("mute", publish="$JS.API.STREAM.>"), user("deaf", subscribe="_INBOX.>")]
        accounts = {"full": {"jetstream": True, "users": users}, "bare": {"users": [user("bare")]}}
        super()._write({**{name: config[name] for name in config if name != "authorization"}, "accounts": accounts})

    def _config(self) -> dict[str, Any]:
        return {"authorization": {"password": ""}, **super()._config()}


@pytest.mark.parametrize(
    ("user", "error", "why"),
    [
        ("mute", NotPermitted, r'publish to "\$js\.api\.stream\.list"\): give this user that permission$'),
        ("deaf", NotPermitted, r'subscription to "_inbox\..*\.\*"\): give this user that permission$'),
        ("bare", Unavailable, "JetStream is not enabled for this user: enable it in the config of NATS"),
    ],
)
async def test_what_a_user_may_not_do_is_said_in_words(
    short_directory: Path, user: str, error: type[PostroomError], why: str
) -> None:
    server = NatsWithAccounts(short_directory / "nats")
    server.start()
    client = await connect(NatsSettings(url=server.url_of(user)), name="test", patience=20)
    try:
        with pytest.raises(error, match=why):
            await Streams().refresh(client.jetstream(timeout=1))
        assert trouble_of(client) is None
    finally:
        await client.close()
        server.stop()


async def test_a_connection_that_is_waited_for_says_why_there_is_none(login: NatsSettings) -> None:
    client = NatsClient()
    assert login.credentials_file is not None
    login.credentials_file.write_text("postroom:wrong")
    connecting = asyncio.create_task(connect(login, name="test", client=client))
    await until(
        lambda: trouble_of(client) == "NATS is unreachable: NATS refused this user: check the url and credentials"
    )
    connecting.cancel()
    with suppress(asyncio.CancelledError):
        await connecting


@pytest.fixture
def login(server: EmbeddedNats, short_directory: Path) -> NatsSettings:
    """A login by a file, `file`, as operators keep it."""
    file = short_directory / "nats.login"
    file.touch(0o600)
    file.write_text(urlsplit(server.url).netloc.rpartition("@")[0])
    return NatsSettings(url=server.address, credentials_file=file, reconnect_seconds=0.05)


async def test_a_connection_whose_password_was_changed_comes_back_with_the_new_one(
    server: EmbeddedNats, login: NatsSettings
) -> None:
    client = await connect(login, name="test", patience=20)
    arrived = await client.subscribe("any")
    await client.flush()
    config = json.loads(server.config_file.read_text())
    config["authorization"] = {"users": [{"user": "postroom", "password": "another"}]}
    server.config_file.write_text(json.dumps(config))
    assert server.process is not None
    with capture_logs() as lines:
        os.kill(server.process.pid, signal.SIGHUP)  # it reads its config again, and ends the connection
        await until(lambda: any("authorization violation" in line.get("error", "") for line in lines))
        with pytest.raises(NotPermitted, match="NATS refused this user"):
            await Link.open(login, name="publisher", ack_seconds=5)
        assert login.credentials_file is not None
        login.credentials_file.write_text("postroom:another")
        await until(lambda: client.is_connected)
    assert not [line for line in lines if line.get("connection") == "publisher"]  # at every try, besides the error
    await client.publish("any", b"again")
    assert (await arrived.next_msg(timeout=60)).data == b"again"
    await client.close()


async def test_a_login_that_cannot_be_read_for_a_while_keeps_no_connection_from_coming_back(
    server: EmbeddedNats, login: NatsSettings
) -> None:
    client = await connect(login, name="test", patience=20)
    assert login.credentials_file is not None
    kept = login.credentials_file.rename(login.credentials_file.with_suffix(".kept"))
    with capture_logs() as lines:
        server.stop()
        server.start()
        await until(lambda: any("cannot read the NATS credentials" in line.get("error", "") for line in lines))
        with pytest.raises(Unavailable, match="connecting to NATS: cannot read the NATS credentials"):
            await Link.open(login, name="publisher", ack_seconds=5)  # what publishes waits too
        kept.rename(login.credentials_file)
        await until(lambda: client.is_connected)
    await client.close()


async def test_another_program_at_the_address_keeps_no_connection_from_coming_back(
    server: EmbeddedNats, login: NatsSettings
) -> None:
    client = await connect(login, name="test", patience=20)
    arrived = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        writer.write(b"a line that never ends" * 10_000)
        with suppress(OSError):
            await writer.drain()
        writer.close()

    with capture_logs() as lines:
        server.stop()
        other = await asyncio.start_server(answer, "127.0.0.1", urlsplit(server.address).port)
        async with asyncio.timeout(60):
            await arrived.wait()
        await until(lambda: any("Separator" in line.get("error", "") for line in lines))
        other.close()
        await other.wait_closed()
    server.start()
    await until(lambda: client.is_connected)
    await client.close()

"""A NATS that knows its users by keys takes our programs: by an nkey's seed, and by a `.creds` file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig
from support.nats_keys import Key, NatsWithKeys, NatsWithTokens
from support.waiting import until

from postroom.chassis.exits import Fatal
from postroom.delivery.nats import connect, trouble_of, usable
from postroom.delivery.settings import NatsSettings

REFUSED = "NATS is unreachable: NATS refused this user: check the url and credentials"


@pytest.fixture
def file(short_directory: Path) -> Path:
    """A file as operators keep it."""
    file = short_directory / "nats.login"
    file.touch(0o600)
    return file


@pytest.fixture
def server(short_directory: Path) -> Iterator[NatsWithTokens]:
    server = NatsWithTokens(short_directory / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def keyed(short_directory: Path) -> Iterator[NatsWithKeys]:
    server = NatsWithKeys(short_directory / "nats")
    server.start()
    yield server
    server.stop()


def settings(server: NatsWithKeys | NatsWithTokens, file: Path, **others: object) -> NatsSettings:
    return NatsSettings(url=server.address, credentials_file=file, reconnect_seconds=0.05, **others)  # type: ignore[arg-type]


async def _works(client: Client) -> None:
    js = client.jetstream()
    await js.add_stream(StreamConfig(name="ANY", subjects=["any"]))
    await js.publish("any", b"a body")
    assert (await js.get_msg("ANY", 1)).data == b"a body"


async def test_a_file_of_nsc_opens_a_connection_and_another_one_the_next(server: NatsWithTokens, file: Path) -> None:
    file.write_text(server.credentials())
    client = await connect(settings(server, file), name="test", patience=20)
    try:
        await _works(client)
        file.write_text(server.credentials().replace("\n", "\r\n"))
        server.stop()
        server.start()
        await until(lambda: client.is_connected)
    finally:
        await client.close()


async def test_an_nkey_opens_a_connection_and_the_one_in_its_place_the_next(keyed: NatsWithKeys, file: Path) -> None:
    one, other = Key(), Key()
    file.write_text(one.seed + "\n")
    keyed.replace_users(one.name)
    client = await connect(settings(keyed, file), name="test", patience=20)
    try:
        await _works(client)
        keyed.replace_users(other.name)
        await until(lambda: trouble_of(client) == REFUSED)
        file.write_text(other.seed)
        await until(lambda: client.is_connected)
    finally:
        await client.close()


async def test_a_token_that_runs_out_is_replaced_in_its_file(server: NatsWithTokens, file: Path) -> None:
    file.write_text(server.credentials(expires_at=int(time.time()) + 2))
    client = await connect(settings(server, file), name="test", patience=20)
    try:
        await until(lambda: trouble_of(client) == REFUSED)
        file.write_text("-----BEGIN NATS USER JWT-----")  # as it is cut short while it is written
        await until(lambda: "nats.login has no NATS credentials" in (trouble_of(client) or ""))
        file.write_text(server.credentials())
        await until(lambda: client.is_connected)
    finally:
        await client.close()


@pytest.mark.parametrize("content", [Key().seed, NatsWithTokens(Path("/nowhere")).credentials()], ids=["nkey", "creds"])
def test_without_the_package_that_signs_a_key_is_refused(
    file: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(content)
    monkeypatch.setitem(sys.modules, "nkeys", None)  # as where it is not installed
    with pytest.raises(Fatal, match=r"nats.login has a key.*: install it with `pip install 'postroom\[nkeys\]'`"):
        usable(NatsSettings(url="nats://127.0.0.1:4222", credentials_file=file))


@pytest.mark.parametrize("kept", ["JWT-----\n", "SEED-----\n", "SEED-----\nSU"])
def test_a_file_of_nsc_that_is_cut_short_is_refused(file: Path, kept: str) -> None:
    whole = NatsWithTokens(Path("/nowhere")).credentials()
    file.write_text(whole[: whole.index(kept) + len(kept)] + "\n")
    with pytest.raises(Fatal, match=r"nats.login has no NATS credentials: give it one line, .*, or a .creds file"):
        usable(NatsSettings(url="nats://127.0.0.1:4222", credentials_file=file))


async def test_answers_go_to_a_prefix_of_the_programs_own(server: NatsWithTokens, file: Path) -> None:
    file.write_text(server.credentials())
    client = await connect(settings(server, file, inbox_prefix="_INBOX_shop"), name="test", patience=20)
    everybody = await connect(settings(server, file), name="other", patience=20)
    try:
        overheard = await everybody.subscribe("_INBOX.>")
        heard = await everybody.subscribe("_INBOX_shop.>")
        await everybody.flush()
        await _works(client)
        assert (await heard.next_msg(timeout=20)).data
        assert not overheard.pending_msgs
    finally:
        await client.close()
        await everybody.close()


@pytest.mark.parametrize("prefix", ["", "a b", "a.*", "a.>", ".a", "a.", "a\n"])
def test_a_prefix_that_is_no_subject_is_refused(prefix: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="inbox_prefix"):
        msgspec.convert({"url": "nats://127.0.0.1:4222", "inbox_prefix": prefix}, NatsSettings)

"""NATS on its own: its port and its password."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import nats
import pytest

from embedded import EmbeddedNats
from postroom.delivery.streams import GIGABYTE


@pytest.fixture
def server(short_directory: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(short_directory / "nats")
    yield server
    server.stop()


def test_a_port_that_was_taken_meanwhile_is_replaced(server: EmbeddedNats) -> None:
    first = urlsplit(server.start())
    server.stop()
    with socket.create_server(("127.0.0.1", first.port or 0)):
        second = urlsplit(server.start())
    assert second.port != first.port
    assert second.password == first.password


@pytest.mark.parametrize("left", ["", '{"port": '])
def test_a_config_that_was_cut_short_is_made_anew(server: EmbeddedNats, left: str) -> None:
    first = urlsplit(server.start())
    server.stop()
    server.config_file.write_text(left)
    second = urlsplit(server.start())
    assert second.password not in (None, first.password)


def test_the_password_is_for_this_user_alone(server: EmbeddedNats) -> None:
    server.start()
    assert server.config_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("credentials", ['{"user":"postroom","pass":"wrong"}', "{}"])
def test_a_client_without_the_password_is_refused(server: EmbeddedNats, credentials: str) -> None:
    address = urlsplit(server.start())
    place = (address.hostname, address.port or 0)
    with socket.create_connection(place, timeout=20) as client, client.makefile("rwb") as stream:
        assert stream.readline().startswith(b"INFO")
        stream.write(f"CONNECT {credentials}\r\nPING\r\n".encode())
        stream.flush()
        assert b"Authorization Violation" in stream.readline()


async def test_the_streams_of_a_thousand_meshes_may_reserve_more_than_the_disk_has_free(nats_url: str) -> None:
    connection = await nats.connect(nats_url)
    js = connection.jetstream()
    wanted = max(2 * shutil.disk_usage("/").free, 1000 * 10 * GIGABYTE)
    made = await js.add_stream(name="LARGE", subjects=["large"], max_bytes=wanted)
    assert made.config.max_bytes == wanted
    await js.delete_stream("LARGE")
    await connection.close()

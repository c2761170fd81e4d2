"""What the tests of several rooms connect to: the session's NATS, and a daemon of their own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from support.mailroom import LoneDaemon
from support.zygote import Zygote

from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[Client]:
    connection = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    yield connection
    await connection.close()


@pytest.fixture
async def daemon(short_directory: Path, zygote: Zygote) -> AsyncIterator[LoneDaemon]:
    """A daemon of this test's own, which no broker answers."""
    running = LoneDaemon(short_directory, zygote=zygote)
    await running.start()
    yield running
    running.stop()

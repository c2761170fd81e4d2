"""A connection to the session's NATS, and a context of its own for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from support.jetstream import Context

from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[Client]:
    connection = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    yield connection
    await connection.close()


@pytest.fixture
async def context(connection: Client) -> AsyncIterator[Context]:
    """A context whose four default streams exist."""
    context = Context(connection)
    await context.declare()
    yield context
    await context.remove()

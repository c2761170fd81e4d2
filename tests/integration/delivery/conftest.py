"""A context of its own for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from support.jetstream import Context


@pytest.fixture
async def context(connection: Client) -> AsyncIterator[Context]:
    """A context whose four default streams exist."""
    context = Context(connection)
    await context.declare()
    yield context
    await context.remove()

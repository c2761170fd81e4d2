"""A context of its own for each test, and agents that have not counted yet."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from support.agents import Counting
from support.jetstream import Context


@pytest.fixture
async def context(connection: Client) -> AsyncIterator[Context]:
    """A context whose four default streams exist."""
    Counting.runs.clear()
    context = Context(connection)
    await context.declare()
    yield context
    await context.remove()

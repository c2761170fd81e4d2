"""Consumers with an HTTP handler, what they call, and what is in their inbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import asyncpg
import pytest
from handlers import CountingHandler, serving
from http_consumers import Inbox, config_of, consuming
from jetstream import Context

from delivery.database import migrate
from delivery.http.settings import HandlerSettings
from embedded import EmbeddedPostgres
from worker.consumer import Services

Start = Callable[..., AbstractAsyncContextManager[Services]]


@pytest.fixture(scope="session")
def inbox_database(postgres_server: EmbeddedPostgres) -> str:
    """One migrated database for all these tests; each has a context of its own in it."""
    url = postgres_server.url_of("inboxes")

    async def create() -> None:
        server = await asyncpg.connect(postgres_server.url)
        await server.execute("CREATE DATABASE inboxes")
        await server.close()
        await migrate(url)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves the loop of the test plugin alone
        runner.run(create())
    return url


@pytest.fixture
async def inbox(inbox_database: str, context: Context) -> AsyncIterator[Inbox]:
    async with asyncpg.create_pool(inbox_database, min_size=1, max_size=2) as pool:
        yield Inbox(pool, context.name)


@pytest.fixture
async def handler() -> AsyncIterator[CountingHandler]:
    async with serving() as handler:
        yield handler


@pytest.fixture
def start(context: Context, nats_url: str, inbox_database: str, handler: CountingHandler) -> Start:
    """How to start a consumer of the context's events that calls `handler`."""

    def start_one(settings: dict[str, Any] | None = None, **consumer: Any) -> AbstractAsyncContextManager[Services]:
        made = HandlerSettings(**{"url": handler.url, **(settings or {})})
        return consuming(config_of(context, nats_url, inbox_database, made, **consumer))

    return start_one

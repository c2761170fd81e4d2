"""Consumers with an HTTP handler, what they call, and what is in their inbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import asyncpg
import pytest
from support.databases import migrated_database
from support.handlers import CountingHandler, serving
from support.http_consumers import Inbox, config_of, consuming
from support.jetstream import Context

from embedded import EmbeddedPostgres
from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM
from postroom.delivery.settings import HandlerSettings
from postroom.worker.consumer import HttpConsumer

Start = Callable[..., AbstractAsyncContextManager[HttpConsumer]]


@pytest.fixture(scope="session")
def inbox_database(postgres_server: EmbeddedPostgres) -> str:
    """One migrated database for all these tests; each has a context of its own in it."""
    return migrated_database(postgres_server, "inboxes", lambda url: migrate(url, ROOM))


@pytest.fixture
def context(context: Context, inbox_database: str) -> Context:
    """A context whose dead letters are kept in the database."""
    context.record = inbox_database
    return context


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

    def start_one(settings: dict[str, Any] | None = None, **consumer: Any) -> AbstractAsyncContextManager[HttpConsumer]:
        made = HandlerSettings(**{"url": handler.url, **(settings or {})})
        return consuming(config_of(context, nats_url, inbox_database, made, **consumer))

    return start_one

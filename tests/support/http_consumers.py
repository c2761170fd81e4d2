"""Consumers with an HTTP handler for tests: built as the program builds them, run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from nats.js.errors import NotFoundError

from postroom.delivery.settings import HandlerSettings, NatsSettings
from postroom.worker.config import ConsumerConfig, worker_of
from postroom.worker.consumer import HttpConsumer, open_consumer
from support.jetstream import DURABLE, Context
from support.waiting import until_so


class Inbox:
    """What the inbox of one context says, asked by the test itself."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record], context: str) -> None:
        self._pool = pool
        self._context = context

    async def row(self, message_id: str) -> dict[str, Any]:
        """Return a message's row; an empty dict where there is none."""
        query = "SELECT * FROM postroom.inbox_messages WHERE source_context = $1 AND message_id = $2"
        row = await self._pool.fetchrow(query, self._context, message_id)
        return dict(row) if row else {}

    async def processed(self) -> set[str]:
        query = "SELECT message_id FROM postroom.inbox_messages WHERE source_context = $1 AND processed_at IS NOT NULL"
        return {row[0] for row in await self._pool.fetch(query, self._context)}

    async def execute(self, statement: str, *values: Any) -> None:
        await self._pool.execute(statement, *values)


def config_of(context: Context, nats_url: str, database_url: str, handler: HandlerSettings, **consumer: Any) -> Any:
    """Return the config of a consumer of the context's events."""
    return ConsumerConfig(
        context=context.name,
        database_url=database_url,
        nats=NatsSettings(url=nats_url),
        consumer=context.settings(**consumer),
        handler=handler,
    )


async def settled(context: Context, durable: str = DURABLE) -> None:
    """Return when every event that the stream has was delivered to the consumer, and none waits for an ack."""

    async def idle() -> bool:
        try:
            info = await context.info(durable)
            last = (await context.js.stream_info(context.events)).state.last_seq
        except NotFoundError:  # not made yet
            return False
        # The server counts a new message as pending a moment after it has confirmed it: the sequence tells for sure.
        return info.delivered is not None and info.delivered.stream_seq >= last and info.num_ack_pending == 0

    await until_so(idle, "everything is settled")


@asynccontextmanager
async def consuming(config: ConsumerConfig) -> AsyncIterator[HttpConsumer]:
    """Run a consumer for the length of the block, then let it finish."""
    async with open_consumer(config, worker_of(config)) as services:
        task = asyncio.create_task(services.consumer.run())
        try:
            yield services
        finally:
            await services.finish()
            await asyncio.gather(task, return_exceptions=True)

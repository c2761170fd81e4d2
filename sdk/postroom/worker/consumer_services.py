"""What a consumer with an HTTP handler is made of: connections, inbox, calls and sweep, as its config says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import asyncpg
import msgspec
import structlog
from nats.aio.client import Client

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import UNREACHABLE, Pool
from postroom.chassis.runtime import notify
from postroom.delivery.consumer import Attempts, Consumer
from postroom.delivery.dead_letters import RecordedLetters
from postroom.delivery.http.client import HandlerClient
from postroom.delivery.http.handler import LEASE_SHARE, HttpHandler
from postroom.delivery.http.inbox_messages import Backlog, InboxMessages, get_inbox_backlog, open_inbox_pool
from postroom.delivery.http.retention import InboxRetention
from postroom.delivery.nats import connect
from postroom.delivery.streams import ensure_stream
from postroom.errors import Conflict, PostroomError
from postroom.worker.consumer_config import ConsumerConfig
from postroom.worker.consumer_metrics import expose

_log = structlog.get_logger(__name__)

_NATS_PATIENCE: Final = 20.0  # seconds; then the process ends, and whoever started it tries again


@dataclass(frozen=True, kw_only=True)
class Services:
    """What one consumer process is made of."""

    config: ConsumerConfig
    pool: Pool
    nats: Client
    inbox: InboxMessages
    handler: HttpHandler
    consumer: Consumer
    retention: InboxRetention

    def reasons(self) -> list[str]:
        """Return what keeps it from consuming now."""
        nats = [] if self.nats.is_connected else ["nats_unavailable"]
        postgres = ["database_unavailable"] if self.inbox.waiting_for_postgres else []
        troubles = (self.handler.reach.error, self.consumer.trouble)
        return [*nats, *postgres, *(trouble for trouble in troubles if trouble is not None)]

    async def backlog(self) -> Backlog | None:
        """Return the consumer's backlog; None where Postgres cannot be asked."""
        try:
            return await get_inbox_backlog(self.pool, self.config.context, self.config.consumer.durable)
        except (*UNREACHABLE, asyncpg.PostgresError):
            return None

    async def metrics(self) -> bytes:
        """Return the metrics as text."""
        consumer = self.consumer
        return expose(consumer.counters, self.handler, consumer.in_hand, await self.backlog())

    async def finish(self) -> None:
        """Take nothing more, begin no further call, and wait for those under way."""
        notify("STOPPING=1")
        self.handler.stop()
        await self.consumer.stop()


@asynccontextmanager
async def open_services(config: ConsumerConfig) -> AsyncIterator[Services]:
    """Build everything, and close it; raises `Fatal`."""
    settings = config.consumer
    name = f"postroom-consumer {settings.durable}"
    async with AsyncExitStack() as stack:
        client = HandlerClient(config.handler)
        stack.push_async_callback(client.close)
        pool = await open_inbox_pool(config.database_url, name=name, connections=config.connections)
        stack.push_async_callback(pool.close)
        nats = await _connected(config, name)
        stack.push_async_callback(nats.close)
        inbox = InboxMessages(pool, settings.durable, lease_seconds=settings.ack_wait_seconds * LEASE_SHARE)
        handler = HttpHandler(
            inbox,
            client,
            attempts=Attempts(settings.max_deliver, settings.backoff.schedule),
            calls_at_once=config.handler.calls_at_once,
        )
        js = nats.jetstream()
        # The calls are limited, not the batches: one slow call holds up nothing but its own place.
        unlimited = msgspec.structs.replace(settings, batches_at_once=settings.max_ack_pending)
        consumer = Consumer(js, unlimited, handler, RecordedLetters(pool, config.context), stream=config.stream)
        await _declare(consumer)
        retention = InboxRetention(pool, js, stream=settings.stream, durable=settings.durable, settings=config.inbox)
        yield Services(
            config=config,
            pool=pool,
            nats=nats,
            inbox=inbox,
            handler=handler,
            consumer=consumer,
            retention=retention,
        )


async def _declare(consumer: Consumer) -> None:
    """Bring the consumer to its settings, or say why that may not be."""
    try:
        await consumer.declare()
    except Conflict as error:
        raise Fatal(Exit.TRY_AGAIN if error.retryable else Exit.CONFIG, str(error)) from error
    except PostroomError as error:  # nobody has declared the stream yet, or NATS is not ready: `run` tries again
        _log.warning("consumer_waits", consumer=consumer.durable, detail=str(error))


async def _connected(config: ConsumerConfig, name: str) -> Client:
    """Connect to NATS and declare the streams of the config."""
    try:
        nats = await connect(config.nats, name=name, patience=_NATS_PATIENCE)
    except PostroomError as error:
        raise Fatal(Exit.UNAVAILABLE, str(error)) from error
    try:
        for stream in config.streams:
            await ensure_stream(nats.jetstream(), stream)
    except PostroomError as error:
        await nats.close()
        raise Fatal(Exit.TRY_AGAIN if error.retryable else Exit.CONFIG, str(error)) from error
    return nats

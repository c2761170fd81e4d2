"""A consumer with an HTTP handler as a process: config → Postgres, NATS → consume → wait → finish what is in hand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
import msgspec
import structlog
from nats.aio.client import Client

from chassis import logs
from chassis.exits import Exit, Fatal
from chassis.postgres import UNREACHABLE, Pool
from chassis.runtime import run as run_program
from chassis.runtime import run_until_stopped, stop_on_signals
from chassis.systemd import answer_watchdog, notify, watchdog_seconds
from delivery.consuming import Consumer
from delivery.dead_letters import DeadLetters
from delivery.http.client import HandlerClient
from delivery.http.handler import LEASE_SHARE, HttpHandler
from delivery.http.inbox_messages import Backlog, InboxMessages, get_inbox_backlog, open_inbox_pool
from delivery.nats import connect
from delivery.streams import ensure_stream
from postroom.errors import PostroomError
from worker.consumer_config import ConsumerConfig
from worker.consumer_metrics import expose
from worker.page import serving_page

_log = structlog.get_logger(__name__)

_NATS_PATIENCE: Final = 20.0  # seconds; then the process ends, and whoever started it tries again
_STATUS_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Services:
    """What one consumer process is made of."""

    config: ConsumerConfig
    pool: Pool
    nats: Client
    inbox: InboxMessages
    handler: HttpHandler
    consumer: Consumer

    def reasons(self) -> list[str]:
        """Return what keeps it from consuming now."""
        nats = [] if self.nats.is_connected else ["nats_unavailable"]
        return [*nats, *(["database_unavailable"] if self.inbox.waiting_for_postgres else [])]

    async def backlog(self) -> Backlog | None:
        """Return the consumer's part of QRY-051; None where Postgres can't tell."""
        try:
            return await get_inbox_backlog(self.pool, self.config.context, self.config.consumer.durable)
        except (*UNREACHABLE, asyncpg.PostgresError):
            return None

    async def metrics(self) -> bytes:
        """Return the metrics as text."""
        consumer = self.consumer
        return expose(consumer.counters, self.handler.counters, consumer.in_hand, await self.backlog())

    async def finish(self) -> None:
        """Take nothing more, begin no further call, and wait for those under way."""
        notify("STOPPING=1")
        self.handler.stop()
        await self.consumer.stop()


def main(config: ConsumerConfig) -> int:
    """Consume until a signal says stop; what is fatal becomes one sentence and its exit code."""
    logs.configure(config.log_level)
    try:
        run_program(run(config))
    except Fatal as fatal:
        sys.stderr.write(f"postroom consumer: {fatal}\n")
        return int(fatal.exit_code)
    return int(Exit.OK)


async def run(config: ConsumerConfig) -> None:
    """Consume until SIGTERM or SIGINT, then finish the calls under way.

    Raises `Fatal`: 78 for a wrong config or schema, 69 where Postgres or NATS can't be reached.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        page = serving_page(config.listen_host, config.listen_port, services.reasons, services.metrics)
        url = await stack.enter_async_context(page)
        _log.info("consuming", consumer=config.consumer.durable, stream=config.consumer.stream, page=url)
        notify("READY=1")
        await run_until_stopped(_tasks(services), stop, services.finish)


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
            inbox, client, max_deliver=settings.max_deliver, calls_at_once=config.handler.calls_at_once
        )
        js = nats.jetstream()
        # The calls are limited, not the batches: one slow call holds up nothing but its own place.
        unlimited = msgspec.structs.replace(settings, batches_at_once=settings.max_ack_pending)
        consumer = Consumer(js, unlimited, handler, DeadLetters(js, config.context), stream=config.stream)
        yield Services(config=config, pool=pool, nats=nats, inbox=inbox, handler=handler, consumer=consumer)


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


def _tasks(services: Services) -> dict[str, Coroutine[Any, Any, None]]:
    tasks = {
        "consumer": services.consumer.run(),
        "leases": services.handler.leases.run(),
        "status": _tell_status(services),
    }
    if (seconds := watchdog_seconds()) is not None:
        tasks["watchdog"] = answer_watchdog(seconds / 2)
    return tasks


async def _tell_status(services: Services) -> None:
    while True:
        backlog = await services.backlog()
        waiting = "an unknown number of" if backlog is None else backlog.messages
        if not notify(f"STATUS={waiting} messages waiting, {services.handler.counters.calls_under_way} being handled"):
            await asyncio.Event().wait()  # nobody listens
        await asyncio.sleep(_STATUS_SECONDS)

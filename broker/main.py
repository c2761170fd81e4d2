"""The broker as a process: config → Postgres, Redis, limiter → HTTP → wait → stop in the opposite order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog

from broker.accept import Accepting
from broker.app import Services
from broker.authentication import Authentication, read_admin_token
from broker.config import BrokerConfig
from broker.database import Database
from broker.limiter import Breaker, Limiter, LocalWindow, RedisWindow, open_redis
from broker.metrics import Metrics
from broker.programs import Health
from broker.retention import Sweeper
from broker.server import serving
from broker.store import AcceptStore, MessageIds
from postroom.chassis.runtime import answer_watchdog, notify, run_until_stopped, stop_on_signals, watchdog_seconds
from postroom.delivery.http.addresses import Guard
from postroom.delivery.settings import networks_of

_log = structlog.get_logger(__name__)


async def run(config: BrokerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish the batches at work.

    Raises `Fatal`: 78 for a wrong config or schema, 69 where Postgres can't be reached or the address is taken.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        url = await stack.enter_async_context(serving(services))
        _log.info("listening", url=url)
        notify(f"READY=1\nSTATUS=accepting on {url}")
        tasks: dict[str, Coroutine[Any, Any, None]] = {"reports": services.health.reporting(url)}
        if services.config.retention.sweep:
            tasks["sweeper"] = Sweeper(services.database, services.config.retention, services.metrics).run()
        if (seconds := watchdog_seconds()) is not None:
            tasks["watchdog"] = answer_watchdog(seconds / 2)
        await run_until_stopped(tasks, stop)
        notify("STOPPING=1")


@asynccontextmanager
async def open_services(config: BrokerConfig) -> AsyncIterator[Services]:
    """Build everything that the handlers need, and close it."""
    metrics = Metrics()
    admin_token = read_admin_token(config.admin_token_file)
    redis = None if config.redis_url is None else open_redis(config.redis_url, config.limiter)
    try:
        database = await Database.open(config.database_url, connections=config.connections)
        try:
            breaker = Breaker(config.limiter.breaker_failures, config.limiter.breaker_seconds)
            shared = None if redis is None else RedisWindow(redis, config.limiter)
            limiter = Limiter(shared, LocalWindow(config.limiter), breaker, config.limiter, metrics)
            store = AcceptStore(database, config.retention, MessageIds())
            yield Services(
                config=config,
                database=database,
                authentication=Authentication(database, admin_token),
                accepting=Accepting(store, limiter, metrics, config),
                limiter=limiter,
                metrics=metrics,
                health=Health(database, limiter, metrics, needs_redis=config.limiter.on_error == "closed"),
                guard=Guard(networks_of(config.webhooks)),
            )
        finally:
            await database.close()
    finally:
        if redis is not None:
            await redis.aclose()

"""The broker as a process: config → Postgres, Redis, limiter → HTTP → wait → stop in the opposite order."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog
from aiohttp import web

from broker.accept import Accepting
from broker.app import Services, build
from broker.authentication import Authentication, read_admin_token
from broker.config import BrokerConfig
from broker.database import Database
from broker.identifiers import MessageIds
from broker.limiter import Breaker, Limiter, LocalWindow, RedisWindow, open_redis
from broker.metrics import Metrics
from broker.retention import Sweeper
from broker.store import AcceptStore
from chassis.exits import Exit, Fatal
from chassis.runtime import run_until_stopped, stop_on_signals
from chassis.systemd import notify

_log = structlog.get_logger(__name__)

_SHUTDOWN_SECONDS = 20.0  # how long the batches at work may take to finish
_IDLE_SECONDS = 75.0  # how long an idle connection is kept


async def run(config: BrokerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish the batches at work.

    Raises `Fatal`: 78 for a wrong config or schema, 69 where Postgres can't be reached or the address is taken.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        address = await stack.enter_async_context(_serving(services))
        _log.info("listening", address=address)
        notify(f"READY=1\nSTATUS=accepting on {address}")
        await run_until_stopped(_tasks(services), stop)
        notify("STOPPING=1")


@asynccontextmanager
async def open_services(config: BrokerConfig) -> AsyncIterator[Services]:
    """Build everything that the handlers need, and close it."""
    metrics = Metrics()
    admin_token = read_admin_token(config.admin_token_file)
    redis = open_redis(config.redis_url, config.limiter)
    try:
        database = await Database.open(config.database_url, connections=config.connections)
        try:
            breaker = Breaker(config.limiter.breaker_failures, config.limiter.breaker_seconds)
            windows = RedisWindow(redis, config.limiter), LocalWindow(config.limiter)
            limiter = Limiter(*windows, breaker, config.limiter, metrics)
            store = AcceptStore(database, config.retention, MessageIds())
            yield Services(
                config=config,
                database=database,
                authentication=Authentication(database, admin_token),
                accepting=Accepting(store, limiter, metrics, config),
                limiter=limiter,
                metrics=metrics,
            )
        finally:
            await database.close()
    finally:
        await redis.aclose()


@asynccontextmanager
async def _serving(services: Services) -> AsyncIterator[str]:
    config = services.config
    runner = web.AppRunner(
        build(services),
        access_log=None,
        handle_signals=False,
        auto_decompress=False,
        keepalive_timeout=_IDLE_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    try:
        await _site(runner, config).start()
        yield str(runner.addresses[0])
    except OSError as error:
        raise Fatal(Exit.UNAVAILABLE, f"cannot listen on {_where(config)}: {error.strerror}") from error
    finally:
        await runner.cleanup()


def _site(runner: web.AppRunner, config: BrokerConfig) -> web.BaseSite:
    tls = None
    if config.tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            tls.load_cert_chain(config.tls_cert, config.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise Fatal(Exit.CONFIG, f"cannot load tls_cert {config.tls_cert} with tls_key: {error}") from error
    if config.socket_path is not None:
        return web.UnixSite(runner, str(config.socket_path), ssl_context=tls)
    return web.TCPSite(runner, config.listen_host, config.listen_port, ssl_context=tls)


def _where(config: BrokerConfig) -> str:
    return str(config.socket_path or f"{config.listen_host}:{config.listen_port}")


def _tasks(services: Services) -> dict[str, Coroutine[Any, Any, None]]:
    sweeper = Sweeper(services.database, services.config.retention, services.metrics)
    return {"sweeper": sweeper.run()} if services.config.retention.sweep else {}

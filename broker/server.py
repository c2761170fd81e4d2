"""The broker as a process: config → Postgres, Redis, limiter → HTTP → wait → stop in the opposite order."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import structlog
from aiohttp import web

from broker.accept import AcceptService
from broker.app import Services, build
from broker.authentication import Authentication, read_admin_token
from broker.config import BrokerConfig
from broker.database import Database
from broker.limiter import Limiter, RedisWindow, open_redis
from broker.metrics import Metrics
from broker.programs import Health
from broker.retention import Sweeper
from broker.store import AcceptStore, MessageIds
from postroom._wire.http import Site
from postroom.chassis.config import show_certificate
from postroom.chassis.listener import Deadlines, listening, remove, running, unix_listener
from postroom.chassis.postgres import letting_go
from postroom.chassis.runtime import notify, run_until_stopped, spare_descriptors, stop_on_signals
from postroom.delivery.http.addresses import Guard
from postroom.delivery.settings import networks_of

_log = structlog.get_logger(__name__)

_SHUTDOWN_SECONDS: Final = 20.0  # how long the batches at work may take to finish
_ENCRYPT: Final = "set tls_cert and tls_key, or listen on loopback or a socket behind a proxy with TLS"


async def run(config: BrokerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish the batches at work.

    Raises `Fatal`: 78 for a wrong config or schema, 69 where Postgres can't be reached or the address is taken.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(letting_go(stop))
        services = await stack.enter_async_context(open_services(config))
        url = await stack.enter_async_context(serving(services))
        _log.info("listening", url=url)
        if config.socket_path is None and Site.of(url).is_exposed:
            _log.warning("tokens_unencrypted", url=url, advice=_ENCRYPT)
        notify(f"READY=1\nSTATUS=accepting on {url}")
        tasks: dict[str, Coroutine[Any, Any, None]] = {"reports": services.health.reporting(url)}
        if services.config.retention.sweep:
            tasks["sweeper"] = Sweeper(services.database, services.config.retention, services.metrics).run()
        await run_until_stopped(tasks, stop)
        notify("STOPPING=1")


@asynccontextmanager
async def open_services(config: BrokerConfig) -> AsyncIterator[Services]:
    """Build everything that the handlers need, and close it."""
    metrics = Metrics()
    admin_token = read_admin_token(config.admin_token_file)
    async with AsyncExitStack() as stack:
        shared: RedisWindow | None = None
        if config.redis_url is not None:
            redis = open_redis(config.redis_url, config.limiter)
            stack.push_async_callback(redis.aclose)
            shared = RedisWindow(redis, config.limiter)
        database = await Database.open(config.database_url, connections=config.connections)
        stack.push_async_callback(database.close)
        limiter = Limiter(shared, config.limiter, metrics)
        store = AcceptStore(database, config.retention, MessageIds())
        yield Services(
            config=config,
            database=database,
            authentication=Authentication(database, admin_token),
            accepting=AcceptService(store, limiter, metrics, config),
            limiter=limiter,
            metrics=metrics,
            health=Health(database, limiter, metrics, needs_redis=config.limiter.on_error == "closed"),
            guard=Guard(networks_of(config.webhooks)),
        )


@asynccontextmanager
async def serving(services: Services) -> AsyncIterator[str]:
    """Listen, and yield the URL; at the end finish the requests at work.

    Raises `Fatal`: 69 where the address is taken or a process answers on the socket, 78 where certificate and key do
    not match, the key is open to others or has a passphrase, or the socket cannot be created.
    """
    config, tls = services.config, None
    deadlines = Deadlines(config.header_seconds, config.body_seconds, config.stall_seconds, config.idle_seconds)
    if config.tls_cert is not None and config.tls_key is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        show_certificate(tls, config.tls_cert, config.tls_key, "tls_cert", "tls_key")
    async with AsyncExitStack() as stack:
        served = running(
            build(services),
            _SHUTDOWN_SECONDS,
            most=min(config.max_connections, spare_descriptors()),
            deadlines=deadlines,
            on_drop=lambda reason: services.metrics.dropped.labels(reason).inc(),
            auto_decompress=False,
        )
        runner = await stack.enter_async_context(served)
        if config.socket_path is None:
            yield await listening(runner, config.listen_host, config.listen_port, tls)
        else:
            sock = unix_listener(config.socket_path, config.socket_group)
            stack.callback(remove, config.socket_path, config.socket_path.lstat().st_ino)
            sock.setblocking(False)
            await web.SockSite(runner, sock, ssl_context=tls).start()
            yield f"unix://{config.socket_path}"
